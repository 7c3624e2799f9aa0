//! What the fuzz targets share: putting the right checksum over mutated bytes, so that they get past it.

pub mod image;

use stratakv_format::PAGE_BYTES;
pub use stratakv_tests::damage::{seal_page as fix_page, seal_seeded as fix_seeded};

/// The nonce that seeds batches and frame headers of the seed corpora.
pub const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
/// Likewise of the segment.
pub const SEGMENT_NONCE: u64 = 0x7365_676d_656e_7431;

/// Pads a front to whole pages, so that small mutations are full structures.
pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..bytes.len().min(64 * PAGE_BYTES)].to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES), 0);
    bytes
}
