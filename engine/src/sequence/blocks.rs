//! Single blocks that a sequence reads and checks for itself.

use super::layer::LayerState;
use crate::catalog::BlockPlace;
use crate::error::{Corruption, Error, Result};
use crate::io::planted::covered;
use crate::kernels::plane_checksum;
use crate::log::Devices;
use crate::read::{BlockReader, CopyFault, SegmentRange, first_good};
use stratakv_format::frame::KIND_GROUPS;
use stratakv_format::{PlaneIdentity, segment};

/// V planes of fewer bytes are read with the K planes around them, because neighbouring blocks then need one request.
const VALUES_LEFT_OUT_BYTES: usize = 16 << 10;

/// The part of a block that a scan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanPart {
    /// The K plane, which is at the start of the block.
    Keys,
    /// All planes.
    Block,
}

impl ScanPart {
    /// Returns the bytes to read from the start of a layer's block.
    pub(super) fn bytes(self, layer: &LayerState) -> usize {
        let block = layer.block();
        let alone = self == Self::Keys && block.value_bytes >= VALUES_LEFT_OUT_BYTES;
        if alone { block.key_bytes } else { block.block_bytes }
    }

    /// Returns the number of planes that are checked. Damage in the others does not matter.
    fn planes(self, layer: &LayerState) -> usize {
        if self == Self::Keys { 1 } else { layer.geometry().planes() }
    }
}

/// Reads and checks one block, or a part of it, from the first copy that has it undamaged. A damaged copy is read once
/// more, because the damage may have happened on the way.
///
/// # Errors
/// The error of the first copy, if every copy fails. [`MemoryLimit`](crate::ErrorKind::MemoryLimit),
/// [`Busy`](crate::ErrorKind::Busy): there is no buffer for the read.
pub(super) fn read_block(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    place: &BlockPlace,
) -> Result<Vec<u8>> {
    let (copies, mut failed) = (place.frame.copies(), Vec::new());
    let block = first_good(0, 1..copies, |copy, again| {
        read_block_copy(devices, layer, (group, part), tokens, place, copy).map_err(|e| {
            let device = place.frame.copy(copy).0.key.0;
            let fault = CopyFault::counted(devices, device, e);
            if copies > 1 && fault.ends_copy(again) {
                devices.suspects.add(&place.frame, copy);
                failed.push(device);
            }
            fault
        })
    })?;
    failed.into_iter().for_each(|device| devices.count_other_copy(device));
    Ok(block)
}

fn read_block_copy(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    place: &BlockPlace,
    copy: usize,
) -> Result<Vec<u8>> {
    let (own, offset) = (place.frame.copy(copy).0, place.frame.offset_in(copy, place.offset));
    let (pages, skip) = SegmentRange::pages_around(own, offset, part.bytes(layer));
    let pages = BlockReader::demand(devices).read_all(&[pages])?.pop().unwrap_or_default();
    let block = pages.get(skip..skip + part.bytes(layer)).unwrap_or_default();
    check_block(devices, layer, (group, part), tokens, (place, copy), block)?;
    Ok(block.to_vec())
}

/// Checks a block, or a part of it, that was read from copy `copy` against its checksums.
///
/// # Errors
/// [`ErrorKind::Corruption`](crate::ErrorKind::Corruption) with the device, segment and offset.
pub(super) fn check_block(
    devices: &Devices,
    layer: &LayerState,
    (group, part): (u64, ScanPart),
    tokens: u64,
    (place, copy): (&BlockPlace, usize),
    block: &[u8],
) -> Result<()> {
    let (own, offset) = (place.frame.copy(copy).0, place.frame.offset_in(copy, place.offset));
    for plane in 0..part.planes(layer) {
        let (start, len) = layer.block().plane(plane);
        let identity = PlaneIdentity::new(
            place.frame.nonce,
            place.frame.origin,
            KIND_GROUPS,
            layer.index() as u16,
            group * tokens,
            tokens as u32,
        )
        .with_plane(plane as u16);
        let data = block.get(start..start + len).unwrap_or_default();
        let corrupt = |code, at: usize, len: usize, expected, found| {
            Error::corrupt(Corruption {
                code,
                device: own.key.0.0,
                file: segment::file_name(own.key.1),
                offset: offset + (start + at) as u64,
                len: len as u64,
                expected,
                found,
            })
        };
        let found = plane_checksum(devices.identity.checksum, &identity, covered(data));
        let expected = place.frame.checksums.get(place.checksum + plane).copied();
        if expected != Some(found) {
            let expected = format!("checksum {:#018x}", expected.unwrap_or(0));
            return Err(corrupt("payload-checksum", 0, len, expected, format!("{found:#018x}")));
        }
        if let Some(at) = layer.coder().and_then(|coder| coder.first_bad(plane, data)) {
            let (expected, found) = ("finite ranges".to_owned(), "a range that is not finite".to_owned());
            return Err(corrupt("payload-codec", at, 4.min(len), expected, found));
        }
    }
    Ok(())
}
