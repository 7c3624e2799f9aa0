//! The block reader: reads ranges of segments in batches, for callers that wait.
//!
//! Openings, scans, cleaning, repair, and the fallback of selections to other copies read through it. A
//! [`ReadTicket`](super::ReadTicket) drives its own batches, because it does not wait for each of them. It shares
//! [`read_request`] and [`submit_batches`].
//!
//! 1. [`read_request`] turns a range and its place in a buffer into an operation.
//! 2. [`BlockReader::submit`] submits one batch per device, in the order of the devices.
//! 3. [`PendingReads`](submit::PendingReads) returns the outcome of each read.
//! 4. The caller checks what was read. [`first_good`] tries the copies of what failed.
//!
//! Invariants:
//! - Readers of one range try its copies in the order that the caller gives.
//! - A read that cannot be requested fails alone. The others of its batch are submitted.
//! - A thread that waits for a buffer holds none itself, because other readers may wait for it.
//! - If the deadline passes, reads that were not submitted to the device are cancelled.

mod copies;
mod submit;

pub(crate) use copies::{CopyFault, first_good};
pub(super) use submit::{DeviceBatches, read_request, submit_batches};

use crate::catalog::SegmentHandle;
use crate::error::Result;
use crate::io::buffer::arena::LeaseError;
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::scheduler::Priority;
use crate::log::{Devices, exhausted};
use std::ops::Range;
use std::time::Instant;
use stratakv_format::{DeviceIndex, PAGE_BYTES};

/// The most bytes of one read into a leased buffer.
const READ_BYTES: usize = 1 << 20;

/// Reads ranges of segments at one priority.
#[derive(Clone, Copy)]
pub(crate) struct BlockReader<'a> {
    devices: &'a Devices,
    priority: Priority,
    deadline: Option<Instant>,
}

/// A range of a segment file.
#[derive(Clone, Copy)]
pub(crate) struct SegmentRange<'a> {
    pub(crate) segment: &'a SegmentHandle,
    /// In bytes from the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl<'a> SegmentRange<'a> {
    /// Returns the whole pages around `bytes` at `offset`, and where the bytes start in them.
    pub(crate) fn pages_around(segment: &'a SegmentHandle, offset: u64, bytes: usize) -> (Self, usize) {
        let first = offset / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let skip = (offset - first) as usize;
        (Self { segment, offset: first, bytes: (skip + bytes).next_multiple_of(PAGE_BYTES) }, skip)
    }
}

impl<'a> BlockReader<'a> {
    /// Returns a reader for a caller that serves a demand of the embedder.
    pub(crate) fn demand(devices: &'a Devices) -> Self {
        Self { devices, priority: Priority::Demand, deadline: None }
    }

    /// Returns a reader for cleaning and repair.
    pub(crate) fn cleaning(devices: &'a Devices) -> Self {
        Self { devices, priority: Priority::Clean, deadline: None }
    }

    /// Sets a deadline, after which waits fail with [`ErrorKind::Deadline`](crate::ErrorKind::Deadline).
    pub(super) fn until(self, deadline: Option<Instant>) -> Self {
        Self { deadline, ..self }
    }

    /// Reads at `offset` of a segment into a range of a buffer.
    ///
    /// # Errors
    /// The read failed, or the deadline passed.
    pub(crate) fn read_into(
        &self,
        segment: &SegmentHandle,
        offset: u64,
        (buffer, range): (&mut Lease, Range<usize>),
    ) -> Result<()> {
        let read = read_request(self.devices, segment, offset, (buffer, range))?;
        self.submit([Ok(read)])?.wait(0)
    }

    /// Reads ranges and returns their bytes.
    ///
    /// # Errors
    /// The errors of [`Self::read_each`]. The first error of a range.
    pub(crate) fn read_all(&self, ranges: &[SegmentRange<'_>]) -> Result<Vec<Vec<u8>>> {
        self.read_each(ranges)?.into_iter().collect()
    }

    /// Reads ranges and returns the outcome of each. It submits one batch per device, or several if memory is short.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`](crate::ErrorKind::MemoryLimit), [`ErrorKind::Busy`](crate::ErrorKind::Busy): no
    /// buffers.
    pub(crate) fn read_each(&self, ranges: &[SegmentRange<'_>]) -> Result<Vec<Result<Vec<u8>>>> {
        let devices = self.devices;
        let mut out: Vec<Result<Vec<u8>>> = ranges.iter().map(|_| Ok(Vec::new())).collect();
        let mut collected = CollectedReads::default();
        for (nth, SegmentRange { segment, offset, bytes }) in ranges.iter().enumerate() {
            for start in (0..*bytes).step_by(READ_BYTES) {
                let len = READ_BYTES.min(bytes - start);
                let mut buffer = match devices.arena.lease_zeroed(len) {
                    // This thread returns its buffers before it waits, because other readers may wait for them.
                    Err(LeaseError::Now) if !collected.buffers.is_empty() => {
                        self.read_collected(std::mem::take(&mut collected), &mut out)?;
                        devices.buffer(len)?
                    }
                    Err(LeaseError::Now) => devices.buffer(len)?,
                    leased => leased.map_err(|e| exhausted(e, len))?,
                };
                let read = read_request(devices, segment, offset + start as u64, (&mut buffer, 0..len));
                collected.reads.push(read);
                collected.buffers.push((nth, buffer));
            }
        }
        self.read_collected(collected, &mut out)?;
        Ok(out)
    }

    /// Reads what was collected and appends it to the outcomes of its ranges.
    fn read_collected(
        &self,
        CollectedReads { buffers, reads }: CollectedReads,
        out: &mut [Result<Vec<u8>>],
    ) -> Result<()> {
        let pending = self.submit(reads)?;
        // Each buffer returns to the arena as soon as it is copied.
        for (at, (nth, buffer)) in buffers.into_iter().enumerate() {
            match (pending.wait(at), &mut out[nth]) {
                (Ok(()), Ok(bytes)) => bytes.extend_from_slice(buffer.bytes().unwrap_or_default()),
                (Err(e), whole @ Ok(_)) => *whole = Err(e),
                (_, Err(_)) => {}
            }
        }
        Ok(())
    }
}

/// Buffers with the indices of the ranges that they are read for, and their reads.
#[derive(Default)]
struct CollectedReads {
    buffers: Vec<(usize, Lease)>,
    reads: Vec<Result<(DeviceIndex, Op)>>,
}
