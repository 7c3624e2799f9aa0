//! Planes with a codec that have the right checksum and still cannot be decoded.

use super::errors::undecodable;
use crate::codec::BlockCoder;
use crate::error::Result;
use crate::io::buffer::lease::Lease;
use crate::log::Devices;
use crate::plan::ReadPart;
use crate::plan::{GroupSource, SelectionInner};

/// Checks that the verified blocks of a part can be decoded. Another copy would hold the same bytes, so no other
/// copy is tried.
pub(super) fn part(devices: &Devices, selection: &SelectionInner, part: &ReadPart, buffer: &Lease) -> Result<()> {
    let Some(coder) = BlockCoder::of(&selection.layout, selection.layer) else { return Ok(()) };
    let bytes = buffer.bytes().unwrap_or_default();
    for (group, at) in selection.groups[part.groups.clone()].iter().zip(&part.blocks) {
        let block = at.and_then(|at| bytes.get(at..)).filter(|_| matches!(group.source, GroupSource::Disk { .. }));
        let Some(block) = block else { continue };
        let bad = group.planes(selection.layout.block(selection.layer)).find_map(|(plane, place)| {
            let start = place.start;
            coder.first_bad(plane, block.get(place).unwrap_or_default()).map(|at| start + at)
        });
        if let (Some(bad), GroupSource::Disk { frame, .. }) = (bad, &group.source) {
            let e = undecodable(selection, group, bad);
            devices.count_damage(frame.segment.key.0, &e);
            return Err(e);
        }
    }
    Ok(())
}
