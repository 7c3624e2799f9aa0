//! Finding the planes of a selected group, or a page: in memory, in a cached block, or in the buffer of a part.

use crate::cache::Resident;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::plan::{GroupSource, ReadPart, SelectionInner};

/// Returns the planes of group `nth` of a selection, as stored. The keys are empty if they are not read.
///
/// # Errors
/// [`ErrorKind::Busy`]: the block has not arrived.
pub(super) fn planes<'a>(
    selection: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    nth: usize,
) -> Result<(&'a [u8], &'a [u8])> {
    let geometry = selection.layout.block(selection.layer);
    let group = &selection.groups[nth];
    let (start, len) = geometry.plane(1);
    let keys = if group.reads_keys() { geometry.key_bytes } else { 0 };
    let block = match &group.source {
        GroupSource::Run { run, index } => run.block(*index)?,
        GroupSource::Copied(block) => block,
        GroupSource::Disk { .. } => {
            let resident = part.resident.get(nth - part.groups.start).and_then(Option::as_ref);
            let at = part.blocks.get(nth - part.groups.start).copied().flatten();
            let bytes = buffer.and_then(Lease::bytes);
            let own = group.bytes(geometry);
            let read = match (resident.and_then(Resident::bytes), at, bytes) {
                (Some(block), ..) if block.len() == own => block,
                (None, Some(at), Some(bytes)) => &bytes[at..at + own],
                _ => return Err(Error::new(ErrorKind::Busy, "attend: the block has not arrived; wait for the read")),
            };
            if !group.reads_keys() {
                return Ok((&[], read));
            }
            read
        }
    };
    Ok((&block[..keys], &block[start..start + len]))
}

/// Returns the bytes of a page of a part, counted within the part.
///
/// # Errors
/// [`ErrorKind::Busy`]: the page has not arrived.
pub(super) fn page_bytes<'a>(
    selection: &'a SelectionInner,
    part: &'a ReadPart,
    buffer: Option<&'a Lease>,
    nth: usize,
) -> Result<&'a [u8]> {
    let bytes = selection.pages[part.pages.start + nth].bytes();
    let resident = part.resident.get(nth).and_then(Option::as_ref).and_then(Resident::bytes);
    let read = part.blocks.get(nth).copied().flatten().zip(buffer.and_then(Lease::bytes));
    let found = resident.or(read.and_then(|(at, all)| all.get(at..at + bytes))).filter(|page| page.len() == bytes);
    found.ok_or_else(|| Error::new(ErrorKind::Busy, "attend: the page has not arrived; wait for the read"))
}
