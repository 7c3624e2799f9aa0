//! One layer of an open sequence: its sealed groups, the groups being collected, the tail, and its summaries.
//!
//! Tokens of a layer pass through four places:
//!
//! 1. The *tail* is the plain block of the tokens behind the last sealed group.
//! 2. The [`GroupBuilder`] is a buffer of sealed groups that still has room.
//! 3. *Pending* runs are full buffers that wait for a frame.
//! 4. The extent table names the place of every sealed group: a run in memory, and later a frame.
//!
//! Invariants:
//! - `tokens / group_tokens` groups are sealed: the table covers the first ones, the builder the rest;
//! - pending runs are in the order of their groups, and the table has an extent for each;
//! - tokens below `written` are in a written frame, in a group or by themselves;
//! - the summaries cover the sealed groups, so each append, cut and reset changes them too.

use super::group_builder::GroupBuilder;
use super::layer_summaries::LayerSummaries;
use super::plain_rows::PlainRows;
use crate::catalog::{Extent, ExtentTable, FrameSlot, GroupBuffer, Source};
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::lease::Lease;
use crate::layout::{KvLayout, TensorView};
use crate::log::Tail;
use crate::retrieval::{KeyShape, MinMax, add_record};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::min_max_record_bytes;
use stratakv_format::layout::{BlockGeometry, LayerGeometry};

/// The most bytes of a run's buffer.
const RUN_BYTES_MAX: usize = 256 << 10;
/// One layer with keys and values.
pub(super) struct LayerState {
    index: usize,
    geometry: LayerGeometry,
    /// The shape of groups as they are stored, in memory as well as on devices.
    block: BlockGeometry,
    /// The shape of the tail and of decoded groups.
    plain: BlockGeometry,
    /// The codec between `plain` and `block`; none if they are the same.
    coder: Option<BlockCoder>,
    dtype: DType,
    group_tokens: usize,
    /// Tokens appended.
    tokens: u64,
    /// The most bytes of a run's buffer.
    run_bytes: usize,
    /// The places of all sealed groups except those being collected.
    table: ExtentTable,
    building: Option<GroupBuilder>,
    /// Full buffers that no frame holds yet, in order.
    pending: Vec<Arc<GroupBuffer>>,
    /// The block of the tokens behind the last group; its first `tokens % group_tokens` tokens are valid.
    tail: Arc<[u8]>,
    /// Tokens below this are in a written frame, in a group or by themselves.
    written: u64,
    summaries: LayerSummaries,
}

/// The state of a layer before an append, for [`LayerState::reset`].
pub(super) struct LayerMark {
    tokens: u64,
    /// The tail, if the append overwrites it. An append that only fills the tail up leaves the tokens before as they
    /// are.
    tail: Option<Arc<[u8]>>,
}

impl LayerState {
    pub(super) fn new(layout: &KvLayout, index: usize, summary: bool, frame_limit: usize) -> Result<Self> {
        let geometry = *layout.kv_layer(index)?;
        let (block, plain) = (*layout.block(index), *layout.plain_block(index));
        // A run goes into one frame with its summaries and checksums.
        let groups = block.blocks_per_page.max(1);
        let disk = block.extent_bytes(groups);
        let record = min_max_record_bytes(&geometry) + 16;
        let run_limit = frame_limit.saturating_sub(2 * PAGE_BYTES) / (disk + groups * record) * disk;
        Ok(Self {
            index,
            geometry,
            block,
            plain,
            coder: BlockCoder::of(layout, index),
            dtype: layout.dtype(),
            group_tokens: layout.group_tokens(),
            run_bytes: RUN_BYTES_MAX.min(run_limit),
            tokens: 0,
            table: ExtentTable::default(),
            building: None,
            pending: Vec::new(),
            tail: vec![0; plain.block_bytes].into(),
            written: 0,
            summaries: LayerSummaries::new(summary.then(|| MinMax::new(&geometry, layout.dtype()))),
        })
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn geometry(&self) -> &LayerGeometry {
        &self.geometry
    }

    /// Returns the shape of groups as they are stored.
    pub(super) fn block(&self) -> &BlockGeometry {
        &self.block
    }

    /// Returns the shape of decoded groups.
    pub(super) fn plain(&self) -> &BlockGeometry {
        &self.plain
    }

    pub(super) fn coder(&self) -> Option<&BlockCoder> {
        self.coder.as_ref()
    }

    /// Returns the tokens appended.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the places of all sealed groups except those being collected.
    pub(super) fn table(&self) -> &ExtentTable {
        &self.table
    }

    /// Returns the runs that no frame holds yet, in order.
    pub(super) fn pending(&self) -> &[Arc<GroupBuffer>] {
        &self.pending
    }

    pub(super) fn summaries(&self) -> &LayerSummaries {
        &self.summaries
    }

    pub(super) fn summaries_mut(&mut self) -> &mut LayerSummaries {
        &mut self.summaries
    }

    /// Returns the shape of the keys for summaries.
    pub(super) fn shape(&self) -> KeyShape {
        KeyShape {
            kv_heads: usize::from(self.geometry.kv_heads),
            key_dim: usize::from(self.geometry.key_dim),
            group_tokens: self.group_tokens,
            dtype: self.dtype,
        }
    }

    fn plain_rows(&self) -> PlainRows {
        let (geometry, block) = (self.geometry, self.plain);
        PlainRows { geometry, block, dtype: self.dtype, group_tokens: self.group_tokens }
    }

    /// Returns the number of sealed groups.
    pub(super) fn groups(&self) -> u64 {
        self.tokens / self.group_tokens as u64
    }

    /// Returns the number of tokens in the tail.
    pub(super) fn tail_tokens(&self) -> usize {
        (self.tokens % self.group_tokens as u64) as usize
    }

    /// Returns the tail's block as it is now.
    pub(super) fn tail(&self) -> &Arc<[u8]> {
        &self.tail
    }

    /// Returns the bytes of groups that no frame holds yet.
    pub(super) fn pending_bytes(&self) -> usize {
        let building = self.building.as_ref().map_or(0, GroupBuilder::disk_bytes);
        self.pending.iter().map(|run| run.disk_bytes()).sum::<usize>() + building
    }

    /// Returns a copy of the layer without summaries of selectors. Groups in memory are shared.
    ///
    /// # Errors
    /// As [`Self::freeze`].
    pub(super) fn snapshot(&mut self) -> Result<Self> {
        self.freeze()?;
        let (table, pending) = (self.table.clone(), self.pending.clone());
        let (tail, summaries) = (Arc::clone(&self.tail), self.summaries.snapshot());
        Ok(Self { table, building: None, pending, tail, summaries, ..*self })
    }

    /// Returns the tokens of the groups that frames hold, whether written or in flight.
    pub(super) fn grouped_tokens(&self) -> u64 {
        let building = self.building.as_ref().map(GroupBuilder::first_group);
        let first = self.pending.first().map(|run| run.first_group).or(building);
        first.unwrap_or_else(|| self.groups()) * self.group_tokens as u64
    }

    /// Returns the bytes of a token's keys and values.
    pub(super) fn token_bytes(&self) -> usize {
        (self.geometry.key_elements() + self.geometry.value_elements()) * self.dtype.bytes()
    }

    /// Returns the state before `more` tokens are appended.
    pub(super) fn mark(&self, more: usize) -> LayerMark {
        let overwritten = self.tail_tokens() > 0 && self.tail_tokens() + more > self.group_tokens;
        LayerMark { tokens: self.tokens, tail: overwritten.then(|| Arc::clone(&self.tail)) }
    }

    /// Rolls back to `mark`. Later groups may be in frames in flight. They are past the sequence's length and are
    /// ignored until later groups replace them.
    pub(super) fn reset(&mut self, mark: LayerMark) {
        let groups = mark.tokens / self.group_tokens as u64;
        self.building = self.building.take().and_then(|mut building| building.truncate(groups).then_some(building));
        self.table.truncate(groups.min(self.table.groups()));
        for run in std::mem::take(&mut self.pending) {
            self.requeue(run);
        }
        self.summaries.truncate(groups);
        self.tokens = mark.tokens;
        if let Some(tail) = mark.tail {
            self.tail = tail;
        }
    }

    /// Rolls back to `mark` after an append that failed.
    ///
    /// A frame may hold the group that the tail was about to fill, as its codec rounded it. The next commit writes the
    /// tail again, because a reader takes tokens from the latest frame.
    pub(super) fn undo(&mut self, mark: LayerMark) {
        let sealed = mark.tokens / self.group_tokens as u64 * self.group_tokens as u64;
        let rounded = self.coder.is_some() && self.grouped_tokens() > sealed;
        self.reset(mark);
        if rounded {
            self.written = self.written.min(sealed);
        }
    }

    /// Cuts the layer to its first `tokens`, at most its length. `block` is the decoded block of the group that the cut
    /// falls into. It is needed if that group is sealed and keeps some tokens. The next commit writes the tail again.
    pub(super) fn cut(&mut self, tokens: u64, block: Option<&[u8]>) {
        let rows = (tokens % self.group_tokens as u64) as usize;
        let tail = block.map(|_| vec![0; self.plain.block_bytes].into());
        self.reset(LayerMark { tokens, tail });
        if let Some(block) = block {
            let (start, len) = self.plain.plane(1);
            self.restore_rows(
                [&block[..self.plain.key_bytes], &block[start..start + len]],
                self.group_tokens,
                0..rows,
                0,
            );
        }
        // Frames keep whole groups only after a cut.
        self.written = self.written.min(tokens / self.group_tokens as u64 * self.group_tokens as u64);
    }

    /// Returns the bytes of the buffer that `groups` more groups need; none if the builder has room.
    pub(super) fn wants_buffer(&self, groups: usize) -> Option<usize> {
        if self.building.as_ref().is_some_and(GroupBuilder::has_room) {
            return None;
        }
        Some(GroupBuilder::buffer_bytes(&self.block, groups, self.run_bytes))
    }

    /// Returns whether blocks have bytes between or behind their planes, which must be zero.
    pub(super) fn has_padding(&self) -> bool {
        let planes = self.block.plane(0).1 + self.block.plane(1).1;
        self.block.blocks_per_page != 0 || self.block.extent_bytes(1) != planes
    }

    /// Takes a buffer to collect groups in, after the one before is full. It must be zeroed if the layer
    /// [has padding](Self::has_padding). Every other byte is written before its group counts.
    ///
    /// # Errors
    /// As [`Self::freeze`].
    pub(super) fn give_buffer(&mut self, buffer: Lease) -> Result<()> {
        self.freeze()?;
        self.building = Some(GroupBuilder::new(self.groups(), self.block, buffer));
        Ok(())
    }

    /// Stops collecting: the groups in the builder become a run that the next frame takes.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: the table has a gap before the run.
    pub(super) fn freeze(&mut self) -> Result<()> {
        let Some(run) = self.building.take().and_then(|building| building.into_run(self.index)) else { return Ok(()) };
        self.table.lay(Extent {
            first_group: run.first_group,
            groups: run.groups,
            skip: 0,
            source: Source::Memory(Arc::clone(&run)),
        })?;
        self.pending.push(run);
        Ok(())
    }

    /// Appends tokens `range` of checked views, at most up to the end of the next group. Returns how many it took.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: the builder has no room for the group.
    pub(super) fn take(
        &mut self,
        keys: &TensorView<'_>,
        values: &TensorView<'_>,
        range: Range<usize>,
    ) -> Result<usize> {
        let start = self.tail_tokens();
        let count = range.len().min(self.group_tokens - start);
        let tokens = range.start..range.start + count;
        if start == 0 && count == self.group_tokens {
            let (rows, coder) = (self.plain_rows(), self.coder);
            let slot = self.slot()?;
            match coder {
                None => rows.write(slot, 0, keys, values, tokens),
                Some(coder) => {
                    let mut whole = vec![0; rows.block.block_bytes];
                    rows.write(&mut whole, 0, keys, values, tokens);
                    coder.encode(&whole, slot)?;
                }
            }
            self.sealed()?;
        } else {
            self.plain_rows().write(unique(&mut self.tail), start, keys, values, tokens);
            if start + count == self.group_tokens {
                self.seal_tail()?;
            }
        }
        self.tokens += count as u64;
        Ok(count)
    }

    /// Appends an encoded group: K plane, V plane. The builder has room, and the layer has no tail.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: planes with a number that is not finite, or a layer that expects none.
    pub(super) fn take_stored(&mut self, planes: (&[u8], &[u8])) -> Result<()> {
        let damaged = |what: &str| Error::new(ErrorKind::Corruption, what.to_owned());
        let coder = self.coder.filter(|_| self.tail_tokens() == 0);
        let coder = coder.ok_or_else(|| damaged("append: an encoded group needs a codec and no tail"))?;
        if !coder.is_finite(0, planes.0) || !coder.is_finite(1, planes.1) {
            return Err(damaged("append: a stored plane has a range or an element that is not finite"));
        }
        let block = self.block;
        let slot = self.slot()?;
        for (plane, stored) in [planes.0, planes.1].into_iter().enumerate() {
            let (start, len) = block.plane(plane);
            slot[start..start + len].copy_from_slice(stored);
        }
        self.sealed()?;
        self.tokens += self.group_tokens as u64;
        Ok(())
    }

    fn slot(&mut self) -> Result<&mut [u8]> {
        let slot = self.building.as_mut().and_then(GroupBuilder::slot);
        slot.ok_or_else(|| Error::new(ErrorKind::Busy, "append: the group buffer is full"))
    }

    /// Puts a run, or what a cut has left of it, back among those that wait for a frame.
    pub(super) fn requeue(&mut self, run: Arc<GroupBuffer>) {
        let groups = self.table.groups_of(&run);
        if groups == 0 {
            return;
        }
        let left = if groups < run.groups { run.first(groups) } else { Arc::clone(&run) };
        self.table.replace(&run, &left);
        let at = self.pending.partition_point(|other| other.first_group < left.first_group);
        self.pending.insert(at, left);
    }

    /// Counts the group in the slot, which is complete, and adds it to the summaries.
    fn sealed(&mut self) -> Result<()> {
        let shape = self.shape();
        let Some(building) = &self.building else { return Ok(()) };
        let (group, keys) =
            building.slot_keys().ok_or_else(|| Error::new(ErrorKind::Busy, "append: the group buffer is shared"))?;
        let needed = self.summaries.need_keys();
        // Summaries describe the decoded keys, because attention sees those.
        let mut decoded = Vec::new();
        let keys = match &self.coder {
            Some(coder) if needed && coder.encodes(0) => {
                decoded.resize(coder.plain_bytes(0), 0);
                coder.decode_plane(0, keys, &mut decoded)?;
                &decoded[..]
            }
            _ => keys,
        };
        self.summaries.push(shape, group, keys)?;
        self.building.iter_mut().for_each(GroupBuilder::seal);
        Ok(())
    }

    /// Computes the min/max records of a run from its keys.
    ///
    /// # Errors
    /// The run's buffer cannot be read, or a block cannot be decoded.
    pub(super) fn records_of(&self, run: &GroupBuffer) -> Result<Vec<u16>> {
        let shape = self.shape();
        let mut records = Vec::with_capacity(run.groups * 2 * shape.width());
        let mut decoded = Vec::new();
        for index in 0..run.groups {
            let keys = &run.block(index)?[..self.block.key_bytes];
            match &self.coder {
                Some(coder) if coder.encodes(0) => {
                    decoded.resize(coder.plain_bytes(0), 0);
                    coder.decode_plane(0, keys, &mut decoded)?;
                    add_record(&shape, &decoded, &mut records);
                }
                _ => add_record(&shape, keys, &mut records),
            }
        }
        Ok(records)
    }

    /// Moves the tail, whose tokens fill a group, to the builder.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: the builder has no room.
    pub(super) fn seal_tail(&mut self) -> Result<()> {
        let tail = Arc::clone(&self.tail);
        let coder = self.coder;
        let slot = self.slot()?;
        match coder {
            None => slot.copy_from_slice(&tail),
            Some(coder) => coder.encode(&tail, slot)?,
        }
        self.sealed()
    }

    /// Returns the elements of a stored block for the tail, when a cut goes through its group.
    ///
    /// # Errors
    /// A block that the codec cannot decode.
    pub(super) fn decoded<'a>(&self, block: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        match &self.coder {
            None => Ok(Cow::Borrowed(block)),
            Some(coder) => coder.decoded_tail(block).map(Cow::Owned),
        }
    }

    /// Returns whether the next frame must hold the pending groups as groups. Encoded groups cannot be stored as single
    /// tokens, because those are exact and the appended values are gone.
    pub(super) fn has_encoded_pending(&self) -> bool {
        self.coder.is_some() && self.pending_bytes() > 0
    }

    /// Returns the block of a group that is being collected.
    pub(super) fn building_block(&self, group: u64) -> Option<&[u8]> {
        self.building.as_ref()?.block(group)
    }

    /// Returns the tokens `from..length` that no written frame holds, in pieces of at most `most` tokens.
    pub(super) fn unwritten(&self, from: u64, length: u64, most: usize) -> Vec<Tail> {
        let (mut first, end) = (from.max(self.written).max(self.grouped_tokens()), self.tokens.min(length));
        let mut pieces = Vec::new();
        while first < end {
            let next = end.min(first + most.max(1) as u64);
            pieces.push(self.piece(first, next));
            first = next;
        }
        pieces
    }

    /// Returns the tokens of the tail; none if it is empty.
    pub(super) fn tail_piece(&self) -> Option<Tail> {
        let first = self.groups() * self.group_tokens as u64;
        (first < self.tokens).then(|| self.piece(first, self.tokens))
    }

    /// Returns the tokens `first..end` as a piece.
    fn piece(&self, first: u64, end: u64) -> Tail {
        let tokens = end - first;
        Tail {
            layer: self.index,
            first_token: first,
            tokens: tokens as u32,
            bytes: tokens as usize * self.token_bytes(),
        }
    }

    /// Adds the parts of a plane `[kv_heads, tokens, dim]` (0: keys, 1: values) of `tail` to `out`.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: some of the tokens are not in memory.
    pub(super) fn rows<'a>(&'a self, tail: &Tail, plane: usize, out: &mut Vec<&'a [u8]>) -> Result<()> {
        let (first, end) = (tail.first_token, tail.first_token + u64::from(tail.tokens));
        let size = self.group_tokens as u64;
        let (start, len) = self.plain.plane(plane);
        let block = |group: u64| {
            self.block_in_memory(group).and_then(|block| block.get(start..start + len)).ok_or_else(|| {
                Error::new(ErrorKind::Corruption, format!("group {group} of layer {} is not in memory", self.index))
            })
        };
        if len == 0 {
            return Ok(());
        }
        if first.is_multiple_of(size) && end == first + size {
            out.push(block(first / size)?);
            return Ok(());
        }
        let blocks = (first / size..end.div_ceil(size)).map(block).collect::<Result<Vec<_>>>()?;
        self.plain_rows().slices(&blocks, first, end, out);
        Ok(())
    }

    /// Returns the plain block of a group in memory, or of the tail behind the last group.
    fn block_in_memory(&self, group: u64) -> Option<&[u8]> {
        if group == self.groups() {
            return Some(&self.tail);
        }
        if self.coder.is_some() {
            return None;
        }
        if let Some(block) = self.building_block(group) {
            return Some(block);
        }
        let at = self.pending.partition_point(|run| run.first_group + run.groups as u64 <= group);
        let run = self.pending.get(at)?;
        run.block(group.checked_sub(run.first_group)? as usize).ok()
    }

    /// Copies rows `from` of planes `[kv_heads, stride, dim]` to the tail, from token `to` on.
    pub(super) fn restore_rows(&mut self, planes: [&[u8]; 2], stride: usize, from: Range<usize>, to: usize) {
        self.plain_rows().copy(unique(&mut self.tail), to, planes, stride, from);
    }

    /// Counts tokens below `length` as written.
    pub(super) fn mark_written(&mut self, length: u64) {
        self.written = self.tokens.min(length).max(self.written);
    }

    /// Counts no token outside of groups as written, because frames with some of them have failed.
    pub(super) fn forget_written(&mut self) {
        self.written = 0;
    }

    /// Removes a run that a frame in flight holds from the pending ones.
    pub(super) fn sent(&mut self, sent: &Arc<GroupBuffer>) {
        self.pending.retain(|run| !Arc::ptr_eq(run, sent));
    }

    /// Records where a written frame holds the groups of a run: page and first checksum.
    pub(super) fn landed(&mut self, run: &Arc<GroupBuffer>, frame: &Arc<FrameSlot>, page: u32, checksum: usize) {
        self.table.landed(run, frame, page, checksum, self.geometry.planes());
    }

    /// Lays groups of a frame over the groups of earlier frames, in an open.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: groups before these are in no frame.
    pub(super) fn lay_groups(&mut self, extent: Extent) -> Result<()> {
        self.table.lay(extent)
    }

    /// Forgets the groups from `group` on, in an open: a later frame holds their tokens by themselves.
    pub(super) fn forget_groups(&mut self, group: u64) {
        self.table.truncate(group);
    }

    /// Sets the layer to the sealed groups that frames hold, up to `tokens`, in an open. Returns the number
    /// of groups, or as an error the number of groups that have min/max records if some lack them.
    pub(super) fn open_sealed(&mut self, tokens: u64) -> std::result::Result<u64, usize> {
        let sealed = self.table.groups().min(tokens / self.group_tokens as u64);
        self.table.truncate(sealed);
        if let Some(known) = self.summaries.min_max().map(MinMax::groups).filter(|known| (*known as u64) < sealed) {
            return Err(known);
        }
        self.summaries.truncate(sealed);
        self.tokens = sealed * self.group_tokens as u64;
        Ok(sealed)
    }

    /// Counts the tokens up to `tokens`, whose rows were [restored](Self::restore_rows), in an open.
    pub(super) fn open_tokens(&mut self, tokens: u64) {
        self.tokens = tokens;
    }
}

/// Returns the tail's bytes for a change. Selections keep the bytes they hold.
fn unique(tail: &mut Arc<[u8]>) -> &mut [u8] {
    Arc::make_mut(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layer with groups of 8 tokens. No group is ever complete, so it needs no buffer.
    fn layer() -> LayerState {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).group_tokens(8).build().unwrap();
        LayerState::new(&layout, 0, true, 64 << 10).unwrap()
    }

    fn take(layer: &mut LayerState, value: f32, tokens: usize) {
        let rows = vec![value; tokens * 4];
        let view = TensorView::token_major(&rows, tokens, 1, 4);
        assert_eq!(layer.take(&view, &view, 0..tokens).unwrap(), tokens);
    }

    fn unwritten(layer: &LayerState) -> Vec<(u64, u32)> {
        layer.unwritten(0, u64::MAX, 2).iter().map(|tail| (tail.first_token, tail.tokens)).collect()
    }

    #[test]
    fn layer_state_rolls_back_to_its_mark() {
        let mut layer = layer();
        take(&mut layer, 1.0, 3);
        let mark = layer.mark(2);
        take(&mut layer, 2.0, 2);
        layer.reset(mark);
        assert_eq!((layer.tokens(), layer.tail_tokens(), layer.groups()), (3, 3, 0));
        assert_eq!(unwritten(&layer), [(0, 2), (2, 1)]);
    }

    #[test]
    fn layer_state_writes_the_tail_again_after_a_cut() {
        let mut layer = layer();
        take(&mut layer, 1.0, 5);
        layer.mark_written(5);
        assert!(unwritten(&layer).is_empty());
        layer.cut(3, None);
        assert_eq!(unwritten(&layer), [(0, 2), (2, 1)]);
        layer.mark_written(3);
        layer.forget_written();
        assert_eq!(unwritten(&layer), [(0, 2), (2, 1)]);
    }

    #[test]
    fn layer_state_gives_snapshots_the_tail_as_it_was() {
        let mut layer = layer();
        take(&mut layer, 1.0, 3);
        let snapshot = layer.snapshot().unwrap();
        take(&mut layer, 2.0, 2);
        assert_eq!((snapshot.tokens(), layer.tokens()), (3, 5));
        assert_ne!(snapshot.tail(), layer.tail());
    }
}
