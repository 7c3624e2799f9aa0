//! Verifying blocks and records: every plane is compared with its checksum, which covers its identity.
//!
//! A block with a wrong checksum is read again, once from its own copy and then from the others. If all fail, the error
//! names its place.

use super::copy_fallback::{self, Reread};
use super::errors::not_there;
use crate::catalog::FrameBody;
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::buffer::lease::Lease;
use crate::io::planted;
use crate::io::planted::covered;
use crate::kernels::{plane_checksum, prefetch};
use crate::log::Devices;
use crate::plan::{GroupSource, SelectedGroup, SelectionInner};
use crate::plan::{ReadPart, SectionAt};
use std::ops::Range;
use std::time::Instant;
use stratakv_format::frame::{KIND_GROUPS, KIND_SUMMARY};
use stratakv_format::{PlaneIdentity, segment};

/// Verifies the blocks of a part, and offers the good ones to the cache.
///
/// # Errors
/// [`ErrorKind::Corruption`]: no copy of a block is good. [`ErrorKind::Deadline`]: the deadline passed while a block
/// was read again. [`ErrorKind::Io`]: the driver broke.
pub(super) fn part(
    devices: &Devices,
    selection: &SelectionInner,
    part: &ReadPart,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<()> {
    if buffer.bytes().is_none() {
        // A broken driver has completed its reads with errors, but may still write into the buffer.
        return Err(Error::new(
            ErrorKind::Io,
            "read: the driver broke, and a read into the buffer may still be in flight",
        ));
    }
    prefetch_checksums(selection, part);
    for (group, block) in selection.groups[part.groups.clone()].iter().zip(&part.blocks) {
        let (Some(at), GroupSource::Disk { frame, offset, checksum }) = (block, &group.source) else { continue };
        let bad = |buffer: &Lease| {
            let bytes = buffer.bytes().unwrap_or_default();
            mismatch(devices, selection, group, frame, *checksum, bytes.get(*at..).unwrap_or_default())
        };
        if bad(buffer).is_none() {
            continue;
        }
        let bytes = group.bytes(selection.layout.block(selection.layer));
        let readable = frame.readable(*offset, bytes);
        let start = at - (*offset - readable.start) as usize;
        let range = start..start + (readable.end - readable.start) as usize;
        let read = part.reads.iter().find(|read| (read.to..read.to + read.bytes).contains(at));
        let read = read.ok_or_else(|| not_there(&format!("read for group {}", group.index)))?;
        let reread = Reread { devices, frame, copy: read.copy, place: (*offset, bytes), deadline };
        let is_bad = |buffer: &Lease| bad(buffer).is_some();
        devices.count_checksum_failures(read.segment.key.0, 1);
        if !planted!(NotReadAgain)
            && copy_fallback::until_good(&reread, (&mut *buffer, &range, &(*at..at + bytes)), &is_bad)?
        {
            continue;
        }
        if let Some((plane, expected, found)) = bad(buffer) {
            devices.count_checksum_failures(frame.segment.key.0, 1);
            return Err(Error::corrupt(Corruption {
                code: "payload-checksum",
                device: frame.segment.key.0.0,
                file: segment::file_name(frame.segment.key.1),
                offset: offset + plane.start as u64,
                len: plane.len() as u64,
                expected: format!("checksum {expected:#018x}"),
                found: format!("{found:#018x}"),
            })
            .during(format!("layer {}, group {}", selection.layer, group.index)));
        }
    }
    admit(selection, part, buffer);
    Ok(())
}

/// Prefetches the checksums of a part, which left the processor's caches while the device worked.
fn prefetch_checksums(selection: &SelectionInner, part: &ReadPart) {
    let read = selection.groups[part.groups.clone()].iter().zip(&part.blocks).filter(|(_, at)| at.is_some());
    let read = read.filter_map(|(group, _)| match &group.source {
        GroupSource::Disk { frame, checksum, .. } => Some((frame, *checksum)),
        _ => None,
    });
    read.clone().for_each(|(frame, _)| prefetch(&frame.checksums));
    read.for_each(|(frame, checksum)| frame.checksums.get(checksum).into_iter().for_each(prefetch));
}

/// Verifies the records of a part.
///
/// # Errors
/// [`ErrorKind::Corruption`]: no copy has good records. [`ErrorKind::Deadline`]: the deadline passed.
pub(super) fn records(
    devices: &Devices,
    selection: &SelectionInner,
    part: &ReadPart,
    at: &SectionAt,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<()> {
    if records_are_good(devices, part, at, selection.group_tokens(), buffer, deadline)? {
        return Ok(());
    }
    let (frame, place) = (&at.section.frame, &at.section.place);
    Err(Error::corrupt(Corruption {
        code: "payload-checksum",
        device: frame.segment.key.0.0,
        file: segment::file_name(frame.segment.key.1),
        offset: at.section.offset(),
        len: place.bytes,
        expected: format!("checksum {:#018x}", place.checksum),
        found: "other records".to_owned(),
    })
    .during(format!("layer {}, records from group {} on", selection.layer, place.first_group)))
}

/// Offers the verified blocks of a part to the cache.
fn admit(selection: &SelectionInner, part: &ReadPart, buffer: &Lease) {
    let (Some(cache), Some(bytes)) = (&selection.cache, buffer.bytes()) else { return };
    let block = selection.layout.block(selection.layer);
    for (group, at) in selection.groups[part.groups.clone()].iter().zip(&part.blocks) {
        if let (Some(at), Some(key)) = (at, group.source.key(selection.layer))
            && let Some(block) = bytes.get(*at..at + group.bytes(block))
        {
            cache.admit(key, block);
        }
    }
}

/// Returns the first plane of a block with a wrong checksum: its range, the expected and the found checksum.
fn mismatch(
    devices: &Devices,
    selection: &SelectionInner,
    group: &SelectedGroup,
    frame: &FrameBody,
    first_checksum: usize,
    block: &[u8],
) -> Option<(Range<usize>, u64, u64)> {
    let tokens = selection.group_tokens();
    group.planes(selection.layout.block(selection.layer)).enumerate().find_map(|(nth, (plane, place))| {
        let identity = PlaneIdentity::new(
            frame.nonce,
            frame.origin,
            KIND_GROUPS,
            selection.layer as u16,
            group.index * tokens as u64,
            tokens as u32,
        )
        .with_plane(plane as u16);
        let data = block.get(place.clone());
        let found = data.map_or(0, |data| plane_checksum(devices.identity.checksum, &identity, covered(data)));
        let expected = frame.checksums.get(first_checksum + nth).copied().unwrap_or(!found);
        (expected != found && !planted!(PayloadChecksumIgnored)).then_some((place, expected, found))
    })
}

/// Returns whether the records of a part match their checksum, after trying every copy.
fn records_are_good(
    devices: &Devices,
    part: &ReadPart,
    SectionAt { section, at }: &SectionAt,
    group_tokens: usize,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<bool> {
    let (frame, place, bytes) = (&section.frame, &section.place, section.bytes());
    let (first, tokens) = (place.first_group * group_tokens as u64, u64::from(place.groups) * group_tokens as u64);
    let identity = PlaneIdentity::new(frame.nonce, frame.origin, KIND_SUMMARY, place.layer, first, tokens as u32);
    let is_bad = |buffer: &Lease| {
        let records = buffer.bytes().and_then(|all| all.get(*at..at + bytes));
        records.is_none_or(|records| {
            plane_checksum(devices.identity.checksum, &identity, covered(records)) != place.checksum
        })
    };
    if !is_bad(buffer) {
        return Ok(true);
    }
    let Some(read) = part.reads.first() else { return Ok(false) };
    devices.count_checksum_failures(read.segment.key.0, 1);
    let reread = Reread { devices, frame, copy: read.copy, place: (section.offset(), bytes), deadline };
    copy_fallback::until_good(&reread, (buffer, &(0..read.bytes), &(*at..at + bytes)), &is_bad)
}
