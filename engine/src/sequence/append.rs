//! Appending: tokens become groups, full buffers become frames.

use super::layer::Layer;
use super::{ReferencedFrame, Sequence};
use crate::codec::BlockCoder;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Exhausted, Lease};
use crate::io::seams::sizes;
use crate::layout::TensorView;
use crate::log::{
    FRAMES_IN_FLIGHT, FrameBuilder, FrameTarget, RecordBytes, Tail, TailRows, WrittenFrame, exhausted, write_frame,
};
use crate::metrics::{Category, lock};
use crate::retrieval::{MinMax, SummaryRecordId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv_format::frame::SUMMARY_RECORD_BYTES_MAX;

/// Frames that may be on their way before an append waits for the oldest, however little memory there is.
const FRAMES_IN_FLIGHT_MIN: usize = 2;
/// How many times the bytes of a frame commits may gather.
pub(super) const GATHERED_FRAMES: usize = 4;
/// The largest frame that a commit writes on its own thread.
const WRITE_HERE_MAX: usize = 4 << 20;
/// How often an append that finds no space makes room and tries again.
const ROOM_TRIES: usize = 8;
/// How long an append waits for memory that views and reads hold.
const MEMORY_WAIT: Duration = Duration::from_secs(10);

/// The layers of a sequence, where its tails are.
struct Tails<'a>(&'a [Option<Layer>]);

impl TailRows for Tails<'_> {
    fn rows<'a>(&'a self, tail: &Tail, plane: usize, out: &mut Vec<&'a [u8]>) -> Result<()> {
        let layer = self.0.get(tail.layer).and_then(Option::as_ref).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("layer {} has no keys and values", tail.layer))
        })?;
        layer.rows(tail, plane, out)
    }
}

impl Sequence {
    /// Appends tokens to one layer: `keys` `[tokens, kv_heads, key_dim]` and `values` `[tokens, kv_heads, value_dim]` (for
    /// layouts without a V plane [`TensorView::empty`]). Prefill gives many tokens at once, decode one. When it returns,
    /// the engine owns the bytes; they are durable with a commit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: wrong shape, or an element that is NaN, infinite, or too large for the layout's
    /// dtype. [`ErrorKind::NoSpace`], [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no room; the layer is as it was.
    pub fn append(&mut self, layer: usize, keys: TensorView<'_>, values: TensorView<'_>) -> Result<()> {
        self.store.committer.check()?;
        let place = format!("append to layer {layer}");
        let geometry = *self.who.layout.kv_layer(layer).map_err(|e| e.during("append"))?;
        let dtype = self.who.layout.dtype();
        let heads = usize::from(geometry.kv_heads);
        keys.check("keys", heads, usize::from(geometry.key_dim), dtype).map_err(|e| e.during(&place))?;
        values.check("values", heads, usize::from(geometry.value_dim), dtype).map_err(|e| e.during(&place))?;
        if keys.tokens() != values.tokens() {
            let text = format!("{place}: keys of {} tokens, values of {}", keys.tokens(), values.tokens());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let tokens = keys.tokens();
        if geometry.is_encoded() {
            keys.check_magnitude("keys", BlockCoder::largest()).map_err(|e| e.during(&place))?;
            values.check_magnitude("values", BlockCoder::largest()).map_err(|e| e.during(&place))?;
        }
        let before = self.layer(layer)?.mark(tokens);
        self.reserve_for(layer, tokens).map_err(|e| e.during(&place))?;
        let outcome = self.append_checked(layer, &keys, &values, tokens);
        if outcome.is_err() {
            self.layer_mut(layer)?.undo(before);
        }
        outcome.map_err(|e| e.during(&place))
    }

    /// Appends a group to a layer under a codec as it is stored: K plane, V plane. The layer has no tail.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: planes that cannot be decoded. As [`Self::append`].
    pub(crate) fn append_stored(&mut self, layer: usize, planes: (&[u8], &[u8])) -> Result<()> {
        let group = self.who.layout.group_tokens();
        let before = self.layer(layer)?.mark(group);
        self.reserve_for(layer, group)?;
        let state = self.layer(layer)?;
        if let Some(bytes) = state.wants_buffer(1) {
            let zeroed = state.has_padding();
            let buffer = self.buffer(bytes, zeroed)?;
            self.layer_mut(layer)?.give_buffer(buffer)?;
        }
        let outcome = self.layer_mut(layer)?.take_stored(planes);
        if outcome.is_err() {
            self.layer_mut(layer)?.undo(before);
        }
        outcome?;
        self.write_full(layer)
    }

    /// Adds to the ids of the sequence's tokens, in order; they become durable with the next commit.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub fn append_token_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.store.committer.check()?;
        self.add_token_ids(ids)
    }

    fn add_token_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.reserve_token_ids(ids.len())?;
        self.token_ids.extend_from_slice(ids);
        Ok(())
    }

    /// Makes them so many, which is not less than there are; the new ones are zero.
    pub(super) fn extend_token_ids(&mut self, count: usize) -> Result<()> {
        self.reserve_token_ids(count.saturating_sub(self.token_ids.len()))?;
        self.token_ids.resize(count, 0);
        Ok(())
    }

    fn reserve_token_ids(&mut self, more: usize) -> Result<()> {
        let held = more.checked_mul(4).and_then(|more| self.index.bytes().checked_add(more));
        if held.is_none_or(|held| !self.store.devices.resize(&mut self.index, held)) {
            return Err(Error::new(ErrorKind::MemoryLimit, "no memory for token ids within memory_limit"));
        }
        Ok(())
    }

    fn append_checked(
        &mut self,
        layer: usize,
        keys: &TensorView<'_>,
        values: &TensorView<'_>,
        tokens: usize,
    ) -> Result<()> {
        let group = self.who.layout.group_tokens();
        let mut at = 0;
        while at < tokens {
            let state = self.layer(layer)?;
            let ready = state.tail_tokens() + (tokens - at);
            if ready >= group
                && let Some(bytes) = state.wants_buffer(ready / group)
            {
                let zeroed = state.has_padding();
                let buffer = self.buffer(bytes, zeroed)?;
                self.layer_mut(layer)?.give_buffer(buffer)?;
            }
            at += self.layer_mut(layer)?.take(keys, values, at..tokens)?;
            self.write_full(layer)?;
        }
        Ok(())
    }

    /// Writes the groups collected, where the buffer of a layer is full and they are enough for a frame.
    fn write_full(&mut self, layer: usize) -> Result<()> {
        if self.layer(layer)?.wants_buffer(1).is_some() && self.pending_bytes() >= self.gather_bytes(layer)? {
            self.write_groups()?;
        }
        Ok(())
    }

    /// Takes the memory of the summaries that the tokens will bring.
    pub(super) fn reserve_for(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let group = self.who.layout.group_tokens();
        let groups = (self.layer(layer)?.tail_tokens() + tokens) / group;
        self.leave_stored(Some(layer))?;
        self.reserve_methods(layer, groups, 0)?;
        let devices = Arc::clone(&self.store.devices);
        let state = self.layer_mut(layer)?;
        let Some(summary) = &mut state.summary else { return Ok(()) };
        match summary.room(groups, &mut |bytes| devices.reserve(bytes, Category::Summaries)) {
            true => Ok(()),
            false => Err(super::no_memory(&format!("the summaries of {groups} groups"))),
        }
    }

    /// A buffer. When there is none, writes what is collected and waits for frames to land.
    pub(super) fn buffer(&mut self, bytes: usize, zeroed: bool) -> Result<Lease> {
        let deadline = Instant::now() + MEMORY_WAIT;
        loop {
            let seen = self.store.devices.arena.returned().epoch();
            let arena = &self.store.devices.arena;
            match if zeroed { arena.lease_zeroed(bytes) } else { arena.lease(bytes) } {
                Ok(lease) => return Ok(lease),
                Err(Exhausted::Now) => {}
                Err(other) => return Err(exhausted(other, bytes)),
            }
            if self.pending_bytes() > 0 && !self.store.committer.is_read_only() {
                self.write_groups()?;
            } else if self.frames.iter().any(|frame| !frame.runs.is_empty()) {
                self.land(true)?;
            } else if !self.store.devices.arena.returned().wait_past(seen, Some(deadline)) {
                let text = "no buffer within memory_limit: views, reads and other sequences hold it all";
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    }

    /// Accounts for the tables as they are. `false` when they do not fit.
    pub(super) fn account(&mut self) -> bool {
        let tables: usize = self.layers.iter().flatten().map(super::Layer::index_bytes).sum();
        let bytes = size_of::<Self>()
            + self.placed.memory_bytes()
            + tables
            + self.frames_memory
            + self.token_ids.capacity() * 4;
        self.store.devices.resize(&mut self.index, bytes)
    }

    /// Measures the tables of frames anew, after some were let go.
    pub(super) fn measure_frames(&mut self) {
        let slots = self.held.iter().map(|held| &held.slot).chain(self.frames.iter().map(|frame| &frame.body));
        self.frames_memory = slots.map(|slot| size_of::<ReferencedFrame>() + slot.memory_bytes()).sum();
    }

    /// Bytes of groups from which on an append to a layer writes them: while few tokens are new, the next commit may gather
    /// more of them.
    fn gather_bytes(&self, layer: usize) -> Result<usize> {
        let new = self.layer(layer)?.tokens.saturating_sub(self.settled);
        Ok(if new < sizes().gather_tokens { self.frame_target * GATHERED_FRAMES } else { self.frame_target })
    }

    pub(super) fn pending_bytes(&self) -> usize {
        self.layers.iter().flatten().map(super::Layer::pending_bytes).sum()
    }

    /// Writes the groups collected so far, without waiting for the writes.
    fn write_groups(&mut self) -> Result<()> {
        self.land(false)?;
        if self.frames.iter().filter(|frame| !frame.runs.is_empty()).count() >= self.frames_in_flight() {
            self.land(true)?;
        }
        let drafts = self.group_drafts()?;
        self.write_drafts(drafts, false)
    }

    /// As many frames as keep every device busy, within what memory allows.
    fn frames_in_flight(&self) -> usize {
        let most = (FRAMES_IN_FLIGHT * self.store.devices.open_count()).max(FRAMES_IN_FLIGHT_MIN);
        (self.store.limits.flight_bytes / self.frame_target.max(1)).clamp(FRAMES_IN_FLIGHT_MIN, most)
    }

    /// Drafts of all groups collected, each within the limit of a frame.
    pub(super) fn group_drafts(&mut self) -> Result<Vec<FrameBuilder>> {
        let group = self.who.layout.group_tokens() as u64;
        let streamed = self.streams_min_max();
        let mut drafts = vec![FrameBuilder::default()];
        for layer in self.layers.iter_mut().flatten() {
            layer.freeze()?;
            let layer = &*layer;
            for run in &layer.pending {
                let element = MinMax::element(self.who.layout.dtype());
                // Those that are streamed are nowhere yet.
                let made = if streamed { Some(layer.records_of(run)?) } else { None };
                let kept = layer.summary.as_ref().map(|summary| {
                    let first = (run.first_group as usize).min(summary.groups());
                    let end = (first + run.groups).min(summary.groups());
                    (
                        element,
                        end - first,
                        summary
                            .shared(first..end)
                            .map(|records| RecordBytes::Shared(Box::new(records)))
                            .collect::<Vec<_>>(),
                    )
                });
                let records = match made {
                    Some(made) => {
                        Some((element, run.groups, vec![RecordBytes::Made(bytemuck::cast_slice(&made).to_vec())]))
                    }
                    None => kept,
                };
                let more = run.disk_bytes()
                    + records.as_ref().map_or(0, |(.., pieces)| pieces.iter().map(|piece| piece.bytes().len()).sum())
                    + run.groups * 16;
                if let Some(last) = drafts.last()
                    && !last.is_empty()
                    && last.bytes() + more + 4096 > self.frame_limit
                {
                    drafts.push(FrameBuilder::default());
                }
                let Some(last) = drafts.last_mut() else { continue };
                last.run(Arc::clone(run), group, layer.geometry.planes(), records);
                for (extra, adapter) in self.methods.stored(&layer.extras) {
                    let Some(SummaryRecordId(stored)) = extra.stored_as() else { continue };
                    let first = (run.first_group as usize).min(extra.groups());
                    let end = (first + run.groups).min(extra.groups());
                    // They are caches: those that do not fit beside their groups, or the format, are left out.
                    let more = (end - first) * stored.record_bytes as usize + FrameBuilder::STORED_OVERHEAD;
                    let fits = (1..=SUMMARY_RECORD_BYTES_MAX).contains(&stored.record_bytes);
                    if fits && end > first && last.bytes() + more + 4096 <= self.frame_limit {
                        let mut encoded = Vec::with_capacity(more);
                        extra.encode(first..end, &mut encoded);
                        // Whoever reads them finds a group's by its place.
                        if encoded.len() == (end - first) * stored.record_bytes as usize {
                            last.stored_summary(stored, adapter, end - first, encoded);
                        }
                    }
                }
            }
        }
        Ok(drafts)
    }

    /// Hands drafts to the log; the last one is written at once when the caller `waits` for them anyway. Runs leave their
    /// layer's pending list as their frame is on its way.
    pub(super) fn write_drafts(&mut self, drafts: Vec<FrameBuilder>, waits: bool) -> Result<()> {
        let last = drafts.iter().rposition(|draft| !draft.is_empty());
        for (at, draft) in drafts.iter().enumerate().filter(|(_, draft)| !draft.is_empty()) {
            let here = waits && Some(at) == last && draft.bytes() <= WRITE_HERE_MAX;
            let mut tries = 0;
            let frame = loop {
                match self.write_draft(draft, here) {
                    Err(e) if e.kind() == ErrorKind::NoSpace && tries < ROOM_TRIES => {
                        tries += 1;
                        if !self.store.make_room()? {
                            tries = ROOM_TRIES;
                        }
                    }
                    // A cut needs room for the tail it leaves before it gives any back.
                    Err(e) if e.kind() == ErrorKind::NoSpace && waits && self.cut && draft.is_small() => {
                        let store = Arc::clone(&self.store);
                        let sequence = self.who.sequence;
                        let lend = |lent| lock(&store.space).lend(sequence, lent);
                        lend(true);
                        let written = self.write_draft(draft, here);
                        lend(false);
                        break written?;
                    }
                    other => break other?,
                }
            };
            self.store.activity.add_written(frame.device_bytes());
            for landed in &frame.runs {
                if let Some(layer) = self.layers.get_mut(landed.run.layer).and_then(Option::as_mut) {
                    layer.pending.retain(|run| !Arc::ptr_eq(run, &landed.run));
                }
            }
            self.frames_memory += size_of::<ReferencedFrame>() + frame.body.memory_bytes();
            self.frames.push(frame);
        }
        Ok(())
    }

    fn write_draft(&mut self, draft: &FrameBuilder, here: bool) -> Result<WrittenFrame> {
        let parts = draft.parts();
        let store = &self.store;
        self.placed.widen(store.devices.list.slots());
        let order = store.devices.order(&self.placed, &parts, lock(&store.space).next_frame());
        let ids = store.ids.next_frame();
        let target = FrameTarget { devices: &store.devices, space: &store.space, order: &order, blocking: here };
        let frame = write_frame(&target, ids, &self.who, draft, &Tails(&self.layers))?;
        frame.meta.locations().for_each(|location| self.placed.add(&parts, usize::from(location.device.0)));
        Ok(frame)
    }

    /// Takes note of frames whose writes ended; with `wait`, at least of the oldest with groups that are read from memory yet.
    /// Their groups are read from the device from now on. The groups of a failed one are pending again.
    pub(super) fn land(&mut self, wait: bool) -> Result<()> {
        let mut waited = !wait;
        let mut failed = None;
        let mut landed_any = false;
        for at in 0..self.frames.len() {
            let frame = &mut self.frames[at];
            // In order, those without groups too, so that what is behind one that failed can still be taken back.
            if waited && !frame.is_written() {
                break;
            }
            if let Err(e) = frame.wait() {
                failed = Some((at, e));
                break;
            }
            if frame.runs.is_empty() {
                continue;
            }
            waited = true;
            let body = Arc::clone(&frame.body);
            for landed in std::mem::take(&mut frame.runs) {
                if let Some(layer) = self.layers.get_mut(landed.run.layer).and_then(Option::as_mut) {
                    let planes = layer.geometry.planes();
                    layer.table.landed(&landed.run, &body, landed.page, landed.checksum, planes);
                }
            }
            landed_any = true;
        }
        match failed {
            None if landed_any && !self.account() => {
                Err(Error::new(ErrorKind::MemoryLimit, "no memory for the index within memory_limit"))
            }
            None => Ok(()),
            Some((at, e)) => {
                self.requeue(at);
                Err(e.during("write of a frame"))
            }
        }
    }

    /// A frame that was not written: its segment takes no more. Its groups wait for another frame, and with them those of
    /// all frames behind it: what comes later in the sequence never stands in an earlier frame.
    pub(super) fn requeue(&mut self, at: usize) {
        let mut frames = self.frames.split_off(at);
        for frame in &mut frames {
            // Whether it was written does not matter any more.
            let _ = frame.wait();
            self.state_dirty |= frame.holds_state;
        }
        // They may have held tail tokens, or groups that a cut turned into tail tokens.
        for layer in self.layers.iter_mut().flatten() {
            layer.written = 0;
        }
        self.ids_written = self.ids_written.min(self.ids_durable);
        self.measure_frames();
        for landed in frames.into_iter().flat_map(|frame| frame.runs) {
            if let Some(layer) = self.layers.get_mut(landed.run.layer).and_then(Option::as_mut) {
                layer.requeue(landed.run);
            }
        }
    }
}
