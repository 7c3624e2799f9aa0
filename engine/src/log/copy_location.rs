//! Where the copies of a frame are: looked up in the catalog, and handed to the slots that readers read from.

use super::device::Device;
use super::devices::Devices;
use super::segment_allocator::SegmentAllocator;
use crate::catalog::{Catalog, FrameCopy, FrameMeta, FrameSlot};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use std::sync::Mutex;
use stratakv_format::{FrameId, Location};

/// A copy of a frame that can be read.
pub(crate) struct CopyAt {
    pub(crate) at: FrameCopy,
    pub(crate) location: Location,
}

/// Returns the copies of a frame on devices that are present, the first copy in front. No I/O.
///
/// # Errors
/// [`ErrorKind::Io`]: no device that has one is there. [`ErrorKind::Corruption`]: its segment is unknown.
pub(crate) fn copies_of(
    devices: &Devices,
    catalog: &Catalog,
    space: &mut SegmentAllocator,
    frame: &FrameMeta,
) -> Result<Vec<CopyAt>> {
    let first = (frame.location, frame.header_crc);
    let others = frame.other_copies.iter().map(|copy| (copy.location, copy.header_crc));
    let mut copies = Vec::with_capacity(frame.copies());
    let mut missing = None;
    for (location, header_crc) in std::iter::once(first).chain(others) {
        let key = (location.device, location.segment);
        let lost =
            || Error::new(ErrorKind::Corruption, format!("segment of a frame at {location} is not in the manifest"));
        let segment = catalog.segments.get(&key).ok_or_else(lost)?;
        match space.handle(devices, key, segment) {
            Ok(segment) => {
                let at = FrameCopy { segment, page: location.page, header_crc };
                copies.push(CopyAt { at, location });
            }
            Err(e) => missing = Some(e),
        }
    }
    // A copy on a device that was declared lost is the last resort.
    copies.sort_by_key(|copy| devices.get(copy.location.device).is_ok_and(Device::is_lost));
    match missing {
        Some(e) if copies.is_empty() => Err(e.during("every copy is on a device that is not there")),
        _ => Ok(copies),
    }
}

/// Updates the slot of a frame to where its copies are now, so that the next read uses them.
///
/// # Errors
/// As [`copies_of`].
pub(super) fn tell_copies(
    devices: &Devices,
    catalog: &Mutex<Catalog>,
    space: &Mutex<SegmentAllocator>,
    id: FrameId,
) -> Result<()> {
    let catalog = lock(catalog);
    let mut space = lock(space);
    match (space.frame_slot(id), catalog.frames.get(&id)) {
        (Some(slot), Some(frame)) => lay_copies(devices, &catalog, &mut space, frame, &slot),
        _ => Ok(()),
    }
}

/// Sets the locations of `slot` to the copies that the catalog names. No I/O.
pub(super) fn lay_copies(
    devices: &Devices,
    catalog: &Catalog,
    space: &mut SegmentAllocator,
    frame: &FrameMeta,
    slot: &FrameSlot,
) -> Result<()> {
    let mut copies = copies_of(devices, catalog, space, frame)?.into_iter().map(|copy| copy.at);
    if let Some(first) = copies.next() {
        slot.set_location(first, copies.collect());
    }
    Ok(())
}
