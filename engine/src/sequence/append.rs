//! Appending: tokens become groups, and full buffers become frames.
//!
//! An append to a layer has three steps:
//!
//! 1. It checks shapes and values, and takes the memory of the summaries that the tokens will add.
//! 2. It copies rows to the tail, or whole groups to the group builder ([`LayerState::take`]). A full builder gets a
//!    new buffer.
//! 3. When the pending groups of all layers reach the target size, it writes them as frames. It does not wait for the
//!    writes.
//!
//! An append that fails rolls its layer back. Frames that it has handed to the log stay, because groups past the length
//! of the sequence are ignored.

use super::errors::no_memory;
use super::handle::Sequence;
use super::layer::LayerState;
use super::token_ids::TokenIds;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::LeaseError;
use crate::io::buffer::lease::Lease;
use crate::layout::TensorView;
use crate::log::{FRAMES_IN_FLIGHT, FrameBuilder, WrittenFrame, exhausted};
use crate::metrics::{Category, lock};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stratakv_format::codec::ENCODED_ELEMENT_MAX;

/// Frames that may be in flight before an append waits for the oldest, even if memory is short.
const FRAMES_IN_FLIGHT_MIN: usize = 2;
/// The most bytes of a frame that a commit writes on its own thread.
const WRITE_HERE_MAX: usize = 4 << 20;
/// The number of times that an append without space frees some and tries again.
const ROOM_TRIES: usize = 8;
/// The time for which an append waits for memory that selections and reads hold.
const MEMORY_WAIT: Duration = Duration::from_secs(10);

impl Sequence {
    /// Appends tokens to one layer: `keys` `[tokens, kv_heads, key_dim]` and `values` `[tokens, kv_heads, value_dim]`.
    /// Layouts without a V plane take [`TensorView::empty`] as values. A prompt appends many tokens at once, a decode
    /// step one. The engine owns the bytes when the call returns; a commit makes them durable.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: wrong shape, or an element that is NaN, infinite, or too large for the layout's
    /// dtype. [`ErrorKind::NoSpace`], [`ErrorKind::MemoryLimit`], [`ErrorKind::Busy`]: no space on devices or in
    /// memory. After an error the layer is unchanged.
    pub fn append(&mut self, layer: usize, keys: TensorView<'_>, values: TensorView<'_>) -> Result<()> {
        self.store.committer.check()?;
        let place = format!("append to layer {layer}");
        self.check_tensors(layer, &keys, &values, &place)?;
        let tokens = keys.tokens();
        let before = self.layer(layer)?.mark(tokens);
        self.reserve_for(layer, tokens).map_err(|e| e.during(&place))?;
        let outcome = self.append_checked(layer, &keys, &values, tokens);
        if outcome.is_err() {
            self.layer_mut(layer)?.undo(before);
        }
        outcome.map_err(|e| e.during(&place))?;
        self.advance_summaries(layer);
        Ok(())
    }

    /// Appends an encoded group as it is stored: K plane, V plane. The layer has a codec and no tail.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: planes with a number that is not finite. Others as [`Self::append`].
    pub(crate) fn append_stored(&mut self, layer: usize, planes: (&[u8], &[u8])) -> Result<()> {
        let group = self.identity.layout.group_tokens();
        let before = self.layer(layer)?.mark(group);
        self.reserve_for(layer, group)?;
        self.give_buffer(layer, 1)?;
        let outcome = self.layer_mut(layer)?.take_stored(planes);
        if outcome.is_err() {
            self.layer_mut(layer)?.undo(before);
        }
        outcome?;
        self.advance_summaries(layer);
        self.write_full(layer)
    }

    /// Appends ids of the sequence's tokens, in order. They become durable with the next commit.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub fn append_token_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.store.committer.check()?;
        TokenIds::reserve(&self.store.devices, &mut self.index, ids.len())?;
        self.token_ids.extend(ids);
        Ok(())
    }

    /// Checks that tensors have the layer's shape, and values that it can store.
    fn check_tensors(&self, layer: usize, keys: &TensorView<'_>, values: &TensorView<'_>, place: &str) -> Result<()> {
        let geometry = *self.identity.layout.kv_layer(layer).map_err(|e| e.during("append"))?;
        let dtype = self.identity.layout.dtype();
        let heads = usize::from(geometry.kv_heads);
        keys.check("keys", heads, usize::from(geometry.key_dim), dtype).map_err(|e| e.during(place))?;
        values.check("values", heads, usize::from(geometry.value_dim), dtype).map_err(|e| e.during(place))?;
        if keys.tokens() != values.tokens() {
            let text = format!("{place}: keys of {} tokens, values of {}", keys.tokens(), values.tokens());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if geometry.is_encoded() {
            keys.check_magnitude("keys", ENCODED_ELEMENT_MAX).map_err(|e| e.during(place))?;
            values.check_magnitude("values", ENCODED_ELEMENT_MAX).map_err(|e| e.during(place))?;
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
        let group = self.identity.layout.group_tokens();
        let mut at = 0;
        while at < tokens {
            let ready = self.layer(layer)?.tail_tokens() + (tokens - at);
            if ready >= group {
                self.give_buffer(layer, ready / group)?;
            }
            at += self.layer_mut(layer)?.take(keys, values, at..tokens)?;
            self.write_full(layer)?;
        }
        Ok(())
    }

    /// Gives a layer a buffer for `groups` more groups if its builder is full.
    pub(super) fn give_buffer(&mut self, layer: usize, groups: usize) -> Result<()> {
        let state = self.layer(layer)?;
        let Some(bytes) = state.wants_buffer(groups) else { return Ok(()) };
        let zeroed = state.has_padding();
        let buffer = self.buffer(bytes, zeroed)?;
        self.layer_mut(layer)?.give_buffer(buffer)
    }

    /// Writes the pending groups if the layer's buffer is full and they are enough for a frame.
    fn write_full(&mut self, layer: usize) -> Result<()> {
        if self.layer(layer)?.wants_buffer(1).is_some() && self.layers.pending_bytes() >= self.gather_bytes(layer)? {
            self.write_groups()?;
        }
        Ok(())
    }

    /// Takes the memory of the summaries that `tokens` more tokens will add to a layer.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`].
    pub(super) fn reserve_for(&mut self, layer: usize, tokens: usize) -> Result<()> {
        let group = self.identity.layout.group_tokens();
        let groups = (self.layer(layer)?.tail_tokens() + tokens) / group;
        self.drop_stored_summaries(Some(layer))?;
        let devices = Arc::clone(&self.store.devices);
        self.selectors.reserve(&devices, &self.layers, (layer, groups), 0)?;
        let state = self.layer_mut(layer)?;
        match state.summaries_mut().reserve_min_max(groups, &mut |bytes| devices.reserve(bytes, Category::Summaries)) {
            true => Ok(()),
            false => Err(no_memory(&format!("the summaries of {groups} groups"))),
        }
    }

    /// Returns a buffer. If there is none, it writes the pending groups and waits for frames in flight, whose buffers
    /// then return.
    fn buffer(&mut self, bytes: usize, zeroed: bool) -> Result<Lease> {
        let deadline = Instant::now() + MEMORY_WAIT;
        loop {
            let seen = self.store.devices.arena.returned().epoch();
            let arena = &self.store.devices.arena;
            match if zeroed { arena.lease_zeroed(bytes) } else { arena.lease(bytes) } {
                Ok(lease) => return Ok(lease),
                Err(LeaseError::Now) => {}
                Err(other) => return Err(exhausted(other, bytes)),
            }
            if self.layers.pending_bytes() > 0 && !self.store.committer.is_read_only() {
                self.write_groups()?;
            } else if self.frames.in_flight() > 0 {
                self.land(true)?;
            } else if !self.store.devices.arena.returned().wait_past(seen, Some(deadline)) {
                let text = format!(
                    "no buffer of {bytes} bytes within {} s: selections, reads and other sequences hold memory_limit; \
                     drop some of them",
                    MEMORY_WAIT.as_secs()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    }

    /// Returns the bytes of groups from which on an append to a layer writes them. If few tokens are new, the next
    /// commit may gather more of them.
    fn gather_bytes(&self, layer: usize) -> Result<usize> {
        let new = self.layer(layer)?.tokens().saturating_sub(self.commits.settled());
        let gathers = new < self.store.devices.environment.sizes().gather_tokens;
        Ok(if gathers { self.frames.gather_limit() } else { self.frames.target() })
    }

    /// Writes the pending groups, without waiting for the writes.
    fn write_groups(&mut self) -> Result<()> {
        self.land(false)?;
        if self.frames.in_flight() >= self.frames_in_flight_max() {
            self.land(true)?;
        }
        let drafts = self.group_drafts()?;
        self.write_drafts(drafts, false)
    }

    /// Returns the number of frames that keep every device busy, within what memory allows.
    fn frames_in_flight_max(&self) -> usize {
        let most = (FRAMES_IN_FLIGHT * self.store.devices.open_count()).max(FRAMES_IN_FLIGHT_MIN);
        (self.store.limits.flight_bytes / self.frames.target().max(1)).clamp(FRAMES_IN_FLIGHT_MIN, most)
    }

    /// Hands drafts to the log. If the caller `waits` for them, this thread writes the last one. Runs leave the pending
    /// list of their layer when their frame is in flight.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] and others of the log. Drafts before the failed one stay in flight.
    pub(super) fn write_drafts(&mut self, drafts: Vec<FrameBuilder>, waits: bool) -> Result<()> {
        let last = drafts.iter().rposition(|draft| !draft.is_empty());
        for (at, draft) in drafts.iter().enumerate().filter(|(_, draft)| !draft.is_empty()) {
            let here = waits && Some(at) == last && draft.bytes() <= WRITE_HERE_MAX;
            let frame = self.write_draft(draft, here, waits)?;
            self.store.activity.add_written(frame.device_bytes());
            for landed in &frame.runs {
                if let Some(layer) = self.layers.get_mut(landed.run.layer) {
                    layer.sent(&landed.run);
                }
            }
            self.frames.add_written(frame);
        }
        Ok(())
    }

    /// Hands one draft to the log and frees space for it if there is none.
    fn write_draft(&mut self, draft: &FrameBuilder, here: bool, waits: bool) -> Result<WrittenFrame> {
        let mut tries = 0;
        loop {
            let written = self.frames.write(&self.store, &self.identity, &self.layers, draft, here);
            match written {
                Err(e) if e.kind() == ErrorKind::NoSpace && tries < ROOM_TRIES => {
                    tries += 1;
                    if !self.store.make_room()? {
                        tries = ROOM_TRIES;
                    }
                }
                // A cut has to store the tail it leaves before it frees any space, so it borrows reserved space.
                Err(e) if e.kind() == ErrorKind::NoSpace && waits && self.commits.is_cut() && draft.is_small() => {
                    let sequence = self.identity.sequence;
                    let lend = |lent| lock(&self.store.space).lend(sequence, lent);
                    lend(true);
                    let written = self.frames.write(&self.store, &self.identity, &self.layers, draft, here);
                    lend(false);
                    return written;
                }
                other => return other,
            }
        }
    }

    /// Takes note of frames whose writes completed. With `wait` it waits for the oldest frame with groups that are read
    /// from memory yet. The groups of a failed frame, and of all frames behind it, are pending again.
    ///
    /// # Errors
    /// The failed write; [`ErrorKind::MemoryLimit`]: no memory for the tables.
    pub(super) fn land(&mut self, wait: bool) -> Result<()> {
        let landing = self.frames.land(&mut self.layers, wait);
        if landing.any && self.store.devices.files.is_crowded() {
            self.frames.sync_sealed(&self.store);
        }
        match landing.failed {
            None if landing.any => self.account(),
            None => Ok(()),
            Some((at, e)) => {
                self.requeue(at);
                Err(e.during("write of a frame"))
            }
        }
    }

    /// Takes back the unnamed frames from `at` on, the first of which could not be written. Their groups wait for other
    /// frames. Later frames are taken back too, because an earlier frame must never hold what is later in the sequence.
    pub(super) fn requeue(&mut self, at: usize) {
        let frames = self.frames.take_back(at);
        if frames.iter().any(|frame| frame.holds_state) {
            self.caller_state.mark_unwritten();
        }
        // The frames may have held tail tokens, or groups that a cut turned into tail tokens.
        self.layers.iter_mut().for_each(LayerState::forget_written);
        self.token_ids.forget_written();
        for landed in frames.into_iter().flat_map(|frame| frame.runs) {
            if let Some(layer) = self.layers.get_mut(landed.run.layer) {
                layer.requeue(landed.run);
            }
        }
    }
}
