//! Submitting reads: one batch per device, and one outcome per read.

use super::BlockReader;
use crate::catalog::SegmentHandle;
use crate::error::{ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::scheduler::{Batch, Priority, Request, Sink, Waiter};
use crate::log::Devices;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use stratakv_format::DeviceIndex;

/// The requests of a batch by device.
pub(in crate::read) type DeviceBatches = BTreeMap<DeviceIndex, Vec<Request>>;

/// Returns the operation that reads at `offset` of a segment into a range of a buffer, and its device.
///
/// # Errors
/// The device is not present, its file cannot be opened, or the buffer is in use.
pub(in crate::read) fn read_request(
    devices: &Devices,
    segment: &SegmentHandle,
    offset: u64,
    (buffer, range): (&mut Lease, Range<usize>),
) -> Result<(DeviceIndex, Op)> {
    devices.get(segment.key.0)?;
    let file = segment.file()?;
    Ok((segment.key.0, Op::Read { file, offset, into: buffer.read_target(range)? }))
}

/// Submits one batch per device, in the order of the devices. `sink` hears every outcome.
///
/// # Errors
/// A device is not present. Its batch and those behind it are not submitted.
pub(in crate::read) fn submit_batches(
    devices: &Devices,
    batches: DeviceBatches,
    priority: Priority,
    sink: &Arc<dyn Sink>,
    cancel: Option<&Arc<AtomicBool>>,
) -> Result<()> {
    for (device, requests) in batches {
        let (sink, cancel) = (Arc::clone(sink), cancel.cloned());
        devices.get(device)?.shard.submit_wait(Batch { requests, priority, sink, cancel });
    }
    Ok(())
}

/// A sink that hands the outcome of each request to the waiter of its tag.
struct PerRequestSink(Vec<Arc<Waiter>>);

impl Sink for PerRequestSink {
    fn complete(&self, tag: u64, outcome: Result<()>) {
        if let Some(waiter) = self.0.get(tag as usize) {
            waiter.complete(0, outcome);
        }
    }
}

/// Reads that were submitted together.
pub(in crate::read) struct PendingReads {
    /// One waiter per read.
    waiters: Vec<Arc<Waiter>>,
    deadline: Option<Instant>,
    cancel: Arc<AtomicBool>,
}

impl BlockReader<'_> {
    /// Submits reads in one batch per device. A read that could not be requested has its error as its outcome.
    ///
    /// # Errors
    /// A device is not present. [`ErrorKind::InUse`]: another process opened the store.
    pub(in crate::read) fn submit(
        &self,
        reads: impl IntoIterator<Item = Result<(DeviceIndex, Op)>>,
    ) -> Result<PendingReads> {
        self.devices.check_process()?;
        let (mut waiters, mut batches) = (Vec::new(), DeviceBatches::new());
        for (tag, read) in (0..).zip(reads) {
            let waiter = Waiter::new(1);
            match read {
                Ok((device, op)) => batches.entry(device).or_default().push(Request { op, tag }),
                Err(e) => waiter.complete(0, Err(e)),
            }
            waiters.push(waiter);
        }
        let sink: Arc<dyn Sink> = Arc::new(PerRequestSink(waiters.clone()));
        let cancel = Arc::default();
        submit_batches(self.devices, batches, self.priority, &sink, Some(&cancel))?;
        Ok(PendingReads { waiters, deadline: self.deadline, cancel })
    }
}

impl PendingReads {
    /// Waits for a read, by its position among those that were submitted.
    ///
    /// # Errors
    /// The read failed. [`ErrorKind::Deadline`]: the deadline passed. Reads that no device has yet are cancelled.
    pub(in crate::read) fn wait(&self, nth: usize) -> Result<()> {
        let outcome = self.waiters.get(nth).map_or(Ok(()), |waiter| waiter.wait_until(self.deadline));
        outcome.inspect_err(|e| {
            if e.kind() == ErrorKind::Deadline {
                self.cancel.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Waits for all reads and returns the outcome of each.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`]: as [`Self::wait`].
    pub(in crate::read) fn wait_each(&self) -> Result<Vec<Result<()>>> {
        let in_time = |nth| match self.wait(nth) {
            Err(e) if e.kind() == ErrorKind::Deadline => Err(e),
            outcome => Ok(outcome),
        };
        (0..self.waiters.len()).map(in_time).collect()
    }
}
