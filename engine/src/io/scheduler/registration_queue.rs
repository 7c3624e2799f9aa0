//! The queue in which devices register with a shard thread.
//!
//! `ShardThreads` registers a device from any thread. The shard thread takes it at its next turn.
//!
//! Invariants:
//! - A thread exits with its last device. It closes the queue first, so a registration is either served or returned to
//!   its caller.
//! - A registration always wakes the thread, so the thread need not announce to the queue that it is about to block.

use std::sync::{Arc, OnceLock};

use crate::io::driver::interface::Wake;
use crate::sync::{Mutex, hold};

/// A queue of registrations of type `T`.
pub(crate) struct RegistrationQueue<T> {
    state: Mutex<RegistrationQueueState<T>>,
    waker: OnceLock<Arc<dyn Wake>>,
}

struct RegistrationQueueState<T> {
    waiting: Vec<T>,
    closed: bool,
}

impl<T> RegistrationQueue<T> {
    pub(crate) fn new() -> Self {
        let state = RegistrationQueueState { waiting: Vec::new(), closed: false };
        Self { state: Mutex::new(state), waker: OnceLock::new() }
    }

    /// Sets the waker. The thread calls this once, before its first [`Self::take`].
    pub(super) fn set_waker(&self, waker: Arc<dyn Wake>) {
        let _ = self.waker.set(waker);
    }

    /// Queues a registration and wakes the thread.
    ///
    /// # Errors
    /// The registration itself, if the thread has exited or is about to.
    pub(super) fn push(&self, registration: T) -> Result<(), T> {
        {
            let mut state = hold(&self.state);
            if state.closed {
                return Err(registration);
            }
            state.waiting.push(registration);
        }
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
        Ok(())
    }

    /// Takes all queued registrations.
    pub(super) fn take(&self) -> Vec<T> {
        std::mem::take(&mut hold(&self.state).waiting)
    }

    /// Closes the queue if it is empty. Returns whether it is closed.
    pub(super) fn close_if_empty(&self) -> bool {
        let mut state = hold(&self.state);
        state.closed |= state.waiting.is_empty();
        state.closed
    }

    /// Closes the queue and returns the registrations that were waiting.
    pub(super) fn close(&self) -> Vec<T> {
        let mut state = hold(&self.state);
        state.closed = true;
        std::mem::take(&mut state.waiting)
    }

    pub(super) fn is_closed(&self) -> bool {
        hold(&self.state).closed
    }
}

/// Closes a queue and drops its registrations when it is dropped, also if the thread panics.
pub(super) struct DrainOnDrop<T>(pub(super) Arc<RegistrationQueue<T>>);

impl<T> Drop for DrainOnDrop<T> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}
