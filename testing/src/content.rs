//! The tokens that a test appends, and the checks of what a read must return.
//!
//! Every token has a seed. Each element of its keys and values is a hash of that seed and of the element's place, so
//! a check needs the seeds alone:
//! 1. [`SequenceShape::append`] writes the elements of tokens in one of three orders.
//! 2. [`SequenceShape::check_blocks`] compares each group byte by byte, and attention with a naive one in f64.
//! 3. [`SequenceShape::check_all`] does this for all layers of a sequence in one read.
//! 4. [`damaged_groups`] reads each group by itself and returns the places of the damaged ones.

use crate::rng::mix;
use half::{bf16, f16};
use std::ops::Range;
use stratakv::layout::LayerSpec;
use stratakv::read::{SelectionBlocks, attend_with};
use stratakv::{
    AttendOptions, DType, ErrorKind, KvLayout, Result, SelectRequest, Selection, Sequence, Store, TensorView,
};

/// The geometry of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// The KV heads; 0 for a layer without keys and values.
    pub heads: u16,
    /// The head dim of keys.
    pub key_dim: u16,
    /// The head dim of values; 0 if values are a prefix of the keys.
    pub value_dim: u16,
    /// The sliding window in tokens.
    pub window: Option<u32>,
}

impl LayerShape {
    /// Returns a layer with these heads and one dim for keys and values.
    #[must_use]
    pub const fn full(heads: u16, dim: u16) -> Self {
        Self { heads, key_dim: dim, value_dim: dim, window: None }
    }
}

/// The geometry of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    /// The geometry of each layer.
    pub layers: Vec<LayerShape>,
    /// The element type on disk.
    pub dtype: DType,
    /// The tokens of a group.
    pub group: usize,
}

/// The memory order of the tensors of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// `[tokens, heads, dim]`.
    TokenMajor,
    /// `[heads, tokens, dim]`.
    HeadMajor,
    /// With gaps between tokens and heads.
    Strided,
}

impl Order {
    /// Returns order `n % 3`, so that consecutive numbers use all three.
    #[must_use]
    pub const fn nth(n: usize) -> Self {
        match n % 3 {
            0 => Self::TokenMajor,
            1 => Self::HeadMajor,
            _ => Self::Strided,
        }
    }
}

/// Returns element `i` of head `head` of a token: a number in (-4, 4) that uses all bits of the mantissa.
#[must_use]
pub fn element(seed: u64, layer: usize, plane: usize, head: usize, i: usize) -> f32 {
    let x = mix(seed ^ mix((layer as u64) << 40 | (plane as u64) << 32 | (head as u64) << 16 | i as u64));
    ((x >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 8.0
}

/// Returns the bytes of `x` as they are stored.
#[must_use]
pub fn encode(x: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        _ => bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

/// Returns `x` rounded to `dtype`, for arithmetic.
#[must_use]
pub fn rounded(x: f32, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x),
        DType::F16 => f16::from_f32(x).to_f64(),
        _ => bf16::from_f32(x).to_f64(),
    }
}

/// Returns shapes with every element type: two layers, one layer, a window with layers without KV and without V, and
/// values that are shorter than keys.
#[must_use]
pub fn varied_shapes() -> Vec<SequenceShape> {
    let shape = |layers: Vec<LayerShape>, dtype, group| SequenceShape { layers, dtype, group };
    vec![
        shape(vec![LayerShape::full(2, 16), LayerShape::full(1, 8)], DType::F16, 4),
        shape(vec![LayerShape::full(2, 64)], DType::F32, 8),
        shape(
            vec![
                LayerShape { window: Some(29), ..LayerShape::full(1, 24) },
                LayerShape::full(0, 0),
                LayerShape { value_dim: 0, ..LayerShape::full(1, 40) },
            ],
            DType::Bf16,
            5,
        ),
        shape(vec![LayerShape { value_dim: 16, ..LayerShape::full(4, 32) }], DType::Bf16, 1),
    ]
}

impl SequenceShape {
    /// Builds the layout.
    ///
    /// # Errors
    /// The layout is invalid, as in [`stratakv::layout::KvLayoutBuilder::build`].
    pub fn layout(&self) -> Result<KvLayout> {
        let spec = |layer: &LayerShape| {
            let spec = match (layer.heads, layer.window) {
                (0, _) => return LayerSpec::none(),
                (heads, None) => LayerSpec::full(heads, layer.key_dim),
                (heads, Some(window)) => LayerSpec::sliding(heads, layer.key_dim, window),
            };
            spec.value_dim(layer.value_dim)
        };
        KvLayout::builder()
            .layer_specs(self.layers.iter().map(spec))
            .dtype(self.dtype)
            .group_tokens(self.group as u16)
            .build()
    }

    /// Iterates over the layers with keys and values.
    pub fn kv_layers(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].heads > 0)
    }

    fn dim(&self, layer: usize, plane: usize) -> usize {
        let shape = &self.layers[layer];
        usize::from(if plane == 0 { shape.key_dim } else { shape.value_dim })
    }

    fn tensor(&self, layer: usize, plane: usize, seeds: &[u64], order: Order) -> (Vec<f32>, usize, usize) {
        let (heads, dim) = (usize::from(self.layers[layer].heads), self.dim(layer, plane));
        let (token_stride, head_stride) = match order {
            Order::TokenMajor => (heads * dim, dim),
            Order::HeadMajor => (dim, seeds.len() * dim),
            Order::Strided => (heads * (dim + 3) + 5, dim + 3),
        };
        let len = (seeds.len() - 1) * token_stride + (heads - 1) * head_stride + dim;
        // Gaps hold NaN, which must never reach the store.
        let mut data = vec![f32::NAN; len];
        for (token, seed) in seeds.iter().enumerate() {
            for head in 0..heads {
                let start = token * token_stride + head * head_stride;
                for (i, out) in data[start..start + dim].iter_mut().enumerate() {
                    *out = element(*seed, layer, plane, head, i);
                }
            }
        }
        (data, token_stride, head_stride)
    }

    /// Appends tokens with these seeds to a layer.
    ///
    /// # Errors
    /// The append fails, as in [`Sequence::append`].
    pub fn append(&self, sequence: &mut Sequence, layer: usize, seeds: &[u64], order: Order) -> Result<()> {
        if seeds.is_empty() {
            return sequence.append(layer, self.empty_tensor(layer, 0), self.empty_tensor(layer, 1));
        }
        let heads = usize::from(self.layers[layer].heads);
        let (keys, values) = (self.tensor(layer, 0, seeds, order), self.tensor(layer, 1, seeds, order));
        fn view<'a>(tensor: &'a (Vec<f32>, usize, usize), shape: [usize; 3], order: Order) -> TensorView<'a> {
            let [tokens, heads, dim] = shape;
            match (dim, order) {
                (0, _) => TensorView::empty(tokens),
                (_, Order::TokenMajor) => TensorView::token_major(&tensor.0, tokens, heads, dim),
                (_, Order::HeadMajor) => TensorView::head_major(&tensor.0, tokens, heads, dim),
                (_, Order::Strided) => TensorView::strided(&tensor.0, tokens, heads, dim, tensor.1, tensor.2),
            }
        }
        let of = |plane| [seeds.len(), heads, self.dim(layer, plane)];
        sequence.append(layer, view(&keys, of(0), order), view(&values, of(1), order))
    }

    fn empty_tensor(&self, layer: usize, plane: usize) -> TensorView<'static> {
        match self.dim(layer, plane) {
            0 => TensorView::empty(0),
            dim => TensorView::token_major::<f32>(&[], 0, usize::from(self.layers[layer].heads), dim),
        }
    }

    /// Returns the K and V plane of the group of these tokens, as they are stored.
    #[must_use]
    pub fn block(&self, layer: usize, seeds: &[u64]) -> [Vec<u8>; 2] {
        [0, 1].map(|plane| {
            let mut bytes = Vec::new();
            for head in 0..usize::from(self.layers[layer].heads) {
                for seed in seeds {
                    for i in 0..self.dim(layer, plane) {
                        bytes.extend(encode(element(*seed, layer, plane, head, i), self.dtype));
                    }
                }
            }
            bytes
        })
    }

    /// Returns a query for a layer, with two query heads per KV head.
    #[must_use]
    pub fn query(&self, layer: usize, seed: u64) -> Vec<f32> {
        let len = 2 * usize::from(self.layers[layer].heads) * self.dim(layer, 0);
        (0..len).map(|i| element(seed, layer, 2, 0, i)).collect()
    }

    /// Computes naive softmax attention in f64 over tokens with these seeds. Also returns the largest |V|.
    #[must_use]
    pub fn attention(&self, layer: usize, query: &[f32], seeds: &[u64]) -> (Vec<f64>, f64) {
        let (key_dim, value_dim) = (self.dim(layer, 0), self.value_out(layer));
        let plane = usize::from(self.dim(layer, 1) > 0);
        let (mut out, mut largest) = (Vec::new(), 0.0_f64);
        for (q_head, q) in query.chunks(key_dim).enumerate() {
            let head = q_head / 2;
            let at = |seed: u64, plane: usize, i: usize| rounded(element(seed, layer, plane, head, i), self.dtype);
            let score = |seed: &u64| {
                let dot: f64 = q.iter().enumerate().map(|(i, q)| f64::from(*q) * at(*seed, 0, i)).sum();
                dot / (key_dim as f64).sqrt()
            };
            let scores: Vec<f64> = seeds.iter().map(score).collect();
            let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - best).exp()).sum();
            for i in 0..value_dim {
                let value = |seed: &u64| at(*seed, plane, i);
                largest = seeds.iter().map(value).map(f64::abs).fold(largest, f64::max);
                out.push(scores.iter().zip(seeds).map(|(s, seed)| (s - best).exp() * value(seed)).sum::<f64>() / total);
            }
        }
        (out, largest)
    }

    /// Returns the elements of an output head: the value dim, or half the key dim if values are a prefix of the keys.
    fn value_out(&self, layer: usize) -> usize {
        match self.dim(layer, 1) {
            0 => self.dim(layer, 0) / 2,
            dim => dim,
        }
    }

    /// Compares the blocks that a read returned for a selection with the layer's tokens at that time. Every group's
    /// bytes must be equal, and attention over the selection must agree with the naive one.
    ///
    /// # Panics
    /// A comparison fails.
    pub fn check_blocks(&self, layer: usize, seeds: &[u64], view: &Selection, blocks: SelectionBlocks<'_>) {
        for (nth, group) in view.groups().enumerate() {
            let start = group as usize * self.group;
            let [keys, values] = self.block(layer, &seeds[start..start + self.group]);
            let (k, v) = blocks.group(nth).expect("a block that was read");
            assert!(k == keys, "layer {layer}, group {group}: other keys than were appended");
            assert!(v == values, "layer {layer}, group {group}: other values than were appended");
        }
        let attended: Vec<u64> = view.positions().map(|at| seeds[at as usize]).collect();
        let query = self.query(layer, attended.len() as u64);
        let (want, largest) = self.attention(layer, &query, &attended);
        let mut out = vec![0.0; want.len()];
        let value_dims = (self.dim(layer, 1) == 0).then(|| self.value_out(layer));
        let options = AttendOptions { value_dims, ..AttendOptions::default() };
        attend_with(&query, view, blocks, &options, &mut out).expect("attention over what was read");
        let limit = match self.dtype {
            DType::F32 => 1e-5,
            DType::F16 => 2e-3,
            _ => 1e-2,
        };
        for (at, (got, want)) in out.iter().zip(want).enumerate() {
            let error = (f64::from(*got) - want).abs() / largest;
            assert!(error <= limit, "layer {layer}, element {at}: {got}, not {want}");
        }
    }

    /// Reads all layers of a sequence in one call and compares them with the seeds of their tokens. `seeds` takes a
    /// layer.
    ///
    /// # Panics
    /// A comparison fails.
    pub fn check_all(&self, store: &Store, sequence: &Sequence, seeds: impl Fn(usize) -> Vec<u64>) {
        let layers: Vec<usize> = self.kv_layers().collect();
        let views: Vec<_> =
            layers.iter().filter_map(|layer| sequence.select(*layer, SelectRequest::all()).ok()).collect();
        if views.is_empty() {
            assert!(sequence.is_empty());
            return;
        }
        assert_eq!(views.len(), layers.len());
        let batch = store.read(&views.iter().collect::<Vec<_>>()).submit().and_then(|t| t.wait()).expect("a read");
        for (at, layer) in layers.into_iter().enumerate() {
            let seeds = seeds(layer);
            assert_eq!(views[at].length(), seeds.len() as u64);
            let window = self.layers[layer].window.map_or(seeds.len(), |w| (w as usize).min(seeds.len()));
            let visible: Range<u64> = (seeds.len() - window) as u64..seeds.len() as u64;
            assert!(views[at].positions().eq(visible), "layer {layer}: other positions than its tokens");
            self.check_blocks(layer, &seeds, &views[at], batch.get(at).expect("blocks that are whole"));
        }
    }
}

/// Reads every group of every layer by itself. Returns the places of the damaged groups and compares all others with
/// the seeds of their tokens.
///
/// # Panics
/// A block has wrong bytes, or its read fails with another error than corruption.
#[must_use]
pub fn damaged_groups(
    shape: &SequenceShape,
    store: &Store,
    sequence: &Sequence,
    seeds: impl Fn(usize) -> Vec<u64>,
) -> Vec<stratakv::error::Corruption> {
    let mut damaged = Vec::new();
    for layer in shape.kv_layers() {
        let seeds = seeds(layer);
        let first = shape.layers[layer].window.map_or(0, |w| seeds.len().saturating_sub(w as usize)) / shape.group;
        let sealed = seeds.len() / shape.group;
        let views: Vec<_> = (first.min(sealed)..sealed)
            .map(|group| sequence.select(layer, SelectRequest::groups(&[group as u64])).expect("a group that is there"))
            .collect();
        let batch = store.read(&views.iter().collect::<Vec<_>>()).submit().and_then(|t| t.wait()).expect("a read");
        for (at, view) in views.iter().enumerate() {
            match batch.get(at) {
                Ok(blocks) => {
                    let group = view.groups().next().expect("the group asked for") as usize;
                    let range = group * shape.group..(group + 1) * shape.group;
                    let [keys, values] = shape.block(layer, &seeds[range]);
                    let (k, v) = blocks.group(0).expect("the block");
                    assert!(k == keys && v == values, "layer {layer}, group {group}: wrong bytes");
                }
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Corruption, "{e:?}");
                    damaged.push(e.corruption().expect("corruption has a place").clone());
                }
            }
        }
    }
    damaged
}
