//! The handle by which callers use a device that a shard serves.
//!
//! Callers submit batches, or execute writes and syncs on their own thread: see [`ShardHandle::run_blocking`].
//!
//! Lock order: the sync lock of a device is taken before any lock of its shard. A sink must not wait for its own shard.

use std::sync::{Arc, Mutex};

use super::batch::{AcceptedBatch, Batch, Priority, Request, Sink, Waiter};
use super::device_guard::Termination;
use super::device_handle::{DeviceHandle, DirectReadCount};
use super::shard_thread::ShardThread;
use super::threadless::ThreadlessDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::blocking;
use crate::io::driver::interface::{DriverStatus, Op};
use crate::io::driver::uring::Uring;
use crate::io::replacement::Replacement;
use crate::metrics::{DeviceCounters, lock};
use crate::sync::Guard;

/// The most threads that help the commit leader sync files.
const SYNC_HELPERS_MAX: usize = 15;

/// A device that a shard serves. Dropping the handle closes the device.
pub(crate) struct ShardHandle {
    handle: DeviceHandle,
    /// True if the device's driver is io_uring.
    uring: bool,
    /// Held around syncs, because two concurrent syncs of one file could share one write-back error.
    syncs: Mutex<()>,
    runner: Runner,
}

/// The runner of a device's shard: a thread, or the callers themselves.
enum Runner {
    Thread(Arc<ShardThread>, Arc<Termination>),
    Caller(Replacement<dyn ThreadlessDevice>),
}

impl ShardHandle {
    /// Returns the handle of a device that `thread` serves.
    pub(super) fn on_thread(handle: DeviceHandle, termination: Arc<Termination>, thread: Arc<ShardThread>) -> Self {
        let uring = lock(&handle.status).name == Uring::NAME;
        Self { handle, uring, syncs: Mutex::default(), runner: Runner::Thread(thread, termination) }
    }

    /// Returns the handle of a device whose shard runs on the threads of its callers.
    pub(super) fn without_thread(handle: DeviceHandle, device: Replacement<dyn ThreadlessDevice>) -> Self {
        Self { handle, uring: false, syncs: Mutex::default(), runner: Runner::Caller(device) }
    }

    /// Submits a batch. Its sink hears every outcome, possibly before this returns. A closed device completes each
    /// request with `Closed`.
    ///
    /// # Errors
    /// The batch itself, untouched, if the inbox is full.
    #[allow(dead_code, reason = "for callers that must not block; only tests call it so far")]
    pub(crate) fn submit(&self, batch: Batch) -> Result<(), Batch> {
        let pushed = self.handle.inbox.push(AcceptedBatch::new(batch)).map_err(AcceptedBatch::into_batch);
        self.submitted();
        pushed
    }

    /// Submits a batch as [`Self::submit`] does, but waits while the inbox is full. A sink must not call this.
    pub(crate) fn submit_wait(&self, batch: Batch) {
        self.handle.inbox.push_wait(AcceptedBatch::new(batch));
        self.submitted();
    }

    #[inline]
    fn submitted(&self) {
        if let Runner::Caller(device) = &self.runner {
            device.submitted();
        }
    }

    /// Submits requests and waits for all of them. A sink must not call this.
    ///
    /// # Errors
    /// The first error among the outcomes.
    pub(crate) fn run(&self, requests: Vec<Request>, priority: Priority) -> Result<()> {
        let waiter = Waiter::new(requests.len());
        self.submit_wait(Batch { requests, priority, sink: Arc::clone(&waiter) as Arc<dyn Sink>, cancel: None });
        waiter.wait()
    }

    /// Executes a write or sync on the calling thread, which saves two thread switches. A failed sync poisons the
    /// device.
    ///
    /// The caller of a sync holds [`Self::lock_syncs`].
    ///
    /// # Errors
    /// The failure of the operation, or `Poisoned`.
    pub(crate) fn run_blocking(&self, op: Op) -> Result<()> {
        if self.is_threadless() {
            return self.run(vec![Request { op, tag: 0 }], Priority::Write);
        }
        self.handle.poison.check()?;
        let is_sync = matches!(op, Op::Sync { .. });
        let outcome = blocking::execute(op, &self.handle.counters);
        match &outcome {
            Ok(()) if is_sync => self.handle.poison.check(),
            Err(e) if is_sync => {
                self.handle.poison.set(e);
                outcome
            }
            _ => outcome,
        }
    }

    /// Syncs files on the calling thread and on helper threads at the same time.
    ///
    /// One flush of the device serves all syncs that wait for it. Concurrent syncs of many files therefore cost little
    /// more than one. The caller holds [`Self::lock_syncs`].
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn sync_blocking(&self, ops: Vec<Op>) -> Result<()> {
        let helpers = if self.is_threadless() { 0 } else { ops.len().saturating_sub(1).min(SYNC_HELPERS_MAX) };
        let left = Mutex::new(ops);
        let work = || {
            let mut outcome = Ok(());
            loop {
                let Some(op) = lock(&left).pop() else { return outcome };
                outcome = outcome.and(self.run_blocking(op));
            }
        };
        std::thread::scope(|scope| {
            let spawn = |_| std::thread::Builder::new().name("stratakv-sync".into()).spawn_scoped(scope, work).ok();
            // If no helper thread can be started, this thread syncs every file.
            let helpers: Vec<_> = (0..helpers).filter_map(spawn).collect();
            let panicked = || Err(Error::new(ErrorKind::Poisoned, "sync: a helper thread panicked"));
            let join =
                |helper: std::thread::ScopedJoinHandle<'_, Result<()>>| helper.join().unwrap_or_else(|_| panicked());
            helpers.into_iter().map(join).fold(work(), Result::and)
        })
    }

    /// Executes writes on the calling thread. Writes that continue each other in one file become one system call.
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn write_blocking(&self, requests: Vec<Request>) -> Result<()> {
        if self.is_threadless() {
            return self.run(requests, Priority::Write);
        }
        self.handle.poison.check()?;
        blocking::write_all(requests.into_iter().map(|request| request.op).collect(), &self.handle.counters)
    }

    /// Locks the syncs of this device. A thread that syncs the device's files holds the lock meanwhile.
    pub(crate) fn lock_syncs(&self) -> Guard<'_, ()> {
        lock(&self.syncs)
    }

    fn is_threadless(&self) -> bool {
        matches!(self.runner, Runner::Caller(_))
    }

    /// Returns the id of the thread that serves the device.
    #[cfg(test)]
    pub(super) fn thread_id(&self) -> Option<std::thread::ThreadId> {
        match &self.runner {
            Runner::Thread(thread, _) => Some(thread.id()),
            Runner::Caller(_) => None,
        }
    }

    /// Wakes the shard so that its driver unregisters retired slabs and closed files. Callers use it after
    /// [`Arena::trim`] and after they closed files.
    ///
    /// [`Arena::trim`]: crate::io::buffer::arena::Arena::trim
    pub(crate) fn nudge(&self) {
        self.handle.inbox.nudge();
    }

    /// Returns whether the device's driver is io_uring, so that callers may drive reads on rings of their own.
    pub(crate) fn drives_uring(&self) -> bool {
        self.uring
    }

    pub(crate) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.handle.counters
    }

    pub(super) fn direct_reads(&self) -> &DirectReadCount {
        &self.handle.direct_reads
    }

    /// Returns the driver in use and the features of the system that it lacks.
    pub(crate) fn status(&self) -> DriverStatus {
        lock(&self.handle.status).clone()
    }

    /// Closes the device: refuses new batches and executes the accepted ones. A second call does nothing.
    ///
    /// The shard's thread exits if no other device is left on it.
    pub(crate) fn close(&self) {
        self.handle.inbox.close();
        match &self.runner {
            Runner::Caller(device) => device.close(),
            // A sink may hold the last handle, and the shard's thread cannot wait for itself.
            Runner::Thread(thread, termination) if !thread.is_current() => {
                termination.wait();
                thread.join_if_ending();
            }
            Runner::Thread(..) => {}
        }
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.close();
    }
}
