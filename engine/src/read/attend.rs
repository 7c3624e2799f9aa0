//! Attention over a selection.
//!
//! 1. Each part in order: decode its planes, reconstruct its keys, attend to it as a partial of its own.
//! 2. The tail, as one more partial.
//! 3. Partials are merged in this order, so that the bits of the result depend on the selection alone.

use super::batch::SelectionBlocks;
use super::errors::{not_there, undecodable, wrong_view};
use super::planes::planes;
use crate::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::plan::{AttendedEntries, KeySource, ReadPart, Selection, SelectionInner};
use std::sync::Arc;

/// Options of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttendOptions {
    /// The factor of scores before the softmax. Default `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// The leading elements of a key that are its value, for layouts without a V plane (MLA). Default: all.
    pub value_dims: Option<usize>,
}

/// Attends with `query` `[q_heads, key_dim]` to a selection and its tail. Writes `out` `[q_heads, value_dim]`.
///
/// Query head `h` uses KV head `h / (q_heads / kv_heads)`. Scores are scaled by `1 / sqrt(key_dim)`.
/// Equal selections give equal bits, whatever was cached and in whatever order blocks arrived.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `query` or `out` has the wrong length or is not finite, or `blocks` are of another
/// selection.
pub fn attend(query: &[f32], view: &Selection, blocks: SelectionBlocks<'_>, out: &mut [f32]) -> Result<()> {
    attend_with(query, view, blocks, &AttendOptions::default(), out)
}

/// Attends as [`attend`] does, with another scale or with values that are a prefix of the keys.
///
/// # Errors
/// The errors of [`attend`].
pub fn attend_with(
    query: &[f32],
    view: &Selection,
    blocks: SelectionBlocks<'_>,
    options: &AttendOptions,
    out: &mut [f32],
) -> Result<()> {
    if !Arc::ptr_eq(blocks.view, &view.inner) {
        return Err(wrong_view(0));
    }
    let mut attending = SelectionAttention::new(query, &view.inner, options)?;
    for part in blocks.parts() {
        attending.part(&part.part, part.buffer.as_deref())?;
    }
    attending.finish(out)
}

/// Attention to a selection, part by part.
pub(super) struct SelectionAttention<'a> {
    view: &'a SelectionInner,
    query: Query,
    total: Partial,
    part: Partial,
    workspace: Workspace,
    /// Reconstructed K planes of a part's groups, in order.
    keys: Vec<u8>,
    /// The part that they are of, by its first group.
    keys_of: Option<usize>,
    /// The codec of the blocks, if they have one.
    coder: Option<BlockCoder>,
    /// Decoded planes of a part's groups, in order.
    decoded: Vec<u8>,
}

impl<'a> SelectionAttention<'a> {
    pub(super) fn new(query: &[f32], view: &'a SelectionInner, options: &AttendOptions) -> Result<Self> {
        let layer = view.layout.kv_layer(view.layer)?;
        let key_dim = usize::from(layer.key_dim);
        if query.is_empty() || !query.len().is_multiple_of(key_dim) {
            let text = format!(
                "attend: query has {} elements, not a multiple of layer {}'s key_dim {key_dim}",
                query.len(),
                view.layer
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let (kv_heads, value_dim) = (usize::from(layer.kv_heads), usize::from(layer.value_dim));
        let mut shape = AttentionShape::new(query.len() / key_dim, kv_heads, key_dim, value_dim, view.layout.dtype())?;
        if let Some(scale) = options.scale {
            shape = shape.with_scale(scale)?;
        }
        if let Some(dims) = options.value_dims {
            shape = shape.with_value_dims(dims)?;
        }
        let query = Query::new(&shape, query)?;
        let (total, part) = (Partial::new(&shape), Partial::new(&shape));
        let coder = BlockCoder::of(&view.layout, view.layer);
        Ok(Self {
            view,
            query,
            total,
            part,
            workspace: Workspace::new(),
            keys: Vec::new(),
            keys_of: None,
            coder,
            decoded: Vec::new(),
        })
    }

    /// Reconstructs the keys of a part. No block needs to have arrived.
    pub(super) fn rebuild(&mut self, part: &ReadPart) {
        let Some(rebuilt) = self.view.rebuilt.as_ref().filter(|_| self.keys_of != Some(part.units.start)) else {
            return;
        };
        let units = self.view.units[part.units.clone()].iter();
        let groups: Vec<u64> = units.filter(|u| matches!(u.keys, KeySource::Rebuilt)).map(|u| u.group).collect();
        rebuilt.rebuild(&groups, &mut self.keys);
        self.keys_of = Some(part.units.start);
    }

    /// Attends to one part, whose buffer has arrived and was checked.
    pub(super) fn part(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        self.rebuild(part);
        self.decode(part, buffer)?;
        let tokens = self.view.group_tokens();
        let heads = HeadMask::all(usize::from(self.view.layout.kv_layer(self.view.layer)?.kv_heads));
        let mut rebuilt = self.keys.chunks_exact(self.view.layout.plain_block(self.view.layer).key_bytes);
        let mut decoded = &self.decoded[..];
        let mut blocks = Vec::with_capacity(part.units.len());
        for nth in part.units.clone() {
            let unit = &self.view.units[nth];
            let stored = planes(self.view, part, buffer, nth)?;
            let mut plane = |plane: usize, stored| match &self.coder {
                Some(coder) if coder.encodes(plane) => {
                    let (plain, rest) = decoded.split_at(coder.plain_bytes(plane).min(decoded.len()));
                    decoded = rest;
                    plain
                }
                _ => stored,
            };
            let k = if unit.reads_keys() { plane(0, stored.0) } else { stored.0 };
            let v = plane(1, stored.1);
            let k = match &unit.keys {
                KeySource::Stored => k,
                KeySource::Kept(plane) => plane,
                KeySource::Rebuilt => rebuilt.next().unwrap_or_default(),
                KeySource::Absent => return Err(not_there("K plane in a selection of values only")),
            };
            let block = KvBlock { k, v, group_tokens: tokens, tokens, heads, positions: None };
            match &unit.entries {
                AttendedEntries::AllHeads(positions) => blocks.push(KvBlock { positions: *positions, ..block }),
                AttendedEntries::PerHead(items) => {
                    let own = |&(heads, tokens)| KvBlock { heads, positions: Some(tokens), ..block };
                    blocks.extend(items.iter().map(own));
                }
            }
        }
        self.part.reset();
        self.part.add_all(&self.query, &blocks, &mut self.workspace)?;
        self.total.merge(&self.part)
    }

    /// Decodes the planes of a part that have a codec.
    fn decode(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        self.decoded.clear();
        let Some(coder) = &self.coder else { return Ok(()) };
        for nth in part.units.clone() {
            let (k, v) = planes(self.view, part, buffer, nth)?;
            let keys = self.view.units[nth].reads_keys().then_some((0, k));
            for (plane, stored) in keys.into_iter().chain([(1, v)]).filter(|(plane, _)| coder.encodes(*plane)) {
                let start = self.decoded.len();
                self.decoded.resize(start + coder.plain_bytes(plane), 0);
                // A cached block may be of a read that failed for this part.
                let decoded = coder.decode_plane(plane, stored, &mut self.decoded[start..]);
                decoded.map_err(|_| undecodable(self.view, &self.view.units[nth], 0))?;
            }
        }
        Ok(())
    }

    /// Attends to the tail and writes the result.
    pub(super) fn finish(mut self, out: &mut [f32]) -> Result<()> {
        if let Some(tail) = &self.view.tail {
            let geometry = self.view.layout.plain_block(self.view.layer);
            let heads = usize::from(self.view.layout.kv_layer(self.view.layer)?.kv_heads);
            let (start, len) = geometry.plane(1);
            let block = KvBlock {
                k: &tail.block[..geometry.key_bytes],
                v: &tail.block[start..start + len],
                group_tokens: self.view.group_tokens(),
                tokens: tail.tokens,
                heads: HeadMask::all(heads),
                positions: tail.positions,
            };
            self.part.reset();
            self.part.add(&self.query, &block, &mut self.workspace)?;
            self.total.merge(&self.part)?;
        }
        self.total.finish(out)
    }
}
