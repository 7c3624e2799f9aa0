//! Threads that serve devices, one each or several: a thread owns a ring and moves the batches that other threads hand to it.

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
pub(crate) use thread_ring::{LaneBatch, Lanes};
pub(crate) use threads::Threads;

use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::blocking;
use crate::io::driver::interface::{DriverStatus, Op};
use crate::io::driver::uring::Uring;
use crate::metrics::{DeviceCounters, lock};
use crate::sync::Guard;
use device_queue::{Beside, Link};
use threads::{End, ShardThread};

/// Threads that sync beside the one that leads a commit, at most.
const SYNCS_BESIDE: usize = 15;

/// A device that is served. Dropping it closes it.
pub(crate) struct ShardHandle {
    link: Link,
    uring: bool,
    /// Held around syncs: two of one file at a time could share one error.
    syncs: Mutex<()>,
    end: Arc<End>,
    /// None in a simulation.
    thread: Option<Arc<ShardThread>>,
    #[cfg(feature = "sim")]
    inline: Option<simulated::Inline>,
}

impl ShardHandle {
    /// Of a device that this thread serves.
    fn of(link: Link, end: Arc<End>, thread: Arc<ShardThread>) -> Self {
        let uring = lock(&link.status).name == Uring::NAME;
        Self {
            link,
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
    fn simulated(link: Link, inline: simulated::Inline) -> Self {
        let (syncs, end) = (Mutex::default(), Arc::default());
        Self { link, uring: false, syncs, end, thread: None, inline: Some(inline) }
    }

    /// Hands a batch over. Its outcomes, that of a closed shard included, go to its sink, possibly before this returns.
    ///
    /// # Errors
    /// The batch itself, untouched, when the inbox is full.
    #[allow(dead_code, reason = "tests; for callers that must not block")]
    pub(crate) fn submit(&self, batch: Batch) -> Result<(), Batch> {
        let pushed = self.link.inbox.push(batch::Accepted::new(batch)).map_err(batch::Accepted::into_batch);
        self.submitted();
        pushed
    }

    /// The same, but waits for room. Not from a sink.
    pub(crate) fn submit_wait(&self, batch: Batch) {
        self.link.inbox.push_wait(batch::Accepted::new(batch));
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
    pub(crate) fn run_here(&self, op: Op) -> Result<()> {
        if self.is_simulated() {
            return self.run(vec![Request { op, tag: 0 }], Priority::Write);
        }
        self.link.poison.check()?;
        let is_sync = matches!(op, Op::Sync { .. });
        let outcome = blocking::execute(op, &self.link.counters);
        match &outcome {
            Ok(()) if is_sync => self.link.poison.check(),
            Err(e) if is_sync => {
                self.link.poison.set(e);
                outcome
            }
            _ => outcome,
        }
    }

    /// Syncs files on the calling thread and on others beside it: a flush of the device that begins serves all who wait for one, so
    /// that many files cost little more than one, where in turn each would cost as much. The caller holds [`Self::lock_syncs`].
    ///
    /// # Errors
    /// The first failure, or `Poisoned`.
    pub(crate) fn sync_here(&self, ops: Vec<Op>) -> Result<()> {
        let helpers = if self.is_simulated() { 0 } else { ops.len().saturating_sub(1).min(SYNCS_BESIDE) };
        let left = Mutex::new(ops);
        let work = || {
            let mut outcome = Ok(());
            loop {
                let Some(op) = lock(&left).pop() else { return outcome };
                outcome = outcome.and(self.run_here(op));
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
    pub(crate) fn write_here(&self, requests: Vec<Request>) -> Result<()> {
        if self.is_simulated() {
            return self.run(requests, Priority::Write);
        }
        self.link.poison.check()?;
        blocking::write_all(requests.into_iter().map(|request| request.op).collect(), &self.link.counters)
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
        self.link.inbox.nudge();
    }

    /// Whether its device is read through io_uring, so that callers may drive reads themselves.
    pub(crate) fn drives_uring(&self) -> bool {
        self.uring
    }

    pub(crate) fn counters(&self) -> &Arc<DeviceCounters> {
        &self.link.counters
    }

    fn beside(&self) -> &Beside {
        &self.link.beside
    }

    /// The driver in use, and what it has to do without.
    pub(crate) fn status(&self) -> DriverStatus {
        lock(&self.link.status).clone()
    }

    /// Takes no more batches, executes those accepted, and ends the thread if no other device is left on it. A second call does
    /// nothing.
    pub(crate) fn close(&self) {
        self.link.inbox.close();
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
