//! Helpers of the fuzz targets.
//!
//! A mutated input almost never has a correct checksum. These helpers write correct checksums over mutated bytes, so
//! that the code after the checksum is tested too.

use stratakv::ErrorKind;
use stratakv_format::PAGE_BYTES;
use stratakv_tests::damage::{Edit, Image, judge, seal};
pub use stratakv_tests::damage::{seal_page as fix_page, seal_seeded as fix_seeded};

/// The nonce that seeds batches and frame headers of the seed corpora.
pub const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
/// The nonce of the segment of the seed corpora.
pub const SEGMENT_NONCE: u64 = 0x7365_676d_656e_7431;

/// Returns `bytes` padded with zeros to whole pages, so that a short input is a full structure.
pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..bytes.len().min(64 * PAGE_BYTES)].to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES), 0);
    bytes
}

/// Applies the edits in a fuzz input to a small store on simulated disks, and reads it with kvfsck and the engine.
///
/// With `fix`, correct checksums are written over the edited metadata.
///
/// # Panics
/// kvfsck reports no finding for a store that the engine does not read, or one of them panics.
pub fn check_image(data: &[u8], fix: bool) {
    let Some((first, edits)) = data.split_first() else { return };
    let mut image = Image::base(1 + usize::from(first & 1));
    Edit::many(edits).iter().for_each(|edit| image.edit(edit));
    if fix {
        seal(&mut image);
    }
    let judgement = judge(&image);
    if let (true, Err(e)) = (judgement.is_clean(), &judgement.held) {
        // Missing space, memory or a lock say nothing about the bytes.
        let about_bytes = !matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::MemoryLimit | ErrorKind::Busy);
        assert!(!about_bytes, "kvfsck reports no finding, but the engine fails: {e:?}");
    }
}
