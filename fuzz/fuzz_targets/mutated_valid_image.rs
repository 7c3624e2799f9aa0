//! A store with any bytes of its metadata changed and the checksums put right: as `kvfsck_image`, past the checksums.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| stratakv_fuzz::check_image(data, true));
