//! What callers hand to a shard, and how they learn the outcome.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::Op;
use crate::sync::{Condvar, Mutex, drive_until, hold};

/// Who goes first. Lower ones have a bounded number of requests in flight, fewer while demand reads are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Reads that a caller waits for.
    Demand,
    /// Reads ahead of need.
    Prefetch,
    /// Appends, commits and their syncs.
    Write,
    /// Moving live data out of the way.
    #[allow(dead_code, reason = "tests; the shard keeps its order for them already")]
    Clean,
}

/// One operation, with a tag that its outcome carries.
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) tag: u64,
}

/// Where outcomes go.
pub(crate) trait Sink: Send + Sync {
    /// Called exactly once per request, whatever happens, when the request's buffers are free again. Mostly on the shard's
    /// thread: be short, and do not wait for that shard.
    fn complete(&self, tag: u64, outcome: Result<()>);
}

/// Requests that are submitted together. They may complete in any order.
pub(crate) struct Batch {
    pub(crate) requests: Vec<Request>,
    pub(crate) priority: Priority,
    pub(crate) sink: Arc<dyn Sink>,
    /// When it turns true, requests not yet submitted complete with `Cancelled`.
    pub(crate) cancel: Option<Arc<AtomicBool>>,
}

/// A batch that a shard has taken over. Dropping it completes what is left.
pub(super) struct AcceptedBatch {
    requests: std::vec::IntoIter<Request>,
    pub(super) priority: Priority,
    since: Instant,
    ticket: Arc<BatchSink>,
}

struct BatchSink {
    sink: Arc<dyn Sink>,
    cancel: Option<Arc<AtomicBool>>,
}

impl AcceptedBatch {
    pub(super) fn new(batch: Batch) -> Self {
        let ticket = Arc::new(BatchSink { sink: batch.sink, cancel: batch.cancel });
        Self { requests: batch.requests.into_iter(), priority: batch.priority, since: Instant::now(), ticket }
    }

    /// Back to the caller's form: nothing of it has been submitted yet.
    #[allow(dead_code, reason = "goes with ShardHandle::submit")]
    pub(super) fn into_batch(mut self) -> Batch {
        let requests = std::mem::take(&mut self.requests).collect();
        let ticket = Arc::clone(&self.ticket);
        Batch { requests, priority: self.priority, sink: Arc::clone(&ticket.sink), cancel: ticket.cancel.clone() }
    }

    pub(super) fn next(&mut self) -> Option<(Op, PendingRequest)> {
        let Request { op, tag } = self.requests.next()?;
        Some((op, PendingRequest { tag, ticket: Some(Arc::clone(&self.ticket)) }))
    }

    /// The file that the next request syncs, if that is what it does.
    pub(super) fn next_sync(&self) -> Option<u64> {
        match &self.requests.as_slice().first()?.op {
            Op::Sync { file } => Some(file.id()),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.len() == 0
    }

    /// How long ago it was handed over.
    pub(super) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.ticket.cancel.as_ref().is_some_and(|c| c.load(Ordering::Relaxed))
    }
}

impl Drop for AcceptedBatch {
    fn drop(&mut self) {
        while let Some((op, pending)) = self.next() {
            drop(op);
            pending.complete(Err(closed()));
        }
    }
}

/// The duty to tell the outcome of one request; dropping it tells `Closed`.
pub(super) struct PendingRequest {
    tag: u64,
    ticket: Option<Arc<BatchSink>>,
}

impl PendingRequest {
    pub(super) fn complete(mut self, outcome: Result<()>) {
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: Result<()>) {
        let Some(ticket) = self.ticket.take() else { return };
        // A sink that panics fails its own caller, not the shard and everyone behind it.
        let call = std::panic::AssertUnwindSafe(|| ticket.sink.complete(self.tag, outcome));
        let _ = std::panic::catch_unwind(call);
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        // Mostly it was told already, and an error takes memory.
        if self.ticket.is_some() {
            self.tell(Err(closed()));
        }
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the device was closed")
}

/// A sink for callers that block: wait until all requests ended, get the first error.
pub(crate) struct Waiter {
    state: Mutex<WaiterState>,
    ended: Condvar,
}

struct WaiterState {
    left: usize,
    error: Option<Error>,
    /// ShardThreads that block. A notification is a system call even when nobody does.
    blocked: usize,
}

impl Waiter {
    /// For `count` requests.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let state = WaiterState { left: count, error: None, blocked: 0 };
        Arc::new(Self { state: Mutex::new(state), ended: Condvar::new() })
    }

    pub(crate) fn wait(&self) -> Result<()> {
        if drive_until(|| self.is_done()) && !self.is_done() {
            return Err(Error::new(ErrorKind::Closed, "the simulation has nothing under way that could end this wait"));
        }
        let mut state = hold(&self.state);
        while state.left > 0 {
            state.blocked += 1;
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.blocked -= 1;
        }
        state.error.as_ref().map_or(Ok(()), |e| Err(e.duplicate()))
    }

    /// [`Self::wait`] until then at the latest.
    ///
    /// # Errors
    /// As [`Self::wait`]; [`ErrorKind::Deadline`]: some have not ended.
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> Result<()> {
        let Some(deadline) = deadline else { return self.wait() };
        drive_until(|| self.is_done());
        let mut state = hold(&self.state);
        while state.left > 0 {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(Error::new(ErrorKind::Deadline, "the deadline passed before the device had answered"));
            }
            state.blocked += 1;
            state = self.ended.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
            state.blocked -= 1;
        }
        state.error.as_ref().map_or(Ok(()), |e| Err(e.duplicate()))
    }

    /// Whether all requests ended.
    pub(crate) fn is_done(&self) -> bool {
        hold(&self.state).left == 0
    }
}

impl Sink for Waiter {
    fn complete(&self, _tag: u64, outcome: Result<()>) {
        let mut state = hold(&self.state);
        state.left = state.left.saturating_sub(1);
        if let Err(e) = outcome {
            state.error.get_or_insert(e);
        }
        if state.left == 0 && state.blocked > 0 {
            self.ended.notify_all();
        }
    }
}
