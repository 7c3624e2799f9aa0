//! The loop of a shard: inbox to queues, queues to driver by priority, completions to sinks.
//!
//! A sync that fails poisons the device: later writes and syncs are refused, and no sync that was under way is believed. The
//! kernel reports a write-back error to one sync of a file and success to the next, so a file has one sync in flight.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::batch::{Accepted, Pending, Priority};
use super::inbox::Inbox;
use crate::device::driver::{Completion, Driver, DriverStatus, Op, Wait};
use crate::device::environment::{Mutant, mutated};
use crate::device::file::Poison;
use crate::error::{Error, ErrorKind};
use crate::metrics::{DeviceCounters, lock};

const CLASSES: usize = 4;
/// Completions per slice.
const SLICE: usize = 16;
/// Requests in flight per priority when no demand read is about, and while one is: it queues behind these at the device.
const LIMITS: [usize; CLASSES] = [usize::MAX, 64, 32, 8];
const LIMITS_BESIDE_DEMAND: [usize; CLASSES] = [usize::MAX, 16, 8, 2];
/// Room in the driver that demand reads leave to the others, so that a backlog of reads does not stop commits.
const ROOM_FOR_OTHERS: usize = 16 + 8 + 2;

struct Flight {
    pending: Pending,
    class: usize,
    /// The file that it syncs.
    sync: Option<u64>,
}

pub(super) struct Shard {
    // Dropped first: with the driver gone nothing is in flight any more.
    driver: Box<dyn Driver>,
    inbox: Arc<Inbox>,
    queues: [VecDeque<Accepted>; CLASSES],
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    in_flight: [usize; CLASSES],
    /// Files with a sync in flight.
    syncing: Vec<u64>,
    /// Demand reads that callers drive themselves, see [`super::Lanes`].
    beside: Arc<AtomicUsize>,
    poison: Arc<Poison>,
    status: Arc<Mutex<DriverStatus>>,
    counters: Arc<DeviceCounters>,
}

impl Shard {
    pub(super) fn new(
        driver: Box<dyn Driver>,
        inbox: Arc<Inbox>,
        poison: Arc<Poison>,
        status: Arc<Mutex<DriverStatus>>,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        inbox.set_waker(driver.waker());
        *lock(&status) = DriverStatus { name: driver.name(), notes: driver.notes().to_vec() };
        Self {
            driver,
            inbox,
            queues: Default::default(),
            flights: Vec::new(),
            free: Vec::new(),
            in_flight: [0; CLASSES],
            syncing: Vec::new(),
            beside: Arc::default(),
            poison,
            status,
            counters,
        }
    }

    pub(super) fn beside(self, beside: Arc<AtomicUsize>) -> Self {
        Self { beside, ..self }
    }

    /// Until closed and all done, or until the driver breaks.
    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        let mut notes = self.driver.notes().len();
        loop {
            let closing = self.inbox.is_closing();
            self.take_in();
            let wait = self.wait();
            if closing && wait == Wait::Wake {
                return;
            }
            // Announced before every wait that may block, so that a new batch ends it, or its slice.
            let wait = if self.inbox.fall_asleep() && self.inbox.is_closing() == closing { wait } else { Wait::No };
            let driven = self.driver.drive(wait, &mut done);
            self.inbox.woke_up();
            for completion in done.drain(..) {
                self.complete(completion);
            }
            if let Err(e) = driven {
                return self.fail(&e);
            }
            if self.driver.notes().len() != notes {
                notes = self.driver.notes().len();
                lock(&self.status).notes = self.driver.notes().to_vec();
            }
        }
    }

    /// From the inbox to the queues, and from there to the driver as far as there is room.
    pub(super) fn take_in(&mut self) {
        while let Some(batch) = self.inbox.pop() {
            self.queues[batch.priority as usize].push_back(batch);
        }
        self.issue();
    }

    /// One turn of [`Self::run`] for a driver that needs no thread: takes in what has come and lets something end. Whether
    /// anything was to be done.
    #[cfg(feature = "sim")]
    pub(super) fn turn(&mut self) -> bool {
        self.take_in();
        if self.in_flight.iter().all(|count| *count == 0) {
            return false;
        }
        let mut done = Vec::new();
        // A driver without a thread cannot break.
        let _ = self.driver.drive(Wait::Completions(1), &mut done);
        for completion in done {
            self.complete(completion);
        }
        true
    }

    /// Whether a turn would do anything.
    #[cfg(feature = "sim")]
    pub(super) fn is_busy(&self) -> bool {
        !self.inbox.is_empty() || self.in_flight.iter().any(|count| *count > 0)
    }

    /// How to wait: idle for a wake-up, otherwise for a slice of what is most urgent. Syncs are slow and end alone. While nobody
    /// waits, slices are short where few are in flight: a demand read that comes meanwhile may have to wait for the slice to end.
    fn wait(&self) -> Wait {
        let total: usize = self.in_flight.iter().sum();
        let demand = self.in_flight[Priority::Demand as usize];
        match (total, demand) {
            (0, _) => Wait::Wake,
            (_, 0) => Wait::Completions(((total - self.syncing.len()) / 4).clamp(1, SLICE)),
            _ => Wait::Completions(demand.min(SLICE)),
        }
    }

    fn issue(&mut self) {
        for class in 0..CLASSES {
            while self.in_flight[class] < self.limit(class) && self.driver.room() > self.room_kept(class) {
                let Some(batch) = self.queues[class].front_mut() else { break };
                if batch.next_sync().is_some_and(|file| self.syncing.contains(&file)) {
                    break;
                }
                let cancelled = batch.is_cancelled();
                let Some((op, pending)) = batch.next() else {
                    self.queues[class].pop_front();
                    continue;
                };
                if batch.is_empty() {
                    self.counters.queued(class == Priority::Demand as usize, batch.waited());
                    self.queues[class].pop_front();
                }
                match self.refusal(&op, cancelled) {
                    Some(error) => {
                        drop(op);
                        pending.complete(Err(error));
                    }
                    None => self.fly(class, op, pending),
                }
            }
        }
    }

    fn room_kept(&self, class: usize) -> usize {
        let demand = class == Priority::Demand as usize;
        if demand && self.in_flight[class] > 0 { ROOM_FOR_OTHERS } else { 0 }
    }

    fn limit(&self, class: usize) -> usize {
        let demand = self.in_flight[Priority::Demand as usize] > 0 || self.beside.load(Ordering::Relaxed) > 0;
        if demand { LIMITS_BESIDE_DEMAND[class] } else { LIMITS[class] }
    }

    fn refusal(&self, op: &Op, cancelled: bool) -> Option<Error> {
        if cancelled {
            return Some(Error::new(ErrorKind::Cancelled, "cancelled before it was submitted"));
        }
        if op.is_read() { None } else { self.poison.check().err() }
    }

    fn fly(&mut self, class: usize, op: Op, pending: Pending) {
        let sync = if let Op::Sync { file } = &op { Some(file.id()) } else { None };
        self.in_flight[class] += 1;
        self.syncing.extend(sync);
        let id = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[id] = Some(Flight { pending, class, sync });
        self.driver.queue(id as u64, op);
    }

    fn complete(&mut self, completion: Completion) {
        let id = completion.id as usize;
        let Some(flight) = self.flights.get_mut(id).and_then(Option::take) else {
            debug_assert!(false, "completion of an unknown request");
            return;
        };
        self.free.push(id);
        self.in_flight[flight.class] -= 1;
        let mut outcome = completion.outcome;
        if let Some(file) = flight.sync {
            self.syncing.retain(|&f| f != file);
            match &outcome {
                Err(_) if mutated(Mutant::SyncRetried) => {}
                Err(e) => self.poison.set(e),
                Ok(()) => outcome = self.poison.check(),
            }
        }
        flight.pending.complete(outcome);
    }

    /// The driver is broken: nothing of what is in flight will be heard of again.
    fn fail(self, error: &Error) {
        self.inbox.bury();
        let Self { driver, flights, poison, counters, .. } = self;
        poison.set(error);
        drop(driver);
        for flight in flights.into_iter().flatten() {
            counters.errors.add(1);
            flight.pending.complete(Err(error.duplicate()));
        }
    }
}
