//! A store with changed bytes and correct checksums of metadata. The checks are those in `kvfsck_image`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| stratakv_fuzz::check_image(data, true));
