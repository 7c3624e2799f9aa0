//! What the fuzz targets share: putting the right checksum over mutated bytes, so that they get past it.

pub mod image;

use stratakv_format::PAGE_BYTES;
use stratakv_format::page::{PAGE_CRC_OFFSET, SECTOR_BYTES};

/// The nonce that seeds batches and frame headers of the seed corpora.
pub const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
/// Likewise of the segment.
pub const SEGMENT_NONCE: u64 = 0x7365_676d_656e_7431;

/// Puts the right CRC into a page. Shorter input stays as it is.
pub fn fix_page(page: &mut [u8]) {
    if let Some(page) = page.first_chunk_mut::<PAGE_BYTES>() {
        let crc = stratakv_format::checksum::page_crc(page);
        page[PAGE_CRC_OFFSET..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Puts the right CRC at offset 4 over the pages that the number at `pages_at` claims, if they are there.
pub fn fix_seeded(bytes: &mut [u8], pages_at: usize, nonce: u64) {
    let Some(pages) = bytes.get(pages_at..pages_at + 4) else { return };
    let pages = u32::from_le_bytes([pages[0], pages[1], pages[2], pages[3]]) as usize;
    let Some(whole) = pages.checked_mul(PAGE_BYTES).and_then(|n| bytes.get_mut(..n)).filter(|w| !w.is_empty()) else {
        return;
    };
    let mut crc = crc32fast::Hasher::new();
    crc.update(&nonce.to_le_bytes());
    crc.update(&whole[..4]);
    crc.update(&[0; 4]);
    crc.update(&whole[8..]);
    whole[4..8].copy_from_slice(&crc.finalize().to_le_bytes());
}

/// Pads a front to whole pages, so that small mutations are full structures.
pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..bytes.len().min(64 * PAGE_BYTES)].to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES), 0);
    bytes
}
