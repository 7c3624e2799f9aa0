//! The loop of a shard: inboxes to queues, queues to driver by priority, completions to sinks.
//!
//! A shard serves one device or several, each through a port of its own: they share the thread and the ring, and nothing that one of
//! them could use up. A sync that fails poisons its device: later writes and syncs are refused, and no sync that was under way is
//! believed. The kernel reports a write-back error to one sync of a file and success to the next, so a file has one sync in flight.

use std::sync::Arc;
use std::time::Instant;

use super::batch::{PendingRequest, Priority};
use super::device_queue::{CLASSES, DeviceHandle, DeviceQueue};
use super::registration_queue::RegistrationQueue;
use super::threads::{DeviceGuard, Registration};
use crate::error::{Error, Result};
use crate::io::driver::interface::{Completion, Driver, DriverStatus, Op, ServedDevice, Wait};
use crate::io::seams;
use crate::metrics::lock;

struct QueuedOp {
    pending: PendingRequest,
    port: usize,
    class: usize,
    /// The file that it syncs.
    sync: Option<u64>,
    /// When a write began, but in a simulation, whose time is not ours.
    since: Option<Instant>,
}

pub(super) struct Shard {
    // Dropped first: with the driver gone nothing is in flight any more.
    driver: Box<dyn Driver>,
    flights: Vec<Option<QueuedOp>>,
    free: Vec<usize>,
    /// By their numbers, as the driver knows them.
    ports: Vec<Option<DeviceQueue>>,
    registrations: Arc<RegistrationQueue<Registration>>,
    /// Notes of the driver that the devices' status has.
    notes: usize,
}

impl Shard {
    pub(super) fn new(driver: Box<dyn Driver>, registrations: Arc<RegistrationQueue<Registration>>) -> Self {
        registrations.set_waker(driver.waker());
        Self { driver, flights: Vec::new(), free: Vec::new(), ports: Vec::new(), registrations, notes: 0 }
    }

    /// Until all devices are closed and all is done, or until the driver breaks.
    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.welcome();
            self.take_in();
            if self.retire() {
                return;
            }
            let wait = self.wait();
            // Announced before every wait that may block, so that a new batch ends it, or its slice.
            let asleep = self.ports().all(DeviceQueue::fall_asleep);
            let driven = self.driver.drive(if asleep { wait } else { Wait::No }, &mut done);
            self.ports().for_each(|port| port.handle.inbox.woke_up());
            for completion in done.drain(..) {
                self.complete(completion);
            }
            if let Err(e) = driven {
                return self.fail(&e);
            }
            self.tell_notes();
        }
    }

    fn ports(&self) -> impl Iterator<Item = &DeviceQueue> {
        self.ports.iter().flatten()
    }

    /// Takes in the devices that wait at the registrations.
    fn welcome(&mut self) {
        for Registration { name, dir, handle, completion_guard, report } in self.registrations.take() {
            let served = ServedDevice { name: &name, lock: dir.lock_fd(), counters: &handle.counters };
            let added = self.add(&served, &handle);
            let outcome = added.map(|port| {
                self.ports[port] = Some(DeviceQueue::new(handle, Some(DeviceGuard { dir, completion_guard })))
            });
            let _ = report.send(outcome);
        }
    }

    /// Where there is room for another port, once the driver serves it.
    fn add(&mut self, served: &ServedDevice<'_>, handle: &DeviceHandle) -> Result<usize> {
        let port = self.ports.iter().position(Option::is_none).unwrap_or_else(|| {
            self.ports.push(None);
            self.ports.len() - 1
        });
        self.driver.add(port, served)?;
        handle.inbox.set_waker(self.driver.waker());
        *lock(&handle.status) = DriverStatus { name: self.driver.name(), notes: self.driver.notes().to_vec() };
        Ok(port)
    }

    /// Serves a device that does not come through the registrations.
    #[cfg(any(test, feature = "sim"))]
    pub(super) fn serve(&mut self, name: &str, handle: DeviceHandle) -> Result<usize> {
        let port = self.add(&ServedDevice { name, lock: None, counters: &handle.counters }, &handle)?;
        self.ports[port] = Some(DeviceQueue::new(handle, None));
        Ok(port)
    }

    #[cfg(feature = "sim")]
    pub(super) fn served(&self) -> usize {
        self.ports().count()
    }

    /// Lets go of a device that is closed and done. How many are left.
    #[cfg(feature = "sim")]
    pub(super) fn let_go(&mut self, port: usize) -> usize {
        self.driver.remove(port);
        self.ports[port] = None;
        self.served()
    }

    /// Lets go of devices that were closed and are done. Whether nobody is left and nobody will come: then the ring goes before the
    /// last one's lock does.
    fn retire(&mut self) -> bool {
        for port in 0..self.ports.len() {
            if !self.ports[port].as_ref().is_some_and(DeviceQueue::is_done) {
                continue;
            }
            if self.ports().count() == 1 && self.registrations.shut() {
                return true;
            }
            self.driver.remove(port);
            self.ports[port] = None;
        }
        self.ports().next().is_none() && self.registrations.shut()
    }

    /// From the inboxes to the queues, and from there to the driver as far as there is room.
    pub(super) fn take_in(&mut self) {
        self.ports.iter_mut().flatten().for_each(DeviceQueue::take_in);
        self.issue();
    }

    /// One turn of [`Self::run`] for a driver that needs no thread: takes in what has come and lets something end. Whether
    /// anything was to be done.
    #[cfg(feature = "sim")]
    pub(super) fn turn(&mut self) -> bool {
        self.take_in();
        if self.ports().all(|port| port.under_way() == 0) {
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
        self.ports().any(|port| !port.handle.inbox.is_empty() || port.under_way() > 0)
    }

    /// How to wait: idle for a wake-up, otherwise for a slice of what is most urgent, and of the device that has the least of it, which
    /// is not to wait for the others.
    fn wait(&self) -> Wait {
        let slices = || self.ports().filter_map(DeviceQueue::slice);
        let demand = slices().filter(|(demand, _)| *demand).map(|(_, slice)| slice).min();
        let slice = demand.or_else(|| slices().map(|(_, slice)| slice).min());
        slice.map_or(Wait::Wake, Wait::Completions)
    }

    /// Demand reads of all devices go before anything else of any.
    fn issue(&mut self) {
        let depth = self.driver.depth();
        for class in 0..CLASSES {
            for port in 0..self.ports.len() {
                while let Some((op, pending)) = self.ports[port].as_mut().and_then(|own| own.next(class, depth)) {
                    self.fly(port, class, op, pending);
                }
            }
        }
    }

    fn fly(&mut self, port: usize, class: usize, op: Op, pending: PendingRequest) {
        let sync = if let Op::Sync { file } = &op { Some(file.id()) } else { None };
        if let Some(own) = &mut self.ports[port] {
            own.began(class, sync);
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        let timed = class == Priority::Write as usize && !seams::is_simulated();
        self.flights[id] = Some(QueuedOp { pending, port, class, sync, since: timed.then(Instant::now) });
        self.driver.queue(port, id as u64, op);
    }

    fn complete(&mut self, completion: Completion) {
        let id = completion.id as usize;
        let Some(flight) = self.flights.get_mut(id).and_then(Option::take) else {
            debug_assert!(false, "completion of an unknown request");
            return;
        };
        self.free.push(id);
        let QueuedOp { pending, port, class, sync, since } = flight;
        let outcome = match self.ports.get_mut(port).and_then(Option::as_mut) {
            Some(own) => {
                if class == Priority::Write as usize && sync.is_none() {
                    own.wrote(since.map(|since| since.elapsed()));
                }
                own.ended(class, sync, completion.outcome)
            }
            None => completion.outcome,
        };
        pending.complete(outcome);
    }

    fn tell_notes(&mut self) {
        let notes = self.driver.notes();
        if notes.len() != self.notes {
            self.ports().for_each(|port| lock(&port.handle.status).notes = notes.to_vec());
            self.notes = notes.len();
        }
    }

    /// The driver is broken: nothing of what is in flight will be heard of again, on any of its devices.
    fn fail(self, error: &Error) {
        let Self { driver, flights, ports, .. } = self;
        for port in ports.iter().flatten() {
            port.handle.inbox.bury();
            port.handle.poison.set(error);
        }
        drop(driver);
        for flight in flights.into_iter().flatten() {
            if let Some(port) = ports.get(flight.port).and_then(Option::as_ref) {
                port.handle.counters.errors.add(1);
            }
            flight.pending.complete(Err(error.duplicate()));
        }
    }
}
