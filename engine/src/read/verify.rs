//! Every block that arrives is held against its checksum, which is bound to its identity. A block that fails is read again
//! once; then it is reported with its place.

use super::{copy_fallback, summary_read};
use crate::catalog::FrameBody;
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::buffer::arena::Lease;
use crate::io::planted;
use crate::io::planted::covered;
use crate::kernels::prefetch;
use crate::log::Devices;
use crate::plan::{GroupSource, SelectedGroup, SelectionInner};
use crate::plan::{ReadPart, SectionAt};
use std::ops::Range;
use std::time::Instant;
use stratakv_format::frame::KIND_GROUPS;
use stratakv_format::{PlaneIdentity, segment};

/// Checks the blocks of a part; the first that stays bad is the error, or that the deadline passed while it was read again.
pub(super) fn part(
    devices: &Devices,
    view: &SelectionInner,
    part: &ReadPart,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<()> {
    if buffer.bytes().is_none() {
        // A driver that broke has said that its reads failed, but may still write what was under way.
        return Err(Error::new(ErrorKind::Io, "a read of a driver that broke may still be under way into the buffer"));
    }
    ask_for_checksums(view, part);
    for (unit, block) in view.units[part.units.clone()].iter().zip(&part.blocks) {
        let (Some(at), GroupSource::Disk { frame, offset, checksum }) = (block, &unit.source) else { continue };
        let bad = |buffer: &Lease| {
            let bytes = buffer.bytes().unwrap_or_default();
            mismatch(devices, view, unit, frame, *checksum, bytes.get(*at..).unwrap_or_default())
        };
        if bad(buffer).is_none() {
            continue;
        }
        let bytes = unit.bytes(view.layout.block(view.layer));
        let readable = frame.readable(*offset, bytes);
        let start = at - (*offset - readable.start) as usize;
        let range = start..start + (readable.end - readable.start) as usize;
        let read = part.reads.iter().find(|read| (read.to..read.to + read.bytes).contains(at));
        let read = read.ok_or_else(|| not_there(&format!("the read of group {}", unit.group)))?;
        let place = (*offset, bytes);
        let is_bad = |buffer: &Lease| bad(buffer).is_some();
        if let Ok(device) = devices.get(read.segment.key.0) {
            device.counters.checksum_failures.add(1);
        }
        if !planted!(NotReadAgain)
            && copy_fallback::until_good(
                devices,
                read,
                frame,
                place,
                (&mut *buffer, &range, &(*at..at + bytes)),
                deadline,
                &is_bad,
            )?
        {
            continue;
        }
        if let Some((plane, expected, found)) = bad(buffer) {
            devices.get(frame.segment.key.0)?.counters.checksum_failures.add(1);
            return Err(Error::corrupt(Corruption {
                code: "payload-checksum",
                device: frame.segment.key.0.0,
                file: segment::file_name(frame.segment.key.1),
                offset: offset + plane.start as u64,
                len: plane.len() as u64,
                expected: format!("checksum {expected:#018x}"),
                found: format!("{found:#018x}"),
            })
            .during(format!("layer {}, group {}", view.layer, unit.group)));
        }
    }
    admit(view, part, buffer);
    Ok(())
}

/// Asks for what the blocks of a part are held against, all at once: while the device worked, other things took its place in the
/// caches.
fn ask_for_checksums(view: &SelectionInner, part: &ReadPart) {
    let read = view.units[part.units.clone()].iter().zip(&part.blocks).filter(|(_, at)| at.is_some());
    let read = read.filter_map(|(unit, _)| match &unit.source {
        GroupSource::Disk { frame, checksum, .. } => Some((frame, *checksum)),
        _ => None,
    });
    read.clone().for_each(|(frame, _)| prefetch(&frame.checksums));
    read.for_each(|(frame, checksum)| frame.checksums.get(checksum).into_iter().for_each(prefetch));
}

/// Checks the records of a part; the error says that no copy gave them, or that the deadline passed.
pub(super) fn records(
    devices: &Devices,
    view: &SelectionInner,
    part: &ReadPart,
    at: &SectionAt,
    buffer: &mut Lease,
    deadline: Option<Instant>,
) -> Result<()> {
    if summary_read::check(devices, part, at, view.group_tokens(), buffer, deadline)? {
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
    .during(format!("layer {}, records from group {} on", view.layer, place.first_group)))
}

/// What was read and is right may stay.
fn admit(view: &SelectionInner, part: &ReadPart, buffer: &Lease) {
    let (Some(cache), Some(bytes)) = (&view.cache, buffer.bytes()) else { return };
    let block = view.layout.block(view.layer);
    for (unit, at) in view.units[part.units.clone()].iter().zip(&part.blocks) {
        if let (Some(at), Some(key)) = (at, unit.source.key(view.layer))
            && let Some(block) = bytes.get(*at..at + unit.bytes(block))
        {
            cache.admit(key, block);
        }
    }
}

/// The first plane of what was read of a block whose checksum is not the stored one, and its place there.
fn mismatch(
    devices: &Devices,
    view: &SelectionInner,
    unit: &SelectedGroup,
    frame: &FrameBody,
    first_checksum: usize,
    block: &[u8],
) -> Option<(Range<usize>, u64, u64)> {
    let tokens = view.group_tokens();
    unit.planes(view.layout.block(view.layer)).enumerate().find_map(|(nth, (plane, place))| {
        let identity = PlaneIdentity::new(
            frame.nonce,
            frame.origin,
            KIND_GROUPS,
            view.layer as u16,
            unit.group * tokens as u64,
            tokens as u32,
        )
        .with_plane(plane as u16);
        let data = block.get(place.clone());
        let found = data.map_or(0, |data| devices.identity.checksum.compute(&identity, covered(data)));
        let expected = frame.checksums.get(first_checksum + nth).copied().unwrap_or(!found);
        (expected != found && !planted!(PayloadChecksumIgnored)).then_some((place, expected, found))
    })
}

/// The error of a view or block that is not there.
pub(super) fn not_there(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, what.to_owned())
}
