//! The state that all handles of an open store share: devices, space, catalog, committer, ids, background.

use super::background_state::Background;
use super::cleaning_progress::CleaningProgress;
use super::commit::{CommitRequest, Committer};
use super::copy_location::lay_copies;
use super::devices::Devices;
use super::ids::IdAllocator;
use super::open_handles::OpenHandles;
use super::segment_allocator::SegmentAllocator;
use crate::cache::BlockCache;
use crate::catalog::{Catalog, Counters, FrameBody, FrameSlot, SegmentKey};
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::planted;
use crate::metrics::{Category, Observers, Reservation, StoreCounters, lock};
use crate::options::Durability;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{FrameId, SequenceId};
use zerocopy::little_endian::U64;

/// Frames of a sequence in flight per device, at most. Fewer leave the device idle at times, and more write no faster.
pub(crate) const FRAMES_IN_FLIGHT: usize = 12;

/// The state that all handles of an open store share.
///
/// Lock order, from the outside: one of `locks`, the catalog, the space, the open handles. The manifest's lock in the
/// committer is taken before the catalog.
pub(crate) struct StoreInner {
    pub(crate) committer: Arc<Committer>,
    pub(crate) catalog: Arc<Mutex<Catalog>>,
    pub(crate) space: Arc<Mutex<SegmentAllocator>>,
    pub(crate) devices: Arc<Devices>,
    /// Resident blocks of all sequences that have no cache of their own.
    pub(crate) cache: Option<Arc<BlockCache>>,
    pub(crate) ids: IdAllocator,
    pub(crate) handles: OpenHandles,
    pub(crate) limits: WriteLimits,
    pub(crate) background: Background,
    pub(crate) locks: MaintenanceLocks,
    /// The memory of adapters that selectors of open sequences choose by, keyed by the adapter's address.
    pub(crate) held_adapters: Mutex<HashMap<usize, Weak<Reservation>>>,
    pub(crate) activity: StoreActivity,
}

/// Limits on what a store writes, and how it makes space. Fixed when it is opened.
#[derive(Clone, Copy)]
pub(crate) struct WriteLimits {
    /// Bytes of group data from which on a frame is written.
    pub(crate) frame_bytes: usize,
    /// Bytes of frames of one sequence that may be in flight.
    pub(crate) flight_bytes: usize,
    /// How long a lazy commit waits at most.
    pub(crate) lazy_delay: Duration,
    /// Shares of the space for frames: eviction starts above `high` and stops at `low`.
    pub(crate) watermarks: Watermarks,
    /// Makes space for an append that found none. Returns whether there is more now.
    pub(crate) make_space: fn(&Arc<StoreInner>) -> Result<bool>,
    /// Makes space for clusters without evicting a sequence. Returns whether there may be more now.
    pub(crate) release_clusters: fn(&Arc<StoreInner>) -> Result<bool>,
}

/// Shares of the space for frames, from 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watermarks {
    pub(crate) high: f64,
    pub(crate) low: f64,
}

/// Locks that let one maintenance job of a kind run at a time. No other lock is held when one of these is taken.
#[derive(Default)]
pub(crate) struct MaintenanceLocks {
    /// Held while adapters are stored or deleted.
    pub(crate) adapters: Mutex<()>,
    /// Held while copies are repaired.
    pub(crate) repairing: Mutex<()>,
    /// Held while segments are cleaned. It knows whether that gains segments.
    pub(crate) cleaning: Mutex<CleaningProgress>,
    /// Held while sequences are evicted for space.
    pub(crate) evicting: Mutex<()>,
    /// Segments that left the catalog and whose files still exist, each with the generation that ended. Held while
    /// files are removed, the commit included.
    pub(crate) removals: Mutex<Vec<(SegmentKey, u64)>>,
}

/// The counters of a store, and the observers of its evictions.
#[derive(Default)]
pub(crate) struct StoreActivity {
    pub(crate) counters: StoreCounters,
    pub(crate) observers: Observers,
    /// Bytes of frames written since the store was opened or last shut.
    written: AtomicU64,
}

impl StoreActivity {
    pub(crate) fn add_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes of frames written since the store was opened.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

impl StoreInner {
    /// Returns the slot of a committed frame that was read as `body`, with its copies where they are now.
    pub(crate) fn place_frame(&self, id: FrameId, body: FrameBody) -> Result<Arc<FrameSlot>> {
        let catalog = lock(&self.catalog);
        let mut space = lock(&self.space);
        let slot = space.place_frame(id, body);
        if let Some(frame) = catalog.frames.get(&id) {
            lay_copies(&self.devices, &catalog, &mut space, frame, &slot)?;
        }
        Ok(slot)
    }

    /// Makes space for an append that found none, by cleaning and evicting. Returns whether there is more now.
    ///
    /// # Errors
    /// A commit failed.
    pub(crate) fn make_room(self: &Arc<Self>) -> Result<bool> {
        self.activity.counters.no_space.add(1);
        event!(warn, "an append found no space");
        (self.limits.make_space)(self).map_err(Error::not_queued)
    }

    /// Returns an empty reservation of the memory for groups that commits gather.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`], which an empty reservation never meets.
    pub(crate) fn gathering(&self) -> Result<Reservation> {
        let none = || Error::new(ErrorKind::MemoryLimit, "no memory for groups that commits gather");
        self.devices.gathering.try_reserve(0, Category::Arena).ok_or_else(none)
    }

    /// Commits a changed member durably.
    pub(crate) fn change_member(&self, member: m::Member) -> Result<()> {
        let members = self.devices.change([member].into_iter());
        self.committer.commit(CommitRequest { members, ..CommitRequest::default() })
    }

    pub(crate) fn commit(&self, request: CommitRequest) -> Result<()> {
        self.committer.commit(request)
    }

    pub(crate) fn flush_commits(&self) -> Result<()> {
        self.committer.flush()
    }

    /// Commits what other handles queued.
    pub(crate) fn flush_others(&self) -> Result<()> {
        self.flush_commits().map_err(Error::not_queued)
    }

    /// Deletes a sequence. With [`Durability::Sync`] the deletion is durable when this returns. It is not listed any
    /// more, even if the deletion waits in the queue.
    pub(crate) fn delete_sequence(&self, id: SequenceId, durability: Durability) -> Result<()> {
        self.committer.check()?;
        lock(&self.catalog).queue_deletion(id);
        let mut request = CommitRequest::default();
        request.records.push(Kind::SequenceDelete, &m::SequenceDelete { sequence: U64::new(id.0) }, &[]);
        match durability {
            Durability::Sync if !planted!(DeleteNotDurable) => self.commit(request),
            Durability::Sync | Durability::Lazy => {
                self.committer.enqueue(request, Some(Instant::now() + self.limits.lazy_delay));
                Ok(())
            }
            Durability::None => {
                self.committer.enqueue(request, None);
                Ok(())
            }
        }
    }

    /// Commits everything and marks the store closed.
    pub(crate) fn shut(&self) -> Result<()> {
        if self.committer.is_read_only() {
            self.committer.stop();
            return Ok(());
        }
        // The counters are recorded, so that no id is given out twice.
        let mut request = CommitRequest::default();
        let known = lock(&self.catalog).counters;
        self.activity.written.store(0, Ordering::Relaxed);
        let next = self.ids.peek();
        let counters = Counters {
            frame: next.frame,
            sequence: next.sequence,
            lsn: next.lsn,
            layout: known.layout,
            lifetime_bytes: self.committer.lifetime_bytes(),
        };
        request.records.push(Kind::Counters, &Catalog::counters_record(&counters), &[]);
        self.committer.enqueue(request, None);
        self.committer.close()
    }
}

impl Drop for StoreInner {
    fn drop(&mut self) {
        if self.devices.is_child() {
            // The files belong to the parent, and the threads to wait for do not exist here.
            self.background.forget_threads();
            std::mem::forget(Arc::clone(&self.devices));
            return;
        }
        // An error leaves the store as a crash would, which recovery handles. A closed store has nothing to do.
        if !self.committer.is_closed() {
            let _ = self.shut();
        }
        self.background.stop(&self.devices.maintenance_wake);
        self.committer.stop();
        self.background.join_lazy();
    }
}
