//! What a shard thread holds for a device, and how it reports that it serves the device no more.

use std::sync::{Arc, Condvar, Mutex};

use super::inbox::Inbox;
use crate::io::file::directory::Directory;
use crate::metrics::lock;
use crate::sync::wait_for;

/// What a shard thread holds for a device: the directory with its lock, and the duty to report the end.
pub(super) struct DeviceGuard {
    // Dropped first, so that the lock is free when the end is reported.
    #[allow(dead_code, reason = "held for its lock")]
    pub(super) directory: Arc<dyn Directory>,
    #[allow(dead_code, reason = "reports when it is dropped")]
    pub(super) completion: CompletionGuard,
}

/// Completes what is left in the inbox when a device is served no more, also after a panic, and then reports the end.
pub(super) struct CompletionGuard {
    inbox: Arc<Inbox>,
    termination: Arc<Termination>,
}

impl CompletionGuard {
    pub(super) fn new(inbox: &Arc<Inbox>, termination: &Arc<Termination>) -> Self {
        Self { inbox: Arc::clone(inbox), termination: Arc::clone(termination) }
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        self.inbox.abandon();
        *lock(&self.termination.reached) = true;
        self.termination.changed.notify_all();
    }
}

/// Whether a device is served no more and its directory is released.
#[derive(Default)]
pub(super) struct Termination {
    reached: Mutex<bool>,
    changed: Condvar,
}

impl Termination {
    /// Blocks until the device is served no more.
    pub(super) fn wait(&self) {
        let mut reached = lock(&self.reached);
        while !*reached {
            reached = wait_for(&self.changed, reached, None);
        }
    }
}
