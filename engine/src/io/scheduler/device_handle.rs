//! The state that the callers of a device share with its queue in the shard.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::inbox::Inbox;
use crate::io::driver::interface::DriverStatus;
use crate::io::file::poison::Poison;
use crate::metrics::DeviceCounters;

/// The state that a `ShardHandle` and its `DeviceQueue` share.
#[derive(Clone)]
pub(crate) struct DeviceHandle {
    pub(super) inbox: Arc<Inbox>,
    pub(super) status: Arc<Mutex<DriverStatus>>,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) direct_reads: Arc<DirectReadCount>,
    pub(super) poison: Arc<Poison>,
}

impl DeviceHandle {
    pub(super) fn new(poison: Arc<Poison>, counters: Arc<DeviceCounters>) -> Self {
        let (inbox, status) = (Arc::new(Inbox::new()), Arc::default());
        Self { inbox, status, counters, direct_reads: Arc::default(), poison }
    }
}

/// Counts demand reads that callers drive on their own rings, which the shard does not see: see [`super::ThreadRings`].
#[derive(Default)]
pub(super) struct DirectReadCount {
    in_flight: AtomicUsize,
    begun: AtomicUsize,
}

impl DirectReadCount {
    pub(super) fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many reads are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns how many reads have begun so far.
    pub(super) fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }
}
