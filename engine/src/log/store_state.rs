//! What all parts of an open store share: devices, space, catalog, committer, and the ids given out.

use super::commit::{CommitRequest, Committer};
use super::devices::Devices;
use super::rate_limiter::RateLimiter;
use super::segment_allocator::SegmentAllocator;
use super::unix_ms;
use crate::cache::BlockCache;
use crate::catalog::{Catalog, Counters, FrameBody, FrameCopy, FrameMeta, FrameSlot, SegmentKey, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::seams::{Mutant, mutated};
use crate::metrics::{Category, Observers, Reservation, StoreCounters, lock};
use crate::options::Durability;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{FrameId, Location, SequenceId};
use zerocopy::little_endian::U64;

/// Frames of a sequence that may be on their way to one device: with fewer it waits for the next ones now and then, with more of
/// them, or larger ones, it writes no faster.
pub(crate) const FRAMES_IN_FLIGHT: usize = 12;

pub(crate) struct StoreInner {
    pub(crate) committer: Arc<Committer>,
    pub(crate) catalog: Arc<Mutex<Catalog>>,
    pub(crate) space: Arc<Mutex<SegmentAllocator>>,
    pub(crate) open_sequences: Mutex<HashSet<SequenceId>>,
    pub(crate) frame_bytes: usize,
    /// Bytes of frames of one sequence that may be on their way.
    pub(crate) flight_bytes: usize,
    pub(crate) lazy_delay: Duration,
    /// Keys of sequences that were created but not committed yet.
    pub(crate) reserved_keys: Mutex<HashSet<String>>,
    pub(crate) next_frame: AtomicU64,
    pub(crate) next_lsn: AtomicU64,
    pub(crate) next_sequence: AtomicU64,
    pub(crate) written: AtomicU64,
    pub(crate) lazy: Mutex<Option<JoinHandle<()>>>,
    pub(crate) devices: Arc<Devices>,
    /// One change of adapters at a time.
    pub(crate) adapters: Mutex<()>,
    /// Memory of adapters that selectors of open sequences choose by, by the address of each: it is accounted for once.
    pub(crate) held_adapters: Mutex<HashMap<usize, Weak<Reservation>>>,
    /// One repair at a time.
    pub(crate) repairing: Mutex<()>,
    pub(crate) health: StoreCounters,
    pub(crate) observers: Observers,
    /// How fast the background cleans.
    pub(crate) pace: RateLimiter,
    /// One cleaning at a time.
    pub(crate) cleaning: Mutex<()>,
    /// One eviction for room at a time.
    pub(crate) evicting: Mutex<()>,
    /// Shares of the room for frames from which on evictable sequences go, and down to which.
    pub(crate) watermarks: (f64, f64),
    /// Makes room when there is none: see [`StoreInner::make_room`].
    pub(crate) room: fn(&Arc<Self>) -> Result<bool>,
    /// Segments that were taken out and whose files are still there, each with the generation that ended. Held while files are removed,
    /// the commit that says so included.
    pub(crate) leaving: Mutex<Vec<(SegmentKey, u64)>>,
    pub(crate) maintenance_thread: Mutex<Option<JoinHandle<()>>>,
    /// When the background looks for expired sequences next, in milliseconds since 1970; `u64::MAX` when it does not, or is at it.
    pub(crate) next_expiry_check_ms: AtomicU64,
    /// The background is to end.
    pub(crate) rest: AtomicBool,
    /// Resident blocks of all sequences that have no cache of their own.
    pub(crate) cache: Option<Arc<BlockCache>>,
}

/// A copy of a frame that can be read.
pub(crate) struct CopyAt {
    pub(crate) at: FrameCopy,
    pub(crate) location: Location,
}

/// The copies of a frame on devices that are there, the first in front. No I/O.
///
/// # Errors
/// [`ErrorKind::Io`]: no device that has one is there. [`ErrorKind::Corruption`]: its segment is unknown.
pub(crate) fn copies_of(
    devices: &Devices,
    catalog: &Catalog,
    space: &mut SegmentAllocator,
    frame: &FrameMeta,
) -> Result<Vec<CopyAt>> {
    let first = (frame.location, frame.header_crc);
    let others = frame.replicas.iter().map(|replica| (replica.location, replica.header_crc));
    let mut copies = Vec::with_capacity(frame.copies());
    let mut missing = None;
    for (location, header_crc) in std::iter::once(first).chain(others) {
        let key = (location.device, location.segment);
        let lost =
            || Error::new(ErrorKind::Corruption, format!("segment of a frame at {location} is not in the manifest"));
        let segment = catalog.segments.get(&key).ok_or_else(lost)?;
        match space.handle(devices, key, segment) {
            Ok(segment) => {
                let at = FrameCopy { segment, page: location.page, header_crc };
                copies.push(CopyAt { at, location });
            }
            Err(e) => missing = Some(e),
        }
    }
    // What is on a device that was declared lost is a last resort.
    copies.sort_by_key(|copy| devices.get(copy.location.device).is_ok_and(super::Device::is_lost));
    match missing {
        Some(e) if copies.is_empty() => Err(e.during("every copy is on a device that is not there")),
        _ => Ok(copies),
    }
}

/// Tells whoever reads a frame where its copies are now.
///
/// # Errors
/// As [`copies_of`].
pub(super) fn tell_copies(
    devices: &Devices,
    catalog: &Mutex<Catalog>,
    space: &Mutex<SegmentAllocator>,
    id: FrameId,
) -> Result<()> {
    let catalog = lock(catalog);
    let mut space = lock(space);
    match (space.frame_slot(id), catalog.frames.get(&id)) {
        (Some(slot), Some(frame)) => lay_copies(devices, &catalog, &mut space, frame, &slot),
        _ => Ok(()),
    }
}

fn lay_copies(
    devices: &Devices,
    catalog: &Catalog,
    space: &mut SegmentAllocator,
    frame: &FrameMeta,
    slot: &FrameSlot,
) -> Result<()> {
    let mut copies = copies_of(devices, catalog, space, frame)?.into_iter().map(|copy| copy.at);
    if let Some(first) = copies.next() {
        slot.set_location(first, copies.collect());
    }
    Ok(())
}

impl StoreInner {
    /// Id and log sequence number of the next frame.
    pub(crate) fn next_frame(&self) -> (FrameId, u64) {
        let id = self.next_frame.fetch_add(1, Ordering::Relaxed);
        (FrameId(id), self.next_lsn.fetch_add(1, Ordering::Relaxed))
    }

    /// The right to a new sequence with this key, empty for none.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the key is too long. [`ErrorKind::AlreadyExists`]: it is taken.
    pub(crate) fn claim(self: &Arc<Self>, key: &str) -> Result<(SequenceId, SequenceLock)> {
        self.committer.check()?;
        if key.len() > m::KEY_BYTES_MAX {
            let text = format!("key of {} bytes; at most {}", key.len(), m::KEY_BYTES_MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let id = SequenceId(self.next_sequence.fetch_add(1, Ordering::Relaxed));
        let taken = || Error::new(ErrorKind::AlreadyExists, format!("a sequence with the key {key:?} exists"));
        let claim = SequenceLock::new(self, id, key).ok_or_else(taken)?;
        if !key.is_empty() {
            // Whoever had the key before let go of it with its last commit queued at least: now it is in the catalog.
            self.flush_others()?;
            if lock(&self.catalog).keys.contains_key(key) {
                return Err(taken());
            }
        }
        Ok((id, claim))
    }

    /// The slot of a committed frame that was read as `body` says, wherever it lies by now.
    pub(crate) fn place_frame(&self, id: FrameId, body: FrameBody) -> Result<Arc<FrameSlot>> {
        let catalog = lock(&self.catalog);
        let mut space = lock(&self.space);
        let slot = space.place_frame(id, body);
        if let Some(frame) = catalog.frames.get(&id) {
            lay_copies(&self.devices, &catalog, &mut space, frame, &slot)?;
        }
        Ok(slot)
    }

    /// Makes room for an append that found none, by all means there are. Whether there is more now.
    ///
    /// # Errors
    /// A commit failed.
    pub(crate) fn make_room(self: &Arc<Self>) -> Result<bool> {
        self.health.no_space.add(1);
        (self.room)(self).map_err(Error::not_queued)
    }

    /// An empty share of the memory for groups that commits gather.
    ///
    /// # Errors
    /// Never in fact: nothing always fits.
    pub(crate) fn gathering(&self) -> Result<Reservation> {
        let none = || Error::new(ErrorKind::MemoryLimit, "no memory for groups that commits gather");
        self.devices.gathering.try_reserve(0, Category::Arena).ok_or_else(none)
    }

    /// Whether the background is to end.
    pub(crate) fn resting(&self) -> bool {
        self.rest.load(Ordering::Relaxed)
    }

    /// Ends the background, and waits until it has.
    pub(crate) fn stop_tending(&self) {
        self.rest.store(true, Ordering::Relaxed);
        self.devices.tend.notify();
        self.pace.wake();
        if let Some(thread) = lock(&self.maintenance_thread).take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }

    pub(crate) fn add_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records durably what a device is from now on.
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

    /// Makes what others queued take effect.
    pub(crate) fn flush_others(&self) -> Result<()> {
        self.flush_commits().map_err(Error::not_queued)
    }

    pub(crate) fn delete_sequence(&self, id: SequenceId, durability: Durability) -> Result<()> {
        self.committer.check()?;
        let mut request = CommitRequest::default();
        request.records.push(Kind::SequenceDelete, &m::SequenceDelete { sequence: U64::new(id.0) }, &[]);
        match durability {
            Durability::Sync if !mutated(Mutant::DeleteNotDurable) => self.commit(request),
            Durability::Sync | Durability::Lazy => {
                self.committer.enqueue(request, Some(Instant::now() + self.lazy_delay));
                Ok(())
            }
            Durability::None => {
                self.committer.enqueue(request, None);
                Ok(())
            }
        }
    }

    pub(crate) fn shut(&self) -> Result<()> {
        if self.committer.is_read_only() {
            self.committer.stop();
            return Ok(());
        }
        // Counters go along, so that ids given out are not given out again.
        let mut request = CommitRequest::default();
        let known = lock(&self.catalog).counters;
        self.written.store(0, Ordering::Relaxed);
        let counters = Counters {
            frame: self.next_frame.load(Ordering::Relaxed),
            sequence: self.next_sequence.load(Ordering::Relaxed),
            lsn: self.next_lsn.load(Ordering::Relaxed),
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
        // An error here leaves the store as a crash would: recovery takes care of it. A second close finds nothing to do.
        if !self.committer.is_closed() {
            let _ = self.shut();
        }
        self.stop_tending();
        self.committer.stop();
        if let Some(thread) = lock(&self.lazy).take() {
            let _ = thread.join();
        }
    }
}

/// The right to be the only handle of a sequence, and to a key that no commit has made its own yet. Whoever lets go of it has
/// queued all that it commits.
pub(crate) struct SequenceLock {
    pub(crate) store: Arc<StoreInner>,
    id: SequenceId,
    /// Empty when no key is reserved.
    key: String,
    /// It may be over when it is let go: whoever tends the store looks then.
    pub(crate) expires: bool,
    /// A handle has it: when that goes is when it was used last.
    pub(crate) uses: bool,
}

impl SequenceLock {
    /// None when another handle has the sequence or the key.
    pub(crate) fn new(store: &Arc<StoreInner>, id: SequenceId, key: &str) -> Option<Self> {
        if !key.is_empty() && !lock(&store.reserved_keys).insert(key.to_owned()) {
            return None;
        }
        if !lock(&store.open_sequences).insert(id) {
            lock(&store.reserved_keys).remove(key);
            return None;
        }
        Some(Self { store: Arc::clone(store), id, key: key.to_owned(), expires: false, uses: false })
    }
}

impl Drop for SequenceLock {
    fn drop(&mut self) {
        if !self.key.is_empty() {
            lock(&self.store.reserved_keys).remove(&self.key);
        }
        lock(&self.store.space).settle(self.id);
        // Before it may be evicted. One that only a queued commit names counts from that.
        if self.uses
            && let Some(meta) = lock(&self.store.catalog).sequences.get_mut(&self.id)
        {
            meta.used_unix_ms = meta.used_unix_ms.max(unix_ms());
        }
        lock(&self.store.open_sequences).remove(&self.id);
        if !self.expires {
            return;
        }
        // One that only a queued commit names is known once the background has flushed.
        let soon = |meta: Option<&SequenceMeta>| {
            let end = meta.map_or(Some(0), SequenceMeta::ends_ms);
            end.is_some_and(|end| end <= unix_ms() || end < self.store.next_expiry_check_ms.load(Ordering::SeqCst))
        };
        if soon(lock(&self.store.catalog).sequences.get(&self.id)) {
            self.store.devices.tend.notify();
        }
    }
}
