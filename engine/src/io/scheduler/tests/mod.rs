//! Tests of the scheduler over the real drivers, over faulty drivers, and with loom.
//!
//! [`Rig`] is a device in a temporary directory with its shard. [`Outcomes`] is a sink that keeps every outcome.
//!
//! | Tests | File |
//! |---|---|
//! | the same tests on every driver | `conformance.rs` |
//! | limits, full disks, refused system calls | `environment.rs` |
//! | drivers that break or forget errors | `faults.rs` |
//! | the device's lock after a kill | `lock.rs` |
//! | interleavings of threads | `loom.rs` |
//! | several devices on one thread | `shared.rs` |
//! | speed against a bare io_uring loop | `speed.rs` |

mod conformance;
mod environment;
mod faults;
mod lock;
#[cfg(loom)]
mod loom;
mod shared;
mod speed;

use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Affinity, Batch, Priority, Request, ShardHandle, ShardThreads, Sink};
use crate::error::Result;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::Arena;
use crate::io::buffer::lease::Lease;
use crate::io::driver::DriverKind;
use crate::io::driver::interface::Op;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use crate::io::file::os_directory::{OsDirectory, OsDirectoryOptions};
use crate::metrics::{DeviceCounters, MemoryBudget, lock};
use crate::sync::{Guard, wait_for};
use std::sync::atomic::{AtomicBool, Ordering};

/// The driver and the neighbours of a test.
#[derive(Clone, Copy)]
struct On {
    kind: DriverKind,
    /// Other devices that the thread of the test's device serves.
    neighbours: usize,
}

impl From<DriverKind> for On {
    fn from(kind: DriverKind) -> Self {
        Self { kind, neighbours: 0 }
    }
}

/// The shard of a test's device, and the shards of the devices that share its thread.
struct Shards {
    own: ShardHandle,
    neighbours: Vec<(ShardHandle, Arc<dyn Directory>, tempfile::TempDir)>,
}

impl Shards {
    fn new(name: &str, on: On, dir: &Arc<dyn Directory>, arena: &Arena, counters: &Arc<DeviceCounters>) -> Self {
        let threads = ShardThreads::new(on.kind, arena.clone(), Some(1), Affinity::default(), None);
        let mut shards = Vec::new();
        let other = |nth: usize| {
            let tmp = tempfile::tempdir().expect("temporary directory");
            let dir: Arc<dyn Directory> = OsDirectory::open(&tmp.path().join("neighbours"), OPTIONS).expect("opened");
            let shard = threads.serve(&format!("{name}-{nth}"), Arc::clone(&dir), Arc::default()).expect("another");
            (shard, dir, tmp)
        };
        // Some neighbours are served before the device, some after it.
        shards.extend((0..on.neighbours / 2).map(other));
        let own = threads.serve(name, Arc::clone(dir), Arc::clone(counters)).expect("shard");
        shards.extend((on.neighbours / 2..on.neighbours).map(other));
        assert!(shards.iter().all(|(shard, ..)| shard.thread_id() == own.thread_id()));
        Self { own, neighbours: shards }
    }
}

impl Deref for Shards {
    type Target = ShardHandle;

    fn deref(&self) -> &ShardHandle {
        &self.own
    }
}

/// A device in a temporary directory with its shard.
struct Rig {
    // The fields are dropped in this order.
    shard: Shards,
    dir: Arc<dyn Directory>,
    arena: Arena,
    counters: Arc<DeviceCounters>,
    _tmp: tempfile::TempDir,
}

const OPTIONS: OsDirectoryOptions =
    OsDirectoryOptions { access: Access::ReadWrite, create: true, lock_wait: Duration::ZERO };

impl Rig {
    fn new(on: impl Into<On>) -> Self {
        Self::within(on, tempfile::tempdir().expect("temporary directory"), 32)
    }

    fn within(on: impl Into<On>, tmp: tempfile::TempDir, slabs: usize) -> Self {
        let dir: Arc<dyn Directory> = OsDirectory::open(&tmp.path().join("device"), OPTIONS).expect("opened");
        let arena = Arena::new(MemoryBudget::new(slabs * SLAB_BYTES), usize::MAX);
        let counters = Arc::new(DeviceCounters::default());
        let shard = Shards::new("test", on.into(), &dir, &arena, &counters);
        Self { shard, dir, arena, counters, _tmp: tmp }
    }

    fn lease(&self, len: usize) -> Lease {
        self.arena.lease(len).expect("room in the arena")
    }

    fn lease_zeroed(&self, len: usize) -> Lease {
        self.arena.lease_zeroed(len).expect("room in the arena")
    }

    /// Writes `bytes` at `offset` and waits.
    fn write(&self, file: &Arc<DeviceFile>, offset: u64, bytes: &[u8]) -> Result<()> {
        let requests = bytes.chunks(SLAB_BYTES).zip(0..).map(|(chunk, i)| {
            let mut lease = self.lease(chunk.len());
            lease.bytes_mut().expect("idle").copy_from_slice(chunk);
            write_of(file, offset + i * SLAB_BYTES as u64, &lease, i)
        });
        self.shard.run(requests.collect(), Priority::Write)
    }

    fn read(&self, file: &Arc<DeviceFile>, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut lease = self.lease(len);
        self.shard.run(vec![read_into(file, offset, &mut lease, 0)], Priority::Demand)?;
        Ok(lease.bytes().expect("idle").to_vec())
    }
}

fn read_into(file: &Arc<DeviceFile>, offset: u64, lease: &mut Lease, tag: u64) -> Request {
    let len = lease.len();
    let into = lease.read_target(0..len).expect("in range");
    Request { op: Op::Read { file: Arc::clone(file), offset, into }, tag }
}

fn write_of(file: &Arc<DeviceFile>, offset: u64, lease: &Lease, tag: u64) -> Request {
    let from = lease.write_source(0..lease.len()).expect("in range");
    Request { op: Op::Write { file: Arc::clone(file), offset, from }, tag }
}

fn sync_of(file: &Arc<DeviceFile>, tag: u64) -> Request {
    Request { op: Op::Sync { file: Arc::clone(file) }, tag }
}

/// A sink that keeps every outcome in the order of arrival.
#[derive(Default)]
struct Outcomes {
    seen: Mutex<Vec<(u64, Result<()>)>>,
    more: Condvar,
    /// Cancels a batch at the outcome with this number.
    cancel_at: Option<(usize, Arc<AtomicBool>)>,
}

impl Sink for Outcomes {
    fn complete(&self, tag: u64, outcome: Result<()>) {
        let count = {
            let mut seen = lock(&self.seen);
            seen.push((tag, outcome));
            seen.len()
        };
        if let Some((at, cancel)) = &self.cancel_at
            && count == *at
        {
            cancel.store(true, Ordering::Relaxed);
        }
        self.more.notify_all();
    }
}

impl Outcomes {
    fn wait_for(&self, count: usize) -> Guard<'_, Vec<(u64, Result<()>)>> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut seen = lock(&self.seen);
        while seen.len() < count {
            assert!(Instant::now() < deadline, "{} of {count} outcomes after a minute", seen.len());
            seen = wait_for(&self.more, seen, Some(Duration::from_millis(100)));
        }
        seen
    }
}

fn batch(requests: Vec<Request>, priority: Priority, sink: &Arc<Outcomes>) -> Batch {
    Batch { requests, priority, sink: Arc::clone(sink) as Arc<dyn Sink>, cancel: None }
}

/// Returns the CPU time of this process's threads whose names start with `name`, in nanoseconds.
fn cpu_ns(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs").flatten();
    tasks
        .filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|c| c.trim().starts_with(name)))
        .filter_map(|t| {
            std::fs::read_to_string(t.path().join("schedstat")).ok()?.split(' ').next()?.parse::<u64>().ok()
        })
        .sum()
}

/// Random numbers by splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(len).collect()
    }
}
