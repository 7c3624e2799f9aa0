//! Where a frame is written, and in writes of which size.

use crate::log::devices::Devices;
use crate::log::segment_allocator::SegmentAllocator;
use std::sync::{Arc, Mutex};
use stratakv_format::DeviceIndex;

/// Bytes of one write: large enough for the device, small enough to come from one slab.
pub(super) const WRITE_BYTES: usize = 1 << 20;

/// Where a frame is written.
#[derive(Clone, Copy)]
pub(crate) struct FrameTarget<'a> {
    pub(crate) devices: &'a Devices,
    pub(crate) space: &'a Arc<Mutex<SegmentAllocator>>,
    /// Devices to try for copies, the best first.
    pub(crate) order: &'a [DeviceIndex],
    /// True if this thread writes and waits, because the caller would only wait.
    pub(crate) blocking: bool,
}
