//! The queue of one device in a shard: batches by priority, and the limits of their operations in flight.
//!
//! The shard's thread is the only caller. At each turn it moves batches from the device's inbox to the queue of their
//! class, takes the operations that may begin, and reports the operations that completed.
//!
//! Invariants:
//! - A file has one sync in flight, because the kernel reports a write-back error to one sync of a file only.
//! - After a failed sync the device is poisoned: later writes and syncs are refused, and no sync in flight is believed.
//! - Every class but demand reads has a limit of operations in flight. The limit is lower while a demand read is in
//!   flight, because the read waits behind them in the device.

use std::collections::VecDeque;
use std::time::Duration;

use super::batch::{AcceptedBatch, PendingRequest, Priority};
use super::device_guard::DeviceGuard;
use super::device_handle::DeviceHandle;
use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::Op;
use crate::io::planted;

pub(super) const CLASSES: usize = 4;
/// Completions per slice.
const SLICE: usize = 16;
/// The most requests of each class in flight, while no demand read is in flight.
const LIMITS: [usize; CLASSES] = [usize::MAX, 64, 32, 8];
/// The same while a demand read is in flight, because it waits behind them in the device.
const LIMITS_WITH_DEMAND: [usize; CLASSES] = [usize::MAX, 16, 8, 2];
/// Writes in flight after a long time without demand reads. More writes in flight make a disk faster.
const WRITES_UNDISTURBED: usize = 128;
/// Undisturbed writes that must complete in time for each write that the limit grows by.
const WRITES_PER_STEP: usize = 8;
/// Slower writes than this shrink the write limit, because the next demand read waits behind all writes in flight.
const WRITE_WAIT: Duration = Duration::from_millis(25);
/// Entries of the driver that demand reads leave to other classes, so that a backlog of reads does not stop commits.
const ROOM_FOR_OTHERS: usize = 16 + 8 + 2;

/// The queue of one device.
pub(super) struct DeviceQueue {
    pub(super) handle: DeviceHandle,
    queues: [VecDeque<AcceptedBatch>; CLASSES],
    in_flight: [usize; CLASSES],
    /// Writes that completed in time since the last demand read, minus slow writes. It stays within the range that
    /// changes the limit.
    undisturbed: usize,
    /// The count of begun direct reads when it was last read.
    direct_reads_seen: usize,
    /// Files with a sync in flight.
    syncing: Vec<u64>,
    /// True if the inbox was closed before it was last emptied.
    closing: bool,
    // Dropped last, so that the lock outlives every operation.
    _guard: Option<DeviceGuard>,
}

impl DeviceQueue {
    pub(super) fn new(handle: DeviceHandle, guard: Option<DeviceGuard>) -> Self {
        let (queues, in_flight) = (Default::default(), [0; CLASSES]);
        let (undisturbed, direct_reads_seen, syncing) = (0, 0, Vec::new());
        Self { handle, queues, in_flight, undisturbed, direct_reads_seen, syncing, closing: false, _guard: guard }
    }

    /// Moves batches from the inbox to the queue of their class.
    pub(super) fn take_in(&mut self) {
        self.closing = self.handle.inbox.is_closing();
        while let Some(batch) = self.handle.inbox.pop() {
            self.queues[batch.priority as usize].push_back(batch);
        }
    }

    /// Returns the next operation of a class that may begin now. `depth` is the number of operations that the driver
    /// takes.
    pub(super) fn next(&mut self, class: usize, depth: usize) -> Option<(Op, PendingRequest)> {
        while self.in_flight[class] < self.limit(class)
            && depth.saturating_sub(self.in_flight()) > self.reserved_for_others(class)
        {
            let batch = self.queues[class].front_mut()?;
            if batch.next_sync().is_some_and(|file| self.syncing.contains(&file)) {
                return None;
            }
            let cancelled = batch.is_cancelled();
            let Some((op, pending)) = batch.next() else {
                self.queues[class].pop_front();
                continue;
            };
            if batch.is_empty() {
                self.handle.counters.queued(class == Priority::Demand as usize, batch.waited());
                self.queues[class].pop_front();
            }
            match self.refusal(&op, cancelled) {
                Some(error) => {
                    drop(op);
                    pending.complete(Err(error));
                }
                None => return Some((op, pending)),
            }
        }
        None
    }

    fn reserved_for_others(&self, class: usize) -> usize {
        let demand = class == Priority::Demand as usize;
        if demand && self.in_flight[class] > 0 { ROOM_FOR_OTHERS } else { 0 }
    }

    /// Returns how many operations of a class may be in flight now.
    fn limit(&mut self, class: usize) -> usize {
        let begun = self.handle.direct_reads.begun();
        let demand = self.in_flight[Priority::Demand as usize] > 0 || self.handle.direct_reads.in_flight() > 0;
        if demand || begun != self.direct_reads_seen {
            (self.undisturbed, self.direct_reads_seen) = (0, begun);
        }
        match demand {
            true => LIMITS_WITH_DEMAND[class],
            false if class == Priority::Write as usize => LIMITS[class] + self.undisturbed / WRITES_PER_STEP,
            false => LIMITS[class],
        }
    }

    fn refusal(&self, op: &Op, cancelled: bool) -> Option<Error> {
        if cancelled {
            return Some(Error::new(ErrorKind::Cancelled, "I/O request: it was cancelled before it was submitted"));
        }
        if op.is_read() { None } else { self.handle.poison.check().err() }
    }

    /// Counts an operation that begins. `sync` is the file that it syncs, if any.
    pub(super) fn began(&mut self, class: usize, sync: Option<u64>) {
        self.in_flight[class] += 1;
        if class == Priority::Demand as usize {
            self.undisturbed = 0;
        }
        self.syncing.extend(sync);
    }

    /// Adapts the write limit to a write that completed. `took` is none if the time means nothing, as in a simulation.
    pub(super) fn wrote(&mut self, took: Option<Duration>) {
        let most = (WRITES_UNDISTURBED - LIMITS[Priority::Write as usize]) * WRITES_PER_STEP;
        self.undisturbed = match took.is_some_and(|took| took > WRITE_WAIT) {
            true => self.undisturbed.saturating_sub(1),
            false => (self.undisturbed + 1).min(most),
        };
    }

    /// Counts an operation that completed. Returns the outcome that its caller hears.
    pub(super) fn ended(&mut self, class: usize, sync: Option<u64>, outcome: Result<()>) -> Result<()> {
        self.in_flight[class] -= 1;
        let Some(file) = sync else { return outcome };
        self.syncing.retain(|&f| f != file);
        match outcome {
            Err(e) if planted!(SyncRetried) => Err(e),
            Err(e) => {
                self.handle.poison.set(&e);
                Err(e)
            }
            Ok(()) => self.handle.poison.check(),
        }
    }

    /// Returns how many operations are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.iter().sum()
    }

    /// Returns how many completions to wait for, and whether a demand read is among them. Returns none while idle.
    ///
    /// Syncs are slow and complete alone, so they do not count. A demand read that arrives may have to wait for the end
    /// of the slice. Without one in flight, a slice is therefore a quarter of the operations, and at most [`SLICE`].
    pub(super) fn slice(&self) -> Option<(bool, usize)> {
        match (self.in_flight(), self.in_flight[Priority::Demand as usize]) {
            (0, _) => None,
            (total, 0) => Some((false, ((total - self.syncing.len()) / 4).clamp(1, SLICE))),
            (_, demand) => Some((true, demand.min(SLICE))),
        }
    }

    /// Announces that the thread is about to block. Returns `false` if a batch is waiting or the inbox was closed, and
    /// then the thread must not block.
    pub(super) fn fall_asleep(&self) -> bool {
        self.handle.inbox.fall_asleep() && self.handle.inbox.is_closing() == self.closing
    }

    /// Returns whether the inbox holds a batch or an operation is in flight.
    #[cfg(feature = "sim")]
    pub(super) fn is_busy(&self) -> bool {
        !self.handle.inbox.is_empty() || self.in_flight() > 0
    }

    /// Returns whether the device was closed and all accepted batches have completed.
    pub(super) fn is_done(&self) -> bool {
        self.closing && self.in_flight() == 0 && self.queues.iter().all(VecDeque::is_empty)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    const DEMAND: usize = Priority::Demand as usize;
    const WRITE: usize = Priority::Write as usize;

    fn write(queue: &mut DeviceQueue, times: usize) {
        (0..times).for_each(|_| queue.wrote(Some(Duration::from_millis(1))));
    }

    /// The write limit grows while no demand read is in flight. It falls back at the first demand read, through the
    /// shard or direct, and it shrinks with slow writes.
    #[test]
    fn the_write_limit_grows_without_demand_reads() {
        let handle = DeviceHandle::new(Arc::default(), Arc::default());
        let direct_reads = Arc::clone(&handle.direct_reads);
        let mut queue = DeviceQueue::new(handle, None);
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE]);
        write(&mut queue, 10_000);
        assert_eq!(queue.limit(WRITE), WRITES_UNDISTURBED);
        (0..10 * WRITES_PER_STEP).for_each(|_| queue.wrote(Some(WRITE_WAIT * 2)));
        assert_eq!(queue.limit(WRITE), WRITES_UNDISTURBED - 10);
        (0..10_000).for_each(|_| queue.wrote(Some(WRITE_WAIT * 2)));
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE]);
        (0..10_000).for_each(|_| queue.wrote(None));
        assert_eq!(queue.limit(WRITE), WRITES_UNDISTURBED);
        queue.began(DEMAND, None);
        assert_eq!(queue.limit(WRITE), LIMITS_WITH_DEMAND[WRITE]);
        queue.ended(DEMAND, None, Ok(())).expect("not poisoned");
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE]);
        write(&mut queue, 10 * WRITES_PER_STEP);
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE] + 10);
        direct_reads.begin();
        assert_eq!(queue.limit(WRITE), LIMITS_WITH_DEMAND[WRITE]);
        direct_reads.end();
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE]);
        write(&mut queue, 10_000);
        // A direct read that began and completed between two turns counts as well.
        direct_reads.begin();
        direct_reads.end();
        assert_eq!(queue.limit(WRITE), LIMITS[WRITE]);
        assert_eq!(queue.limit(Priority::Clean as usize), LIMITS[Priority::Clean as usize]);
    }
}
