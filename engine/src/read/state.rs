//! State that a ticket and its helpers share: which parts another copy has given, and how a planned read becomes a
//! request.

use super::block_reader::read_request;
use crate::error::Result;
use crate::io::buffer::lease::Lease;
use crate::io::driver::interface::Op;
use crate::log::Devices;
use crate::plan::PlannedRead;
use std::collections::BTreeSet;
use stratakv_format::DeviceIndex;

/// The parts of a read that another copy has given, because their first read was late or failed.
#[derive(Default)]
pub(super) struct Hedges(BTreeSet<usize>);

impl Hedges {
    /// Returns whether another copy has given a part.
    pub(super) fn won(&self, part: usize) -> bool {
        self.0.contains(&part)
    }

    /// Notes that another copy has given a part.
    pub(super) fn set_won(&mut self, part: usize) {
        self.0.insert(part);
    }
}

/// Returns the operation of a planned read into its place in the buffer of its part, and its device.
///
/// # Errors
/// The device is not present, its file cannot be opened, or the buffer is in use.
pub(super) fn request(devices: &Devices, read: &PlannedRead, buffer: &mut Lease) -> Result<(DeviceIndex, Op)> {
    read_request(devices, &read.segment, read.offset, (buffer, read.to..read.to + read.bytes))
}
