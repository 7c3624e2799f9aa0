//! Group commit: all commits that wait at a moment share two syncs, first the data, then the manifest.

mod lost;
mod room;

use super::commit_queue::{CommitQueue, QueuedCommit};
use super::copies::CopyChange;
use super::copy_location::tell_copies;
use super::devices::{Devices, Failures};
use super::manifest::{ManifestLog, ManifestPlace, room_for};
use super::segment_allocator::SegmentAllocator;
use crate::catalog::{Catalog, Counters, Flight, RecordBuffer, SegmentHandle, SegmentKey, SegmentState, free_record};
use crate::error::{Error, ErrorKind, Result};
use crate::io::seams::{Event, Mutant, mutated, note};
use crate::layout::KvLayout;
use crate::metrics::{Category, Reservation, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::superblock::STATE_CLOSED;
use stratakv_format::{DeviceIndex, LayoutId};

/// Commits that wait for a sync, at most.
const QUEUE_MAX: usize = 4096;
/// How soon a commit that found no space is tried again by itself.
const STALL_WAIT: Duration = Duration::from_secs(1);

/// What one commit makes durable.
#[derive(Default)]
pub(crate) struct CommitRequest {
    /// Layouts of sequences that it creates; recorded in front where the store does not know them yet.
    pub(crate) layouts: Vec<(LayoutId, KvLayout)>,
    /// Its records, which take effect together.
    pub(crate) records: RecordBuffer,
    /// Segments that its frames were written to.
    pub(crate) segments: Vec<Arc<SegmentHandle>>,
    /// Frames whose copies are to be others. Those that have changed in the meantime are passed over.
    pub(crate) copies: Vec<CopyChange>,
    /// Free segments whose files go, with the generation that ended. Those that the catalog does not have like this are passed over.
    pub(crate) removed: Vec<(SegmentKey, u64)>,
    /// Members as they are from now on, but for their epoch.
    pub(crate) members: Vec<m::Member>,
    /// Pages of its frames, which are live once it has taken effect.
    pub(crate) flights: Vec<Flight>,
    /// Segments that must not be used again before it has taken effect: its records name frames in them that it did not write.
    pub(crate) pins: Vec<Arc<SegmentHandle>>,
    /// Its frames have fewer copies than they should have.
    pub(crate) owes_copies: bool,
    /// Why its members are not changed, while all else is well.
    pub(crate) refused: Option<Error>,
}

impl CommitRequest {
    /// Takes another one along, behind this.
    fn absorb(&mut self, other: Self) {
        self.layouts.extend(other.layouts);
        self.records.append(&other.records);
        self.segments.extend(other.segments);
        self.copies.extend(other.copies);
        self.removed.extend(other.removed);
        self.members.extend(other.members);
        self.flights.extend(other.flights);
        self.pins.extend(other.pins);
        self.owes_copies |= other.owes_copies;
    }
}

type Queued = QueuedCommit<CommitRequest, Result<()>>;

/// Takes commits and makes them durable together.
pub(crate) struct Committer {
    devices: Arc<Devices>,
    space: Arc<Mutex<SegmentAllocator>>,
    catalog: Arc<Mutex<Catalog>>,
    group: CommitQueue<CommitRequest, Result<()>>,
    manifest: Mutex<ManifestLog>,
    /// Set by the first commit that failed midway.
    broken: Mutex<Option<Error>>,
    /// Nothing is ever committed.
    read_only: bool,
    /// Bytes written to the devices before the store was opened.
    lifetime_bytes: u64,
    tables: Mutex<CatalogMemory>,
    /// Bytes of a generation of the manifest that there are files for.
    room: AtomicU64,
    /// Bytes of records that were admitted since, and may not be in the catalog yet.
    admitted: AtomicU64,
    /// See [`Committer::owed_copies`].
    owed_copies: AtomicU64,
}

/// The memory that the catalog takes.
struct CatalogMemory {
    account: Reservation,
    /// Entries when it was last measured.
    entries: usize,
    /// It has grown beyond what `memory_limit` has left.
    short: bool,
}

impl CatalogMemory {
    /// Follows the catalog when it has grown or shrunk by an eighth.
    fn follow(&mut self, devices: &Devices, catalog: &Catalog) {
        let entries = catalog.frames.len() + catalog.sequences.len() + catalog.segments.len();
        if entries.abs_diff(self.entries) > self.entries / 8 + 64 || self.short {
            self.entries = entries;
            let bytes = catalog.memory_bytes();
            self.short = !devices.resize(&mut self.account, bytes + bytes / 8);
        }
    }
}

/// How a group commit failed.
enum CommitFailure {
    /// There is no space for a checkpoint. Nothing was recorded: the group waits for the next commit.
    Stalled(Error),
    /// Midway.
    Broken(Error),
}

/// How a new generation is made.
#[derive(Clone, Copy)]
struct NewGeneration<'a> {
    /// Pages behind its state.
    room: u64,
    /// Records that its state has in it.
    with: Option<&'a RecordBuffer>,
    /// It may take more than the capacity leaves.
    beyond: bool,
}

impl NewGeneration<'_> {
    /// The state as it is, with room for the next commits.
    fn for_more() -> Self {
        Self { room: room_for(&RecordBuffer::default()), with: None, beyond: false }
    }
}

impl From<Error> for CommitFailure {
    fn from(e: Error) -> Self {
        Self::Broken(e)
    }
}

/// Keeps files for the next manifest generation, as far as the capacity allows.
pub(crate) fn keep_spare(devices: &Devices, space: &Mutex<SegmentAllocator>, manifest: &mut ManifestLog) -> Result<()> {
    let allowed = {
        let mut space = lock(space);
        space.set_metadata_bytes(manifest.file_bytes(), 0);
        let allowed = space.allowance(devices);
        // No segment takes the room meanwhile.
        space.set_metadata_bytes(manifest.file_bytes(), manifest.file_bytes().min(allowed));
        allowed
    };
    let kept = manifest.keep_spare(devices, allowed);
    lock(space).set_metadata_bytes(manifest.file_bytes(), manifest.spare_bytes());
    kept
}

impl Committer {
    pub(crate) fn new(
        devices: Arc<Devices>,
        space: Arc<Mutex<SegmentAllocator>>,
        catalog: Arc<Mutex<Catalog>>,
        manifest: ManifestLog,
    ) -> Result<Self> {
        lock(&space).set_metadata_bytes(manifest.file_bytes(), manifest.spare_bytes());
        let (lifetime_bytes, bytes) = {
            let catalog = lock(&catalog);
            (catalog.counters.lifetime_bytes, catalog.memory_bytes())
        };
        let account = devices.reserve(bytes + bytes / 8, Category::Index).ok_or_else(|| {
            let text = format!("the tables of this store take {bytes} bytes, more than memory_limit has left");
            Error::new(ErrorKind::MemoryLimit, text)
        })?;
        let read_only = manifest.is_read_only();
        let committer = Self {
            devices,
            space,
            catalog,
            group: CommitQueue::new(),
            manifest: Mutex::new(manifest),
            broken: Mutex::default(),
            read_only,
            lifetime_bytes,
            tables: Mutex::new(CatalogMemory { account, entries: 0, short: false }),
            room: AtomicU64::new(0),
            admitted: AtomicU64::new(0),
            owed_copies: AtomicU64::new(0),
        };
        committer.measure(&lock(&committer.manifest));
        Ok(committer)
    }

    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: the tables of the store leave no memory for more of it. Deleting helps.
    pub(crate) fn check_tables(&self) -> Result<()> {
        if !lock(&self.tables).short {
            return Ok(());
        }
        let text = "the tables of the store have outgrown memory_limit; delete sequences or raise it";
        Err(Error::new(ErrorKind::MemoryLimit, text))
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// # Errors
    /// An earlier commit failed midway, or the store is open for reading only.
    pub(crate) fn check(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the store is open for reading only"));
        }
        match &*lock(&self.broken) {
            None => Ok(()),
            Some(cause) => {
                let text = format!("the store is read-only until it is opened again: {cause}");
                Err(Error::new(ErrorKind::Poisoned, text))
            }
        }
    }

    /// Queues a commit that need not be durable yet; it is with the next sync, or when `due` (never for `None`).
    pub(crate) fn enqueue(&self, request: CommitRequest, due: Option<Instant>) {
        if self.group.waiting() >= QUEUE_MAX {
            // Whoever queues faster than the background commits does it himself. A failure stands in the committer.
            let _ = self.commit(CommitRequest::default());
        }
        if mutated(Mutant::ReuseBeforeFlush) {
            self.reuse_early(&request);
        }
        self.group.add(request, due);
    }

    /// Commits durably, together with all that is queued.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`]: a sync or write failed; whether the commit is durable is known after reopening.
    /// [`ErrorKind::NoSpace`]: there is no room for a checkpoint; the commit [stays queued](Error::is_queued).
    pub(crate) fn commit(&self, request: CommitRequest) -> Result<()> {
        self.check()?;
        let panicked = || {
            let text = "a commit panicked; what is durable is known after the store is opened again";
            lock(&self.broken).get_or_insert_with(|| Error::new(ErrorKind::Poisoned, text));
            Err(Error::new(ErrorKind::Indeterminate, text))
        };
        self.group.join(request, |all| self.lead(all), panicked)
    }

    /// Commits what is queued, if anything, and waits for a commit under way: what was queued before has taken effect.
    pub(crate) fn flush(&self) -> Result<()> {
        if self.is_idle() { Ok(()) } else { self.commit(CommitRequest::default()) }
    }

    fn lead(&self, mut group: Vec<Queued>) {
        if let Err(e) = self.check() {
            // Nothing of it was written.
            return group.into_iter().for_each(|queued| queued.tell(Err(e.duplicate())));
        }
        let outcome = match self.perform(&mut group) {
            Ok(()) => Ok(()),
            Err(CommitFailure::Stalled(e)) => return self.stall(group, &e),
            Err(CommitFailure::Broken(e)) => {
                lock(&self.broken).get_or_insert_with(|| e.duplicate());
                Err(e)
            }
        };
        for mut queued in group {
            let copy = match &outcome {
                Ok(()) => queued.request.refused.take().map_or(Ok(()), Err),
                Err(e) => {
                    let text = format!("commit: {e}; whether it is durable is known after the store is opened again");
                    Err(Error::new(ErrorKind::Indeterminate, text))
                }
            };
            queued.tell(copy);
        }
    }

    /// A group that was not recorded for want of space waits for the next commit, as one from now on; whoever waits for it learns why.
    fn stall(&self, group: Vec<Queued>, e: &Error) {
        for queued in &group {
            let text = format!("{e}; the commit stays queued, and is made with the next one that finds room");
            queued.tell(Err(Error::new(e.kind(), text).queued()));
        }
        let mut all = CommitRequest::default();
        group.into_iter().for_each(|queued| all.absorb(queued.request));
        all.records.settle();
        self.group.put_back(std::iter::once(all), Instant::now() + STALL_WAIT);
    }

    /// Bytes written to the devices over the life of the store.
    pub(crate) fn lifetime_bytes(&self) -> u64 {
        self.lifetime_bytes + self.devices.written_bytes()
    }

    fn perform(&self, group: &mut [Queued]) -> Result<(), CommitFailure> {
        note(Event::GroupCommit);
        // First what the space has to say: the header of a segment is durable before a record names it, whoever opened it.
        let (mut records, opened) = lock(&self.space).take_pending();
        let fresh = (records.clone(), opened.clone());
        // Now and then, so that a crash forgets little of what was written.
        let counted = !opened.is_empty();
        let mut segments: BTreeMap<SegmentKey, &Arc<SegmentHandle>> = BTreeMap::new();
        for segment in group.iter().flat_map(|queued| &queued.request.segments).chain(&opened) {
            segments.insert(segment.key, segment);
        }
        if mutated(Mutant::ManifestBeforeData) {
            group.iter().for_each(|queued| records.append(&queued.request.records));
            if !records.is_empty() {
                self.record(records.clone(), &mut [], false)?;
            }
        }
        let skipped = mutated(Mutant::DataSyncSkipped);
        let files = segments.iter().filter(|_| !skipped).map(|(key, handle)| Ok((key.0, handle.file()?)));
        let files = files.collect::<Result<Vec<_>>>()?;
        let sync = || self.devices.sync_each(files.iter().map(|(device, file)| (*device, file)));
        let mut failures = sync();
        if !failures.is_empty() && mutated(Mutant::SyncRetried) {
            failures = sync();
        }
        let lost = self.lost_to(failures, group)?;
        if !lost.is_empty() {
            // What this commits has copies on them that are no good.
            self.devices.suspects.owe();
        }
        if mutated(Mutant::ManifestBeforeData) {
            return Ok(());
        }
        drop(opened);
        let mut changed = BTreeSet::new();
        {
            // Before the records of the group, which may delete them.
            let catalog = lock(&self.catalog);
            let durable = |change: &&CopyChange| change.wanted.iter().all(|(at, _)| !lost.contains(&at.device));
            for change in group.iter().flat_map(|queued| &queued.request.copies).filter(durable) {
                // Of several changes of one frame the first counts: the others were decided before it.
                if let Some(frame) = catalog.frames.get(&change.frame)
                    && changed.insert(change.frame)
                {
                    change.push(frame, &mut records);
                }
            }
            for (key, generation) in group.iter().flat_map(|queued| &queued.request.removed) {
                let meta = catalog.segments.get(key);
                if meta.is_some_and(|meta| meta.state == SegmentState::Free && meta.generation == *generation) {
                    records.push(Kind::SegmentFree, &free_record(*key, *generation, true), &[]);
                }
            }
        }
        self.let_go_of_leaving(group, &lost)?;
        let members = self.members_of(group, &lost);
        for member in &members {
            if member.state == m::MEMBER_REMOVED {
                lock(&self.space).forget(DeviceIndex(member.device.get()));
            }
            records.push(Kind::Member, member, &[]);
        }
        let mut defined = BTreeSet::new();
        for queued in &*group {
            for (id, layout) in &queued.request.layouts {
                if !lock(&self.catalog).layouts.contains_key(id) && defined.insert(*id) {
                    records.push_layout(*id, layout);
                }
            }
            records.append(&queued.request.records);
        }
        if !records.is_empty() {
            match self.record(records, group, counted).and_then(|()| self.change_members(&members)) {
                Err(CommitFailure::Stalled(e)) => {
                    let (records, opened) = fresh;
                    lock(&self.space).put_back(records, opened);
                    return Err(CommitFailure::Stalled(e));
                }
                other => other?,
            }
        }
        // Whoever queued this may not be there any more to do it.
        for frame in changed {
            // Where a frame cannot be told, it is read from where it was, which it holds.
            let _ = tell_copies(&self.devices, &self.catalog, &self.space, frame);
        }
        if group.iter().any(|queued| queued.request.owes_copies) {
            // Not before: a repair would have found nothing to do.
            self.devices.suspects.owe();
        }
        for queued in &*group {
            let space = lock(&self.space);
            let written_out = |segment: &&Arc<SegmentHandle>| space.is_sealed(segment.key);
            let segments = queued.request.segments.iter().filter(written_out);
            segments.filter(|segment| segment.in_flight_pages() == 0).for_each(|segment| segment.lazy.hold(false));
        }
        match self.free_dead_segments() {
            // They are freed by a later commit.
            Err(CommitFailure::Stalled(_)) => Ok(()),
            other => other,
        }
    }

    /// Applies to the catalog and appends to the manifest, in a new generation when this one is full. In this order: records
    /// that contradict the catalog must never reach the manifest, which could not be replayed any more. What failed comes back: the
    /// other devices have the records.
    fn append(
        &self,
        mut records: RecordBuffer,
        group: &mut [Queued],
        counted: bool,
    ) -> Result<Failures, CommitFailure> {
        let mut manifest = lock(&self.manifest);
        // The first records of copies, and of codecs, go to a generation that says so: nobody who does not know them reads past it.
        let needed = records.features();
        let first = needed & !self.devices.incompat.fetch_or(needed, Ordering::Relaxed);
        let mut recorded = false;
        if first != 0 || !manifest.has_room(&records) {
            let made = self.begin_anew(&mut manifest, &records);
            if made.is_err() {
                self.devices.incompat.fetch_and(!first, Ordering::Relaxed);
            }
            recorded = made?;
        }
        {
            let mut catalog = lock(&self.catalog);
            records.apply(&mut catalog)?;
            // What was in flight is live: nobody sees it as neither.
            group.iter_mut().for_each(|queued| queued.request.flights.clear());
            lock(&self.tables).follow(&self.devices, &catalog);
            if counted {
                let counters = Counters { lifetime_bytes: self.lifetime_bytes(), ..catalog.counters };
                records.push(Kind::Counters, &Catalog::counters_record(&counters), &[]);
            }
        }
        if recorded {
            return Ok(Failures::default());
        }
        Ok(manifest.append(&self.devices, &records)?)
    }

    /// Starts a new generation for records that the one in force has no room for. Whether they stand in it already: where the capacity
    /// leaves too little for the state and them, the state as they leave it is written instead, which is smaller when they delete.
    /// Only what must be recorded goes beyond the capacity: where that has been lowered, or what waits was admitted too early.
    fn begin_anew(&self, manifest: &mut ManifestLog, records: &RecordBuffer) -> Result<bool, CommitFailure> {
        match self.checkpoint(manifest, &NewGeneration { room: room_for(records), ..NewGeneration::for_more() }) {
            Err(CommitFailure::Stalled(_)) => {}
            other => return other.map(|()| false),
        }
        let with = NewGeneration { with: Some(records), ..NewGeneration::for_more() };
        match self.checkpoint(manifest, &with) {
            Err(CommitFailure::Stalled(_)) => self.checkpoint(manifest, &NewGeneration { beyond: true, ..with })?,
            other => other?,
        }
        Ok(true)
    }

    /// The manifest in force.
    pub(crate) fn place(&self) -> ManifestPlace {
        *lock(&self.manifest).place()
    }

    /// The membership epoch that superblocks have.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.manifest).epoch()
    }

    /// Starts a new generation. Until it is whole nothing has changed, so that a full device breaks nothing.
    fn checkpoint(&self, manifest: &mut ManifestLog, fresh: &NewGeneration<'_>) -> Result<(), CommitFailure> {
        let state = {
            let mut catalog = lock(&self.catalog);
            catalog.counters.lifetime_bytes = self.lifetime_bytes();
            match fresh.with {
                None => catalog.checkpoint(),
                Some(records) => {
                    let mut after = catalog.clone();
                    records.clone().apply(&mut after)?;
                    after.checkpoint()
                }
            }
        };
        let limit = self.limit(manifest);
        let successor = match manifest.successor(&self.devices, &state, fresh.room, (limit, fresh.beyond)) {
            Ok(successor) => successor,
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                manifest.count_spare(&self.devices)?;
                lock(&self.space).set_metadata_bytes(manifest.file_bytes(), manifest.spare_bytes());
                return Err(CommitFailure::Stalled(e.during("checkpoint")));
            }
            Err(e) => return Err(CommitFailure::Broken(e)),
        };
        manifest.give_way(&self.devices, successor)?;
        Ok(self.spare(manifest)?)
    }

    /// Frees sealed segments in which nothing is live: the record first, durably, then the file may be used again.
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
        let mut lavish = false;
        {
            let mut space = lock(&self.space);
            for (key, generation) in dead {
                lavish |= space.freed(key, generation);
            }
        }
        if lavish {
            self.devices.tend.notify();
        }
        Ok(())
    }

    /// The fault of a store that frees segments when a deletion is queued.
    fn reuse_early(&self, request: &CommitRequest) {
        let mut after = lock(&self.catalog).clone();
        if request.records.clone().apply(&mut after).is_ok() {
            let mut space = lock(&self.space);
            for (key, segment) in after.segments.iter().filter(|(_, s)| s.state == SegmentState::Sealed) {
                if segment.live_pages == 0 && space.reclaimable(*key) {
                    space.freed(*key, segment.generation);
                }
            }
        }
    }

    /// Commits what is queued and marks the store closed. Later commits fail.
    pub(crate) fn close(&self) -> Result<()> {
        self.flush()?;
        self.check()?;
        self.stop();
        lock(&self.manifest).mark(&self.devices, STATE_CLOSED)
    }

    /// Waits until a lazy commit is due. `false` once the store is closed.
    pub(crate) fn wait_due(&self) -> bool {
        // Nothing is committed any more after a failure: nobody tries again and again.
        self.group.wait_due(|| self.check().is_err())
    }

    /// Ends [`Self::wait_due`] for good.
    pub(crate) fn stop(&self) {
        self.group.close();
    }

    /// Commits that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.group.waiting()
    }

    /// Whether nothing is queued and no commit is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.group.is_idle()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.group.is_closed()
    }
}
