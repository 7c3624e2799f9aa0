//! The frames of a sequence: those being written, and those that commits have named.
//!
//! A frame passes through three steps:
//!
//! 1. [`FrameSet::write`] hands a draft to the log. The frame is *unnamed*, and its writes may be in flight.
//! 2. [`FrameSet::land`] sees its writes complete. Its groups are read from the device from then on.
//! 3. A commit announces it in the manifest ([`FrameSet::announce_written`]). It is *named*.
//!
//! Invariants:
//! - Unnamed frames are in the order of their groups: an earlier frame never holds what is later in the sequence.
//! - The space of a frame is not used again while a write into it is in flight, so a frame is waited for before it is
//!   dropped.
//! - `memory` is what the tables of all frames take. It may lag behind while frames are released.

use super::caller_state::CallerState;
use super::commit_state::CommitState;
use super::layer_set::LayerSet;
use super::referenced_frame::{ForkOrigin, ReferencedFrame, cut_references, merge_references};
use crate::catalog::{
    Catalog, DerivedRef, RecordBuffer, SegmentHandle, SegmentKey, ref_record, release_record, without_stale,
};
use crate::error::{Error, Result};
use crate::io::coverage;
use crate::io::planted;
use crate::layout::PlacedBytes;
use crate::log::{CommitRequest, FrameBuilder, FrameTarget, SequenceIdentity, StoreInner, WrittenFrame, write_frame};
use crate::metrics::{Reservation, lock};
use std::collections::BTreeMap;
use std::sync::Arc;
use stratakv_format::manifest::Kind;
use stratakv_format::{FrameId, SequenceId};

/// Commits gather groups up to this many times the bytes of a frame.
const GATHERED_FRAMES: usize = 4;

/// The frames of one sequence.
pub(super) struct FrameSet {
    /// Frames that no commit names yet, in the order in which they were written.
    unnamed: Vec<WrittenFrame>,
    /// Frames that commits of this sequence, or of the one it was forked from, have named.
    named: Vec<ReferencedFrame>,
    /// Derived frames of the sequence this was forked from, with the ends of their tokens. The first commit names those
    /// that still exist.
    derived: Vec<DerivedRef>,
    /// The bytes of each layer on each device.
    placed: PlacedBytes,
    /// The most bytes of a frame.
    limit: usize,
    /// The bytes of groups from which on a frame is written.
    target: usize,
    /// Groups in memory between commits, out of what all sequences may gather.
    gathered: Reservation,
    /// Bytes of memory that the tables of `unnamed` and `named` take.
    memory: usize,
}

/// The result of [`FrameSet::land`].
pub(super) struct Landing {
    /// The groups of at least one frame are read from the device now.
    pub(super) any: bool,
    /// The first unnamed frame that could not be written, with its error.
    pub(super) failed: Option<(usize, Error)>,
}

impl FrameSet {
    /// Returns an empty set. `limit` and `target` are in bytes.
    pub(super) fn new(placed: PlacedBytes, (limit, target): (usize, usize), gathered: Reservation) -> Self {
        let (unnamed, named, derived) = (Vec::new(), Vec::new(), Vec::new());
        Self { unnamed, named, derived, placed, limit, target, gathered, memory: 0 }
    }

    /// Returns an empty set for a handle that never writes. It keeps the derived frames of this moment.
    pub(super) fn snapshot(&self, gathered: Reservation, derived: Vec<DerivedRef>) -> Self {
        Self { derived, ..Self::new(PlacedBytes::default(), (self.limit, self.target), gathered) }
    }

    /// Returns the most bytes of a frame.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the bytes of groups from which on a frame is written.
    pub(super) fn target(&self) -> usize {
        self.target
    }

    /// Returns the most bytes of groups that commits may gather in memory.
    pub(super) fn gather_limit(&self) -> usize {
        self.target * GATHERED_FRAMES
    }

    /// Returns the number of frames that the next commit announces.
    pub(super) fn to_announce(&self) -> usize {
        self.unnamed.len() + self.named.iter().filter(|held| held.shared.is_some()).count() + self.derived.len()
    }

    /// Returns the number of frames with groups that are read from memory yet.
    pub(super) fn in_flight(&self) -> usize {
        self.unnamed.iter().filter(|frame| !frame.runs.is_empty()).count()
    }

    /// Returns whether some unnamed frame holds groups.
    pub(super) fn has_unnamed_groups(&self) -> bool {
        self.unnamed.iter().any(|frame| frame.small.is_none())
    }

    /// Returns the bytes of memory that the tables take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.placed.memory_bytes() + self.memory
    }

    /// Accounts for `bytes` of groups in memory. Returns `false` if all sequences together have gathered too much.
    pub(super) fn gather(&mut self, bytes: usize) -> bool {
        self.gathered.resize(bytes)
    }

    /// Hands a draft to the log, which writes it to the devices that hold least of its layers. With `here` this thread
    /// writes it. Returns the frame and the runs in it.
    ///
    /// # Errors
    /// No space, or no buffers.
    pub(super) fn write(
        &mut self,
        store: &StoreInner,
        identity: &SequenceIdentity,
        layers: &LayerSet,
        draft: &FrameBuilder,
        here: bool,
    ) -> Result<WrittenFrame> {
        let parts = draft.parts();
        self.placed.widen(store.devices.list.slots());
        let order = store.devices.order(&self.placed, &parts, lock(&store.space).next_frame());
        let ids = store.ids.next_frame();
        let target = FrameTarget { devices: &store.devices, space: &store.space, order: &order, blocking: here };
        let frame = write_frame(&target, ids, identity, draft, layers)?;
        frame.meta.locations().for_each(|location| self.placed.add(&parts, usize::from(location.device.0)));
        Ok(frame)
    }

    /// Adds a frame that was handed to the log.
    pub(super) fn add_written(&mut self, frame: WrittenFrame) {
        self.memory += ReferencedFrame::table_bytes(&frame.body);
        self.unnamed.push(frame);
    }

    /// Adds a frame that the manifest names.
    pub(super) fn add_named(&mut self, frame: ReferencedFrame) {
        self.memory += ReferencedFrame::table_bytes(&frame.slot);
        self.named.push(frame);
    }

    /// Returns references to all frames with tokens, for a fork. A frame that holds only the caller's state is not
    /// shared.
    pub(super) fn share(&self) -> Vec<ReferencedFrame> {
        let named = self
            .named
            .iter()
            .map(|held| ReferencedFrame { shared: held.shared.or(Some(ForkOrigin::Named)), ..held.clone() });
        let unnamed = self.unnamed.iter().map(|frame| ReferencedFrame::written(frame, Some(ForkOrigin::Unnamed)));
        named.chain(unnamed).filter(|held| held.first_token.is_some()).collect()
    }

    /// Returns the derived frames of a sequence, for a fork: those that its commits named, and those that it was forked
    /// with. Frames that hold tokens that were cut off are left out.
    pub(super) fn share_derived(&self, catalog: &Catalog, id: SequenceId, commits: &CommitState) -> Vec<DerivedRef> {
        // A reader has the id of its sequence, which may have other clusters by now.
        // What is stored about tokens is derived from committed ones. Bytes on a device may say otherwise.
        let committed = catalog.sequences.get(&id).map_or(0, |own| own.tokens);
        let known = |own: DerivedRef| DerivedRef { end: own.end.min(committed), ..own };
        let named = catalog.derived_refs(id).filter(|_| commits.is_stored()).map(known).collect();
        let mut named = without_stale(named, |own| commits.is_stale(own.frame, own.end));
        named.extend_from_slice(&self.derived);
        named
    }

    /// Takes over the frames of the sequence this was forked from.
    pub(super) fn adopt(&mut self, frames: Vec<ReferencedFrame>, derived: Vec<DerivedRef>) {
        (self.named, self.derived) = (frames, derived);
        self.measure();
    }

    /// Measures the tables after some frames were released.
    pub(super) fn measure(&mut self) {
        let slots = self.named.iter().map(|held| &held.slot).chain(self.unnamed.iter().map(|frame| &frame.body));
        self.memory = slots.map(|slot| ReferencedFrame::table_bytes(slot)).sum();
    }

    /// Moves groups of written frames from memory to their place on the device. With `wait` it waits for the oldest
    /// frame whose groups are read from memory yet. Frames are taken in order, including those without groups, so that
    /// everything behind a failed frame can be taken back.
    pub(super) fn land(&mut self, layers: &mut LayerSet, wait: bool) -> Landing {
        let mut waited = !wait;
        let mut any = false;
        for (at, frame) in self.unnamed.iter_mut().enumerate() {
            if waited && !frame.is_written() {
                break;
            }
            if let Err(e) = frame.wait() {
                return Landing { any, failed: Some((at, e)) };
            }
            if frame.runs.is_empty() {
                continue;
            }
            waited = true;
            for landed in std::mem::take(&mut frame.runs) {
                if let Some(layer) = layers.get_mut(landed.run.layer) {
                    layer.landed(&landed.run, &frame.body, landed.page, landed.checksum);
                }
            }
            any = true;
        }
        Landing { any, failed: None }
    }

    /// Syncs the sealed segments of unnamed frames whose frames are all written. Their files may then be closed, so
    /// that appends without a commit do not use up the descriptors of the process.
    ///
    /// A failed sync poisons its device, which the next commit reports.
    pub(super) fn sync_sealed(&self, store: &StoreInner) {
        let ready: BTreeMap<SegmentKey, &Arc<SegmentHandle>> = {
            let space = lock(&store.space);
            let all = self.unnamed.iter().flat_map(WrittenFrame::segments);
            let ready = all.filter(|own| !own.is_synced() && own.is_written() && space.is_sealed(own.key));
            ready.map(|own| (own.key, own)).collect()
        };
        let files = ready.values().map(|own| Some((own.key.0, own.file().ok()?)));
        let Some(files) = files.collect::<Option<Vec<_>>>().filter(|files| !files.is_empty()) else { return };
        let failures = match planted!(EarlySyncSkipped) {
            true => BTreeMap::new(),
            false => store.devices.sync_each(files.iter().map(|(device, file)| (*device, file))),
        };
        ready.values().filter(|own| !failures.contains_key(&own.key.0)).for_each(|own| own.set_synced());
    }

    /// Waits for every unnamed frame. Returns the first that could not be written.
    pub(super) fn wait_all(&mut self) -> Option<(usize, Error)> {
        self.unnamed.iter_mut().enumerate().find_map(|(at, frame)| frame.wait().err().map(|e| (at, e)))
    }

    /// Waits until no write is in flight, whatever its outcome: its space may be used again after this.
    pub(super) fn quiesce(&mut self) {
        for frame in &mut self.unnamed {
            let _ = frame.wait();
        }
    }

    /// Drops all unnamed frames. They must be [quiet](Self::quiesce).
    pub(super) fn drop_unnamed(&mut self) {
        self.unnamed.clear();
    }

    /// Takes back the unnamed frames from `at` on and waits for their writes, whose outcome no longer matters.
    pub(super) fn take_back(&mut self, at: usize) -> Vec<WrittenFrame> {
        let mut frames = self.unnamed.split_off(at);
        for frame in &mut frames {
            let _ = frame.wait();
        }
        self.measure();
        frames
    }

    /// Removes a refused state of the caller from unnamed frames. A frame that holds nothing else is dropped.
    pub(super) fn refuse_state(&mut self) {
        self.unnamed.retain_mut(|frame| {
            let useless = frame.holds_state && frame.first_token.is_none();
            if useless {
                let _ = frame.wait();
            }
            frame.holds_state = false;
            !useless
        });
        self.measure();
    }

    /// Cuts every frame to `sealed` tokens, a multiple of the group size, because the next commit writes the tail
    /// again. Frames of which nothing is left are dropped, so cutting and growing repeatedly leaves none behind.
    /// Returns the frames that the next commit releases. No write may be in flight.
    pub(super) fn cut(&mut self, sealed: u64, state_frame: u64) -> Vec<FrameId> {
        let keeps = |first_token: Option<u64>| first_token.is_some_and(|first| first < sealed);
        self.unnamed.retain(|frame| frame.holds_state || keeps(frame.first_token));
        for frame in &mut self.unnamed {
            frame.token_end = frame.token_end.min(sealed);
            frame.first_token = frame.first_token.filter(|first| *first < sealed);
        }
        self.derived = without_stale(std::mem::take(&mut self.derived), |own| own.end > sealed);
        cut_references(&mut self.named, sealed, state_frame)
    }

    /// Records that a commit of groups has written all tokens and token ids again. Small frames that were split off
    /// because of long token ids hold ids that are not written again, so they do not count as small.
    pub(super) fn keep_split_ids(&mut self) {
        for frame in &mut self.unnamed {
            frame.small = frame.small.filter(|ends| ends.ids == 0);
        }
    }

    /// Drops small frames whose content is in groups by now: `ends` are the tokens and token ids in frames with groups.
    /// Returns the records that release them.
    pub(super) fn release_merged(
        &mut self,
        identity: &SequenceIdentity,
        ends: (u64, u64),
        state_frame: u64,
    ) -> RecordBuffer {
        let before = self.named.len();
        let mut records = RecordBuffer::default();
        for frame in merge_references(&mut self.named, ends, state_frame) {
            records.push(Kind::FrameRelease, &release_record(identity.sequence, frame), &[]);
        }
        if self.named.len() < before {
            coverage!(Merged);
            self.measure();
        }
        records
    }

    /// Announces the frames that the sequence was forked with, once.
    pub(super) fn announce_forked(&mut self, identity: &SequenceIdentity, request: &mut CommitRequest) {
        for held in &mut self.named {
            let Some(shared) = held.shared.take() else { continue };
            let segments = held.announce(&mut request.records);
            request.records.push(Kind::FrameRef, &ref_record(identity.sequence, held.frame, held.token_end), &[]);
            match shared {
                ForkOrigin::Named => request.pins.extend(segments),
                ForkOrigin::Unnamed => add_written(request, held, segments, identity.copies),
            }
        }
    }

    /// Announces the derived frames that the sequence was forked with, once. One that no sequence has any more, or
    /// whose device is gone, is left out.
    pub(super) fn announce_derived(
        &mut self,
        store: &StoreInner,
        identity: &SequenceIdentity,
        request: &mut CommitRequest,
    ) {
        if self.derived.is_empty() {
            return;
        }
        let catalog = lock(&store.catalog);
        let mut space = lock(&store.space);
        for DerivedRef { frame: id, end, .. } in std::mem::take(&mut self.derived) {
            let Some(frame) = catalog.frames.get(&id) else { continue };
            let key = (frame.location.device, frame.location.segment);
            let Some(segment) = catalog.segments.get(&key) else { continue };
            let Ok(segment) = space.handle(&store.devices, key, segment) else { continue };
            frame.announce(id, &mut request.records);
            request.records.push(Kind::FrameRef, &ref_record(identity.sequence, id, end), &[]);
            request.pins.push(segment);
        }
    }

    /// Announces the unnamed frames, which are named from now on. Frames are recorded where they are stored now,
    /// because a committed fork may have brought one into the catalog, and cleaning may have moved it since.
    ///
    /// Releases frames that hold nothing but an older state of the caller: from the last commit, and from later
    /// attempts that failed.
    pub(super) fn announce_written(
        &mut self,
        identity: &SequenceIdentity,
        request: &mut CommitRequest,
        state: &mut CallerState,
    ) {
        let mut old_states = Vec::new();
        for frame in self.unnamed.drain(..) {
            let held = ReferencedFrame::written(&frame, None);
            let segments = held.announce(&mut request.records);
            add_written(request, &held, segments, identity.copies);
            request.records.push(Kind::FrameRef, &ref_record(identity.sequence, frame.id, frame.token_end), &[]);
            self.named.push(held);
            if frame.holds_state {
                old_states.push(state.name_frame(frame.id));
            }
        }
        for old in old_states {
            if let Some(at) = self.named.iter().position(|held| held.frame == old && held.first_token.is_none()) {
                self.named.swap_remove(at);
                request.records.push(Kind::FrameRelease, &release_record(identity.sequence, old), &[]);
            }
        }
    }

    /// Returns the unnamed frames.
    #[cfg(test)]
    pub(super) fn unnamed(&self) -> &[WrittenFrame] {
        &self.unnamed
    }

    /// Returns the named frames.
    #[cfg(test)]
    pub(super) fn named(&self) -> &[ReferencedFrame] {
        &self.named
    }
}

/// Adds a frame that the request makes durable.
fn add_written(request: &mut CommitRequest, held: &ReferencedFrame, segments: Vec<Arc<SegmentHandle>>, copies: usize) {
    request.owes_copies |= segments.len() < copies;
    request.segments.extend(segments);
    request.flights.extend(held.slot.take_flights());
}
