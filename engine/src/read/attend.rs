//! Attention over a selection.
//!
//! 1. Each part in order: decode its planes, reconstruct its keys, attend to it as a partial of its own.
//! 2. The tail, as one more partial.
//! 3. Partials are merged in this order, so that the bits of the result depend on the selection alone.

use super::batch::SelectionBlocks;
use super::errors::{not_there, undecodable, wrong_selection};
use super::planes::{page_bytes, planes};
use crate::attention::{AttentionShape, HeadMask, KvBlock, Partial, Query, Workspace};
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::plan::{AttendedEntries, KeySource, ReadPart, SelectedGroup, Selection, SelectionInner};
use std::sync::Arc;
use stratakv_format::pool::EntryHeads;

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
pub fn attend(query: &[f32], selection: &Selection, blocks: SelectionBlocks<'_>, out: &mut [f32]) -> Result<()> {
    attend_with(query, selection, blocks, &AttendOptions::default(), out)
}

/// Attends as [`attend`] does, with another scale or with values that are a prefix of the keys.
///
/// # Errors
/// The errors of [`attend`].
pub fn attend_with(
    query: &[f32],
    selection: &Selection,
    blocks: SelectionBlocks<'_>,
    options: &AttendOptions,
    out: &mut [f32],
) -> Result<()> {
    if !Arc::ptr_eq(blocks.selection, &selection.inner) {
        return Err(wrong_selection(0));
    }
    let mut attending = SelectionAttention::new(query, &selection.inner, options)?;
    for part in blocks.parts() {
        attending.part(&part.part, part.buffer.as_deref())?;
    }
    attending.finish(out)
}

/// Attention to a selection, part by part.
///
/// Its buffers are reused, so that a part allocates nothing.
pub(super) struct SelectionAttention {
    selection: Arc<SelectionInner>,
    query: Query,
    /// None before the first partial is merged.
    total: Option<Partial>,
    /// Partials that are not in use.
    spare: Vec<Partial>,
    workspace: Workspace,
    /// Empty. It keeps the memory of a part's list of blocks.
    blocks: Vec<KvBlock<'static>>,
    /// Reconstructed K planes of a part's groups, in order.
    keys: Vec<u8>,
    /// The part that they are of, by its first group.
    keys_of: Option<usize>,
    /// The codec of the blocks, if they have one.
    coder: Option<BlockCoder>,
    /// Decoded planes of a part's groups, in order.
    decoded: Vec<u8>,
}

impl SelectionAttention {
    pub(super) fn new(query: &[f32], selection: &Arc<SelectionInner>, options: &AttendOptions) -> Result<Self> {
        let layer = selection.layout.kv_layer(selection.layer)?;
        let key_dim = usize::from(layer.key_dim);
        if query.is_empty() || !query.len().is_multiple_of(key_dim) {
            let text = format!(
                "attend: query has {} elements, not a multiple of layer {}'s key_dim {key_dim}",
                query.len(),
                selection.layer
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let (kv_heads, value_dim) = (usize::from(layer.kv_heads), usize::from(layer.value_dim));
        let mut shape =
            AttentionShape::new(query.len() / key_dim, kv_heads, key_dim, value_dim, selection.layout.dtype())?;
        if let Some(scale) = options.scale {
            shape = shape.with_scale(scale)?;
        }
        if let Some(dims) = options.value_dims {
            shape = shape.with_value_dims(dims)?;
        }
        let query = Query::new(&shape, query)?;
        let coder = BlockCoder::of(&selection.layout, selection.layer);
        Ok(Self {
            selection: Arc::clone(selection),
            query,
            total: None,
            spare: Vec::new(),
            workspace: Workspace::new(),
            blocks: Vec::new(),
            keys: Vec::new(),
            keys_of: None,
            coder,
            decoded: Vec::new(),
        })
    }

    /// Returns whether it reconstructs keys.
    pub(super) fn rebuilds(&self) -> bool {
        self.selection.rebuilt.is_some()
    }

    /// Reconstructs the keys of a part. No block needs to have arrived.
    pub(super) fn rebuild(&mut self, part: &ReadPart) {
        let Some(rebuilt) = self.selection.rebuilt.as_ref().filter(|_| self.keys_of != Some(part.groups.start)) else {
            return;
        };
        let groups = self.selection.groups[part.groups.clone()].iter();
        let is_rebuilt = |group: &&SelectedGroup| matches!(group.keys, KeySource::Rebuilt);
        let indexes: Vec<u64> = groups.filter(is_rebuilt).map(|group| group.index).collect();
        rebuilt.rebuild(&indexes, &mut self.keys);
        self.keys_of = Some(part.groups.start);
    }

    /// Attends to one part, whose buffer has arrived and was checked, and merges it. Call it in part order.
    pub(super) fn part(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        let partial = self.partial(part, buffer)?;
        self.merge(partial)
    }

    /// Merges the partial of the next part.
    pub(super) fn merge(&mut self, partial: Partial) -> Result<()> {
        let Some(total) = &mut self.total else {
            self.total = Some(partial);
            return Ok(());
        };
        total.merge(&partial)?;
        self.spare.push(partial);
        Ok(())
    }

    /// Returns a partial without tokens.
    fn empty_partial(&mut self) -> Partial {
        let Some(mut spare) = self.spare.pop() else { return Partial::new(self.query.shape()) };
        spare.reset();
        spare
    }

    /// Attends to one part by itself. Its buffer has arrived and was checked. Parts may come in any order.
    pub(super) fn partial(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<Partial> {
        if part.pages.is_empty() {
            self.rebuild(part);
            self.decode(part, buffer)?;
        }
        let mut partial = self.empty_partial();
        let mut blocks: Vec<KvBlock<'_>> = std::mem::take(&mut self.blocks);
        let made = (self.coder.as_ref(), &self.decoded[..], &self.keys[..]);
        match part.pages.is_empty() {
            true => list_blocks(&self.selection, part, buffer, made, &mut blocks)?,
            false => list_pages(&self.selection, part, buffer, &mut blocks)?,
        }
        partial.add_all(&self.query, &blocks, &mut self.workspace)?;
        // The standard library collects into the same memory.
        self.blocks = blocks.into_iter().map_while(|_| None).collect();
        Ok(partial)
    }

    /// Decodes the planes of a part that have a codec.
    fn decode(&mut self, part: &ReadPart, buffer: Option<&Lease>) -> Result<()> {
        self.decoded.clear();
        let Some(coder) = &self.coder else { return Ok(()) };
        let selection = &*self.selection;
        for nth in part.groups.clone().filter(|nth| selection.groups[*nth].is_needed()) {
            let (k, v) = planes(selection, part, buffer, nth)?;
            let keys = selection.groups[nth].reads_keys().then_some((0, k));
            for (plane, stored) in keys.into_iter().chain([(1, v)]).filter(|(plane, _)| coder.encodes(*plane)) {
                let start = self.decoded.len();
                self.decoded.resize(start + coder.plain_bytes(plane), 0);
                // A cached block may be of a read that failed for this part.
                let decoded = coder.decode_plane(plane, stored, &mut self.decoded[start..]);
                decoded.map_err(|_| undecodable(selection, &selection.groups[nth], 0))?;
            }
        }
        Ok(())
    }

    /// Attends to the tail and writes the result.
    pub(super) fn finish(&mut self, out: &mut [f32]) -> Result<()> {
        let selection = Arc::clone(&self.selection);
        if let Some(tail) = &selection.tail {
            let geometry = selection.layout.plain_block(selection.layer);
            let heads = usize::from(selection.layout.kv_layer(selection.layer)?.kv_heads);
            let (start, len) = geometry.plane(1);
            let block = KvBlock {
                k: &tail.block[..geometry.key_bytes],
                v: &tail.block[start..start + len],
                group_tokens: selection.group_tokens(),
                tokens: tail.tokens,
                heads: HeadMask::all(heads),
                positions: tail.positions,
                one_head: false,
            };
            let mut partial = self.empty_partial();
            partial.add(&self.query, &block, &mut self.workspace)?;
            self.merge(partial)?;
        }
        let total = self.total.take();
        total.unwrap_or_else(|| self.empty_partial()).finish(out)
    }
}

/// Lists what is attended of a part: planes as stored, decoded planes and reconstructed keys, each in the order of the
/// groups.
fn list_blocks<'a>(
    selection: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    (coder, mut decoded, keys): (Option<&BlockCoder>, &'a [u8], &'a [u8]),
    blocks: &mut Vec<KvBlock<'a>>,
) -> Result<()> {
    let tokens = selection.group_tokens();
    let heads = HeadMask::all(usize::from(selection.layout.kv_layer(selection.layer)?.kv_heads));
    let mut rebuilt = keys.chunks_exact(selection.layout.plain_block(selection.layer).key_bytes);
    for nth in part.groups.clone().filter(|nth| selection.groups[*nth].is_needed()) {
        let group = &selection.groups[nth];
        let stored = planes(selection, part, buffer, nth)?;
        let mut plane = |plane: usize, stored| match coder {
            Some(coder) if coder.encodes(plane) => {
                let (plain, rest) = decoded.split_at(coder.plain_bytes(plane).min(decoded.len()));
                decoded = rest;
                plain
            }
            _ => stored,
        };
        let k = if group.reads_keys() { plane(0, stored.0) } else { stored.0 };
        let v = plane(1, stored.1);
        let k = match &group.keys {
            KeySource::Stored => k,
            KeySource::Kept(plane) => plane,
            KeySource::Rebuilt => rebuilt.next().unwrap_or_default(),
            KeySource::Absent => return Err(not_there("K plane in a selection of values only")),
        };
        let block = KvBlock { k, v, group_tokens: tokens, tokens, heads, positions: None, one_head: false };
        match group.own_entries() {
            AttendedEntries::AllHeads(positions) => blocks.push(KvBlock { positions: *positions, ..block }),
            AttendedEntries::PerHead(items) => {
                let own = |&(heads, tokens)| KvBlock { heads, positions: Some(tokens), ..block };
                blocks.extend(items.iter().map(own));
            }
        }
    }
    Ok(())
}

/// Lists the pages of a part.
fn list_pages<'a>(
    selection: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    blocks: &mut Vec<KvBlock<'a>>,
) -> Result<()> {
    for (nth, page) in selection.pages[part.pages.clone()].iter().enumerate() {
        let own = &page.chosen;
        let bytes = page_bytes(selection, part, buffer, nth)?;
        let (k, v) = bytes.split_at(own.geometry.row(1, 0, 0).start);
        blocks.extend(own.items.iter().map(|&(heads, slots)| KvBlock {
            k,
            v,
            group_tokens: own.geometry.entries,
            tokens: own.page.valid as usize,
            heads,
            positions: Some(slots),
            one_head: own.heads != EntryHeads::All,
        }));
    }
    Ok(())
}
