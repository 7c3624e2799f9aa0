//! The least capacity of a store: its metadata, and three segments on each device.
//!
//! A store without segments and with a smaller capacity never takes a frame, because its manifest takes the space. It
//! is not created, and not opened for writing. A store that has segments opens under any capacity, because deletions
//! free space in them. A store that is open for reading takes no space.

use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::io::seams::Sizes;
use crate::log::bytes_without_data;
use crate::options::StoreOptions;
use stratakv_format::PAGE_BYTES;
use stratakv_format::manifest::MEMBER_ACTIVE;
use stratakv_format::superblock::SLOTS;

/// Segments per device: one for frames, one to continue with while the first is emptied or takes clusters, and the one
/// that appends leave to cleaning.
const SEGMENTS_MIN: u64 = 3;

/// Checks that the capacity has space for segments. `call` begins the error.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: the store has no segments, and its capacity is below the least.
pub(super) fn check_capacity(
    options: &StoreOptions,
    catalog: &Catalog,
    segment_bytes: u64,
    sizes: &Sizes,
    call: &str,
) -> Result<()> {
    let Some(capacity) = options.capacity.filter(|_| catalog.segments.is_empty()) else { return Ok(()) };
    let active = catalog.members.values().filter(|member| member.state == MEMBER_ACTIVE);
    let devices = active.count() as u64;
    let device = SEGMENTS_MIN.saturating_mul(segment_bytes).saturating_add((SLOTS * PAGE_BYTES) as u64);
    let least = devices.saturating_mul(device).saturating_add(bytes_without_data(&catalog.members, sizes));
    if capacity.bytes() >= least {
        return Ok(());
    }
    let text = format!(
        "{call}: capacity is {} bytes; metadata and {SEGMENTS_MIN} segments of {segment_bytes} bytes on each of \
         {devices} devices take {least} bytes; raise capacity to at least that, or make segment_bytes smaller",
        capacity.bytes()
    );
    Err(Error::new(ErrorKind::InvalidArgument, text))
}
