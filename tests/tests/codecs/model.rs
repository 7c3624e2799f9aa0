//! The shapes of the tests, and what a reader of a sequence has to see.

use half::{bf16, f16};
use stratakv::codec::{Codec, PlaneKind, PlaneShape, decode, encode};
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::{DType, KvLayout, PlaneSet, SelectRequest, Sequence, Store, TensorView, attend};
use stratakv_tests::rng::mix;

pub(crate) const RAW: [PlaneCodec; 2] = [PlaneCodec::Raw; 2];

/// The heads, key dim, value dim, window and codecs of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) window: Option<u32>,
    pub(crate) codecs: [PlaneCodec; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) layers: Vec<Layer>,
    pub(crate) dtype: DType,
    pub(crate) group: usize,
    pub(crate) separate: bool,
}

impl Shape {
    pub(crate) fn layout(&self) -> KvLayout {
        let spec = |layer: &Layer| {
            let (heads, dim) = (layer.heads as u16, layer.key_dim as u16);
            let spec = match (heads, layer.window) {
                (0, _) => return LayerSpec::none(),
                (_, None) => LayerSpec::full(heads, dim),
                (_, Some(window)) => LayerSpec::sliding(heads, dim, window),
            };
            spec.value_dim(layer.value_dim as u16).codecs(layer.codecs[0], layer.codecs[1])
        };
        let builder = KvLayout::builder().layer_specs(self.layers.iter().map(spec)).dtype(self.dtype);
        builder.group_tokens(self.group as u16).separate_planes(self.separate).build().expect("a layout")
    }

    pub(crate) fn plane(&self, layer: usize, plane: usize) -> PlaneShape {
        let own = &self.layers[layer];
        PlaneShape {
            kind: [PlaneKind::Keys, PlaneKind::Values][plane],
            heads: own.heads,
            tokens: self.group,
            dims: [own.key_dim, own.value_dim][plane],
            dtype: self.dtype,
        }
    }

    pub(crate) fn kv_layers(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].heads > 0).collect()
    }
}

pub(crate) fn shapes() -> Vec<Shape> {
    use PlaneCodec::{Int4, Int8, Raw};
    let layer = |heads, key_dim, value_dim, codecs| Layer { heads, key_dim, value_dim, window: None, codecs };
    let none = Layer { heads: 0, key_dim: 0, value_dim: 0, window: None, codecs: RAW };
    let shape = |layers: Vec<Layer>, dtype, group| Shape { layers, dtype, group, separate: false };
    vec![
        shape(vec![layer(2, 16, 16, [Int8, Int8]), layer(1, 40, 40, RAW)], DType::F16, 8),
        shape(vec![layer(2, 33, 70, [Int4, Int4]), none, layer(1, 24, 24, [Raw, Int8])], DType::Bf16, 8),
        // Blocks of several pages, V planes on pages of their own, a window, and a layer with keys only.
        Shape {
            separate: true,
            ..shape(
                vec![
                    Layer { window: Some(37), ..layer(4, 64, 64, [Int4, Raw]) },
                    layer(1, 96, 0, [Int8, Raw]),
                    layer(8, 128, 128, [Int8, Int4]),
                ],
                DType::F32,
                16,
            )
        },
        // Keys of four tokens stay raw, because int8 does not make them shorter than f16.
        shape(vec![layer(2, 64, 64, [Int8, Int8])], DType::F16, 4),
    ]
}

/// Returns an element of a token. Channels have different magnitudes.
pub(crate) fn element(seed: u64, layer: usize, plane: usize, i: usize) -> f32 {
    let x = mix(seed ^ mix((layer as u64) << 40 | (plane as u64) << 32 | i as u64));
    let size = [0.01, 1.0, 1.0, 30.0][i % 4];
    ((x >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * size + if i % 7 == 3 { 2.0 * size } else { 0.0 }
}

pub(crate) fn bytes_of(x: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

pub(crate) fn number(bytes: &[u8], dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        DType::F16 => f16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
    }
}

/// The content that a reader sees: the rows of keys and values `[heads, dim]` by layer and token.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) shape: Shape,
    pub(crate) rows: Vec<Vec<[Vec<u8>; 2]>>,
}

impl Model {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self { shape: shape.clone(), rows: vec![Vec::new(); shape.layers.len()] }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows[self.shape.kv_layers()[0]].len()
    }

    pub(crate) fn truncate(&mut self, tokens: usize) {
        self.rows.iter_mut().for_each(|rows| rows.truncate(tokens));
    }

    /// Returns the current plane of a group.
    pub(crate) fn block(&self, layer: usize, group: usize, plane: usize) -> Vec<u8> {
        let own = &self.shape.layers[layer];
        let row = [own.key_dim, own.value_dim][plane] * self.shape.dtype.bytes();
        let rows = &self.rows[layer][group * self.shape.group..][..self.shape.group];
        (0..own.heads).flat_map(|head| rows.iter().flat_map(move |r| r[plane][head * row..][..row].to_vec())).collect()
    }

    /// Appends a token to each layer. Rounds the groups that it fills with the public coder.
    pub(crate) fn push(&mut self, seed: u64) {
        for layer in self.shape.kv_layers() {
            let own = self.shape.layers[layer];
            let row = |plane: usize| -> Vec<u8> {
                let count = own.heads * [own.key_dim, own.value_dim][plane];
                (0..count).flat_map(|i| bytes_of(element(seed, layer, plane, i), self.shape.dtype)).collect()
            };
            let row = [row(0), row(1)];
            self.rows[layer].push(row);
            if self.rows[layer].len().is_multiple_of(self.shape.group) {
                let group = self.rows[layer].len() / self.shape.group - 1;
                (0..2).for_each(|plane| self.round(layer, group, plane));
            }
        }
    }

    fn round(&mut self, layer: usize, group: usize, plane: usize) {
        let codec = match self.shape.layers[layer].codecs[plane] {
            PlaneCodec::Raw => return,
            PlaneCodec::Int8 => Codec::Int8,
            PlaneCodec::Int4 => Codec::Int4,
        };
        let shape = self.shape.plane(layer, plane);
        let plain = self.block(layer, group, plane);
        let (mut stored, mut back) = (Vec::new(), vec![0; plain.len()]);
        // The coder returns raw if the codec would save less than 5 %.
        let used = encode(codec, &shape, &plain, &mut stored).expect("a plane");
        decode(used, &shape, &stored, &mut back).expect("a plane");
        let row = shape.dims * self.shape.dtype.bytes();
        for (at, bytes) in back.chunks_exact(row).enumerate() {
            let (head, token) = (at / self.shape.group, group * self.shape.group + at % self.shape.group);
            self.rows[layer][token][plane][head * row..][..row].copy_from_slice(bytes);
        }
    }

    /// Compares everything that can be read of a sequence with the model.
    pub(crate) fn check(&self, store: &Store, sequence: &Sequence) {
        assert_eq!(sequence.len() as usize, self.len());
        for layer in self.shape.kv_layers().into_iter().filter(|_| self.len() > 0) {
            let own = self.shape.layers[layer];
            let view = sequence.select(layer, SelectRequest::all()).expect("a view");
            let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            let blocks = batch.get(0).expect("blocks");
            for (nth, group) in view.groups().enumerate() {
                let (keys, values) = blocks.group(nth).expect("a group");
                assert!(keys == self.block(layer, group as usize, 0), "keys of layer {layer}, group {group}");
                assert!(values == self.block(layer, group as usize, 1), "values of layer {layer}, group {group}");
            }
            let query: Vec<f32> = (0..2 * own.heads * own.key_dim).map(|i| element(7, 9, 2, i) / 20.0).collect();
            let dim = if own.value_dim == 0 { own.key_dim } else { own.value_dim };
            let mut out = vec![0.0; 2 * own.heads * dim];
            attend(&query, &view, blocks, &mut out).expect("attention");
            let positions: Vec<usize> = view.positions().map(|at| at as usize).collect();
            for (head, out) in out.chunks_exact(dim).enumerate() {
                let query = &query[head * own.key_dim..][..own.key_dim];
                self.check_attention(layer, head / 2, query, &positions, out);
            }
            if own.value_dim > 0 {
                let values = view.groups().collect::<Vec<_>>();
                let alone = sequence
                    .select(layer, SelectRequest::groups(&values).planes(PlaneSet::ValuesOnly))
                    .expect("a view");
                let batch = store.read(&[&alone]).submit().and_then(|ticket| ticket.wait()).expect("read");
                for (nth, group) in values.iter().enumerate() {
                    let (keys, values) = batch.get(0).and_then(|blocks| blocks.group(nth)).expect("a group");
                    assert!(keys.is_empty() && values == self.block(layer, *group as usize, 1));
                }
            }
        }
    }

    fn check_attention(&self, layer: usize, head: usize, query: &[f32], positions: &[usize], out: &[f32]) {
        let own = self.shape.layers[layer];
        let row = |token: usize, plane: usize, dim: usize| {
            let size = self.shape.dtype.bytes();
            let row = &self.rows[layer][token][plane][head * dim * size..][..dim * size];
            row.chunks_exact(size).map(|bytes| number(bytes, self.shape.dtype)).collect::<Vec<f64>>()
        };
        let scale = 1.0 / (own.key_dim as f64).sqrt();
        let dot = |key: Vec<f64>| key.iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum::<f64>() * scale;
        let scores: Vec<f64> = positions.iter().map(|token| dot(row(*token, 0, own.key_dim))).collect();
        let most = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut want = vec![0.0; out.len()];
        for (token, weight) in positions.iter().zip(weights) {
            let value = if own.value_dim == 0 { row(*token, 0, own.key_dim) } else { row(*token, 1, own.value_dim) };
            want.iter_mut().zip(value).for_each(|(want, x)| *want += weight / total * x);
        }
        for (want, found) in want.iter().zip(out) {
            assert!((want - f64::from(*found)).abs() < 2e-3 * (1.0 + want.abs()), "layer {layer}: {found}, not {want}");
        }
    }
}

/// Appends tokens of these seeds to all layers, in one or two calls.
pub(crate) fn append(sequence: &mut Sequence, shape: &Shape, seeds: &[u64]) {
    for layer in shape.kv_layers() {
        let own = shape.layers[layer];
        for seeds in [&seeds[..seeds.len() / 3], &seeds[seeds.len() / 3..]] {
            let rows = |plane: usize, dim: usize| -> Vec<f32> {
                seeds.iter().flat_map(|seed| (0..own.heads * dim).map(|i| element(*seed, layer, plane, i))).collect()
            };
            let (keys, values) = (rows(0, own.key_dim), rows(1, own.value_dim));
            let keys = TensorView::token_major(&keys, seeds.len(), own.heads, own.key_dim);
            let values = match own.value_dim {
                0 => TensorView::empty(seeds.len()),
                dim => TensorView::token_major(&values, seeds.len(), own.heads, dim),
            };
            sequence.append(layer, keys, values).expect("appended");
        }
    }
}
