//! Segment pages, manifest pages and file names: the input itself, and the input with a correct CRC.
//!
//! A page or name that is valid is written with the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_format::manifest::{self, ManifestPage};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::{PAGE_BYTES, Unverified};

fuzz_target!(|data: &[u8]| {
    if let Ok(name) = std::str::from_utf8(data) {
        if let Some(id) = segment::parse_file_name(name) {
            assert_eq!(segment::file_name(id), format!("segments/{name}"));
        }
        if let Some((generation, copy)) = manifest::parse_file_name(name) {
            assert_eq!(manifest::file_name(generation, copy), format!("manifest/{name}"));
        }
    }
    let mut fixed = stratakv_fuzz::padded(data);
    fixed.truncate(PAGE_BYTES);
    stratakv_fuzz::fix_page(&mut fixed);
    for bytes in [data, &fixed[..]] {
        if let Ok(page) = Unverified::<SegmentPage>::at_front(bytes, "segment").and_then(|p| p.verify()) {
            assert_eq!(page.encode()[..], *bytes);
        }
        if let Ok(page) = Unverified::<ManifestPage>::at_front(bytes, "manifest").and_then(|p| p.verify()) {
            assert_eq!(page.encode()[..], *bytes);
        }
    }
});
