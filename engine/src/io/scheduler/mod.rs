//! ShardThreads that serve devices, one each or several: a thread owns a ring and moves the batches that other threads hand to it.

mod affinity;
mod batch;
mod device_queue;
mod inbox;
pub(crate) mod profile;
mod registration_queue;
mod run;
#[cfg(feature = "sim")]
mod simulated;
mod thread_ring;
mod threads;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};

pub(crate) use affinity::Affinity;
pub(crate) use batch::{Batch, Priority, Request, Sink, Waiter};
pub(crate) use thread_ring::{ThreadRingBatch, ThreadRings};
pub(crate) use threads::ShardThreads;

use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::blocking;
use crate::io::driver::interface::{DriverStatus, Op};
use crate::io::driver::uring::Uring;
use crate::metrics::{DeviceCounters, lock};
use crate::sync::Guard;
use device_queue::{DeviceHandle, DirectReadCount};
use threads::{ShardThread, Termination};

/// ShardThreads that sync direct_reads the one that leads a commit, at most.
const SYNC_HELPERS_MAX: usize = 15;

/// A device that is served. Dropping it closes it.
pub(crate) struct ShardHandle {
    handle: DeviceHandle,
    uring: bool,
    /// Held around syncs: two of one file at a time could share one error.
    syncs: Mutex<()>,
    end: Arc<Termination>,
    /// None in a simulation.
    thread: Option<Arc<ShardThread>>,
    #[cfg(feature = "sim")]
    inline: Option<simulated::SimulatedShard>,
}

impl ShardHandle {
    /// Of a device that this thread serves.
    fn of(handle: DeviceHandle, end: Arc<Termination>, thread: Arc<ShardThread>) -> Self {
        let uring = lock(&handle.status).name == Uring::NAME;
        Self {
            handle,
            uring,
            syncs: Mutex::default(),
            end,
            thread: Some(thread),
            #[cfg(feature = "sim")]
            inline: None,
        }
    }

    /// Of a simulated device.
    #[cfg(feature = "sim")]
    fn simulated(handle: DeviceHandle, inline: simulated::SimulatedShard) -> Self {
        let (syncs, end) = (Mutex::default(), Arc::default());
        Self { handle, uring: false, syncs, end, thread: None, inline: Some(inline) }
    }

    /// Hands a batch over. Its outcomes, that of a closed shard included, go to its sink, possibly before this returns.
    ///
    /// # Errors
    /// The batch itself, untouched, when the inbox is full.
    #[allow(dead_code, reason = "tests; for callers that must not block")]
    pub(crate) fn submit(&self, batch: Batch) -> Result<(), Batch> {
        let pushed = self.handle.inbox.push(batch::AcceptedBatch::new(batch)).map_err(batch::AcceptedBatch::into_batch);
        self.submitted();
        pushed
    }

    /// The same, but waits for room. Not from a sink.
    pub(crate) fn submit_wait(&self, batch: Batch) {
        self.handle.inbox.push_wait(batch::AcceptedBatch::new(batch));
        self.submitted();
    }

    #[inline]
    fn submitted(&self) {
        #[cfg(feature = "sim")]
        if let Some(inline) = &self.inline {
            inline.submitted();
        }
    }

    /// Submits requests and waits for all of them; the first error. Not from a sink.
    pub(crate) fn run(&self, requests: Vec<Request>, priority: Priority) -> Result<()> {
        let waiter = Waiter::new(requests.len());
        self.submit_wait(Batch { requests, priority, sink: Arc::clone(&waiter) as Arc<dyn Sink>, cancel: None });
        waiter.wait()
    }

    /// Executes a write or sync on the calling thread, which would only wait for the shard's: two thread hops less. A sync that
    /// fails poisons the device. Syncs hold [`Self::lock_syncs`].
    ///
    /// # Errors
    /// Its failure, or `Poisoned`.
    pub(crate) fn run_blocking(&self, op: Op) -> Result<()> {
        if self.is_simulated() {
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

    /// Syncs files on the calling thread and on others direct_reads it: a flush of the device that begins serves all who wait for one, so
    /// that many files cost little more than one, where in turn each would cost as much. The caller holds [`Self::lock_syncs`].
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn sync_blocking(&self, ops: Vec<Op>) -> Result<()> {
        let helpers = if self.is_simulated() { 0 } else { ops.len().saturating_sub(1).min(SYNC_HELPERS_MAX) };
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
            // Where there is no thread to be had, this one does it all.
            let helpers: Vec<_> = (0..helpers).filter_map(spawn).collect();
            let panicked = || Err(Error::new(ErrorKind::Poisoned, "a thread that syncs panicked"));
            let join =
                |helper: std::thread::ScopedJoinHandle<'_, Result<()>>| helper.join().unwrap_or_else(|_| panicked());
            helpers.into_iter().map(join).fold(work(), Result::and)
        })
    }

    /// Executes writes on the calling thread, neighbours as one.
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn write_blocking(&self, requests: Vec<Request>) -> Result<()> {
        if self.is_simulated() {
            return self.run(requests, Priority::Write);
        }
        self.handle.poison.check()?;
        blocking::write_all(requests.into_iter().map(|request| request.op).collect(), &self.handle.counters)
    }

    /// To be held while files of this device are synced, on whichever thread.
    pub(crate) fn lock_syncs(&self) -> Guard<'_, ()> {
        lock(&self.syncs)
    }

    fn is_simulated(&self) -> bool {
        #[cfg(feature = "sim")]
        return self.inline.is_some();
        #[cfg(not(feature = "sim"))]
        false
    }

    /// The thread that serves it.
    #[cfg(test)]
    fn thread_id(&self) -> Option<std::thread::ThreadId> {
        self.thread.as_ref().map(|thread| thread.id())
    }

    /// Makes the shard look around: after [`Arena::trim`] or after files were closed, so that it lets go of them too.
    pub(crate) fn nudge(&self) {
        self.handle.inbox.nudge();
    }

    /// Whether its device is read through io_uring, so that callers may drive reads themselves.
    pub(crate) fn drives_uring(&self) -> bool {
        self.uring
    }

    pub(crate) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.handle.counters
    }

    fn direct_reads(&self) -> &DirectReadCount {
        &self.handle.direct_reads
    }

    /// The driver in use, and what it has to do without.
    pub(crate) fn status(&self) -> DriverStatus {
        lock(&self.handle.status).clone()
    }

    /// Takes no more batches, executes those accepted, and ends the thread if no other device is left on it. A second call does
    /// nothing.
    pub(crate) fn close(&self) {
        self.handle.inbox.close();
        #[cfg(feature = "sim")]
        if let Some(inline) = &self.inline {
            return inline.close();
        }
        // A sink may hold the last handle; its own thread cannot wait for itself.
        if let Some(thread) = self.thread.as_ref().filter(|thread| !thread.is_current()) {
            self.end.wait();
            thread.join_if_ending();
        }
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.close();
    }
}
