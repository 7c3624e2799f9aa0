//! Recovery that is interrupted several times gives the same store as one recovery.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_tests::sim::{Case, Coverage, Regime, run};

fuzz_target!(|data: &[u8]| {
    let mut case = Case::from_bytes(data);
    // The only fault is the loss of power. Every recovery must therefore bring back everything that was acknowledged.
    case.regime = Regime::Plain;
    let cuts: Vec<u64> = data.iter().rev().take(6).map(|byte| u64::from(*byte)).collect();
    for round in &mut case.rounds {
        (round.faults, round.rot) = (None, None);
        round.again.extend(&cuts);
    }
    if let Err(failure) = run(&case, &mut Coverage::default()) {
        panic!("{failure}");
    }
});
