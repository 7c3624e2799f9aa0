//! An eventfd that is raised where a task would be woken: for event loops that know descriptors and no futures.

use crate::error::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

/// Raises an eventfd when a read it was polled with has news. Make a [`Waker`](std::task::Waker) of it (`Waker::from(Arc)`), poll
/// [`ReadTicket`](crate::ReadTicket)s with that, and wait for its descriptor to become readable; then [`Self::clear`] it and poll
/// again. One serves any number of tickets.
#[derive(Debug)]
pub struct EventWaker(OwnedFd);

impl EventWaker {
    /// A new eventfd, not raised.
    ///
    /// # Errors
    /// The system has no descriptor to give.
    pub fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(Self).map_err(|e| Error::io("make an eventfd", e.into()))
    }

    /// Lowers it. Before polling, so that what happens meanwhile raises it again.
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
        // Cannot block, and a counter that is full is raised already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}
