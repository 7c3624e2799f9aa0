//! The copies of a frame, compared with each other (SPEC.md chapter 7, "Replica").
//!
//! Every copy has the same header except for its place, and the same payload. The header holds the checksums of the
//! payload, and each copy is compared with its own checksums. Equal headers therefore mean equal copies.

use super::info::FrameInfo;
use crate::devices::Devices;
use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::replay::State;
use std::collections::HashMap;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use stratakv_format::frame::FrameHeader;
use stratakv_format::ids::RawLocation;
use stratakv_format::segment::file_name;
use stratakv_format::{Location, PAGE_BYTES};

/// The bytes of a header that say where the copy is. They differ between copies.
const PLACE: [Range<usize>; 3] = {
    let (crc, location) = (offset_of!(FrameHeader, crc), offset_of!(FrameHeader, location));
    let generation = offset_of!(FrameHeader, segment_generation);
    [crc..crc + 4, location..location + size_of::<RawLocation>(), generation..generation + 8]
};

/// Returns the CRC-64/NVME of the header pages with the place of the copy taken as zeros.
pub(super) fn digest(header: &[u8]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    let mut at = 0;
    for Range { start, end } in PLACE {
        digest.update(&header[at..start]);
        at = end;
    }
    digest.update(&header[at..]);
    digest.finalize()
}

/// Returns one content per frame, from the contents of all copies. Reports copies that differ from the first one.
///
/// The first copy counts, or the one on the lowest device if the first copy has no valid header. A later copy counts
/// instead if the pieces of an adapter in the copies before it are bad.
pub(crate) fn merge(
    mut copies: Vec<(u64, FrameInfo)>,
    devices: &Devices,
    state: &State,
    sink: &Sink,
) -> HashMap<u64, FrameInfo> {
    let first = |id: u64| state.frames().get(&id).map(|frame| frame.location);
    copies.sort_by_key(|(id, info)| (*id, first(*id) != Some(info.location), info.location.device.0));
    let mut merged: HashMap<u64, FrameInfo> = HashMap::new();
    let mut before: Option<(u64, u64, Location)> = None;
    for (id, info) in copies {
        match before {
            Some((frame, digest, other)) if frame == id => {
                if digest != info.digest {
                    let text = format!("the header of this copy differs from the copy on device {}", other.device.0);
                    sink.push(finding(text, id, info.location, devices, state));
                }
            }
            _ => before = Some((id, info.digest, info.location)),
        }
        let replaces = merged.get(&id).is_none_or(|known| known.adapter.iter().any(|piece| !piece.good));
        if replaces {
            merged.insert(id, info);
        }
    }
    merged
}

/// Returns the damage of the header of a copy.
fn finding(text: String, id: u64, copy: Location, devices: &Devices, state: &State) -> Finding {
    let finding = Finding::damage(Code::FrameHeader, text).frame(id);
    let (Some(device), Some(frame)) = (devices.get(copy.device.0), state.frames().get(&id)) else { return finding };
    let file = file_name(copy.segment).into();
    let place = FilePlace { device: Some(device.index), path: device.path.clone(), file };
    let header_bytes = u64::from(frame.record.header_pages.get()) * PAGE_BYTES as u64;
    finding.sequence(frame.record.origin.get()).at(&place, copy.offset(), header_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_leaves_out_only_the_place_of_a_copy() {
        let header: Vec<u8> = (0..PAGE_BYTES).map(|at| at as u8).collect();
        let own = digest(&header);
        for at in (0..200).chain([PAGE_BYTES - 1]) {
            let mut other = header.clone();
            other[at] ^= 1;
            let is_place = PLACE.iter().any(|range| range.contains(&at));
            assert_eq!(digest(&other) == own, is_place, "byte {at}");
        }
        assert_eq!(PLACE, [4..8, 32..48, 64..72]);
    }
}
