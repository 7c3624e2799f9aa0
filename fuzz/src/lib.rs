//! What the fuzz targets share: putting the right checksum over mutated bytes, so that they get past it.

use stratakv::ErrorKind;
use stratakv_format::PAGE_BYTES;
use stratakv_tests::damage::{Edit, Image, judge, seal};
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

/// A small store on simulated disks, changed by the bytes of a fuzz input, and read by kvfsck and by the engine.
///
/// # Panics
/// kvfsck calls clean what the engine does not read, or either panics.
pub fn check_image(data: &[u8], fix: bool) {
    let Some((first, edits)) = data.split_first() else { return };
    let mut image = Image::base(1 + usize::from(first & 1));
    Edit::many(edits).iter().for_each(|edit| image.edit(edit));
    if fix {
        seal(&mut image);
    }
    let judgement = judge(&image);
    if let (true, Err(e)) = (judgement.is_clean(), &judgement.held) {
        // Room and memory are no matter of the bytes being right.
        let about_bytes = !matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::MemoryLimit | ErrorKind::Busy);
        assert!(!about_bytes, "kvfsck finds nothing, the engine says {e:?}");
    }
}
