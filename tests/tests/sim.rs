//! Crash cases on simulated devices: a short run of what `crash sim` does for long.

use stratakv_tests::sim::{Case, Coverage, run, run_many, run_verbose};

#[test]
fn two_thousand_crash_cases() {
    let mut coverage = Coverage::default();
    let (passed, failures) = run_many(1_000_000, 2_000, &mut coverage, 1, 2);
    assert!(failures.is_empty(), "{}", failures[0]);
    assert_eq!(passed, 2_000);
    assert!(coverage.crashes > 4_000 && coverage.operations > 40_000);
}

#[test]
fn one_seed_is_one_history() {
    for seed in 0..60 {
        let case = Case::generate(seed);
        let traces = [0, 1].map(|_| run_verbose(&case, &mut Coverage::default()).0);
        assert!(traces[0] != 0 && traces[0] == traces[1], "seed {seed}");
    }
}

/// Seeds that once found something: a creation cut short, a layout recorded twice, tokens behind a commit at `None`, an
/// unreadable superblock slot, a run longer than a frame, a segment named before its header was durable, frames out of
/// order after a failed write, the state of a failed commit.
#[test]
fn seeds_that_found_something() {
    for seed in [27, 96, 136, 144, 158, 448, 508, 960, 1187, 2370, 3968, 4001, 4800, 6278, 11_531] {
        if let Err(failure) = run(&Case::generate(seed), &mut Coverage::default()) {
            panic!("{failure}");
        }
    }
}
