//! Group commit: all commits that wait share two syncs, first of the data, then of the manifest.
//!
//! 1. A caller queues its [`CommitRequest`] and waits ([`Committer::commit`]), or queues it without waiting
//!    ([`Committer::enqueue`]).
//! 2. One of the waiting callers leads: it takes everything that is queued and runs the [steps].
//! 3. Each caller gets its own outcome.
//!
//! Invariants:
//! - One leader runs at a time.
//! - After a failure midway the committer is broken for good: no sync is retried, and the store is read-only until it
//!   is opened again.
//! - A commit that finds no space for a checkpoint changes nothing. It stays queued.
//!
//! Lock order: the manifest, the catalog, the space. `broken` and `memory` are taken last.

mod admission;
mod failure;
mod generation;
mod membership;
mod request;
mod steps;

pub(crate) use generation::keep_spare;
pub(crate) use request::CommitRequest;

use super::commit_queue::{CommitQueue, QueuedCommit};
use super::devices::Devices;
use super::manifest::{ManifestLog, ManifestPlace};
use super::segment_allocator::SegmentAllocator;
use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{event, span};
use crate::io::planted;
use crate::metrics::{Category, Reservation, lock};
use failure::CommitFailure;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stratakv_format::superblock::STATE_CLOSED;

/// Commits that may wait for a sync. A caller that queues more commits them itself.
const QUEUE_MAX: usize = 4096;
/// How soon a commit that found no space is tried again without a caller.
const STALL_WAIT: Duration = Duration::from_secs(1);

type Queued = QueuedCommit<CommitRequest, Result<()>>;

/// The committer of a store.
pub(crate) struct Committer {
    devices: Arc<Devices>,
    space: Arc<Mutex<SegmentAllocator>>,
    catalog: Arc<Mutex<Catalog>>,
    queue: CommitQueue<CommitRequest, Result<()>>,
    manifest: Mutex<ManifestLog>,
    /// The error of the first commit that failed midway.
    broken: Mutex<Option<Error>>,
    /// True if the store was opened for reading only.
    read_only: bool,
    /// Bytes written to the devices over the life of the store, before this opening.
    lifetime_bytes: u64,
    memory: Mutex<CatalogMemory>,
    /// Bytes of a manifest generation for which files exist.
    room: AtomicU64,
    /// Bytes of records that were admitted since `room` was measured. The catalog may not have them yet.
    admitted: AtomicU64,
    /// See [`Committer::owed_copies`].
    owed_copies: AtomicU64,
}

/// The memory of the catalog, as accounted for.
struct CatalogMemory {
    account: Reservation,
    /// The catalog's entries when it was last measured.
    entries: usize,
    /// True if it has outgrown what `memory_limit` leaves.
    short: bool,
}

impl CatalogMemory {
    /// Adjusts the account once the catalog has grown or shrunk by an eighth.
    fn follow(&mut self, devices: &Devices, catalog: &Catalog) {
        let entries = catalog.entries();
        if entries.abs_diff(self.entries) > self.entries / 8 + 64 || self.short {
            self.entries = entries;
            let bytes = catalog.memory_bytes();
            self.short = !devices.resize(&mut self.account, bytes + bytes / 8);
        }
    }
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
            let text =
                format!("open: the catalog takes {bytes} bytes, more than memory_limit leaves; raise memory_limit");
            Error::new(ErrorKind::MemoryLimit, text)
        })?;
        let read_only = manifest.is_read_only();
        let committer = Self {
            devices,
            space,
            catalog,
            queue: CommitQueue::new(),
            manifest: Mutex::new(manifest),
            broken: Mutex::default(),
            read_only,
            lifetime_bytes,
            memory: Mutex::new(CatalogMemory { account, entries: 0, short: false }),
            room: AtomicU64::new(0),
            admitted: AtomicU64::new(0),
            owed_copies: AtomicU64::new(0),
        };
        committer.measure(&lock(&committer.manifest));
        Ok(committer)
    }

    /// Checks that the catalog may grow.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: the catalog has outgrown `memory_limit`. Deleting sequences helps.
    pub(crate) fn check_memory(&self) -> Result<()> {
        if !lock(&self.memory).short {
            return Ok(());
        }
        let text = "the catalog has outgrown memory_limit; delete sequences or raise memory_limit";
        Err(Error::new(ErrorKind::MemoryLimit, text))
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Checks that commits are possible.
    ///
    /// # Errors
    /// [`ErrorKind::Poisoned`]: an earlier commit failed midway. [`ErrorKind::ReadOnly`]: the store is open for reading
    /// only. [`ErrorKind::InUse`]: the caller is a child of the process that opened the store.
    pub(crate) fn check(&self) -> Result<()> {
        self.devices.check_process()?;
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

    /// Queues a commit without waiting. It becomes durable with the next commit, at `due` at the latest if that is
    /// given.
    pub(crate) fn enqueue(&self, request: CommitRequest, due: Option<Instant>) {
        if self.queue.waiting() >= QUEUE_MAX {
            // The caller queues faster than the background commits. A failure is kept in `broken`.
            let _ = self.commit(CommitRequest::default());
        }
        if planted!(ReuseBeforeFlush) {
            self.reuse_early(&request.records);
        }
        self.queue.add(request, due);
    }

    /// Commits durably, together with everything that is queued.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`]: a sync or write failed. The next opening finds out whether the commit is durable.
    /// [`ErrorKind::NoSpace`]: there is no space for a checkpoint. The commit [stays queued](Error::is_queued).
    pub(crate) fn commit(&self, request: CommitRequest) -> Result<()> {
        self.check()?;
        let panicked = || {
            let text = "commit: it panicked; what is durable is known after the store is opened again";
            lock(&self.broken).get_or_insert_with(|| Error::new(ErrorKind::Poisoned, text));
            Err(Error::new(ErrorKind::Indeterminate, text))
        };
        self.queue.join(request, |all| self.lead(all), panicked)
    }

    /// Commits what is queued and waits for a commit in flight. Requests queued before the call have then taken effect.
    pub(crate) fn flush(&self) -> Result<()> {
        if self.is_idle() { Ok(()) } else { self.commit(CommitRequest::default()) }
    }

    /// Commits a group and tells each caller its outcome.
    fn lead(&self, mut group: Vec<Queued>) {
        if let Err(e) = self.check() {
            // Nothing of the group was written.
            return group.into_iter().for_each(|queued| queued.tell(Err(e.duplicate())));
        }
        let _span = span!("commit");
        let outcome = match self.perform(&mut group) {
            Ok(()) => Ok(()),
            Err(CommitFailure::Stalled(e)) => {
                event!(warn, cause = e, "a commit waits for space");
                return self.stall(group, &e);
            }
            Err(CommitFailure::Broken(e)) => {
                event!(error, cause = e, "the store is read-only until it is opened again");
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

    /// Puts a group that found no space back as one request, for the next commit. Its callers get the error now.
    fn stall(&self, group: Vec<Queued>, e: &Error) {
        for queued in &group {
            let text = format!("{e}; the commit stays queued and is made with the next one that finds space");
            queued.tell(Err(Error::new(e.kind(), text).queued()));
        }
        let mut all = CommitRequest::default();
        group.into_iter().for_each(|queued| all.absorb(queued.request));
        all.records.settle();
        self.queue.put_back(std::iter::once(all), Instant::now() + STALL_WAIT);
    }

    /// Returns the bytes written to the devices over the life of the store.
    pub(crate) fn lifetime_bytes(&self) -> u64 {
        self.lifetime_bytes + self.devices.written_bytes()
    }

    /// Returns where the current manifest is.
    pub(crate) fn place(&self) -> ManifestPlace {
        *lock(&self.manifest).place()
    }

    /// Returns the membership epoch that the superblocks have.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.manifest).epoch()
    }

    /// Commits what is queued and marks the store closed. Later commits fail.
    pub(crate) fn close(&self) -> Result<()> {
        self.flush()?;
        self.check()?;
        self.stop();
        lock(&self.manifest).mark(&self.devices, STATE_CLOSED)
    }

    /// Waits until a lazy commit is due. Returns false once the store is closed.
    pub(crate) fn wait_due(&self) -> bool {
        // After a failure nothing is ever committed again, so nothing is due.
        self.queue.wait_due(|| self.check().is_err())
    }

    /// Ends [`Self::wait_due`] for good.
    pub(crate) fn stop(&self) {
        self.queue.close();
    }

    /// Returns how many commits wait.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Returns whether nothing is queued and no commit is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_idle()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }
}
