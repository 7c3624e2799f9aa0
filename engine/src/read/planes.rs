//! Finding the planes of a selected group: in memory, in a cached block, or in the buffer of a part.

use crate::cache::Resident;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::plan::{GroupSource, ReadPart, SelectionInner};

/// Returns the planes of group `nth` of a selection, as stored. The keys are empty if they are not read.
///
/// # Errors
/// [`ErrorKind::Busy`]: the block has not arrived.
pub(super) fn planes<'a>(
    view: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    nth: usize,
) -> Result<(&'a [u8], &'a [u8])> {
    let geometry = view.layout.block(view.layer);
    let unit = &view.units[nth];
    let (start, len) = geometry.plane(1);
    let keys = if unit.reads_keys() { geometry.key_bytes } else { 0 };
    let block = match &unit.source {
        GroupSource::Run { run, index } => run.block(*index)?,
        GroupSource::Copied(block) => block,
        GroupSource::Disk { .. } => {
            let resident = part.resident.get(nth - part.units.start).and_then(Option::as_ref);
            let at = part.blocks.get(nth - part.units.start).copied().flatten();
            let bytes = buffer.and_then(Lease::bytes);
            let own = unit.bytes(geometry);
            let read = match (resident.and_then(Resident::bytes), at, bytes) {
                (Some(block), ..) if block.len() == own => block,
                (None, Some(at), Some(bytes)) => &bytes[at..at + own],
                _ => return Err(Error::new(ErrorKind::Busy, "attend: the block has not arrived; wait for the read")),
            };
            if !unit.reads_keys() {
                return Ok((&[], read));
            }
            read
        }
    };
    Ok((&block[..keys], &block[start..start + len]))
}
