//! The steps of one group commit, in order. The leader runs them for every commit that waits.
//!
//! 1. [`collect`](GroupCommit::collect): the records that open segments owe, and the segments to sync.
//! 2. [`sync_data`](Committer::sync_data): sync every segment once. Devices that fail are declared lost if every frame
//!    has another copy.
//! 3. [`push_changes`](Committer::push_changes): records of moved copies, released derived frames and removed segments.
//! 4. [`push_members`](Committer::push_members): records of devices that join or leave.
//! 5. [`push_requests`](Committer::push_requests): layouts and records of the commits themselves.
//! 6. [`record`](Committer::record): append the batch to the manifest and sync it. This makes the commits durable.
//! 7. [`publish`](Committer::publish): tell readers where copies are, wake the repair, release idle segments.
//! 8. [`free_dead_segments`](Committer::free_dead_segments): free segments that no record refers to any more.
//!
//! Invariant: data is durable before a record names it, and a record is durable before space is reused because of it.

use super::failure::CommitFailure;
use super::{Committer, Queued};
use crate::catalog::{Catalog, RecordBuffer, SegmentHandle, SegmentKey, SegmentState, free_record};
use crate::error::Result;
use crate::io::coverage;
use crate::io::planted;
use crate::log::copies::CopyChange;
use crate::log::copy_location::tell_copies;
use crate::metrics::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{DeviceIndex, FrameId};

/// A group commit under way.
struct GroupCommit {
    /// The records of the next batch.
    records: RecordBuffer,
    /// Segments whose headers the batch makes durable.
    opened: Vec<Arc<SegmentHandle>>,
    /// Records of open segments as they were taken, to be put back if the batch finds no space.
    taken: (RecordBuffer, Vec<Arc<SegmentHandle>>),
    /// Segments to sync, each once.
    segments: BTreeMap<SegmentKey, Arc<SegmentHandle>>,
    /// Frames whose copies the batch moves.
    moved: BTreeSet<FrameId>,
    /// True if the batch also records the counters, so that a crash forgets little of what was written.
    counted: bool,
}

impl GroupCommit {
    /// Takes the records that open segments owe: the header of a segment is durable before a record names it.
    fn collect(committer: &Committer, group: &[Queued]) -> Self {
        let (records, opened) = lock(&committer.space).take_pending();
        let segments = group.iter().flat_map(|queued| &queued.request.segments).chain(&opened);
        let segments = segments.filter(|segment| !segment.is_synced());
        let segments = segments.map(|segment| (segment.key, Arc::clone(segment))).collect();
        let (taken, counted) = ((records.clone(), opened.clone()), !opened.is_empty());
        Self { records, opened, taken, segments, moved: BTreeSet::new(), counted }
    }
}

impl Committer {
    /// Makes the commits of `group` durable together.
    ///
    /// # Errors
    /// [`CommitFailure::Stalled`]: the manifest has no space. Nothing changed. [`CommitFailure::Broken`]: a sync or
    /// write failed.
    pub(super) fn perform(&self, group: &mut [Queued]) -> Result<(), CommitFailure> {
        coverage!(GroupCommit);
        let mut commit = GroupCommit::collect(self, group);
        if planted!(ManifestBeforeData) {
            group.iter().for_each(|queued| commit.records.append(&queued.request.records));
            if !commit.records.is_empty() {
                self.record(commit.records.clone(), &mut [], false)?;
            }
        }
        let lost = self.sync_data(&commit, group)?;
        if planted!(ManifestBeforeData) {
            return Ok(());
        }
        // The handles of new segments are held no longer than until they are synced.
        commit.opened.clear();
        commit.segments.clear();
        self.push_changes(&mut commit, group, &lost);
        self.release_leaving_devices(group, &lost)?;
        let members = self.push_members(&mut commit.records, group, &lost);
        self.push_requests(&mut commit.records, group);
        if !commit.records.is_empty() {
            let recorded = self.record(commit.records, group, commit.counted);
            match recorded.and_then(|()| self.change_members(&members)) {
                Err(CommitFailure::Stalled(e)) => {
                    let (records, opened) = commit.taken;
                    lock(&self.space).put_back(records, opened);
                    return Err(CommitFailure::Stalled(e));
                }
                other => other?,
            }
        }
        self.publish(group, &commit.moved);
        match self.free_dead_segments() {
            // A later commit frees them.
            Err(CommitFailure::Stalled(_)) => Ok(()),
            other => other,
        }
    }

    /// Syncs every segment that the group wrote to. Returns the devices that failed and that the store can do without.
    fn sync_data(&self, commit: &GroupCommit, group: &[Queued]) -> Result<BTreeSet<DeviceIndex>> {
        let skipped = planted!(DataSyncSkipped);
        let files = commit.segments.iter().filter(|_| !skipped).map(|(key, handle)| Ok((key.0, handle.file()?)));
        let files = files.collect::<Result<Vec<_>>>()?;
        let sync = || self.devices.sync_each(files.iter().map(|(device, file)| (*device, file)));
        let mut failures = sync();
        if !failures.is_empty() && planted!(SyncRetried) {
            failures = sync();
        }
        let lost = self.lost_to(failures, group)?;
        if !lost.is_empty() {
            // The frames of this group have copies on these devices that no reader may trust.
            self.devices.suspects.owe();
        }
        Ok(lost)
    }

    /// Adds the records of moved copies, of released derived frames and of removed segments. They come before the
    /// records of the group, which may delete the same frames.
    fn push_changes(&self, commit: &mut GroupCommit, group: &[Queued], lost: &BTreeSet<DeviceIndex>) {
        let catalog = lock(&self.catalog);
        let is_durable = |change: &&CopyChange| change.wanted.iter().all(|(at, _)| !lost.contains(&at.device));
        for change in group.iter().flat_map(|queued| &queued.request.copies).filter(is_durable) {
            // The first of several changes of one frame counts, because the others were decided before it.
            if let Some(frame) = catalog.frames.get(&change.frame)
                && commit.moved.insert(change.frame)
            {
                change.push(frame, &mut commit.records);
            }
        }
        let mut released = BTreeSet::new();
        for release in group.iter().flat_map(|queued| &queued.request.derived) {
            release.push(&catalog, &mut released, &mut commit.records);
        }
        for (key, generation) in group.iter().flat_map(|queued| &queued.request.removed) {
            let meta = catalog.segments.get(key);
            if meta.is_some_and(|meta| meta.state == SegmentState::Free && meta.generation == *generation) {
                commit.records.push(Kind::SegmentFree, &free_record(*key, *generation, true), &[]);
            }
        }
    }

    /// Adds the records of devices that join, leave or failed. Returns these members.
    fn push_members(
        &self,
        records: &mut RecordBuffer,
        group: &[Queued],
        lost: &BTreeSet<DeviceIndex>,
    ) -> Vec<m::Member> {
        let members = self.members_of(group, lost);
        for member in &members {
            if member.state == m::MEMBER_REMOVED {
                lock(&self.space).forget(DeviceIndex(member.device.get()));
            }
            records.push(Kind::Member, member, &[]);
        }
        members
    }

    /// Adds the records of the commits, each layout that the store does not know yet in front.
    fn push_requests(&self, records: &mut RecordBuffer, group: &[Queued]) {
        let mut defined = BTreeSet::new();
        for queued in group {
            for (id, layout) in &queued.request.layouts {
                if !lock(&self.catalog).layouts.contains_key(id) && defined.insert(*id) {
                    records.push_layout(*id, layout);
                }
            }
            records.append(&queued.request.records);
        }
    }

    /// Makes a durable commit known: to the readers of moved frames, to the repair, and to segments that wait for it.
    fn publish(&self, group: &[Queued], moved: &BTreeSet<FrameId>) {
        for frame in moved {
            // A slot that cannot be told keeps the old place, which its readers hold.
            let _ = tell_copies(&self.devices, &self.catalog, &self.space, *frame);
        }
        if group.iter().any(|queued| queued.request.owes_copies) {
            // Not before the commit: until then a repair finds nothing to do.
            self.devices.suspects.owe();
        }
        for queued in group {
            let space = lock(&self.space);
            let is_sealed = |segment: &&Arc<SegmentHandle>| space.is_sealed(segment.key);
            let segments = queued.request.segments.iter().filter(is_sealed);
            segments.filter(|segment| segment.in_flight_pages() == 0).for_each(|segment| segment.lazy.hold(false));
        }
    }

    /// Frees sealed segments without live frames. The record is durable before the file is reused.
    fn free_dead_segments(&self) -> Result<(), CommitFailure> {
        let dead: Vec<(SegmentKey, u64)> = {
            let catalog = lock(&self.catalog);
            let space = lock(&self.space);
            let idle = catalog.idle.iter().filter(|key| space.reclaimable(**key));
            idle.filter_map(|key| catalog.segments.get(key).map(|meta| (*key, meta.generation))).collect()
        };
        if dead.is_empty() {
            return Ok(());
        }
        let mut records = RecordBuffer::default();
        for (key, generation) in &dead {
            records.push(Kind::SegmentFree, &free_record(*key, *generation, false), &[]);
        }
        self.record(records, &mut [], false)?;
        let mut has_surplus = false;
        {
            let mut space = lock(&self.space);
            for (key, generation) in dead {
                has_surplus |= space.freed(key, generation);
            }
        }
        if has_surplus {
            self.devices.maintenance_wake.notify();
        }
        Ok(())
    }

    /// Applies a planted fault: segments are freed as soon as a deletion is queued.
    pub(super) fn reuse_early(&self, records: &RecordBuffer) {
        let mut after: Catalog = lock(&self.catalog).clone();
        if records.clone().apply(&mut after).is_ok() {
            let mut space = lock(&self.space);
            for (key, segment) in after.segments.iter().filter(|(_, s)| s.state == SegmentState::Sealed) {
                if segment.live_pages == 0 && space.reclaimable(*key) {
                    space.freed(*key, segment.generation);
                }
            }
        }
    }
}
