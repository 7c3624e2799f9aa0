//! Group commit: all commits that wait at a moment share two syncs, first the data, then the manifest.

use super::devices::Devices;
use super::manifest::ManifestLog;
use super::space::Space;
use crate::device::environment::{Event, Mutant, mutated, note};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{Catalog, RecordBuffer, SegmentHandle, SegmentKey, SegmentState, free_record};
use crate::layout::KvLayout;
use crate::metrics::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stratakv_format::LayoutId;
use stratakv_format::manifest::Kind;
use stratakv_format::superblock::STATE_CLOSED;

/// What one commit makes durable.
#[derive(Default)]
pub(crate) struct CommitRequest {
    /// The layout of a sequence that it creates; recorded in front when the store does not know it yet.
    pub(crate) layout: Option<(LayoutId, KvLayout)>,
    /// Its records, which take effect together.
    pub(crate) records: RecordBuffer,
    /// Segments that its frames were written to.
    pub(crate) segments: Vec<Arc<SegmentHandle>>,
}

struct Queued {
    request: CommitRequest,
    ticket: Arc<Outcome>,
}

#[derive(Default)]
struct Outcome(Mutex<Option<Result<()>>>);

#[derive(Default)]
struct Queue {
    waiting: Vec<Queued>,
    /// Somebody is committing.
    busy: bool,
    /// When the oldest lazy commit is due.
    due: Option<Instant>,
    closed: bool,
}

/// Takes commits and makes them durable together.
pub(crate) struct Committer {
    devices: Arc<Devices>,
    space: Arc<Mutex<Space>>,
    catalog: Arc<Mutex<Catalog>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    manifest: Mutex<ManifestLog>,
    /// Set by the first commit that failed midway.
    broken: Mutex<Option<Error>>,
    /// Nothing is ever committed.
    read_only: bool,
}

impl Committer {
    pub(crate) fn new(
        devices: Arc<Devices>,
        space: Arc<Mutex<Space>>,
        catalog: Arc<Mutex<Catalog>>,
        manifest: ManifestLog,
    ) -> Self {
        lock(&space).set_metadata_bytes(manifest.file_bytes());
        let read_only = manifest.is_read_only();
        Self {
            devices,
            space,
            catalog,
            queue: Mutex::default(),
            changed: Condvar::new(),
            manifest: Mutex::new(manifest),
            broken: Mutex::default(),
            read_only,
        }
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
        if mutated(Mutant::ReuseBeforeFlush) {
            self.reuse_early(&request);
        }
        let mut queue = lock(&self.queue);
        queue.waiting.push(Queued { request, ticket: Arc::default() });
        if let Some(due) = due {
            queue.due = Some(queue.due.map_or(due, |old| old.min(due)));
            self.changed.notify_all();
        }
    }

    /// Commits durably, together with all that is queued.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`]: a sync or write failed; whether the commit is durable is known after reopening.
    pub(crate) fn commit(&self, request: CommitRequest) -> Result<()> {
        self.check()?;
        let ticket = Arc::<Outcome>::default();
        let mut queue = lock(&self.queue);
        queue.waiting.push(Queued { request, ticket: Arc::clone(&ticket) });
        loop {
            if let Some(outcome) = lock(&ticket.0).take() {
                return outcome;
            }
            if queue.busy {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.busy = true;
            queue.due = None;
            let group = std::mem::take(&mut queue.waiting);
            drop(queue);
            self.lead(group);
            queue = lock(&self.queue);
            queue.busy = false;
            self.changed.notify_all();
        }
    }

    /// Commits what is queued, if anything, and waits for a commit under way: what was queued before has taken effect.
    pub(crate) fn flush(&self) -> Result<()> {
        {
            let queue = lock(&self.queue);
            if queue.waiting.is_empty() && !queue.busy {
                return Ok(());
            }
        }
        self.commit(CommitRequest::default())
    }

    fn lead(&self, group: Vec<Queued>) {
        let outcome = self.check().and_then(|()| {
            self.perform(&group).inspect_err(|e| {
                lock(&self.broken).get_or_insert_with(|| e.duplicate());
            })
        });
        for queued in group {
            let copy = match &outcome {
                Ok(()) => Ok(()),
                Err(e) if e.kind() == ErrorKind::Poisoned => Err(e.duplicate()),
                Err(e) => {
                    let text = format!("commit: {e}; whether it is durable is known after the store is opened again");
                    Err(Error::new(ErrorKind::Indeterminate, text))
                }
            };
            *lock(&queued.ticket.0) = Some(copy);
        }
    }

    fn perform(&self, group: &[Queued]) -> Result<()> {
        note(Event::GroupCommit);
        // First what the space has to say: the header of a segment is durable before a record names it, whoever opened it.
        let (mut records, opened) = lock(&self.space).take_pending();
        let mut segments: BTreeMap<SegmentKey, &Arc<SegmentHandle>> = BTreeMap::new();
        for segment in group.iter().flat_map(|queued| &queued.request.segments).chain(&opened) {
            segments.insert(segment.key, segment);
        }
        if mutated(Mutant::ManifestBeforeData) {
            group.iter().for_each(|queued| records.append(&queued.request.records));
            if !records.is_empty() {
                self.record(&records)?;
            }
        }
        let skipped = mutated(Mutant::DataSyncSkipped);
        let sync = |s: &Self| {
            s.devices.sync_all(
                segments
                    .iter()
                    .filter(|_| !skipped)
                    .map(|(key, handle)| (key.0, &handle.file))
                    .collect::<Vec<_>>()
                    .into_iter(),
            )
        };
        match sync(self) {
            Err(_) if mutated(Mutant::SyncRetried) => sync(self)?,
            other => other?,
        }
        if mutated(Mutant::ManifestBeforeData) {
            return Ok(());
        }
        drop(opened);
        let mut defined = BTreeSet::new();
        for queued in group {
            if let Some((id, layout)) = &queued.request.layout
                && !lock(&self.catalog).layouts.contains_key(id)
                && defined.insert(*id)
            {
                records.push_layout(*id, layout);
            }
            records.append(&queued.request.records);
        }
        if !records.is_empty() {
            self.record(&records)?;
        }
        self.free_dead_segments()
    }

    /// Applies to the catalog and appends to the manifest, in a new generation when this one is full. In this order: records
    /// that contradict the catalog must never reach the manifest, which could not be replayed any more.
    fn record(&self, records: &RecordBuffer) -> Result<()> {
        let mut manifest = lock(&self.manifest);
        if !manifest.has_room(records) {
            let state = lock(&self.catalog).checkpoint();
            manifest.checkpoint(&self.devices, &state, records)?;
            lock(&self.space).set_metadata_bytes(manifest.file_bytes());
        }
        records.apply(&mut lock(&self.catalog))?;
        manifest.append(&self.devices, records)
    }

    /// Frees sealed segments in which nothing is live: the record first, durably, then the file may be used again.
    fn free_dead_segments(&self) -> Result<()> {
        let dead: Vec<(SegmentKey, u64)> = {
            let catalog = lock(&self.catalog);
            let sealed = catalog.segments.iter().filter(|(_, s)| s.state == SegmentState::Sealed && s.live_pages == 0);
            let space = lock(&self.space);
            sealed.filter(|(key, _)| space.reclaimable(**key)).map(|(key, s)| (*key, s.generation)).collect()
        };
        if dead.is_empty() {
            return Ok(());
        }
        let mut records = RecordBuffer::default();
        for (key, generation) in &dead {
            records.push(Kind::SegmentFree, &free_record(*key, *generation, false), &[]);
        }
        self.record(&records)?;
        let mut space = lock(&self.space);
        for (key, generation) in dead {
            space.freed(key, generation);
        }
        Ok(())
    }

    /// The fault of a store that frees segments when a deletion is queued.
    fn reuse_early(&self, request: &CommitRequest) {
        let mut after = lock(&self.catalog).clone();
        if request.records.apply(&mut after).is_ok() {
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
        let mut queue = lock(&self.queue);
        loop {
            if queue.closed {
                return false;
            }
            if queue.due.is_some() && self.check().is_err() {
                // Nothing is committed any more: do not try again and again.
                queue.due = None;
            }
            queue = match queue.due.map(|due| due.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return true,
                Some(rest) => self.changed.wait_timeout(queue, rest).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Ends [`Self::wait_due`] for good.
    pub(crate) fn stop(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }
}
