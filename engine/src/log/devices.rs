//! The devices of an open store: directory, shard, counters, superblock.

use super::device_set::DeviceList;
use super::suspect_copies::{Latencies, Suspects};
use crate::cache::BlockCache;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Arena, Exhausted, Lease};
use crate::io::driver::interface::Op;
use crate::io::file::cached_file::{CachedFile, FdCache};
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use crate::io::scheduler::profile::Profile;
use crate::io::scheduler::{Batch, Priority, Request, ShardHandle, ShardThreads, Sink, ThreadRings, Waiter};
use crate::metrics::{Category, DeviceCounters, EventCount, MemoryBudget, Reservation, lock};
use crate::options::{BalancePolicy, CacheOptions};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use stratakv_format::features::Features;
use stratakv_format::manifest::Member;
use stratakv_format::superblock::{self, SLOTS, Slot};
use stratakv_format::{DeviceIndex, PAGE_BYTES, PayloadChecksum, SegmentId, segment};
use zerocopy::little_endian::U64;

/// The most bytes of a write that is made on the calling thread beside another.
const SMALL_WRITE: usize = 64 << 10;
/// Bytes of the buffer that is kept back for metadata: a batch of records at its largest.
pub(crate) const CONTROL_BYTES: usize = 1 << 20;
/// How long to wait for a slab that is given up.
const TRIM_WAIT: std::time::Duration = std::time::Duration::from_millis(200);

/// What never changes while a store is open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) store_id: [u8; 16],
    pub(crate) checksum: PayloadChecksum,
    pub(crate) segment_pages: u32,
    /// Tells this opening of the store from every other.
    pub(crate) instance: u64,
}

/// One device.
pub(crate) struct Device {
    pub(crate) index: DeviceIndex,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) shard: ShardHandle,
    pub(crate) counters: Arc<DeviceCounters>,
    /// The slot written last.
    pub(crate) slot: Mutex<Slot>,
    pub(crate) profile: Arc<Profile>,
    /// What the manifest says of it.
    pub(crate) member: Mutex<Member>,
    /// Bytes of its file system.
    pub(crate) total_bytes: u64,
}

impl Device {
    /// Writes the next superblock slot with what `change` makes of the last one, durably.
    pub(crate) fn write_superblock(&self, change: impl Fn(&mut Slot)) -> Result<()> {
        let mut slot = lock(&self.slot);
        let mut next = *slot;
        change(&mut next);
        next.sequence = U64::new(slot.sequence.get() + 1);
        let file = self.directory.open_file(superblock::FILE, Access::ReadWrite)?;
        let at = next.sequence.get() % SLOTS as u64 * PAGE_BYTES as u64;
        self.directory.write_small(&file, at, &next.encode())?;
        self.directory.sync_small(&file)?;
        *slot = next;
        Ok(())
    }
}

/// What failed, by device.
pub(crate) type Failures = BTreeMap<DeviceIndex, Error>;

/// All devices of an open store, by index, and the buffers they share.
pub(crate) struct Devices {
    pub(crate) list: DeviceList,
    pub(crate) arena: Arena,
    pub(crate) budget: Arc<MemoryBudget>,
    /// What groups in memory may take that small frames hold as well: a part of what the arena has.
    pub(crate) gathering: Arc<MemoryBudget>,
    /// The buffer of [`Devices::write_all`], kept back so that a commit never waits for what reads and views hold.
    pub(crate) control: Mutex<Lease>,
    pub(crate) identity: Identity,
    /// Segment files that are open.
    pub(crate) files: Arc<FdCache>,
    /// Copies that failed to give what they hold.
    pub(crate) suspects: Suspects,
    /// How long parts of reads take.
    pub(crate) latencies: Latencies,
    pub(crate) balance: BalancePolicy,
    /// Bytes that a read takes along between two blocks at most.
    pub(crate) gap_limit: usize,
    /// What serves the devices, those that join later too.
    pub(crate) threads: ShardThreads,
    /// Incompatible features that the store has: of copies, of codecs.
    pub(crate) incompat: AtomicU64,
    /// Rings of threads that read for themselves.
    pub(crate) lanes: ThreadRings,
    /// Told when a segment is taken: whoever tends the store looks whether there are enough left.
    pub(crate) tend: Arc<EventCount>,
}

impl Devices {
    /// The file of a segment, open already or to be opened when it is needed.
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

    /// What new metadata says of the format.
    pub(crate) fn features(&self) -> Features {
        Features::current().with(self.incompat.load(Ordering::Relaxed))
    }

    /// Whether frames may have copies.
    pub(crate) fn has_replicas(&self) -> bool {
        self.features().has_copies()
    }

    /// Bytes that the devices took since the store was opened.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.list.iter().map(|device| device.counters.write_bytes.get()).sum()
    }

    /// The device of this index; one that left while the store is open counts: views may still read what it held.
    ///
    /// # Errors
    /// None such.
    pub(crate) fn get(&self, index: DeviceIndex) -> Result<&Device> {
        let found = self.list.get_any(usize::from(index.0));
        found.ok_or_else(|| Error::new(ErrorKind::Io, format!("device {index} of the store is not there")))
    }

    /// Counts what was read of a device and is not what was written, if that is what this error says.
    pub(crate) fn count_damage(&self, device: DeviceIndex, e: &Error) {
        if let (ErrorKind::Corruption, Ok(device)) = (e.kind(), self.get(device)) {
            device.counters.checksum_failures.add(1);
        }
    }

    /// Takes memory off the budget for something else than buffers, if need be from slabs of buffers that are idle.
    pub(crate) fn reserve(&self, bytes: usize, category: Category) -> Option<Reservation> {
        let mut got = None;
        self.make_room(|| {
            got = self.budget.try_reserve(bytes, category);
            got.is_some()
        });
        got
    }

    /// [`Reservation::resize`], if need be with memory from slabs of buffers that are idle.
    pub(crate) fn resize(&self, reservation: &mut Reservation, bytes: usize) -> bool {
        self.make_room(|| reservation.resize(bytes))
    }

    /// A cache of resident blocks, its capacity taken off the budget.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: the budget has less left; [`ErrorKind::Configuration`]: too small to hold anything.
    pub(crate) fn block_cache(&self, options: &CacheOptions) -> Result<Arc<BlockCache>> {
        let bytes = usize::try_from(options.bytes.bytes()).unwrap_or(usize::MAX);
        let account = self.reserve(bytes, Category::Cache).ok_or_else(|| {
            let text = format!("a cache of {} does not fit in what memory_limit has left; raise it", options.bytes);
            Error::new(ErrorKind::MemoryLimit, text)
        })?;
        BlockCache::new(options, account)
    }

    fn make_room(&self, mut attempt: impl FnMut() -> bool) -> bool {
        if attempt() {
            return true;
        }
        if self.arena.trim() == 0 {
            return false;
        }
        // A ring that has a slab registered lets go of it when it wakes.
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

    /// A zeroed buffer; waits until what is in flight gives memory back.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`] when it can never fit, [`ErrorKind::Busy`] when nothing came back for a while.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Lease> {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let seen = self.arena.returned().epoch();
            match self.arena.lease_zeroed(bytes) {
                Ok(lease) => return Ok(lease),
                Err(Exhausted::Now) => {
                    if !self.arena.returned().wait_past(seen, Some(deadline)) {
                        let text =
                            format!("no buffer of {bytes} bytes within memory_limit; reads or views hold it all");
                        return Err(Error::new(ErrorKind::Busy, text));
                    }
                }
                Err(other) => return Err(exhausted(other, bytes)),
            }
        }
    }

    /// Writes `bytes`, at most [`CONTROL_BYTES`], at `offset` of files, and waits; the first error.
    pub(crate) fn write_all(&self, writes: &[(DeviceIndex, Arc<DeviceFile>)], offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_each(writes, offset, bytes)?.into_values().next().map_or(Ok(()), Err)
    }

    /// As [`Self::write_all`], with what failed by device.
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

    /// Syncs files, all at once, and waits; the first error. A failure poisons the device; it is never repeated.
    pub(crate) fn sync_all<'a>(
        &self,
        files: impl ExactSizeIterator<Item = (DeviceIndex, &'a Arc<DeviceFile>)>,
    ) -> Result<()> {
        self.sync_each(files).into_values().next().map_or(Ok(()), Err)
    }

    /// As [`Self::sync_all`], with what failed by device.
    pub(crate) fn sync_each<'a>(
        &self,
        files: impl ExactSizeIterator<Item = (DeviceIndex, &'a Arc<DeviceFile>)>,
    ) -> Failures {
        let ops: Vec<_> = files.map(|(device, file)| (device, Op::Sync { file: Arc::clone(file) })).collect();
        // In the order of the list, so that no two callers wait for each other.
        let involved = |device: &&Device| ops.iter().any(|(index, _)| *index == device.index);
        let _exclusive: Vec<_> = self.list.iter().filter(involved).map(|device| device.shard.lock_syncs()).collect();
        self.run_each(ops)
    }

    /// Executes operations and waits: those of one device on this thread, the others beside it.
    fn run_each(&self, ops: Vec<(DeviceIndex, Op)>) -> Failures {
        let mut failures = Failures::new();
        let Some(first) = ops.first().map(|(device, _)| *device) else { return failures };
        let (mut own, mut syncs, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (device, op) in ops {
            match op {
                Op::Sync { .. } if device == first => syncs.push(op),
                // Large writes of one device go side by side. Small ones would wait behind the frames that its shard has queued.
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

/// The error for a buffer that cannot be had.
pub(crate) fn exhausted(why: Exhausted, bytes: usize) -> Error {
    match why {
        Exhausted::Now => Error::new(ErrorKind::Busy, format!("no buffer of {bytes} bytes is free at the moment")),
        Exhausted::Never => Error::new(
            ErrorKind::MemoryLimit,
            format!("a buffer of {bytes} bytes can never fit within memory_limit; raise it"),
        ),
        Exhausted::System => {
            Error::new(ErrorKind::MemoryLimit, format!("the system has no memory for a buffer of {bytes} bytes"))
        }
    }
}
