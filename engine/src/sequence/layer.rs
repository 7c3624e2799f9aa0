//! One layer of an open sequence: sealed groups, the buffer they are collected in, the rolling tail, the summary.

use crate::catalog::{Extent, ExtentTable, GroupBuffer, Source};
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Lease, PAGE_BYTES};
use crate::layout::{KvLayout, TensorView};
use crate::log::Tail;
use crate::retrieval::{KeptKeys, KeyGroup, KeyShape, LayerSummary, MinMax, add_record};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::summary_record_bytes;
use stratakv_format::layout::{BlockGeometry, LayerGeometry};

/// The most bytes of a run's buffer.
const RUN_BYTES_MAX: usize = 256 << 10;
/// The bytes of a run's buffer when groups come one by one.
const RUN_BYTES_MIN: usize = 16 << 10;

/// Groups being collected.
struct GroupBuilder {
    first_group: u64,
    groups: usize,
    capacity: usize,
    buffer: Lease,
}

/// One layer with keys and values.
pub(crate) struct Layer {
    pub(crate) index: usize,
    pub(crate) geometry: LayerGeometry,
    /// Of its groups as they are stored, in memory as well as on devices.
    pub(crate) block: BlockGeometry,
    /// Of the tail, and of groups that were decoded.
    pub(crate) plain: BlockGeometry,
    /// What makes the one of the other, where they differ.
    pub(crate) coder: Option<BlockCoder>,
    dtype: DType,
    group_tokens: usize,
    /// Tokens appended.
    pub(crate) tokens: u64,
    /// The most bytes of a run's buffer.
    run_bytes: usize,
    /// Sealed groups but for those being collected.
    pub(crate) table: ExtentTable,
    building: Option<GroupBuilder>,
    /// Full buffers that no frame holds yet, in order.
    pub(crate) pending: Vec<Arc<GroupBuffer>>,
    /// The block of the tokens behind the last group; `tokens % G` of them are valid.
    tail: Arc<[u8]>,
    /// Tokens below this are in a written frame, in a group or by themselves.
    pub(crate) written: u64,
    pub(crate) summary: Option<MinMax>,
    /// Summaries of the selectors of the sequence, in its order.
    pub(crate) extras: Vec<Box<dyn LayerSummary>>,
    /// Keys in memory for selections that read values alone.
    pub(crate) kept: Option<KeptKeys>,
}

/// What a layer was before an append, to go back to.
pub(crate) struct LayerMark {
    tokens: u64,
    /// Its tail, where the append writes over it: tokens that only join a group leave those before them as they are.
    tail: Option<Arc<[u8]>>,
}

impl Layer {
    pub(crate) fn new(layout: &KvLayout, index: usize, summary: bool, frame_limit: usize) -> Result<Self> {
        let geometry = *layout.kv_layer(index)?;
        let (block, plain) = (*layout.block(index), *layout.plain_block(index));
        // A run goes into one frame with its summaries and checksums.
        let groups = block.blocks_per_page.max(1);
        let disk = block.extent_bytes(groups);
        let record = summary_record_bytes(&geometry, MinMax::element(layout.dtype())) + 16;
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
            summary: summary.then(|| MinMax::new(&geometry, layout.dtype())),
            extras: Vec::new(),
            kept: None,
        })
    }

    /// What summaries know of the keys.
    pub(crate) fn shape(&self) -> KeyShape {
        KeyShape {
            kv_heads: usize::from(self.geometry.kv_heads),
            key_dim: usize::from(self.geometry.key_dim),
            group_tokens: self.group_tokens,
            dtype: self.dtype,
        }
    }

    /// Sealed groups.
    pub(crate) fn groups(&self) -> u64 {
        self.tokens / self.group_tokens as u64
    }

    /// Tokens of the tail.
    pub(crate) fn tail_tokens(&self) -> usize {
        (self.tokens % self.group_tokens as u64) as usize
    }

    /// The tail's block as it is now.
    pub(crate) fn tail(&self) -> &Arc<[u8]> {
        &self.tail
    }

    /// Bytes of groups that no frame holds yet.
    pub(crate) fn pending_bytes(&self) -> usize {
        let building = self.building.as_ref().map_or(0, |b| self.block.extent_bytes(b.groups));
        self.pending.iter().map(|run| run.disk_bytes()).sum::<usize>() + building
    }

    /// The layer as it is now: what comes later does not change it. Groups in memory are shared.
    pub(crate) fn snapshot(&mut self) -> Result<Self> {
        self.freeze()?;
        let (table, pending) = (self.table.clone(), self.pending.clone());
        let (tail, summary) = (Arc::clone(&self.tail), self.summary.clone());
        Ok(Self { table, building: None, pending, tail, summary, extras: Vec::new(), kept: None, ..*self })
    }

    /// Tokens of the groups that frames hold, written or on their way.
    pub(crate) fn grouped_tokens(&self) -> u64 {
        let building = self.building.as_ref().map(|building| building.first_group);
        let first = self.pending.first().map(|run| run.first_group).or(building);
        first.unwrap_or_else(|| self.groups()) * self.group_tokens as u64
    }

    /// Bytes of keys and values of a token.
    pub(crate) fn token_bytes(&self) -> usize {
        (self.geometry.key_elements() + self.geometry.value_elements()) * self.dtype.bytes()
    }

    /// The layer as it is before `more` tokens are appended.
    pub(crate) fn mark(&self, more: usize) -> LayerMark {
        let overwritten = self.tail_tokens() > 0 && self.tail_tokens() + more > self.group_tokens;
        LayerMark { tokens: self.tokens, tail: overwritten.then(|| Arc::clone(&self.tail)) }
    }

    /// Goes back to `mark` after an append that failed. A frame may hold the group that the tail was about to fill, as its codec
    /// rounded it. The next commit writes the tail again, because a reader takes tokens from the latest frame.
    pub(crate) fn undo(&mut self, mark: LayerMark) {
        let sealed = mark.tokens / self.group_tokens as u64 * self.group_tokens as u64;
        let rounded = self.coder.is_some() && self.grouped_tokens() > sealed;
        self.reset(mark);
        if rounded {
            self.written = self.written.min(sealed);
        }
    }

    /// Back to `mark`, which is not further than now. Groups beyond it in frames on their way stand behind the length of the
    /// sequence until later ones take their place.
    pub(crate) fn reset(&mut self, mark: LayerMark) {
        let groups = mark.tokens / self.group_tokens as u64;
        if let Some(building) = &mut self.building {
            let kept = building.groups.min(groups.saturating_sub(building.first_group) as usize);
            // Padding is zero: no group that was never appended goes to a device behind others on their page.
            if let Some(bytes) = building.buffer.bytes_mut() {
                for group in kept..building.groups {
                    let start = self.block.block_offset(group);
                    bytes[start..start + self.block.block_bytes].fill(0);
                }
            }
            building.groups = kept;
            if building.groups == 0 {
                self.building = None;
            }
        }
        self.table.truncate(groups.min(self.table.groups()));
        for run in std::mem::take(&mut self.pending) {
            self.requeue(run);
        }
        if let Some(summary) = &mut self.summary {
            summary.truncate(groups as usize);
        }
        for summary in &mut self.extras {
            summary.truncate(groups as usize);
        }
        if let Some(kept) = &mut self.kept {
            kept.truncate(groups);
        }
        self.tokens = mark.tokens;
        if let Some(tail) = mark.tail {
            self.tail = tail;
        }
    }

    /// Cuts the layer to its first `tokens`, which are not more than there are. `block` is that of the group the cut falls
    /// into, decoded; needed when that group is sealed and some of its tokens are kept. The next commit writes the tail anew.
    pub(crate) fn cut(&mut self, tokens: u64, block: Option<&[u8]>) {
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
        // Frames are cut to whole groups.
        self.written = self.written.min(tokens / self.group_tokens as u64 * self.group_tokens as u64);
    }

    /// Bytes a buffer should have for `groups` more groups; none when there is room.
    pub(crate) fn wants_buffer(&self, groups: usize) -> Option<usize> {
        if self.building.as_ref().is_some_and(|b| b.groups < b.capacity) {
            return None;
        }
        let one = self.block.extent_bytes(1);
        let fit = |bytes: usize| {
            if self.block.blocks_per_page == 0 { bytes / one } else { bytes / PAGE_BYTES * self.block.blocks_per_page }
        };
        let capacity = groups.clamp(fit(RUN_BYTES_MIN.min(self.run_bytes)).max(1), fit(self.run_bytes).max(1));
        Some(self.block.extent_bytes(capacity))
    }

    /// Whether there are bytes between or behind the planes, which must be zero.
    pub(crate) fn has_padding(&self) -> bool {
        let planes = self.block.plane(0).1 + self.block.plane(1).1;
        self.block.blocks_per_page != 0 || self.block.extent_bytes(1) != planes
    }

    /// Takes a buffer to collect groups in, zeroed when the layer [has padding](Self::has_padding): every other byte is
    /// written before its group counts. The buffer before is full.
    pub(crate) fn give_buffer(&mut self, buffer: Lease) -> Result<()> {
        self.freeze()?;
        let one = self.block.extent_bytes(1);
        let capacity = if self.block.blocks_per_page == 0 {
            buffer.len() / one
        } else {
            buffer.len() / PAGE_BYTES * self.block.blocks_per_page
        };
        self.building = Some(GroupBuilder { first_group: self.groups(), groups: 0, capacity, buffer });
        Ok(())
    }

    /// Ends collecting: what there is becomes a run that the next frame takes.
    pub(crate) fn freeze(&mut self) -> Result<()> {
        let Some(building) = self.building.take() else { return Ok(()) };
        if building.groups == 0 {
            return Ok(());
        }
        let run = Arc::new(GroupBuffer {
            layer: self.index,
            first_group: building.first_group,
            groups: building.groups,
            geometry: self.block,
            buffer: Arc::new(building.buffer),
            cut: false,
        });
        self.table.lay(Extent {
            first_group: run.first_group,
            groups: run.groups,
            skip: 0,
            source: Source::Memory(Arc::clone(&run)),
        })?;
        self.pending.push(run);
        Ok(())
    }

    /// Appends tokens `range` of views that were checked, up to the end of the next group at most, and only groups for
    /// which there is room; gives how many it took.
    pub(crate) fn take(
        &mut self,
        keys: &TensorView<'_>,
        values: &TensorView<'_>,
        range: Range<usize>,
    ) -> Result<usize> {
        let start = self.tail_tokens();
        let count = range.len().min(self.group_tokens - start);
        let tokens = range.start..range.start + count;
        if start == 0 && count == self.group_tokens {
            let (layer, plain) = (self.geometry, self.plain);
            let (dtype, group, coder) = (self.dtype, self.group_tokens, self.coder);
            let slot = self.slot()?;
            match coder {
                None => write_rows(&layer, &plain, dtype, group, slot, 0, keys, values, tokens),
                Some(coder) => {
                    let mut whole = vec![0; plain.block_bytes];
                    write_rows(&layer, &plain, dtype, group, &mut whole, 0, keys, values, tokens);
                    coder.encode(&whole, slot)?;
                }
            }
            self.sealed()?;
        } else {
            let tail = unique(&mut self.tail);
            write_rows(&self.geometry, &self.plain, self.dtype, self.group_tokens, tail, start, keys, values, tokens);
            if start + count == self.group_tokens {
                self.seal_tail()?;
            }
        }
        self.tokens += count as u64;
        Ok(count)
    }

    /// Takes a group under a codec as it is stored, for which there is room and no tail before it.
    pub(crate) fn take_stored(&mut self, planes: (&[u8], &[u8])) -> Result<()> {
        let damaged = |what: &str| Error::new(ErrorKind::Corruption, what.to_owned());
        let coder = self.coder.filter(|_| self.tail_tokens() == 0);
        let coder = coder.ok_or_else(|| damaged("a group where none is due"))?;
        if [planes.0, planes.1].into_iter().enumerate().any(|(plane, stored)| coder.first_bad(plane, stored).is_some())
        {
            return Err(damaged("a plane with a range that is not finite"));
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
        let block = self.block;
        let building = self.building.as_mut().filter(|b| b.groups < b.capacity);
        let slot = building.and_then(|b| {
            let start = block.block_offset(b.groups);
            b.buffer.bytes_mut().and_then(|bytes| bytes.get_mut(start..start + block.block_bytes))
        });
        slot.ok_or_else(|| Error::new(ErrorKind::Busy, "no room for another group"))
    }

    /// Puts a run, or what is left of it, among those that wait for a frame.
    pub(crate) fn requeue(&mut self, run: Arc<GroupBuffer>) {
        let groups = self.table.groups_of(&run);
        if groups == 0 {
            return;
        }
        let kept = if groups < run.groups { run.first(groups) } else { Arc::clone(&run) };
        self.table.replace(&run, &kept);
        let at = self.pending.partition_point(|other| other.first_group < kept.first_group);
        self.pending.insert(at, kept);
    }

    /// The group in the slot is complete.
    fn sealed(&mut self) -> Result<()> {
        let shape = self.shape();
        let Some(building) = &mut self.building else { return Ok(()) };
        let start = self.block.block_offset(building.groups);
        let bytes = building.buffer.bytes().and_then(|bytes| bytes.get(start..start + self.block.key_bytes));
        let keys = bytes.ok_or_else(|| Error::new(ErrorKind::Busy, "the group's buffer is in use"))?;
        let needed = self.summary.is_some() || !self.extras.is_empty() || self.kept.is_some();
        // Summaries are of what attention will see.
        let mut decoded = Vec::new();
        let keys = match &self.coder {
            Some(coder) if needed && coder.encodes(0) => {
                decoded.resize(coder.plain_bytes(0), 0);
                coder.decode_plane(0, keys, &mut decoded)?;
                &decoded[..]
            }
            _ => keys,
        };
        if let Some(summary) = &mut self.summary {
            summary.push(keys, usize::from(self.geometry.kv_heads), self.group_tokens, self.dtype);
        }
        if !self.extras.is_empty() || self.kept.is_some() {
            let group = KeyGroup::new(shape, keys, building.first_group + building.groups as u64)?;
            self.extras.iter_mut().for_each(|summary| summary.push(&group));
            if let Some(kept) = &mut self.kept {
                kept.push(group.index(), keys);
            }
        }
        building.groups += 1;
        Ok(())
    }

    /// The min/max records of a run, made from its keys.
    pub(crate) fn records_of(&self, run: &GroupBuffer) -> Result<Vec<u16>> {
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

    /// The tail, whose tokens now fill a group, goes where groups are collected.
    pub(crate) fn seal_tail(&mut self) -> Result<()> {
        let tail = Arc::clone(&self.tail);
        let coder = self.coder;
        let slot = self.slot()?;
        match coder {
            None => slot.copy_from_slice(&tail),
            Some(coder) => coder.encode(&tail, slot)?,
        }
        self.sealed()
    }

    /// A stored block decoded: what attention sees.
    pub(crate) fn decoded<'a>(&self, block: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        match &self.coder {
            None => Ok(Cow::Borrowed(block)),
            Some(coder) => coder.decoded(block).map(Cow::Owned),
        }
    }

    /// Whether groups in memory have to go into the next frame as groups: what was appended is not there any more, and tokens by
    /// themselves are exact.
    pub(crate) fn has_encoded_pending(&self) -> bool {
        self.coder.is_some() && self.pending_bytes() > 0
    }

    /// The block of a group that is still being collected, if it is.
    pub(crate) fn building_block(&self, group: u64) -> Option<&[u8]> {
        let building = self.building.as_ref()?;
        let index = group.checked_sub(building.first_group)? as usize;
        if index >= building.groups {
            return None;
        }
        let start = self.block.block_offset(index);
        building.buffer.bytes()?.get(start..start + self.block.block_bytes)
    }

    /// Tokens `from..length` that no written frame holds, in pieces of `most` tokens at most.
    pub(crate) fn unwritten(&self, from: u64, length: u64, most: usize) -> Vec<Tail> {
        let (mut first, end) = (from.max(self.written).max(self.grouped_tokens()), self.tokens.min(length));
        let mut pieces = Vec::new();
        while first < end {
            let next = end.min(first + most.max(1) as u64);
            pieces.push(self.piece(first, next));
            first = next;
        }
        pieces
    }

    /// The tokens of the tail, none when it is empty.
    pub(crate) fn tail_piece(&self) -> Option<Tail> {
        let first = self.groups() * self.group_tokens as u64;
        (first < self.tokens).then(|| self.piece(first, self.tokens))
    }

    /// Tokens `first..end`.
    fn piece(&self, first: u64, end: u64) -> Tail {
        let tokens = end - first;
        Tail {
            layer: self.index,
            first_token: first,
            tokens: tokens as u32,
            bytes: tokens as usize * self.token_bytes(),
        }
    }

    /// The parts of a plane `[kv_heads, tokens, dim]` of tokens by themselves, all of which are in memory.
    pub(crate) fn rows<'a>(&'a self, tail: &Tail, plane: usize, out: &mut Vec<&'a [u8]>) -> Result<()> {
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
        let head_bytes = len / usize::from(self.geometry.kv_heads);
        let row = head_bytes / self.group_tokens;
        for head in 0..usize::from(self.geometry.kv_heads) {
            let mut token = first;
            for block in &blocks {
                let rows = (token % size) as usize..(end - token / size * size).min(size) as usize;
                out.push(&block[head * head_bytes..][rows.start * row..rows.end * row]);
                token += rows.len() as u64;
            }
        }
        Ok(())
    }

    /// The block of a group that is in memory as it is, or of the tail behind the last one.
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

    /// Puts rows of a stored piece into the tail: planes `[kv_heads, stride, dim]`, rows `from` to slots `to`.
    pub(crate) fn restore_rows(&mut self, planes: [&[u8]; 2], stride: usize, from: Range<usize>, to: usize) {
        let (block, group, dtype) = (self.plain, self.group_tokens, self.dtype);
        let dims = [self.geometry.key_dim, self.geometry.value_dim];
        let heads = usize::from(self.geometry.kv_heads);
        let tail = unique(&mut self.tail);
        for (index, (source, dim)) in planes.into_iter().zip(dims).enumerate() {
            let row = usize::from(dim) * dtype.bytes();
            let (start, _) = block.plane(index);
            if row == 0 {
                continue;
            }
            for head in 0..heads {
                let source = &source[(head * stride + from.start) * row..][..from.len() * row];
                tail[start + (head * group + to) * row..][..source.len()].copy_from_slice(source);
            }
        }
    }

    /// Bytes of memory that grow with the sequence: tables and summary.
    pub(crate) fn index_bytes(&self) -> usize {
        self.table.memory_bytes()
    }
}

/// The tail's bytes, alone: views keep what they have.
fn unique(tail: &mut Arc<[u8]>) -> &mut [u8] {
    Arc::make_mut(tail)
}

#[allow(clippy::too_many_arguments, reason = "one call per group, all of it needed")]
fn write_rows(
    layer: &LayerGeometry,
    block: &BlockGeometry,
    dtype: DType,
    group: usize,
    out: &mut [u8],
    slot: usize,
    keys: &TensorView<'_>,
    values: &TensorView<'_>,
    tokens: Range<usize>,
) {
    for (plane, dim, view) in [(0, layer.key_dim, keys), (1, layer.value_dim, values)] {
        let row = usize::from(dim) * dtype.bytes();
        let (start, _) = block.plane(plane);
        if row == 0 {
            continue;
        }
        for head in 0..usize::from(layer.kv_heads) {
            for (index, token) in tokens.clone().enumerate() {
                let at = start + (head * group + slot + index) * row;
                view.write_row(token, head, dtype, &mut out[at..at + row]);
            }
        }
    }
}
