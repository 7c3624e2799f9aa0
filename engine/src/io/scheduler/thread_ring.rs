//! Thread rings: io_uring rings on which a calling thread drives its own demand reads, without a switch to the shard's
//! thread.
//!
//! How a read runs:
//! 1. A thread that has read a few times takes its rings, one per device, from the pool. It sets up those that are
//!    missing.
//! 2. It queues the requests of every device, so that all devices work before any is waited for.
//! 3. It waits for waves of completions, reports them to the sink and calls `step`, until every request has completed.
//! 4. It puts the rings back into the pool.
//!
//! Invariants:
//! - A ring is used by the thread that set it up, by one call at a time, and it is empty when the call returns.
//!   Therefore no other thread ever needs to complete its operations.
//! - Idle rings keep slabs and files registered. [`ThreadRings::close_idle`] releases them from any thread by closing
//!   the rings.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::batch::{Request, Sink};
use super::device_handle::DirectReadCount;
use super::helper_pace::HelperPace;
use super::helper_thread::HelperThread;
use super::shard_handle::ShardHandle;
use crate::error::Result;
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{Completion, Driver, Wait};
use crate::io::driver::uring::Uring;
use crate::metrics::lock;

/// Threads that have rings, at most. The reads of other threads are served by the shards.
const RINGS_MAX: usize = 16;
/// Reads of a thread before it gets rings, because setting rings up pays only for threads that read again.
const READS_BEFORE: u32 = 2;
/// Up to this many bytes a read waits for all completions at once. The caller uses the first part of a larger read
/// while the rest is in flight.
const WHOLE_BYTES: usize = 384 << 10;

/// How many completions a call waits for at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waves {
    /// All of a small batch. Three quarters of a large batch, then the rest. A smaller first wave leaves more to verify
    /// at the end. More and smaller waves cost more system calls than they hide.
    Halves,
    /// A quarter of what is in flight, for callers that do more than verify. The last waves are small, so that little
    /// is left to do after the last completion.
    Quarters {
        /// The bytes of a wave, at least.
        least: usize,
        /// True if `step` also runs before the first wait, because the caller has work that needs no block.
        begins: bool,
    },
}

thread_local! {
    static READS: Cell<u32> = const { Cell::new(0) };
}

/// The rings of one thread.
struct ThreadRing {
    owner: ThreadId,
    /// Rings by device.
    rings: Vec<Option<Uring>>,
}

#[derive(Default)]
struct RingPool {
    /// The least recently used first.
    idle: Vec<ThreadRing>,
    in_use: usize,
    /// Raised by [`ThreadRings::close_idle`], so that rings in use at that time are closed when they are put back.
    era: u64,
    /// True if the kernel refused a ring. The store then sets up no other one.
    refused: bool,
}

/// The thread rings of a store.
pub(crate) struct ThreadRings {
    arena: Arena,
    pool: Mutex<RingPool>,
    /// A thread that takes over half of a call's reads, on rings of its own.
    pub(crate) helper: HelperThread,
    pub(crate) helper_pace: HelperPace,
}

/// The requests for one device.
pub(crate) struct ThreadRingBatch<'a> {
    pub(crate) device: usize,
    pub(crate) shard: &'a ShardHandle,
    pub(crate) requests: Vec<Request>,
}

/// A demand read that the shard does not see but counts when it limits other classes.
struct DirectRead<'a>(&'a DirectReadCount);

impl<'a> DirectRead<'a> {
    fn new(count: &'a DirectReadCount) -> Self {
        count.begin();
        Self(count)
    }
}

impl Drop for DirectRead<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// One device's part of a call.
struct DeviceReads<'a> {
    ring: Uring,
    device: usize,
    queue: std::vec::IntoIter<Request>,
    /// Tags by request. An entry is none once the sink heard its outcome.
    tags: Vec<Option<u64>>,
    in_flight: usize,
    /// Bytes per request, on average.
    bytes_each: usize,
    _direct_read: DirectRead<'a>,
}

impl DeviceReads<'_> {
    /// Queues as many requests as the ring takes.
    fn fill_ring(&mut self) {
        while self.in_flight < self.ring.depth()
            && let Some(Request { op, tag }) = self.queue.next()
        {
            self.ring.queue(0, self.tags.len() as u64, op);
            self.tags.push(Some(tag));
            self.in_flight += 1;
        }
    }

    /// Returns how many completions to wait for.
    fn wave(&self, waves: Waves) -> usize {
        if let Waves::Quarters { least, .. } = waves {
            return (least / self.bytes_each.max(1)).max(self.in_flight / 4).clamp(1, self.in_flight);
        }
        let small = self.in_flight * self.bytes_each <= WHOLE_BYTES;
        let first = self.in_flight == self.tags.len() || 2 * self.in_flight > self.ring.depth();
        match small || !first {
            true => self.in_flight,
            false => (3 * self.in_flight).div_ceil(4),
        }
    }

    /// Submits, waits and reports. Returns `false` if the ring broke. Every request is reported in that case too.
    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>, sink: &dyn Sink) -> bool {
        let driven = self.ring.drive(wait, done);
        for completion in done.drain(..) {
            if let Some(tag) = self.tags.get_mut(completion.id as usize).and_then(Option::take) {
                self.in_flight -= 1;
                sink.complete(tag, completion.outcome);
            }
        }
        let Err(e) = driven else { return true };
        let queued = std::mem::take(&mut self.queue).map(|request| request.tag);
        for tag in self.tags.drain(..).flatten().chain(queued) {
            sink.complete(tag, Err(e.duplicate()));
        }
        self.in_flight = 0;
        false
    }
}

impl ThreadRings {
    pub(crate) fn new(arena: Arena, helper: Option<bool>) -> Self {
        let (helper, helper_pace) = (HelperThread::default(), HelperPace::new(helper));
        Self { arena, pool: Mutex::default(), helper, helper_pace }
    }

    /// Executes reads on the calling thread. The sink hears each request once, and `step` runs after each wave of
    /// completions.
    ///
    /// # Errors
    /// The batches, untouched, if this thread has no ring or a device has another driver. The caller then submits them
    /// to the shards.
    pub(crate) fn read<'a>(
        &self,
        batches: Vec<ThreadRingBatch<'a>>,
        waves: Waves,
        sink: &dyn Sink,
        step: &mut dyn FnMut(),
    ) -> Result<(), Vec<ThreadRingBatch<'a>>> {
        let reads = READS.get();
        READS.set(reads.saturating_add(1));
        if reads < READS_BEFORE || !batches.iter().all(|batch| batch.shard.drives_uring()) {
            return Err(batches);
        }
        let Some((mut own, era)) = self.take() else { return Err(batches) };
        if !self.set_up(&mut own, &batches) {
            return Err(batches);
        }
        let mut work: Vec<DeviceReads<'_>> = Vec::with_capacity(batches.len());
        for ThreadRingBatch { device, shard, requests } in batches {
            let Some(ring) = own.rings[device].take() else { continue };
            let bytes: usize = requests.iter().map(|request| request.op.len()).sum();
            work.push(DeviceReads {
                ring,
                device,
                bytes_each: bytes / requests.len().max(1),
                tags: Vec::with_capacity(requests.len()),
                queue: requests.into_iter(),
                in_flight: 0,
                _direct_read: DirectRead::new(shard.direct_reads()),
            });
        }
        let whole = Self::execute(&mut work, waves, sink, step);
        for DeviceReads { ring, device, .. } in work {
            own.rings[device] = Some(ring);
        }
        self.put_back(whole.then_some(own), era);
        Ok(())
    }

    /// Sets up the rings that the batches need. Returns `false` if the kernel refused a ring. The thread then no longer
    /// counts as one with rings.
    fn set_up(&self, own: &mut ThreadRing, batches: &[ThreadRingBatch<'_>]) -> bool {
        for batch in batches {
            if own.rings.len() <= batch.device {
                own.rings.resize_with(batch.device + 1, || None);
            }
            let ring = &mut own.rings[batch.device];
            if ring.is_none() {
                *ring = Uring::start_reader(&self.arena, Arc::clone(batch.shard.counters())).ok();
            }
            if ring.is_none() {
                let mut pool = lock(&self.pool);
                (pool.refused, pool.in_use) = (true, pool.in_use - 1);
                return false;
            }
        }
        true
    }

    /// Executes the reads of all devices. Returns `false` if a ring broke. Every request is reported in that case too.
    fn execute(work: &mut [DeviceReads<'_>], waves: Waves, sink: &dyn Sink, step: &mut dyn FnMut()) -> bool {
        let mut done = Vec::new();
        let mut whole = true;
        let begins = matches!(waves, Waves::Quarters { begins: true, .. });
        if work.len() > 1 || begins {
            // All devices begin before any is waited for.
            for part in work.iter_mut() {
                part.fill_ring();
                whole &= part.drive(Wait::No, &mut done, sink);
            }
        }
        if begins {
            step();
        }
        loop {
            let mut busy = false;
            for part in work.iter_mut() {
                part.fill_ring();
                if part.in_flight > 0 {
                    busy = true;
                    let wave = part.wave(waves);
                    whole &= part.drive(Wait::Completions(wave), &mut done, sink);
                    step();
                }
            }
            if !busy {
                return whole;
            }
        }
    }

    /// Returns the rings of this thread, which may be none yet, with the current era. Returns none if too many threads
    /// use rings or the kernel refuses them.
    fn take(&self) -> Option<(ThreadRing, u64)> {
        let owner = std::thread::current().id();
        let mut pool = lock(&self.pool);
        if pool.refused {
            return None;
        }
        let era = pool.era;
        let own = pool.idle.iter().position(|rings| rings.owner == owner);
        if own.is_none() && pool.idle.len() + pool.in_use >= RINGS_MAX {
            if pool.idle.is_empty() {
                return None;
            }
            // The least recently used rings, perhaps of a thread that has exited.
            drop(pool.idle.remove(0));
        }
        pool.in_use += 1;
        let rings = own.map(|at| pool.idle.remove(at));
        Some((rings.unwrap_or(ThreadRing { owner, rings: Vec::new() }), era))
    }

    fn put_back(&self, rings: Option<ThreadRing>, era: u64) {
        let mut pool = lock(&self.pool);
        pool.in_use -= 1;
        if pool.era == era {
            pool.idle.extend(rings);
        }
    }

    /// Closes idle rings, which unregisters their slabs and files. Callers use it after [`Arena::trim`] and after they
    /// removed files.
    pub(crate) fn close_idle(&self) {
        let idle = {
            let mut pool = lock(&self.pool);
            pool.era += 1;
            std::mem::take(&mut pool.idle)
        };
        drop(idle);
    }
}
