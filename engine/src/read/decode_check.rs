//! Planes under a codec that have the right checksum, and still cannot be decoded: damage with a place.

use crate::codec::BlockCoder;
use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::buffer::arena::Lease;
use crate::log::Devices;
use crate::plan::ReadPart;
use crate::plan::{GroupSource, SelectedGroup, SelectionInner};
use stratakv_format::segment;

/// Sees that the blocks of a part, which were checked, can be decoded. They are what was written: another copy would be no better.
pub(super) fn part(devices: &Devices, view: &SelectionInner, part: &ReadPart, buffer: &Lease) -> Result<()> {
    let Some(coder) = BlockCoder::of(&view.layout, view.layer) else { return Ok(()) };
    let bytes = buffer.bytes().unwrap_or_default();
    for (unit, at) in view.units[part.units.clone()].iter().zip(&part.blocks) {
        let block = at.and_then(|at| bytes.get(at..)).filter(|_| matches!(unit.source, GroupSource::Disk { .. }));
        let Some(block) = block else { continue };
        let bad = unit.planes(view.layout.block(view.layer)).find_map(|(plane, place)| {
            let start = place.start;
            coder.first_bad(plane, block.get(place).unwrap_or_default()).map(|at| start + at)
        });
        if let (Some(bad), GroupSource::Disk { frame, .. }) = (bad, &unit.source) {
            let e = undecodable(view, unit, bad);
            devices.count_damage(frame.segment.key.0, &e);
            return Err(e);
        }
    }
    Ok(())
}

/// The error of a unit's block with a range at `at`, counted from what is read of it, that is no number.
pub(super) fn undecodable(view: &SelectionInner, unit: &SelectedGroup, at: usize) -> Error {
    let error = match &unit.source {
        GroupSource::Disk { frame, offset, .. } => Error::corrupt(Corruption {
            code: "payload-codec",
            device: frame.segment.key.0.0,
            file: segment::file_name(frame.segment.key.1),
            offset: offset + at as u64,
            len: view.layout.dtype().bytes() as u64,
            expected: "finite ranges".into(),
            found: "a range that is not finite".into(),
        }),
        _ => Error::new(ErrorKind::Corruption, "a range that is not finite"),
    };
    error.during(format!("layer {}, group {}", view.layer, unit.group))
}
