//! Attention over a view: its parts in order, each a partial of its own, then the tail, merged in order.

use super::batch::SelectionBlocks;
use super::decode_check::undecodable;
use super::verify::not_there;
use crate::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};
use crate::cache::Resident;
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Lease;
use crate::plan::ReadPart;
use crate::plan::{GroupSource, KeySource, Selection, SelectionInner};
use std::sync::Arc;

/// How to attend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttendOptions {
    /// What scores are multiplied by before the softmax. Default `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// Elements of a key that are its value, for layouts without a V plane (MLA). Default: all.
    pub value_dims: Option<usize>,
}

/// Attention of `query` `[q_heads, key_dim]` over a view and its blocks, tail included, to `out` `[q_heads, value_dim]`.
/// Query head `h` uses KV head `h / (q_heads / kv_heads)`. Scores are scaled by `1 / sqrt(key_dim)`.
///
/// The same view gives the same bits, whatever was resident and in whatever order blocks arrived.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `query` or `out` has the wrong length or is not finite, or `blocks` belong to another view.
pub fn attend(query: &[f32], view: &Selection, blocks: SelectionBlocks<'_>, out: &mut [f32]) -> Result<()> {
    attend_with(query, view, blocks, &AttendOptions::default(), out)
}

/// [`attend`] with another scale, or with values that are a prefix of the keys.
///
/// # Errors
/// As [`attend`].
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
    let mut attending = Attending::new(query, &view.inner, options)?;
    for part in blocks.parts() {
        attending.part(&part.part, part.buffer.as_deref())?;
    }
    attending.finish(out)
}

pub(super) fn wrong_view(index: usize) -> Error {
    not_there(&format!("view {index} of the read is another view than the one given"))
}

/// Attention under way.
pub(super) struct Attending<'a> {
    view: &'a SelectionInner,
    query: Query,
    total: Partial,
    part: Partial,
    workspace: Workspace,
    /// K planes of units of a part, rebuilt, one behind the other.
    keys: Vec<u8>,
    /// The part that they are of, by its first unit.
    keys_of: Option<usize>,
    /// How the blocks are stored, where not as they are, and the planes of a part decoded, one behind the other.
    coder: Option<BlockCoder>,
    decoded: Vec<u8>,
}

impl<'a> Attending<'a> {
    pub(super) fn new(query: &[f32], view: &'a SelectionInner, options: &AttendOptions) -> Result<Self> {
        let layer = view.layout.kv_layer(view.layer)?;
        let key_dim = usize::from(layer.key_dim);
        if query.is_empty() || !query.len().is_multiple_of(key_dim) {
            let text = format!("query of {} elements; layer {} has keys of {key_dim}", query.len(), view.layer);
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

    /// Rebuilds the keys of a part, for which nothing needs to have arrived.
    pub(super) fn rebuild(&mut self, part: &ReadPart) {
        let Some(rebuilt) = self.view.rebuilt.as_ref().filter(|_| self.keys_of != Some(part.units.start)) else {
            return;
        };
        let units = self.view.units[part.units.clone()].iter();
        let groups: Vec<u64> = units.filter(|u| matches!(u.keys, KeySource::Rebuilt)).map(|u| u.group).collect();
        rebuilt.rebuild(&groups, &mut self.keys);
        self.keys_of = Some(part.units.start);
    }

    /// One part, whose buffer has arrived and was checked.
    pub(super) fn part(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        self.rebuild(part);
        self.decode(part, buffer)?;
        let tokens = self.view.group_tokens();
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
                KeySource::Absent => return Err(not_there("the keys of a view of values alone")),
            };
            blocks.push(KvBlock { k, v, group_tokens: tokens, tokens, heads: unit.heads, positions: unit.positions });
        }
        self.part.reset();
        self.part.add_all(&self.query, &blocks, &mut self.workspace)?;
        self.total.merge(&self.part)
    }

    /// Decodes the planes of a part that are under a codec.
    fn decode(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        self.decoded.clear();
        let Some(coder) = &self.coder else { return Ok(()) };
        for nth in part.units.clone() {
            let (k, v) = planes(self.view, part, buffer, nth)?;
            let keys = self.view.units[nth].reads_keys().then_some((0, k));
            for (plane, stored) in keys.into_iter().chain([(1, v)]).filter(|(plane, _)| coder.encodes(*plane)) {
                let start = self.decoded.len();
                self.decoded.resize(start + coder.plain_bytes(plane), 0);
                // A block that was resident already may have come with a read that failed for it.
                let decoded = coder.decode_plane(plane, stored, &mut self.decoded[start..]);
                decoded.map_err(|_| undecodable(self.view, &self.view.units[nth], 0))?;
            }
        }
        Ok(())
    }

    /// The tail, then the result.
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

/// The planes of unit `nth` of a view, which `part` holds, as they are stored; no keys where they are not read.
pub(super) fn planes<'a>(
    view: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    nth: usize,
) -> Result<(&'a [u8], &'a [u8])> {
    let geometry = view.layout.block(view.layer);
    let unit = &view.units[nth];
    let (start, len) = geometry.plane(1);
    let keys = if unit.reads_keys() { geometry.key_bytes } else { 0 };
    let block = match &unit.source {
        GroupSource::Run { run, index } => run.block(*index)?,
        GroupSource::Copied(block) => block,
        GroupSource::Disk { .. } => {
            let resident = part.resident.get(nth - part.units.start).and_then(Option::as_ref);
            let at = part.blocks.get(nth - part.units.start).copied().flatten();
            let bytes = buffer.and_then(Lease::bytes);
            let own = unit.bytes(geometry);
            let read = match (resident.and_then(Resident::bytes), at, bytes) {
                (Some(block), ..) if block.len() == own => block,
                (None, Some(at), Some(bytes)) => &bytes[at..at + own],
                _ => return Err(Error::new(ErrorKind::Busy, "the block has not arrived")),
            };
            if !unit.reads_keys() {
                return Ok((&[], read));
            }
            read
        }
    };
    Ok((&block[..keys], &block[start..start + len]))
}
