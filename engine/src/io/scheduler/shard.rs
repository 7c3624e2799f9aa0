//! The loop of a shard: it moves batches from inboxes to the driver by priority, and outcomes from the driver to sinks.
//!
//! A shard serves one device or several, each through a [`DeviceQueue`] of its own. The devices share the thread and
//! the driver. They share nothing else that one of them could use up.
//!
//! One turn of the loop:
//! 1. Serve the devices that registered since the last turn.
//! 2. Move batches from the inboxes to the queues, and from the queues to the driver as far as their limits allow.
//! 3. Release devices that are closed and done. Exit if no device is left and none can register.
//! 4. Wait for completions or a wake-up, and report the completions to their sinks.
//!
//! Invariants:
//! - An operation in the driver has an entry in `in_flight`, whose number is the operation's id in the driver.
//! - The driver is dropped before the devices and their locks, so a write never outlives its lock.
//! - If the driver breaks, all its devices are poisoned and every request completes with the driver's error.

use std::sync::Arc;
use std::time::Instant;

use super::batch::{PendingRequest, Priority};
use super::device_guard::DeviceGuard;
use super::device_handle::DeviceHandle;
use super::device_queue::{CLASSES, DeviceQueue};
use super::registration_queue::RegistrationQueue;
use super::shard_thread::Registration;
use crate::error::{Error, Result};
use crate::io::driver::interface::{Completion, Driver, DriverStatus, Op, ServedDevice, Wait};
use crate::metrics::lock;

/// An operation in the driver.
struct OpInFlight {
    pending: PendingRequest,
    device: usize,
    class: usize,
    /// The file that it syncs, if it is a sync.
    sync: Option<u64>,
    /// The time at which a write began, if the shard measures time.
    since: Option<Instant>,
}

/// A driver with the devices that it serves.
pub(crate) struct Shard {
    // Dropped first: without the driver nothing is in flight.
    driver: Box<dyn Driver>,
    in_flight: Vec<Option<OpInFlight>>,
    /// Unused entries of `in_flight`.
    free: Vec<usize>,
    /// The devices by their number in the driver.
    devices: Vec<Option<DeviceQueue>>,
    registrations: Arc<RegistrationQueue<Registration>>,
    /// The number of the driver's notes that the status of each device has.
    notes: usize,
    /// True if operations take the device's time. They do not in a simulation.
    is_timed: bool,
}

impl Shard {
    pub(super) fn new(driver: Box<dyn Driver>, registrations: Arc<RegistrationQueue<Registration>>) -> Self {
        registrations.set_waker(driver.waker());
        let (in_flight, free, devices) = (Vec::new(), Vec::new(), Vec::new());
        Self { driver, in_flight, free, devices, registrations, notes: 0, is_timed: true }
    }

    /// Runs until all devices are closed and done, or until the driver breaks.
    pub(super) fn run(mut self) {
        let mut done = Vec::new();
        loop {
            self.serve_registered();
            self.take_in();
            if self.release_closed() {
                return;
            }
            let wait = self.wait();
            // Announced before every wait that may block, so that a new batch ends the wait.
            let asleep = self.queues().all(DeviceQueue::fall_asleep);
            let driven = self.driver.drive(if asleep { wait } else { Wait::No }, &mut done);
            self.queues().for_each(|queue| queue.handle.inbox.woke_up());
            for completion in done.drain(..) {
                self.complete(completion);
            }
            if let Err(e) = driven {
                return self.fail(&e);
            }
            self.publish_notes();
        }
    }

    fn queues(&self) -> impl Iterator<Item = &DeviceQueue> {
        self.devices.iter().flatten()
    }

    /// Serves the devices in the registration queue.
    fn serve_registered(&mut self) {
        for Registration { name, directory, handle, completion, report } in self.registrations.take() {
            let served = ServedDevice { name: &name, lock: directory.lock_fd(), counters: &handle.counters };
            let outcome = self.add(&served, &handle).map(|device| {
                self.devices[device] = Some(DeviceQueue::new(handle, Some(DeviceGuard { directory, completion })));
            });
            let _ = report.send(outcome);
        }
    }

    /// Adds a device to the driver. Returns its number, whose entry in `devices` is still empty.
    fn add(&mut self, served: &ServedDevice<'_>, handle: &DeviceHandle) -> Result<usize> {
        let device = self.devices.iter().position(Option::is_none).unwrap_or_else(|| {
            self.devices.push(None);
            self.devices.len() - 1
        });
        self.driver.add(device, served)?;
        handle.inbox.set_waker(self.driver.waker());
        *lock(&handle.status) = DriverStatus { name: self.driver.name(), notes: self.driver.notes().to_vec() };
        Ok(device)
    }

    /// Releases devices that were closed and are done. Returns true if no device is left and none can register.
    ///
    /// The last device stays until the shard is dropped, so that the ring is closed before the device's lock is
    /// released.
    fn release_closed(&mut self) -> bool {
        for device in 0..self.devices.len() {
            if !self.devices[device].as_ref().is_some_and(DeviceQueue::is_done) {
                continue;
            }
            if self.queues().count() == 1 && self.registrations.close_if_empty() {
                return true;
            }
            self.driver.remove(device);
            self.devices[device] = None;
        }
        self.queues().next().is_none() && self.registrations.close_if_empty()
    }

    /// Moves batches from the inboxes to the queues, and operations from the queues to the driver as far as limits
    /// allow.
    pub(crate) fn take_in(&mut self) {
        self.devices.iter_mut().flatten().for_each(DeviceQueue::take_in);
        self.issue();
    }

    /// Returns how to wait: for a wake-up while idle, otherwise for a slice of the most urgent operations.
    ///
    /// The shortest slice of all devices counts, so that no device waits for the slice of another.
    fn wait(&self) -> Wait {
        let slices = || self.queues().filter_map(DeviceQueue::slice);
        let demand = slices().filter(|(demand, _)| *demand).map(|(_, slice)| slice).min();
        let slice = demand.or_else(|| slices().map(|(_, slice)| slice).min());
        slice.map_or(Wait::Wake, Wait::Completions)
    }

    /// Submits operations class by class, so that demand reads of all devices precede everything else of any device.
    fn issue(&mut self) {
        let depth = self.driver.depth();
        for class in 0..CLASSES {
            for device in 0..self.devices.len() {
                while let Some((op, pending)) = self.devices[device].as_mut().and_then(|own| own.next(class, depth)) {
                    self.submit(device, class, op, pending);
                }
            }
        }
    }

    fn submit(&mut self, device: usize, class: usize, op: Op, pending: PendingRequest) {
        let sync = if let Op::Sync { file } = &op { Some(file.id()) } else { None };
        if let Some(own) = &mut self.devices[device] {
            own.began(class, sync);
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            self.in_flight.len() - 1
        });
        let timed = class == Priority::Write as usize && self.is_timed;
        self.in_flight[id] = Some(OpInFlight { pending, device, class, sync, since: timed.then(Instant::now) });
        self.driver.queue(device, id as u64, op);
    }

    fn complete(&mut self, completion: Completion) {
        let id = completion.id as usize;
        let Some(op) = self.in_flight.get_mut(id).and_then(Option::take) else {
            debug_assert!(false, "completion of an unknown request");
            return;
        };
        self.free.push(id);
        let OpInFlight { pending, device, class, sync, since } = op;
        let outcome = match self.devices.get_mut(device).and_then(Option::as_mut) {
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

    /// Copies new notes of the driver to the status of each device.
    fn publish_notes(&mut self) {
        let notes = self.driver.notes();
        if notes.len() != self.notes {
            self.queues().for_each(|queue| lock(&queue.handle.status).notes = notes.to_vec());
            self.notes = notes.len();
        }
    }

    /// Ends all devices after the driver broke. The driver reports no operation in flight any more.
    fn fail(self, error: &Error) {
        let Self { driver, in_flight, devices, .. } = self;
        for queue in devices.iter().flatten() {
            queue.handle.inbox.abandon();
            queue.handle.poison.set(error);
        }
        drop(driver);
        for op in in_flight.into_iter().flatten() {
            if let Some(queue) = devices.get(op.device).and_then(Option::as_ref) {
                queue.handle.counters.errors.add(1);
            }
            op.pending.complete(Err(error.duplicate()));
        }
    }
}

/// A shard without a thread: its owner drives it turn by turn. For the simulator and for tests.
#[cfg(any(test, feature = "sim"))]
impl Shard {
    /// Returns a shard whose operations take no time of their device.
    #[cfg(feature = "sim")]
    pub(crate) fn without_thread(driver: Box<dyn Driver>) -> Self {
        Self { is_timed: false, ..Self::new(driver, Arc::new(RegistrationQueue::new())) }
    }

    /// Serves a device that does not register. Returns its number in this shard.
    pub(crate) fn serve(&mut self, name: &str, handle: DeviceHandle) -> Result<usize> {
        let device = self.add(&ServedDevice { name, lock: None, counters: &handle.counters }, &handle)?;
        self.devices[device] = Some(DeviceQueue::new(handle, None));
        Ok(device)
    }
}

#[cfg(feature = "sim")]
impl Shard {
    /// Returns how many devices the shard serves.
    pub(crate) fn served(&self) -> usize {
        self.queues().count()
    }

    /// Releases a device that is closed and done. Returns how many devices are left.
    pub(crate) fn release(&mut self, device: usize) -> usize {
        self.driver.remove(device);
        self.devices[device] = None;
        self.served()
    }

    /// Executes one turn: takes batches in and lets one operation complete. Returns whether there was anything to do.
    pub(crate) fn turn(&mut self) -> bool {
        self.take_in();
        if self.queues().all(|queue| queue.in_flight() == 0) {
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

    /// Returns whether a turn would do anything.
    pub(crate) fn is_busy(&self) -> bool {
        self.queues().any(DeviceQueue::is_busy)
    }
}
