//! Batches: the requests that callers hand to a shard, and the sinks that hear their outcomes.
//!
//! A caller builds a [`Batch`] of [`Request`]s, submits it through a `ShardHandle`, and its [`Sink`] hears one outcome
//! per request. [`Waiter`] is the sink of callers that block.
//!
//! Invariants:
//! - A sink hears each request exactly once, even if the shard ends or panics: [`AcceptedBatch`] and [`PendingRequest`]
//!   report `Closed` when they are dropped.
//! - A sink hears the outcome after the request's buffers are free again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::Op;
use crate::sync::{Condvar, Mutex, drive_until, hold};

/// The urgency of a batch, most urgent first.
///
/// Every class but `Demand` has a bounded number of requests in flight, and a lower bound while a demand read is in
/// flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Reads that a caller is waiting for.
    Demand,
    /// Reads of blocks that a later step may need.
    Prefetch,
    /// Appends, commits and their syncs.
    Write,
    /// Reads and writes of cleaning, which moves live data.
    Clean,
}

/// One operation, with a tag that the sink hears together with its outcome.
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) tag: u64,
}

/// The receiver of outcomes.
pub(crate) trait Sink: Send + Sync {
    /// Receives the outcome of one request.
    ///
    /// The shard calls this on its own thread in most cases. The call must therefore be short and must not wait for the
    /// shard.
    fn complete(&self, tag: u64, outcome: Result<()>);
}

/// Requests that are submitted together and may complete in any order.
pub(crate) struct Batch {
    pub(crate) requests: Vec<Request>,
    pub(crate) priority: Priority,
    pub(crate) sink: Arc<dyn Sink>,
    /// Once true, requests that the shard has not submitted yet complete with `Cancelled`.
    pub(crate) cancel: Option<Arc<AtomicBool>>,
}

/// A batch that a shard has accepted. Dropping it completes the remaining requests with `Closed`.
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

    /// Returns the batch in the caller's form. The shard has submitted no request of it yet.
    #[allow(dead_code, reason = "only ShardHandle::submit uses it, which only tests call")]
    pub(super) fn into_batch(mut self) -> Batch {
        let requests = std::mem::take(&mut self.requests).collect();
        let ticket = Arc::clone(&self.ticket);
        Batch { requests, priority: self.priority, sink: Arc::clone(&ticket.sink), cancel: ticket.cancel.clone() }
    }

    pub(super) fn next(&mut self) -> Option<(Op, PendingRequest)> {
        let Request { op, tag } = self.requests.next()?;
        Some((op, PendingRequest { tag, ticket: Some(Arc::clone(&self.ticket)) }))
    }

    /// Returns the id of the file that the next request syncs, or none if the next request is not a sync.
    pub(super) fn next_sync(&self) -> Option<u64> {
        match &self.requests.as_slice().first()?.op {
            Op::Sync { file } => Some(file.id()),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.len() == 0
    }

    /// Returns the time since the caller submitted the batch.
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

/// The obligation to report the outcome of one request. Dropping it reports `Closed`.
pub(super) struct PendingRequest {
    tag: u64,
    ticket: Option<Arc<BatchSink>>,
}

impl PendingRequest {
    pub(super) fn complete(mut self, outcome: Result<()>) {
        self.report(outcome);
    }

    fn report(&mut self, outcome: Result<()>) {
        let Some(ticket) = self.ticket.take() else { return };
        // A sink that panics fails its own caller only, not the shard and the other batches in it.
        let call = std::panic::AssertUnwindSafe(|| ticket.sink.complete(self.tag, outcome));
        let _ = std::panic::catch_unwind(call);
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        // Most requests have reported already, and building an error allocates.
        if self.ticket.is_some() {
            self.report(Err(closed()));
        }
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "I/O request: the device was closed")
}

/// A sink for callers that block. It collects all outcomes and keeps the first error.
pub(crate) struct Waiter {
    state: Mutex<WaiterState>,
    ended: Condvar,
}

struct WaiterState {
    left: usize,
    error: Option<Error>,
    /// Number of blocked threads. The last outcome notifies only if there are any, because a notification is a system
    /// call.
    blocked: usize,
}

impl Waiter {
    /// Returns a waiter for `count` requests.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let state = WaiterState { left: count, error: None, blocked: 0 };
        Arc::new(Self { state: Mutex::new(state), ended: Condvar::new() })
    }

    /// Blocks until all requests have completed.
    ///
    /// # Errors
    /// The first error among the outcomes. [`ErrorKind::Closed`]: in a simulation, no request in flight can end the
    /// wait.
    pub(crate) fn wait(&self) -> Result<()> {
        if drive_until(|| self.is_done()) && !self.is_done() {
            let text = "wait for I/O: no request is in flight in the simulation that could end this wait";
            return Err(Error::new(ErrorKind::Closed, text));
        }
        let mut state = hold(&self.state);
        while state.left > 0 {
            state.blocked += 1;
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.blocked -= 1;
        }
        state.error.as_ref().map_or(Ok(()), |e| Err(e.duplicate()))
    }

    /// Blocks until all requests have completed or the deadline has passed.
    ///
    /// # Errors
    /// As [`Self::wait`]. [`ErrorKind::Deadline`]: some requests had not completed by the deadline.
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> Result<()> {
        let Some(deadline) = deadline else { return self.wait() };
        drive_until(|| self.is_done());
        let mut state = hold(&self.state);
        while state.left > 0 {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(Error::new(
                    ErrorKind::Deadline,
                    "wait for I/O: the deadline passed before the device answered",
                ));
            }
            state.blocked += 1;
            state = self.ended.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
            state.blocked -= 1;
        }
        state.error.as_ref().map_or(Ok(()), |e| Err(e.duplicate()))
    }

    /// Returns whether all requests have completed.
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
