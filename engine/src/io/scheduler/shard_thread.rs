//! A running shard thread, and the devices that wait to be served by one.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, ThreadId};

use super::device_guard::CompletionGuard;
use super::device_handle::DeviceHandle;
use super::registration_queue::RegistrationQueue;
use crate::error::Result;
use crate::io::file::directory::Directory;
use crate::metrics::lock;

/// A device that waits for a shard thread to serve it.
pub(super) struct Registration {
    pub(super) name: String,
    pub(super) directory: Arc<dyn Directory>,
    pub(super) handle: DeviceHandle,
    pub(super) completion: CompletionGuard,
    /// Receives `Ok` once the device is served, or the error.
    pub(super) report: Sender<Result<()>>,
}

/// A thread that serves devices. It exits with the last of them.
pub(super) struct ShardThread {
    /// The lowest number that no other thread of the store has.
    number: usize,
    registrations: Arc<RegistrationQueue<Registration>>,
    id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl ShardThread {
    pub(super) fn new(
        number: usize,
        registrations: Arc<RegistrationQueue<Registration>>,
        thread: JoinHandle<()>,
    ) -> Self {
        Self { number, registrations, id: thread.thread().id(), thread: Mutex::new(Some(thread)) }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Returns whether the thread has exited or is about to.
    pub(super) fn is_ending(&self) -> bool {
        self.registrations.is_closed()
    }

    /// Hands a device to the thread.
    ///
    /// # Errors
    /// The registration itself, if the thread has exited or is about to.
    pub(super) fn register(&self, registration: Registration) -> Result<(), Registration> {
        self.registrations.push(registration)
    }

    pub(super) fn is_current(&self) -> bool {
        std::thread::current().id() == self.id
    }

    /// Waits for the thread to exit if it has no device left.
    pub(super) fn join_if_ending(&self) {
        if self.is_ending() {
            self.join();
        }
    }

    fn join(&self) {
        // A sink may hold the last handle, and the thread cannot wait for itself.
        if !self.is_current()
            && let Some(thread) = lock(&self.thread).take()
        {
            let _ = thread.join();
        }
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> ThreadId {
        self.id
    }
}

impl Drop for ShardThread {
    fn drop(&mut self) {
        self.join();
    }
}
