//! Computes valid checksums over damaged bytes, so that a test reaches the checks after the checksums.

use super::image::Image;
use std::collections::HashMap;
use stratakv_format::PAGE_BYTES;
use stratakv_format::ids::RawLocation;
use stratakv_format::manifest::{Batch, Kind, ManifestPage, RecordHeader};
use stratakv_format::page::{PAGE_CRC_OFFSET, SECTOR_BYTES};
use stratakv_format::segment::SegmentPage;
use zerocopy::FromBytes;

/// The bytes of a batch header.
const BATCH_HEADER_BYTES: usize = 56;

/// Writes the valid CRC into a page of a superblock, manifest or segment. Shorter input stays as it is.
pub fn seal_page(page: &mut [u8]) {
    if let Some(page) = page.first_chunk_mut::<PAGE_BYTES>() {
        let crc = stratakv_format::checksum::page_crc(page);
        page[PAGE_CRC_OFFSET..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Writes the valid CRC at offset 4, over the number of pages that the field at `pages_at` claims, and returns it.
/// Returns none if `bytes` is shorter.
pub fn seal_seeded(bytes: &mut [u8], pages_at: usize, nonce: u64) -> Option<u32> {
    let pages = u32::from_le_bytes(*bytes.get(pages_at..)?.first_chunk()?) as usize;
    let whole = bytes.get_mut(..pages.checked_mul(PAGE_BYTES)?).filter(|whole| !whole.is_empty())?;
    let mut crc = crc32fast::Hasher::new();
    crc.update(&nonce.to_le_bytes());
    crc.update(&whole[..4]);
    crc.update(&[0; 4]);
    crc.update(&whole[8..]);
    let crc = crc.finalize();
    whole[4..8].copy_from_slice(&crc.to_le_bytes());
    Some(crc)
}

/// The start of a frame: device, segment, page.
type FrameStart = (u16, u32, u32);

/// Updates every checksum of metadata, and the checksums of frame headers that manifest records hold.
pub fn seal(image: &mut Image) {
    let mut crcs = HashMap::new();
    for (device, name, bytes) in &mut image.files {
        if name.starts_with("segments/") {
            seal_segment(*device as u16, bytes, &mut crcs);
        }
    }
    for (_, name, bytes) in &mut image.files {
        if name.starts_with("manifest/") {
            seal_manifest(bytes, &crcs);
        } else if name == "superblock" {
            bytes.chunks_mut(PAGE_BYTES).for_each(seal_page);
        }
    }
}

fn seal_segment(device: u16, bytes: &mut [u8], crcs: &mut HashMap<FrameStart, u32>) {
    let Ok((header, _)) = SegmentPage::read_from_prefix(bytes) else { return };
    let pages = bytes.len() / PAGE_BYTES;
    for page in 0..pages {
        let rest = &mut bytes[page * PAGE_BYTES..];
        if rest.starts_with(&stratakv_format::segment::MAGIC) {
            seal_page(rest);
        } else if rest.starts_with(&stratakv_format::frame::MAGIC)
            && let Some(crc) = seal_seeded(rest, 8, header.nonce.get())
        {
            crcs.insert((device, header.segment.get(), page as u32), crc);
        }
    }
}

fn seal_manifest(bytes: &mut [u8], crcs: &HashMap<FrameStart, u32>) {
    let Ok((header, _)) = ManifestPage::read_from_prefix(bytes) else { return };
    seal_page(bytes);
    let mut rest = bytes.get_mut(PAGE_BYTES..).unwrap_or_default();
    while let Some(pages) = Batch::claimed_pages(rest) {
        let Some((batch, behind)) = rest.split_at_mut_checked(pages as usize * PAGE_BYTES) else { break };
        seal_records(&mut batch[BATCH_HEADER_BYTES..], crcs);
        let _ = seal_seeded(batch, 40, header.nonce.get());
        rest = behind;
    }
}

/// Updates the frame header CRCs that manifest records hold.
fn seal_records(mut records: &mut [u8], crcs: &HashMap<FrameStart, u32>) {
    while let Ok((header, _)) = RecordHeader::read_from_prefix(records) {
        let Some(kind) = Kind::from_code(header.kind.get()) else { break };
        let padded = (header.bytes.get() as usize).next_multiple_of(8);
        let Some(body) = records.get_mut(size_of::<RecordHeader>()..).and_then(|rest| rest.get_mut(..padded)) else {
            break;
        };
        let location_at = match kind {
            Kind::Frame => Some(32),
            Kind::FrameMoved => Some(8),
            Kind::Replica => Some(16),
            _ => None,
        };
        if let Some(at) = location_at
            && let Some(Ok((place, _))) = body.get(at..).map(RawLocation::read_from_prefix)
            && let Some(crc) = crcs.get(&(place.device.get(), place.segment.get(), place.page.get()))
            && let Some(field) = body.get_mut(at + size_of::<RawLocation>()..).and_then(|rest| rest.first_chunk_mut())
        {
            *field = crc.to_le_bytes();
        }
        records = records.get_mut(size_of::<RecordHeader>() + padded..).unwrap_or_default();
    }
}
