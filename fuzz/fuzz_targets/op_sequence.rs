//! A sequence of operations, crashes and faults, compared with the model of the crash simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_tests::sim::{Case, Coverage, run};

fuzz_target!(|data: &[u8]| {
    if let Err(failure) = run(&Case::from_bytes(data), &mut Coverage::default()) {
        panic!("{failure}");
    }
});
