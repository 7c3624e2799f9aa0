//! The keys and values of a case, and the checks of what a read returns.
//!
//! An element is a hash of its token's salt, layer, plane and index, so a wrong place shows as wrong bytes.
//!
//! - Raw planes are compared bit by bit.
//! - Encoded planes are compared within the rounding error of their codec. A truncation moves decoded tokens from a
//!   full group to the tail, and the next group rounds them again. [`Token`] counts these roundings.
//! - Attention over a whole layer is compared with a naive one over the elements that were read.

use super::case::Case;
use crate::content::encode;
use std::ops::Range;
use stratakv::layout::PlaneCodec;
use stratakv::read::SelectionBlocks;
use stratakv::retrieval::KeyShape;
use stratakv::{DType, KvLayout, Selection, Sequence, Store, TensorView, attend};

/// The layout of a case, with what the checks need of it.
pub(crate) struct CaseShape {
    pub(crate) layout: KvLayout,
    pub(crate) layers: usize,
    heads: usize,
    dim: usize,
    pub(super) group: usize,
    dtype: DType,
    /// The codecs of K and V by layer.
    codecs: Vec<[PlaneCodec; 2]>,
    /// True if the case has a codec. Elements are then whole steps apart, so that rounding never makes one of another.
    encoded: bool,
}

/// The largest distance of a decoded element from the appended one. Elements under a codec are multiples of 1 apart.
const ROUNDING: f32 = 0.45;
/// The largest difference of two elements of an encoded range, earlier roundings included.
const SPREAD: f32 = 3.0 + ROUNDING;

/// Returns an element of a token. It is exact in every dtype.
fn element(salt: u64, layer: usize, plane: usize, index: usize, encoded: bool) -> f32 {
    let place = (layer as u64) << 40 | (plane as u64) << 32 | index as u64;
    let mut x = salt ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    if encoded { (x >> 62) as f32 - 1.5 } else { ((x >> 56) as f32 - 128.0) / 64.0 }
}

/// Converts the elements of a row to numbers.
fn numbers(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
        bytes.as_chunks::<N>().0.iter().zip(out).for_each(|(bytes, out)| *out = number(*bytes));
    }
    match dtype {
        DType::F32 => each(bytes, out, f32::from_le_bytes),
        DType::Bf16 => each(bytes, out, |bytes| half::bf16::from_le_bytes(bytes).to_f32()),
        _ => each(bytes, out, |bytes| half::f16::from_le_bytes(bytes).to_f32()),
    }
}

/// An appended token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    /// The seed of its elements.
    pub(super) salt: u64,
    /// The number of truncations that moved it from a full group to the tail. A codec rounded it at most as often.
    roundings: u8,
}

/// Tokens are equal if the same elements were appended.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.salt == other.salt
    }
}

impl Eq for Token {}

impl Token {
    /// Returns a token that no codec has rounded.
    pub(super) const fn new(salt: u64) -> Self {
        Self::rounded(salt, 0)
    }

    /// Returns a token that a codec has rounded at most this often before it came to the tail.
    pub(crate) const fn rounded(salt: u64, roundings: u8) -> Self {
        Self { salt, roundings }
    }

    /// Truncates a layer to its first `len` tokens. If this splits a full group, its remaining tokens become the tail,
    /// with the values that the group decodes to.
    pub(super) fn cut(tokens: &mut Vec<Self>, len: usize, group: usize) {
        let first = len / group * group;
        if len < tokens.len() && first + group <= tokens.len() {
            for token in &mut tokens[first..len] {
                token.roundings = token.roundings.saturating_add(1);
            }
        }
        tokens.truncate(len);
    }
}

/// The result of reading a whole layer: K and V, `[tokens, kv_heads, head_dim]` each.
pub(super) struct Contents {
    planes: [Vec<f32>; 2],
}

impl CaseShape {
    pub(super) fn new(case: &Case) -> Result<Self, String> {
        Self::of(case.layout, case.dtype, case.codec)
    }

    /// Returns a shape of layers, KV heads, head dim and group tokens. `codec` has the bits per element of encoded
    /// groups, 0 for raw groups, and the share of encoded layers.
    pub(crate) fn of(layout: (u16, u16, u16, u16), dtype: DType, codec: (u8, f64)) -> Result<Self, String> {
        let (layers, heads, dim, group) = layout;
        let builder = KvLayout::builder().layers(layers).kv_heads(heads).head_dim(dim).group_tokens(group);
        let (bits, share) = codec;
        let codec = match bits {
            0 => PlaneCodec::Raw,
            4 => PlaneCodec::Int4,
            _ => PlaneCodec::Int8,
        };
        let builder = builder.dtype(dtype).codec(codec).codec_share(share);
        let layout = builder.build().map_err(|e| format!("layout: {e:?}"))?;
        let codecs = (0..usize::from(layers)).map(|layer| layout.codecs(layer)).collect::<stratakv::Result<_>>();
        let codecs = codecs.map_err(|e| format!("codecs: {e:?}"))?;
        let (heads, dim) = (usize::from(heads), usize::from(dim));
        let encoded = bits > 0;
        Ok(Self { layout, layers: layers.into(), heads, dim, group: group.into(), dtype, codecs, encoded })
    }

    fn element(&self, salt: u64, layer: usize, plane: usize, index: usize) -> f32 {
        element(salt, layer, plane, index, self.encoded)
    }

    /// Returns whether groups of a layer encode this plane.
    pub(super) fn encodes(&self, layer: usize, plane: usize) -> bool {
        self.codecs[layer][plane] != PlaneCodec::Raw
    }

    /// Returns the shape of the keys for summaries.
    pub(super) fn keys(&self) -> KeyShape {
        KeyShape { kv_heads: self.heads, key_dim: self.dim, group_tokens: self.group, dtype: self.dtype }
    }

    /// Returns the K plane of the group of these tokens, as it is stored.
    pub(super) fn key_plane(&self, layer: usize, tokens: &[Token]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for head in 0..self.heads {
            for token in tokens {
                for i in 0..self.dim {
                    bytes.extend(encode(self.element(token.salt, layer, 0, head * self.dim + i), self.dtype));
                }
            }
        }
        bytes
    }

    /// Returns the elements of the keys of a token.
    pub(super) fn width(&self) -> usize {
        self.heads * self.dim
    }

    pub(crate) fn append(&self, sequence: &mut Sequence, layer: usize, added: &[Token]) -> stratakv::Result<()> {
        let row = self.heads * self.dim;
        let plane = |plane| {
            let tokens = added.iter();
            tokens
                .flat_map(|token| (0..row).map(move |i| self.element(token.salt, layer, plane, i)))
                .collect::<Vec<f32>>()
        };
        let (keys, values) = (plane(0), plane(1));
        let view = |data| TensorView::token_major(data, added.len(), self.heads, self.dim);
        sequence.append(layer, view(&keys), view(&values))
    }

    /// Returns whether groups of a layer encode either plane.
    pub(super) fn is_encoded(&self, layer: usize) -> bool {
        (0..2).any(|plane| self.encodes(layer, plane))
    }

    /// Reads a whole layer and compares every token with what was appended. `select` selects all tokens of a layer.
    /// `Ok(Err)` is an error of the store.
    pub(crate) fn check(
        &self,
        store: &Store,
        select: impl Fn(usize) -> stratakv::Result<Selection>,
        layer: usize,
        tokens: &[Token],
    ) -> Result<stratakv::Result<()>, String> {
        match self.read(store, select, layer, tokens)? {
            Ok(contents) => self.compare_tail(layer, &contents, tokens).map(Ok),
            Err(e) => Ok(Err(e)),
        }
    }

    /// Reads a whole layer. Compares its groups with what was appended, and attention with a naive one over the
    /// elements that were read. Does not compare the tail: [`Self::compare_tail`] does.
    pub(super) fn read(
        &self,
        store: &Store,
        select: impl Fn(usize) -> stratakv::Result<Selection>,
        layer: usize,
        tokens: &[Token],
    ) -> Result<stratakv::Result<Contents>, String> {
        let len = tokens.len() * self.width();
        let mut contents = Contents { planes: [0, 1].map(|_| vec![0.0; len]) };
        if tokens.is_empty() {
            return Ok(Ok(contents));
        }
        let view = match select(layer) {
            Ok(view) => view,
            Err(e) => return Ok(Err(e)),
        };
        if !view.positions().eq(0..tokens.len() as u64) {
            return Err(format!("layer {layer}: the view has {} tokens, not {}", view.tokens(), tokens.len()));
        }
        let batch = match store.read(&[&view]).submit().and_then(stratakv::read::ReadTicket::wait) {
            Ok(batch) => batch,
            Err(e) => return Ok(Err(e)),
        };
        let blocks = match batch.get(0) {
            Ok(blocks) => blocks,
            Err(e) => return Ok(Err(e)),
        };
        for (nth, group) in view.groups().enumerate() {
            let planes = match blocks.group(nth) {
                Ok((keys, values)) => [keys, values],
                Err(e) => return Ok(Err(e)),
            };
            let first = group as usize * self.group;
            let range = first..first + self.group;
            for (plane, bytes) in planes.iter().enumerate() {
                self.take_plane(bytes, range.clone(), &mut contents.planes[plane])
                    .map_err(|e| format!("layer {layer}, group {group}: {e}"))?;
            }
            self.compare(layer, &contents, tokens, range)?;
        }
        let tail = self.sealed(tokens)..tokens.len();
        if !tail.is_empty() {
            let Some(planes) = stratakv::sim::tail(&view) else {
                return Err(format!("layer {layer}: the view has no tail"));
            };
            for (plane, bytes) in planes.into_iter().enumerate() {
                self.take_plane(bytes, tail.clone(), &mut contents.planes[plane])
                    .map_err(|e| format!("layer {layer}, tail: {e}"))?;
            }
        }
        let query: Vec<f32> = (0..self.width()).map(|i| self.element(tokens[0].salt ^ 77, layer, 2, i) / 2.0).collect();
        let mut out = vec![0.0; query.len()];
        if let Err(e) = attend(&query, &view, blocks, &mut out) {
            return Ok(Err(e));
        }
        self.check_attention(layer, &contents, &query, &out)?;
        Ok(Ok(contents))
    }

    /// Compares the contents of a layer with these tokens.
    pub(super) fn compare_all(&self, layer: usize, contents: &Contents, tokens: &[Token]) -> Result<(), String> {
        self.compare(layer, contents, tokens, 0..tokens.len())
    }

    /// Compares the tail of a layer with these tokens.
    pub(super) fn compare_tail(&self, layer: usize, contents: &Contents, tokens: &[Token]) -> Result<(), String> {
        self.compare(layer, contents, tokens, self.sealed(tokens)..tokens.len())
    }

    /// Returns the number of tokens in full groups.
    fn sealed(&self, tokens: &[Token]) -> usize {
        tokens.len() / self.group * self.group
    }

    /// Compares the tokens of a range, exactly unless a codec rounded them.
    fn compare(&self, layer: usize, contents: &Contents, tokens: &[Token], range: Range<usize>) -> Result<(), String> {
        let (width, sealed) = (self.width(), self.sealed(tokens));
        for (plane, found) in contents.planes.iter().enumerate() {
            if found.len() != tokens.len() * width {
                return Err(format!("layer {layer}, plane {plane}: {} elements", found.len()));
            }
            for (at, token) in range.clone().zip(&tokens[range.clone()]) {
                let roundings = token.roundings.saturating_add(u8::from(at < sealed));
                let bound = self.bound(self.codecs[layer][plane], roundings);
                let same = |(i, found): (usize, &f32)| {
                    let want = self.element(token.salt, layer, plane, i);
                    if bound > 0.0 { (found - want).abs() <= bound } else { found.to_bits() == want.to_bits() }
                };
                if !found[at * width..][..width].iter().enumerate().all(same) {
                    let part = if at < sealed { "a group" } else { "the tail" };
                    return Err(format!("layer {layer}, plane {plane}: token {at}, of {part}, has wrong bytes"));
                }
            }
        }
        Ok(())
    }

    /// Returns the largest distance of an element from the appended one after `roundings` roundings; 0 for equality.
    fn bound(&self, codec: PlaneCodec, roundings: u8) -> f32 {
        let levels = match codec {
            PlaneCodec::Raw => return 0.0,
            PlaneCodec::Int4 => 15.0,
            _ => 255.0,
        };
        let dtype = match self.dtype {
            DType::F32 => f32::EPSILON,
            DType::Bf16 => 1.0 / 128.0,
            _ => 1.0 / 1024.0,
        };
        // Half a quantisation step, rounded up in the dtype, plus the rounding of the element to the dtype.
        let once = SPREAD / levels * (1.0 + dtype) / 2.0 + SPREAD / 2.0 * dtype;
        (once * f32::from(roundings)).min(ROUNDING)
    }

    /// Decodes a stored plane `[heads, group, dim]` into the tokens of a range, from its start on.
    fn take_plane(&self, bytes: &[u8], range: Range<usize>, out: &mut [f32]) -> Result<(), String> {
        let row = self.dim * self.dtype.bytes();
        if bytes.len() != self.heads * self.group * row {
            return Err(format!("a plane of {} bytes", bytes.len()));
        }
        for (head, bytes) in bytes.chunks_exact(self.group * row).enumerate() {
            for (token, bytes) in range.clone().zip(bytes.chunks_exact(row)) {
                numbers(bytes, self.dtype, &mut out[token * self.width() + head * self.dim..][..self.dim]);
            }
        }
        Ok(())
    }

    /// Compares the entries that a selection gives with the contents of their layer, and attention `out` over them with
    /// a naive one. Groups and pages hold the same bits.
    pub(super) fn compare_entries(
        &self,
        layer: usize,
        (selection, blocks): (&Selection, SelectionBlocks<'_>),
        contents: &Contents,
        (query, out): (&[f32], &[f32]),
    ) -> Result<(), String> {
        let entries: Vec<Vec<usize>> =
            (0..self.heads).map(|head| selection.entries(head).map(|token| token as usize).collect()).collect();
        let mut row = vec![0.0; self.dim];
        for (nth, group) in selection.groups().enumerate() {
            let (keys, values) = blocks.group(nth).map_err(|e| format!("layer {layer}, group {group}: {e}"))?;
            let first = group as usize * self.group;
            for (plane, bytes) in [&keys, &values].into_iter().enumerate() {
                let stride = self.dim * self.dtype.bytes();
                for (head, own) in entries.iter().enumerate() {
                    for token in own.iter().filter(|token| (first..first + self.group).contains(token)) {
                        let at = (head * self.group + token - first) * stride;
                        numbers(&bytes[at..at + stride], self.dtype, &mut row);
                        let want = &contents.planes[plane][token * self.width() + head * self.dim..][..self.dim];
                        if row.iter().zip(want).any(|(found, want)| found.to_bits() != want.to_bits()) {
                            return Err(format!("layer {layer}, head {head}: entry {token} has other bytes"));
                        }
                    }
                }
            }
        }
        self.attention_over(layer, contents, (query, out), |head| entries[head].iter().copied())
    }

    fn check_attention(&self, layer: usize, contents: &Contents, query: &[f32], out: &[f32]) -> Result<(), String> {
        self.attention_over(layer, contents, (query, out), |_| 0..contents.planes[0].len() / self.width())
    }

    /// Compares attention over some tokens of each head with a naive one.
    fn attention_over<I: Iterator<Item = usize>>(
        &self,
        layer: usize,
        contents: &Contents,
        (query, out): (&[f32], &[f32]),
        tokens: impl Fn(usize) -> I,
    ) -> Result<(), String> {
        let mut want = vec![0.0; self.dim];
        for head in 0..self.heads {
            let at = head * self.dim..(head + 1) * self.dim;
            let row = |plane: usize, token: usize| &contents.planes[plane][token * self.width()..][at.clone()];
            let rows = |plane: usize| tokens(head).map(move |token| row(plane, token));
            let scores = rows(0).map(|key| dot(&query[at.clone()], key) / (self.dim as f32).sqrt());
            let scores: Vec<f32> = scores.collect();
            let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            want.fill(0.0);
            let mut total = 0.0;
            for (value, score) in rows(1).zip(&scores) {
                let weight = (score - best).exp();
                total += weight;
                want.iter_mut().zip(value).for_each(|(want, value)| *want += weight * value);
            }
            for (found, want) in out[at.clone()].iter().zip(&want) {
                let want = want / total;
                if (found - want).abs() > 2e-4 || found.is_nan() {
                    return Err(format!("layer {layer}: attention gives {found}, not {want}"));
                }
            }
        }
        Ok(())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
