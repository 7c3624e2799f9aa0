//! A store with changed bytes. If kvfsck calls it clean, the engine opens it and reads it completely. Neither panics.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| stratakv_fuzz::check_image(data, false));
