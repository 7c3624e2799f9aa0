//! Reads that the calling thread drives itself, on a ring of its own: no hop to the shard and back.
//!
//! A ring_set serves one call at a time and is empty when the call returns, so a ring that only its maker may enter is enough and
//! nothing is ever left for another thread to pick up. Idle lanes hold slabs and files registered; [`ThreadRings::close_idle`] lets
//! go of them from any thread, by closing the rings.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::ShardHandle;
use super::batch::{Request, Sink};
use super::device_queue::DirectReadCount;
use crate::error::Result;
use crate::io::buffer::arena::Arena;
use crate::io::driver::interface::{Completion, Driver, Wait};
use crate::io::driver::uring::Uring;
use crate::metrics::lock;

/// ThreadRings that may be idle or in use, over all threads; further threads go through the shards.
const RINGS_MAX: usize = 16;
/// Reads of a thread that go through the shards before it gets a ring_set: setting rings up pays only for threads that stay.
const READS_BEFORE: u32 = 2;
/// So many bytes are waited for in one go; of more, the rest is in flight while the first are used.
const WHOLE_BYTES: usize = 384 << 10;
thread_local! {
    static READS: Cell<u32> = const { Cell::new(0) };
}

struct ThreadRing {
    owner: ThreadId,
    /// By device.
    rings: Vec<Option<Uring>>,
}

#[derive(Default)]
struct Pool {
    idle: Vec<ThreadRing>,
    in_use: usize,
    /// Raised by [`ThreadRings::close_idle`]: lanes in use then are not kept either.
    era: u64,
    /// No ring could be had: not tried again.
    refused: bool,
}

/// The lanes of a store.
pub(crate) struct ThreadRings {
    arena: Arena,
    pool: Mutex<Pool>,
}

/// The requests for one device.
pub(crate) struct ThreadRingBatch<'a> {
    pub(crate) device: usize,
    pub(crate) shard: &'a ShardHandle,
    pub(crate) requests: Vec<Request>,
}

/// A demand read that the shard does not see, for its admission of lesser requests.
struct Reading<'a>(&'a DirectReadCount);

impl<'a> Reading<'a> {
    fn new(direct_reads: &'a DirectReadCount) -> Self {
        direct_reads.begin();
        Self(direct_reads)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// One device's part of a call.
struct Work<'a> {
    ring: Uring,
    device: usize,
    queue: std::vec::IntoIter<Request>,
    /// Tags by request; none once it was told.
    tags: Vec<Option<u64>>,
    in_flight: usize,
    bytes_each: usize,
    _reading: Reading<'a>,
}

impl Work<'_> {
    /// Queues what there is room for.
    fn feed(&mut self) {
        while self.in_flight < self.ring.depth()
            && let Some(Request { op, tag }) = self.queue.next()
        {
            self.ring.queue(0, self.tags.len() as u64, op);
            self.tags.push(Some(tag));
            self.in_flight += 1;
        }
    }

    /// How many completions to wait for: all of a small batch; of a large one three quarters, as long as there is more behind or
    /// nothing has ended yet, and then the rest. With half, fewer parts were whole by then and the rest had more to check; more
    /// and smaller slices cost more by their calls than they hide.
    fn slice(&self) -> usize {
        let small = self.in_flight * self.bytes_each <= WHOLE_BYTES;
        let first = self.in_flight == self.tags.len() || 2 * self.in_flight > self.ring.depth();
        match small || !first {
            true => self.in_flight,
            false => (3 * self.in_flight).div_ceil(4),
        }
    }

    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>, sink: &dyn Sink) -> Result<()> {
        let driven = self.ring.drive(wait, done);
        for completion in done.drain(..) {
            if let Some(tag) = self.tags.get_mut(completion.id as usize).and_then(Option::take) {
                self.in_flight -= 1;
                sink.complete(tag, completion.outcome);
            }
        }
        driven
    }
}

impl ThreadRings {
    pub(crate) fn new(arena: Arena) -> Self {
        Self { arena, pool: Mutex::default() }
    }

    /// Executes reads on the calling thread; `step` runs whenever some have ended. Each request is told to `sink` once.
    ///
    /// # Errors
    /// The batches, untouched: this thread has no ring_set, or a device has another driver. Hand them to the shards.
    pub(crate) fn read<'a>(
        &self,
        batches: Vec<ThreadRingBatch<'a>>,
        sink: &dyn Sink,
        step: &mut dyn FnMut(),
    ) -> Result<(), Vec<ThreadRingBatch<'a>>> {
        let reads = READS.get();
        READS.set(reads.saturating_add(1));
        if reads < READS_BEFORE || !batches.iter().all(|batch| batch.shard.drives_uring()) {
            return Err(batches);
        }
        let Some((mut ring_set, era)) = self.take() else { return Err(batches) };
        for batch in &batches {
            if ring_set.rings.len() <= batch.device {
                ring_set.rings.resize_with(batch.device + 1, || None);
            }
            let ring = &mut ring_set.rings[batch.device];
            if ring.is_none() {
                *ring = Uring::start_reader(&self.arena, Arc::clone(batch.shard.counters())).ok();
            }
            if ring.is_none() {
                let mut pool = lock(&self.pool);
                (pool.refused, pool.in_use) = (true, pool.in_use - 1);
                return Err(batches);
            }
        }
        let mut work: Vec<Work<'_>> = Vec::with_capacity(batches.len());
        for ThreadRingBatch { device, shard, requests } in batches {
            let Some(ring) = ring_set.rings[device].take() else { continue };
            let bytes: usize = requests.iter().map(|request| request.op.len()).sum();
            work.push(Work {
                ring,
                device,
                bytes_each: bytes / requests.len().max(1),
                tags: Vec::with_capacity(requests.len()),
                queue: requests.into_iter(),
                in_flight: 0,
                _reading: Reading::new(shard.direct_reads()),
            });
        }
        let whole = Self::execute(&mut work, sink, step);
        for Work { ring, device, .. } in work {
            ring_set.rings[device] = Some(ring);
        }
        self.put_back(whole.then_some(ring_set), era);
        Ok(())
    }

    /// `false` when a ring broke; everything was told nevertheless.
    fn execute(work: &mut [Work<'_>], sink: &dyn Sink, step: &mut dyn FnMut()) -> bool {
        let mut done = Vec::new();
        let mut whole = true;
        if work.len() > 1 {
            // All devices begin before any is waited for.
            for part in work.iter_mut() {
                part.feed();
                whole &= Self::drive(part, Wait::No, &mut done, sink);
            }
        }
        loop {
            let mut busy = false;
            for part in work.iter_mut() {
                part.feed();
                if part.in_flight > 0 {
                    busy = true;
                    whole &= Self::drive(part, Wait::Completions(part.slice()), &mut done, sink);
                    step();
                }
            }
            if !busy {
                return whole;
            }
        }
    }

    fn drive(part: &mut Work<'_>, wait: Wait, done: &mut Vec<Completion>, sink: &dyn Sink) -> bool {
        let Err(e) = part.drive(wait, done, sink) else { return true };
        let queued = std::mem::take(&mut part.queue).map(|request| request.tag);
        for tag in part.tags.drain(..).flatten().chain(queued) {
            sink.complete(tag, Err(e.duplicate()));
        }
        part.in_flight = 0;
        false
    }

    /// The ring_set of this thread, or a new one.
    fn take(&self) -> Option<(ThreadRing, u64)> {
        let owner = std::thread::current().id();
        let mut pool = lock(&self.pool);
        if pool.refused {
            return None;
        }
        let era = pool.era;
        let own = pool.idle.iter().position(|ring_set| ring_set.owner == owner);
        if own.is_none() && pool.idle.len() + pool.in_use >= RINGS_MAX {
            if pool.idle.is_empty() {
                return None;
            }
            // Perhaps of a thread that has ended; the least recently used one.
            drop(pool.idle.remove(0));
        }
        pool.in_use += 1;
        let ring_set = own.map(|at| pool.idle.remove(at));
        Some((ring_set.unwrap_or(ThreadRing { owner, rings: Vec::new() }), era))
    }

    fn put_back(&self, ring_set: Option<ThreadRing>, era: u64) {
        let mut pool = lock(&self.pool);
        pool.in_use -= 1;
        if pool.era == era {
            pool.idle.extend(ring_set);
        }
    }

    /// Lets go of slabs and files that lanes have registered: after [`Arena::trim`], and when files were removed.
    pub(crate) fn close_idle(&self) {
        let idle = {
            let mut pool = lock(&self.pool);
            pool.era += 1;
            std::mem::take(&mut pool.idle)
        };
        drop(idle);
    }
}
