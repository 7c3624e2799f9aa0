//! An eventfd that is raised when a task would be woken, for event loops that use descriptors instead of futures.

use crate::error::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

/// An eventfd that is raised when a polled read makes progress. One serves any number of tickets.
///
/// 1. Make a [`Waker`](std::task::Waker) of it with `Waker::from(Arc)`.
/// 2. Poll [`ReadTicket`](crate::read::ReadTicket)s with that waker.
/// 3. Wait for the descriptor to become readable, [clear](Self::clear) it, and poll again.
#[derive(Debug)]
pub struct EventWaker(OwnedFd);

impl EventWaker {
    /// Makes an eventfd that is not raised.
    ///
    /// # Errors
    /// The system has no free descriptor.
    pub fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(Self).map_err(|e| Error::io("make an eventfd", e.into()))
    }

    /// Lowers it. Call this before polling, so that later progress raises it again.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for EventWaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // The write cannot block. A full counter is raised already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}
