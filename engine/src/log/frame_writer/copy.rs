//! Writing one copy of a frame to one device.

use super::tables::{Front, fill_front};
use super::target::{FrameTarget, WRITE_BYTES};
use super::written::{CopyFlight, PlacedRun};
use crate::catalog::SegmentHandle;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::LeaseError;
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::io::file::device_file::DeviceFile;
use crate::io::scheduler::{Batch, Priority, Request, Sink, Waiter};
use crate::log::devices::{Devices, exhausted};
use crate::log::segment_allocator::{SegmentAllocator, Writer, allocate};
use crate::metrics::lock;
use std::sync::{Arc, Mutex};
use stratakv_format::frame::{FramePlace, HeaderBuilder};
use stratakv_format::{DeviceIndex, Location};

/// A frame that is complete except for the place that its header names, which differs from copy to copy.
pub(super) struct PlacedFrame<'a> {
    pub(super) header: HeaderBuilder<'a>,
    pub(super) header_bytes: usize,
    pub(super) front_bytes: usize,
    pub(super) front: &'a Front<'a>,
    pub(super) runs: &'a [PlacedRun],
    /// The pages of its pools, if it is a derived frame. It has no runs then.
    pub(super) pools: &'a [u8],
    /// Pages of the front, of the runs and of the pools.
    pub(super) pages: u32,
}

impl PlacedFrame<'_> {
    /// Writes a copy to one device: allocates its pages and submits its writes, or waits for them if `blocking`.
    ///
    /// # Errors
    /// The device has no space, there is no memory, or a write that is waited for failed.
    pub(super) fn write_copy(
        &self,
        target: &FrameTarget<'_>,
        device: DeviceIndex,
        writer: Writer,
    ) -> Result<CopyFlight> {
        let FrameTarget { devices, space, blocking, .. } = *target;
        let shard = &devices.get(device)?.shard;
        let mut front_buffers = self.lease_front(devices)?;
        let (location, flight) = allocate(devices, space, device, writer, self.pages)?;
        let segment = Arc::clone(flight.segment());
        let (header_page, header_crc) = self.header_page(devices, location, &segment)?;
        let mut pieces = vec![(0, &header_page[..])];
        pieces.extend(self.front.pieces.iter().map(|(offset, bytes)| (self.header_bytes + offset, *bytes)));
        let mut writes =
            CopyWrites { devices, space, device, file: segment.file()?, segment: &segment, requests: Vec::new() };
        let mut offset = location.offset();
        if front_buffers.is_empty() {
            let mut front = vec![0; self.front_bytes];
            fill_front(&pieces, 0, &mut front);
            writes.write_now(offset, &front)?;
        }
        for (index, buffer) in front_buffers.iter_mut().enumerate() {
            let bytes = buffer.len();
            let in_use = || Error::new(ErrorKind::Busy, "write frame: a buffer that was just leased is in use");
            fill_front(&pieces, index * WRITE_BYTES, buffer.bytes_mut().ok_or_else(in_use)?);
            writes.push(buffer, offset, bytes)?;
            offset += bytes as u64;
        }
        let behind = location.offset() + self.front_bytes as u64;
        self.write_runs(&mut writes, behind)?;
        if !self.pools.is_empty() {
            writes.write_now(behind, self.pools)?;
        }
        let requests = writes.requests;
        let waiter = Waiter::new(if blocking { 1 } else { requests.len() });
        if blocking {
            waiter.complete(0, shard.write_blocking(requests));
        } else {
            let sink = Arc::clone(&waiter) as Arc<dyn Sink>;
            shard.submit_wait(Batch { requests, priority: Priority::Write, sink, cancel: None });
        }
        Ok(CopyFlight { location, header_crc, segment, flight: Some(flight), waiter, front: front_buffers })
    }

    /// Leases buffers for the front. Returns none if the arena is full now: groups that wait to be written hold its
    /// memory, so that writing them must not wait for it.
    fn lease_front(&self, devices: &Devices) -> Result<Vec<Lease>> {
        let mut buffers = Vec::new();
        let mut left = self.front_bytes;
        while left > 0 {
            match devices.arena.lease(left.min(WRITE_BYTES)) {
                Ok(buffer) => buffers.push(buffer),
                Err(LeaseError::Now) => return Ok(Vec::new()),
                Err(other) => return Err(exhausted(other, WRITE_BYTES)),
            }
            left -= left.min(WRITE_BYTES);
        }
        Ok(buffers)
    }

    /// Returns the header as stored at `location`, and its CRC.
    fn header_page(&self, devices: &Devices, location: Location, segment: &SegmentHandle) -> Result<(Vec<u8>, u32)> {
        let place = FramePlace {
            store_id: devices.identity.store_id,
            location,
            segment_generation: segment.generation,
            segment_nonce: segment.nonce,
        };
        let mut page = vec![0; self.header_bytes];
        let crc = self.header.write(&place, &mut page);
        let crc = crc.map_err(|e| Error::new(ErrorKind::Configuration, format!("write frame: its header: {e}")))?;
        Ok((page, crc))
    }

    /// Adds the writes of the groups, from `offset` on.
    fn write_runs(&self, writes: &mut CopyWrites<'_>, mut offset: u64) -> Result<()> {
        for placed in self.runs {
            let run = &placed.run;
            if run.cut && !run.ends_on_page() {
                // The padding of its last page still holds groups that were cut off, so a clean copy is written.
                let mut bytes = vec![0; run.disk_bytes()];
                for at in 0..run.groups {
                    let block = run.block(at)?;
                    bytes[run.geometry.block_offset(at)..][..block.len()].copy_from_slice(block);
                }
                writes.write_now(offset, &bytes)?;
            } else {
                writes.push(&run.buffer, offset, run.disk_bytes())?;
            }
            offset += run.disk_bytes() as u64;
        }
        Ok(())
    }
}

/// The writes of one copy.
struct CopyWrites<'a> {
    devices: &'a Devices,
    space: &'a Mutex<SegmentAllocator>,
    device: DeviceIndex,
    file: Arc<DeviceFile>,
    segment: &'a Arc<SegmentHandle>,
    requests: Vec<Request>,
}

impl CopyWrites<'_> {
    /// Writes bytes on this thread. A failure abandons the segment.
    fn write_now(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let target = [(self.device, Arc::clone(&self.file))];
        let mut chunks = bytes.chunks(WRITE_BYTES).enumerate();
        let written = chunks.try_for_each(|(index, chunk)| {
            self.devices.write_all(&target, offset + (index * WRITE_BYTES) as u64, chunk)
        });
        written.map_err(|e| {
            lock(self.space).abandon(self.segment);
            e.during("write frame")
        })
    }

    /// Adds a request for the first `bytes` of a buffer.
    fn push(&mut self, buffer: &Lease, offset: u64, bytes: usize) -> Result<()> {
        let from = buffer.write_source(0..bytes)?;
        self.requests.push(Request { op: Op::Write { file: Arc::clone(&self.file), offset, from }, tag: 0 });
        Ok(())
    }
}
