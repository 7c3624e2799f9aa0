//! The devices of an open store, and what they share: buffers, budgets, open files, rings.
//!
//! Invariant: one caller at a time syncs files of a device, because an error that belongs to one file may be reported
//! for another. The files of one call are synced together, and one error fails the call.
//!
//! Lock order: the control buffer, then the sync locks of devices in the order of the list.

use super::device::Device;
use super::device_set::DeviceList;
use super::latency::Latencies;
use super::suspect_copies::SuspectCopies;
use crate::cache::BlockCache;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::buffer::arena::{Arena, LeaseError};
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::file::cached_file::{CachedFile, FdCache};
use crate::io::file::device_file::DeviceFile;
use crate::io::scheduler::{Batch, Priority, Request, ShardThreads, Sink, ThreadRings, Waiter};
use crate::io::seams::Environment;
use crate::metrics::{Category, EventCount, MemoryBudget, Reservation, lock};
use crate::options::{BalancePolicy, CacheOptions, ComputeThreads};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use stratakv_format::features::Features;
use stratakv_format::{DeviceIndex, PayloadChecksum, SegmentId, segment};

/// Bytes of a write that the calling thread makes beside another one, at most.
const SMALL_WRITE: usize = 64 << 10;
/// Bytes of the buffer that is reserved for metadata: the largest batch of records.
pub(crate) const CONTROL_BYTES: usize = 1 << 20;
/// How long to wait for a slab that is being freed.
const TRIM_WAIT: std::time::Duration = std::time::Duration::from_millis(200);

/// The properties of a store that never change while it is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreIdentity {
    pub(crate) store_id: [u8; 16],
    pub(crate) checksum: PayloadChecksum,
    pub(crate) segment_pages: u32,
    /// Unique per opening of a store.
    pub(crate) instance: u64,
}

/// The first failure of each device.
pub(crate) type Failures = BTreeMap<DeviceIndex, Error>;

/// All devices of an open store, by index, and the buffers they share.
pub(crate) struct Devices {
    pub(crate) environment: Environment,
    pub(crate) list: DeviceList,
    pub(crate) arena: Arena,
    pub(crate) budget: Arc<MemoryBudget>,
    /// The memory of groups that commits gather, because small frames hold their tokens. It is a part of the arena's.
    pub(crate) gathering: Arc<MemoryBudget>,
    /// The buffer of [`Devices::write_all`], reserved so that a commit never waits for the memory of reads and
    /// selections.
    pub(crate) control: Mutex<Lease>,
    pub(crate) identity: StoreIdentity,
    /// Open segment files.
    pub(crate) files: Arc<FdCache>,
    /// Copies that could not be read.
    pub(crate) suspects: SuspectCopies,
    /// How long parts of reads take.
    pub(crate) latencies: Latencies,
    pub(crate) balance: BalancePolicy,
    /// Bytes between two blocks that one read may cover, at most.
    pub(crate) gap_limit: usize,
    /// The threads that serve the devices, also those that join later.
    pub(crate) threads: ShardThreads,
    /// Incompatible features that the store uses: copies, codecs.
    pub(crate) incompat: AtomicU64,
    /// Rings of threads that read by themselves.
    pub(crate) lanes: ThreadRings,
    /// Threads of the host that compute parts of a call.
    pub(crate) compute: RwLock<Option<Arc<dyn ComputeThreads>>>,
    /// Notified when a segment is taken, so that the maintenance thread checks how many are left.
    pub(crate) maintenance_wake: Arc<EventCount>,
    /// The process that opened the store. A child shares the files and the lock, but has none of the threads.
    pub(crate) process: AtomicU32,
}

impl Devices {
    /// Returns whether this process is a child of the one that opened the store.
    pub(crate) fn is_child(&self) -> bool {
        self.process.load(Ordering::Relaxed) != std::process::id()
    }

    /// Checks that this process opened the store. No thread of a child ends a request, and rings are not mapped there.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`]: it is a child of that process.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_child() {
            let text = "another process opened the store, and this one is a child of it; open stores after a fork";
            return Err(Error::new(ErrorKind::InUse, text));
        }
        Ok(())
    }

    /// Makes the store take this process for a child of the one that opened it.
    #[cfg(test)]
    pub(crate) fn become_child(&self) {
        self.process.store(0, Ordering::Relaxed);
    }

    /// Returns the threads of the host that compute parts of a call.
    pub(crate) fn compute_threads(&self) -> Option<Arc<dyn ComputeThreads>> {
        self.compute.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the file of a segment. It is opened when it is first used, unless `open` is given.
    pub(crate) fn segment_file(
        &self,
        device: &Device,
        id: SegmentId,
        open: Option<Arc<DeviceFile>>,
    ) -> Arc<CachedFile> {
        let (directory, path) = (&device.directory, segment::file_name(id));
        match open {
            Some(file) => CachedFile::opened(directory, path, &self.files, file),
            None => CachedFile::new(directory, path, &self.files),
        }
    }

    /// Returns the feature bits for new metadata.
    pub(crate) fn features(&self) -> Features {
        Features::current().with(self.incompat.load(Ordering::Relaxed))
    }

    /// Returns whether frames may have copies.
    pub(crate) fn has_copies(&self) -> bool {
        self.features().has_copies()
    }

    /// Returns the bytes written to devices since the store was opened.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.list.iter().map(|device| device.counters.write_bytes.get()).sum()
    }

    /// Returns the device of this index. A device that left while the store is open counts, because selections may
    /// still read it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`]: there is no such device.
    pub(crate) fn get(&self, index: DeviceIndex) -> Result<&Device> {
        let found = self.list.get_any(usize::from(index.0));
        found.ok_or_else(|| Error::new(ErrorKind::Io, format!("device {index} of the store is not present")))
    }

    /// Counts a checksum failure of a device, if the error is one.
    pub(crate) fn count_damage(&self, device: DeviceIndex, e: &Error) {
        if e.kind() == ErrorKind::Corruption {
            self.count_checksum_failures(device, 1);
        }
    }

    /// Counts blocks or frames of a device that do not match their checksum.
    pub(crate) fn count_checksum_failures(&self, index: DeviceIndex, count: u64) {
        if let (Ok(device), 1..) = (self.get(index), count) {
            device.counters.checksum_failures.add(count);
            event!(warn, device = index, count = count, "bytes read do not match their checksum");
        }
    }

    /// Counts a block or read of a device that a copy on another device gave.
    pub(crate) fn count_other_copy(&self, index: DeviceIndex) {
        if let Ok(device) = self.get(index) {
            device.counters.other_copies.add(1);
            event!(debug, device = index, "another copy gives what a read did not");
        }
    }

    /// Reserves memory that is not for buffers. Idle slabs of buffers are freed if that is needed.
    pub(crate) fn reserve(&self, bytes: usize, category: Category) -> Option<Reservation> {
        let mut got = None;
        self.make_room(|| {
            got = self.budget.try_reserve(bytes, category);
            got.is_some()
        });
        got
    }

    /// Resizes a reservation. Idle slabs of buffers are freed if that is needed.
    pub(crate) fn resize(&self, reservation: &mut Reservation, bytes: usize) -> bool {
        self.make_room(|| reservation.resize(bytes))
    }

    /// Makes a cache of resident blocks and reserves its capacity.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: the budget has less left. [`ErrorKind::Configuration`]: it is too small for any
    /// block.
    pub(crate) fn block_cache(&self, options: &CacheOptions) -> Result<Arc<BlockCache>> {
        let bytes = usize::try_from(options.bytes.bytes()).unwrap_or(usize::MAX);
        let account = self.reserve(bytes, Category::Cache).ok_or_else(|| {
            let text = format!("cache: {} does not fit in what memory_limit leaves; raise memory_limit", options.bytes);
            Error::new(ErrorKind::MemoryLimit, text)
        })?;
        BlockCache::new(options, account)
    }

    /// Tries to reserve memory, frees idle slabs if it fails, and tries again until [`TRIM_WAIT`] is over.
    fn make_room(&self, mut attempt: impl FnMut() -> bool) -> bool {
        if attempt() {
            return true;
        }
        if self.arena.trim() == 0 {
            return false;
        }
        // A ring unregisters a freed slab when it wakes.
        self.lanes.close_idle();
        self.list.iter().for_each(|device| device.shard.nudge());
        let deadline = std::time::Instant::now() + TRIM_WAIT;
        loop {
            let seen = self.budget.returned().epoch();
            if attempt() {
                return true;
            }
            if !self.budget.returned().wait_past(seen, Some(deadline)) {
                return false;
            }
        }
    }

    /// Leases a zeroed buffer. Waits up to ten seconds for reads and writes in flight to return memory.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: it can never fit. [`ErrorKind::Busy`]: no memory came back in time.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Lease> {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let seen = self.arena.returned().epoch();
            match self.arena.lease_zeroed(bytes) {
                Ok(lease) => return Ok(lease),
                Err(LeaseError::Now) => {
                    if !self.arena.returned().wait_past(seen, Some(deadline)) {
                        let text = format!(
                            "no buffer of {bytes} bytes within memory_limit: reads or selections hold it all; drop \
                             some or raise memory_limit"
                        );
                        return Err(Error::new(ErrorKind::Busy, text));
                    }
                }
                Err(other) => return Err(exhausted(other, bytes)),
            }
        }
    }

    /// Writes `bytes`, at most [`CONTROL_BYTES`], at `offset` of each file, and waits. Returns the first error.
    pub(crate) fn write_all(&self, writes: &[(DeviceIndex, Arc<DeviceFile>)], offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_each(writes, offset, bytes)?.into_values().next().map_or(Ok(()), Err)
    }

    /// Writes as [`Self::write_all`] does. Returns the failures by device.
    pub(crate) fn write_each(
        &self,
        writes: &[(DeviceIndex, Arc<DeviceFile>)],
        offset: u64,
        bytes: &[u8],
    ) -> Result<Failures> {
        let mut buffer = lock(&self.control);
        let out = buffer.bytes_mut().and_then(|out| out.get_mut(..bytes.len()));
        let out = out.ok_or_else(|| Error::new(ErrorKind::Busy, format!("no buffer for {} bytes", bytes.len())))?;
        out.copy_from_slice(bytes);
        let mut ops = Vec::with_capacity(writes.len());
        for (device, file) in writes {
            let from = buffer.write_source(0..bytes.len())?;
            ops.push((*device, Op::Write { file: Arc::clone(file), offset, from }));
        }
        Ok(self.run_each(ops))
    }

    /// Syncs files at the same time and waits. Returns the first error.
    ///
    /// A failure poisons the device. No sync is ever retried.
    pub(crate) fn sync_all<'a>(
        &self,
        files: impl ExactSizeIterator<Item = (DeviceIndex, &'a Arc<DeviceFile>)>,
    ) -> Result<()> {
        self.sync_each(files).into_values().next().map_or(Ok(()), Err)
    }

    /// Syncs as [`Self::sync_all`] does. Returns the failures by device.
    pub(crate) fn sync_each<'a>(
        &self,
        files: impl ExactSizeIterator<Item = (DeviceIndex, &'a Arc<DeviceFile>)>,
    ) -> Failures {
        let ops: Vec<_> = files.map(|(device, file)| (device, Op::Sync { file: Arc::clone(file) })).collect();
        // Locked in the order of the list, so that no two callers wait for each other.
        let involved = |device: &&Device| ops.iter().any(|(index, _)| *index == device.index);
        let _exclusive: Vec<_> = self.list.iter().filter(involved).map(|device| device.shard.lock_syncs()).collect();
        self.run_each(ops)
    }

    /// Runs operations and waits for them. Operations of the first device run on this thread, all others on the
    /// devices' threads.
    fn run_each(&self, ops: Vec<(DeviceIndex, Op)>) -> Failures {
        let mut failures = Failures::new();
        let Some(first) = ops.first().map(|(device, _)| *device) else { return failures };
        let (mut own, mut syncs, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (device, op) in ops {
            match op {
                Op::Sync { .. } if device == first => syncs.push(op),
                // A second large write goes to the device's thread, beside the first. A small one would wait there
                // behind frames.
                op if device == first && (own.is_empty() || op.len() <= SMALL_WRITE) => own.push(op),
                op => others.push((device, op)),
            }
        }
        let mut waiters: Vec<(DeviceIndex, Arc<Waiter>)> = Vec::new();
        for (device, op) in others {
            let waiter = Waiter::new(1);
            match self.submit_one(device, op, &waiter) {
                Ok(()) => waiters.push((device, waiter)),
                Err(e) => {
                    failures.entry(device).or_insert(e);
                }
            }
        }
        let outcome = self.get(first).and_then(|device| {
            let written = own.into_iter().try_for_each(|op| device.shard.run_blocking(op));
            let synced = device.shard.sync_blocking(syncs);
            written.and(synced)
        });
        let outcomes = waiters.iter().map(|(device, waiter)| (*device, waiter.wait()));
        for (device, outcome) in outcomes.chain([(first, outcome)]) {
            if let Err(e) = outcome {
                failures.entry(device).or_insert(e);
            }
        }
        failures
    }

    /// Submits one operation to a device's thread.
    fn submit_one(&self, device: DeviceIndex, op: Op, waiter: &Arc<Waiter>) -> Result<()> {
        let batch = Batch {
            requests: vec![Request { op, tag: 0 }],
            priority: Priority::Write,
            sink: Arc::clone(waiter) as Arc<dyn Sink>,
            cancel: None,
        };
        match self.get(device) {
            Ok(device) => {
                device.shard.submit_wait(batch);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }
}

/// Returns the error for a buffer that cannot be leased.
pub(crate) fn exhausted(why: LeaseError, bytes: usize) -> Error {
    match why {
        LeaseError::Now => Error::new(ErrorKind::Busy, format!("no buffer of {bytes} bytes is free at the moment")),
        LeaseError::Never => Error::new(
            ErrorKind::MemoryLimit,
            format!("a buffer of {bytes} bytes can never fit within memory_limit; raise memory_limit"),
        ),
        LeaseError::System => {
            Error::new(ErrorKind::MemoryLimit, format!("the system has no memory for a buffer of {bytes} bytes"))
        }
    }
}
