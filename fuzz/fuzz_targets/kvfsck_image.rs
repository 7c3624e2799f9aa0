//! A store with any bytes changed: what kvfsck calls clean the engine opens and reads whole, and neither panics.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| stratakv_fuzz::check_image(data, false));
