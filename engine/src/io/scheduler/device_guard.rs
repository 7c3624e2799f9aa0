//! The guard of a device: it keeps the directory locked while a shard thread serves the device, and reports the end.

use std::sync::{Arc, Condvar, Mutex};

use super::inbox::Inbox;
use crate::io::file::directory::Directory;
use crate::metrics::lock;
use crate::sync::wait_for;

/// The guard that a shard thread holds for a device: the directory with its lock, and the report of the end.
pub(super) struct DeviceGuard {
    // Dropped first, so that the lock is free when the end is reported.
    #[allow(dead_code, reason = "held for its lock")]
    pub(super) directory: Arc<dyn Directory>,
    #[allow(dead_code, reason = "reports when it is dropped")]
    pub(super) completion: CompletionGuard,
}

/// Reports the end of a device when it is dropped, also after a panic. It first completes the batches that are left in
/// the inbox.
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

/// The end of a device: no shard serves it any more, and its directory is released.
#[derive(Default)]
pub(super) struct Termination {
    reached: Mutex<bool>,
    changed: Condvar,
}

impl Termination {
    /// Blocks until the end is reported.
    pub(super) fn wait(&self) {
        let mut reached = lock(&self.reached);
        while !*reached {
            reached = wait_for(&self.changed, reached, None);
        }
    }
}
