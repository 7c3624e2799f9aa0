//! One device of a shard: its inbox and queues, and what of them may be under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::batch::{AcceptedBatch, PendingRequest, Priority};
use super::inbox::Inbox;
use super::threads::DeviceGuard;
use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::{DriverStatus, Op};
use crate::io::file::device_file::Poison;
use crate::io::planted;
use crate::metrics::DeviceCounters;

pub(super) const CLASSES: usize = 4;
/// Completions per slice.
const SLICE: usize = 16;
/// Requests in flight per priority when no demand read is about, and while one is: it queues behind these at the device.
const LIMITS: [usize; CLASSES] = [usize::MAX, 64, 32, 8];
const LIMITS_BESIDE_DEMAND: [usize; CLASSES] = [usize::MAX, 16, 8, 2];
/// Writes in flight once no demand read has been about for long: a disk that nobody waits for writes faster with more of them.
const WRITES_UNDISTURBED: usize = 128;
/// Writes that end, without a demand read and in time, for each that the limit grows by.
const WRITES_PER_STEP: usize = 8;
/// So long a write takes at most where there may be more of them: the first demand read that comes waits for all that are there.
const WRITE_WAIT: Duration = Duration::from_millis(25);
/// Room in the driver that demand reads leave to the others, so that a backlog of reads does not stop commits.
const ROOM_FOR_OTHERS: usize = 16 + 8 + 2;

/// Demand reads that callers drive themselves, see [`super::ThreadRings`].
#[derive(Default)]
pub(super) struct DirectReadCount {
    now: AtomicUsize,
    begun: AtomicUsize,
}

impl DirectReadCount {
    pub(super) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.now.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a device's handle and its port share.
#[derive(Clone)]
pub(super) struct DeviceHandle {
    pub(super) inbox: Arc<Inbox>,
    pub(super) status: Arc<Mutex<DriverStatus>>,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) direct_reads: Arc<DirectReadCount>,
    pub(super) poison: Arc<Poison>,
}

impl DeviceHandle {
    pub(super) fn new(poison: Arc<Poison>, counters: Arc<DeviceCounters>) -> Self {
        let (inbox, status) = (Arc::new(Inbox::new()), Arc::default());
        Self { inbox, status, counters, direct_reads: Arc::default(), poison }
    }
}

/// See the top of the file.
pub(super) struct DeviceQueue {
    pub(super) handle: DeviceHandle,
    queues: [VecDeque<AcceptedBatch>; CLASSES],
    in_flight: [usize; CLASSES],
    /// Writes that ended in time since a demand read was about, less those that did not, up to where more make no difference.
    undisturbed: usize,
    /// Of [`DirectReadCount::begun`], as last seen.
    direct_reads_seen: usize,
    /// Files with a sync in flight.
    syncing: Vec<u64>,
    /// As it was before the inbox was last emptied.
    closing: bool,
    /// Goes last.
    _guard: Option<DeviceGuard>,
}

impl DeviceQueue {
    pub(super) fn new(handle: DeviceHandle, kept: Option<DeviceGuard>) -> Self {
        let (queues, in_flight) = (Default::default(), [0; CLASSES]);
        let (undisturbed, direct_reads_seen, syncing) = (0, 0, Vec::new());
        Self { handle, queues, in_flight, undisturbed, direct_reads_seen, syncing, closing: false, _guard: kept }
    }

    /// From the inbox to the queues.
    pub(super) fn take_in(&mut self) {
        self.closing = self.handle.inbox.is_closing();
        while let Some(batch) = self.handle.inbox.pop() {
            self.queues[batch.priority as usize].push_back(batch);
        }
    }

    /// The next operation of a priority that may begin now.
    pub(super) fn next(&mut self, class: usize, depth: usize) -> Option<(Op, PendingRequest)> {
        while self.in_flight[class] < self.limit(class)
            && depth.saturating_sub(self.under_way()) > self.room_kept(class)
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

    fn room_kept(&self, class: usize) -> usize {
        let demand = class == Priority::Demand as usize;
        if demand && self.in_flight[class] > 0 { ROOM_FOR_OTHERS } else { 0 }
    }

    fn limit(&mut self, class: usize) -> usize {
        let begun = self.handle.direct_reads.begun.load(Ordering::Relaxed);
        let demand =
            self.in_flight[Priority::Demand as usize] > 0 || self.handle.direct_reads.now.load(Ordering::Relaxed) > 0;
        if demand || begun != self.direct_reads_seen {
            (self.undisturbed, self.direct_reads_seen) = (0, begun);
        }
        match demand {
            true => LIMITS_BESIDE_DEMAND[class],
            false if class == Priority::Write as usize => LIMITS[class] + self.undisturbed / WRITES_PER_STEP,
            false => LIMITS[class],
        }
    }

    fn refusal(&self, op: &Op, cancelled: bool) -> Option<Error> {
        if cancelled {
            return Some(Error::new(ErrorKind::Cancelled, "cancelled before it was submitted"));
        }
        if op.is_read() { None } else { self.handle.poison.check().err() }
    }

    /// An operation begins that syncs this file, if any.
    pub(super) fn began(&mut self, class: usize, sync: Option<u64>) {
        self.in_flight[class] += 1;
        if class == Priority::Demand as usize {
            self.undisturbed = 0;
        }
        self.syncing.extend(sync);
    }

    /// A write takes so long, where that is known.
    pub(super) fn wrote(&mut self, took: Option<Duration>) {
        let most = (WRITES_UNDISTURBED - LIMITS[Priority::Write as usize]) * WRITES_PER_STEP;
        self.undisturbed = match took.is_some_and(|took| took > WRITE_WAIT) {
            true => self.undisturbed.saturating_sub(1),
            false => (self.undisturbed + 1).min(most),
        };
    }

    /// It has ended. What its caller is to be told.
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

    pub(super) fn under_way(&self) -> usize {
        self.in_flight.iter().sum()
    }

    /// How many completions to wait for, none while idle, and whether a demand read is among them. Syncs are slow and end alone.
    /// While nobody waits, slices are short where few are in flight: a demand read that comes meanwhile may have to wait for the
    /// slice to end.
    pub(super) fn slice(&self) -> Option<(bool, usize)> {
        match (self.under_way(), self.in_flight[Priority::Demand as usize]) {
            (0, _) => None,
            (total, 0) => Some((false, ((total - self.syncing.len()) / 4).clamp(1, SLICE))),
            (_, demand) => Some((true, demand.min(SLICE))),
        }
    }

    /// Before the thread blocks. `false`: something has come in, do not block.
    pub(super) fn fall_asleep(&self) -> bool {
        self.handle.inbox.fall_asleep() && self.handle.inbox.is_closing() == self.closing
    }

    /// It was closed, and what it had accepted is done.
    pub(super) fn is_done(&self) -> bool {
        self.closing && self.under_way() == 0 && self.queues.iter().all(VecDeque::is_empty)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const DEMAND: usize = Priority::Demand as usize;
    const WRITE: usize = Priority::Write as usize;

    fn write(port: &mut DeviceQueue, times: usize) {
        (0..times).for_each(|_| port.wrote(Some(Duration::from_millis(1))));
    }

    /// Writes get more room the longer nobody reads, and lose it to the first who does, by the shard or on its own, and where they
    /// take long.
    #[test]
    fn writes_have_more_room_while_nobody_reads() {
        let handle = DeviceHandle::new(Arc::default(), Arc::default());
        let direct_reads = Arc::clone(&handle.direct_reads);
        let mut port = DeviceQueue::new(handle, None);
        assert_eq!(port.limit(WRITE), LIMITS[WRITE]);
        write(&mut port, 10_000);
        assert_eq!(port.limit(WRITE), WRITES_UNDISTURBED);
        (0..10 * WRITES_PER_STEP).for_each(|_| port.wrote(Some(WRITE_WAIT * 2)));
        assert_eq!(port.limit(WRITE), WRITES_UNDISTURBED - 10);
        (0..10_000).for_each(|_| port.wrote(Some(WRITE_WAIT * 2)));
        assert_eq!(port.limit(WRITE), LIMITS[WRITE]);
        (0..10_000).for_each(|_| port.wrote(None));
        assert_eq!(port.limit(WRITE), WRITES_UNDISTURBED);
        port.began(DEMAND, None);
        assert_eq!(port.limit(WRITE), LIMITS_BESIDE_DEMAND[WRITE]);
        port.ended(DEMAND, None, Ok(())).expect("not poisoned");
        assert_eq!(port.limit(WRITE), LIMITS[WRITE]);
        write(&mut port, 10 * WRITES_PER_STEP);
        assert_eq!(port.limit(WRITE), LIMITS[WRITE] + 10);
        direct_reads.begin();
        assert_eq!(port.limit(WRITE), LIMITS_BESIDE_DEMAND[WRITE]);
        direct_reads.end();
        assert_eq!(port.limit(WRITE), LIMITS[WRITE]);
        write(&mut port, 10_000);
        // One that began and ended unseen counts as well.
        direct_reads.begin();
        direct_reads.end();
        assert_eq!(port.limit(WRITE), LIMITS[WRITE]);
        assert_eq!(port.limit(Priority::Clean as usize), LIMITS[Priority::Clean as usize]);
    }
}
