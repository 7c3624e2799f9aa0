//! Superblock files: the input itself, and the input with a correct CRC in both slots.
//!
//! A valid slot is written with the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_format::{PAGE_BYTES, superblock};

fuzz_target!(|data: &[u8]| {
    let _ = superblock::newest(data);
    let mut file = stratakv_fuzz::padded(data);
    file.resize(2 * PAGE_BYTES, 0);
    for page in file.chunks_exact_mut(PAGE_BYTES) {
        stratakv_fuzz::fix_page(page);
    }
    if let Ok(slot) = superblock::newest(&file) {
        let at = (slot.sequence.get() % 2) as usize * PAGE_BYTES;
        assert_eq!(slot.encode()[..], file[at..at + PAGE_BYTES], "a valid slot is written with the same bytes");
        assert!(superblock::segment_pages(slot.segment_bytes.get()).is_some());
        let _ = (slot.checksum(), slot.features.writable());
    }
});
