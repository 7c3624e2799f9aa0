//! The shard threads of a store, and which devices each of them serves.
//!
//! To serve a device:
//! 1. If the limit of threads is reached, the device registers with the running thread that serves the fewest devices.
//! 2. Otherwise, or if that thread is about to exit, a new thread starts with the device as its first one.
//! 3. The caller waits until the thread reports that its driver serves the device, or an error.
//!
//! Lock order: `running` is held while a thread is chosen or started. No other lock is taken under it except the
//! registration queue's, which is a leaf.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, Weak};

use super::affinity::Affinity;
use super::device_guard::{CompletionGuard, Termination};
use super::device_handle::DeviceHandle;
use super::registration_queue::{DrainOnDrop, RegistrationQueue};
use super::shard::Shard;
use super::shard_handle::ShardHandle;
use super::shard_thread::{Registration, ShardThread};
use super::threadless::ThreadlessScheduler;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::driver::{DriverKind, start_driver};
use crate::io::file::directory::Directory;
use crate::io::replacement::Replacement;
use crate::metrics::{DeviceCounters, lock};

/// The shard threads of a store. They also serve devices that join later.
pub(crate) struct ShardThreads {
    kind: DriverKind,
    arena: Arena,
    affinity: Affinity,
    /// The number of threads at most, or none for one thread per device.
    threads_max: Option<usize>,
    running: Mutex<Vec<Weak<ShardThread>>>,
    /// Serves the devices in place of threads.
    threadless: Option<Replacement<dyn ThreadlessScheduler>>,
}

impl ShardThreads {
    pub(crate) fn new(
        kind: DriverKind,
        arena: Arena,
        threads_max: Option<usize>,
        affinity: Affinity,
        threadless: Option<Replacement<dyn ThreadlessScheduler>>,
    ) -> Self {
        Self { kind, arena, affinity, threads_max, running: Mutex::default(), threadless }
    }

    /// Serves a device. The directory's lock stays held at least until the last write has completed.
    ///
    /// # Errors
    /// `Configuration`: the requested driver cannot run here, or the thread cannot be restricted to its CPUs.
    pub(crate) fn serve(
        &self,
        name: &str,
        directory: Arc<dyn Directory>,
        counters: Arc<DeviceCounters>,
    ) -> Result<ShardHandle> {
        let handle = DeviceHandle::new(Arc::clone(directory.poison()), counters);
        if let Some(threadless) = &self.threadless {
            let device = threadless.serve(handle.clone(), self.threads_max)?;
            return Ok(ShardHandle::without_thread(handle, device));
        }
        let termination = Arc::<Termination>::default();
        let (report, served) = mpsc::channel();
        let completion = CompletionGuard::new(&handle.inbox, &termination);
        let registration =
            Registration { name: name.to_owned(), directory, handle: handle.clone(), completion, report };
        let thread = self.register(registration)?;
        let ended = |_| {
            Err(Error::new(
                ErrorKind::Io,
                format!("open: the shard thread of device {name} ended before it served the device"),
            ))
        };
        served.recv().unwrap_or_else(ended)?;
        Ok(ShardHandle::on_thread(handle, termination, thread))
    }

    /// Registers a device with a thread. Returns the thread that will serve it.
    fn register(&self, registration: Registration) -> Result<Arc<ShardThread>> {
        let mut running = lock(&self.running);
        let threads: Vec<_> = running.iter().filter_map(Weak::upgrade).filter(|thread| !thread.is_ending()).collect();
        let is_full = self.threads_max.is_some_and(|most| threads.len() >= most);
        // Each served device holds one reference to its thread.
        let least = threads.iter().min_by_key(|thread| (Arc::strong_count(thread), thread.number()));
        let registered = match least.filter(|_| is_full) {
            Some(thread) => thread.register(registration).map(|()| Arc::clone(thread)),
            None => Err(registration),
        };
        match registered {
            Ok(thread) => Ok(thread),
            Err(registration) => {
                let taken = |number| threads.iter().any(|thread| thread.number() == number);
                let number = (0..).find(|number| !taken(*number)).unwrap_or_default();
                let thread = self.start(number, registration)?;
                running.retain(|thread| thread.strong_count() > 0);
                running.push(Arc::downgrade(&thread));
                Ok(thread)
            }
        }
    }

    /// Starts a thread with its first device.
    fn start(&self, number: usize, first: Registration) -> Result<Arc<ShardThread>> {
        let name = first.name.clone();
        let registrations = Arc::new(RegistrationQueue::new());
        let _ = registrations.push(first);
        let main = {
            let registrations = Arc::clone(&registrations);
            let (kind, arena, affinity) = (self.kind, self.arena.clone(), self.affinity.clone());
            move || {
                let _drain = DrainOnDrop(Arc::clone(&registrations));
                // The thread starts its driver itself, because a ring belongs to the thread that set it up.
                match affinity.keep(number).and_then(|()| start_driver(kind, &arena)) {
                    Ok(driver) => Shard::new(driver, registrations).run(),
                    Err(e) => {
                        for Registration { directory, completion, report, .. } in registrations.close() {
                            // The lock is free when the caller hears of the failure.
                            drop((directory, completion));
                            let _ = report.send(Err(e.duplicate()));
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(main);
        let thread = thread.map_err(|e| Error::io(format!("open: start the shard thread of device {name}"), e))?;
        Ok(Arc::new(ShardThread::new(number, registrations, thread)))
    }
}
