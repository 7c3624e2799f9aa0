//! Crash cases on simulated devices: a short run of `crash sim`, and all kept histories.

use std::path::Path;
use stratakv_tests::sim::{Case, Coverage, History, run_many, run_verbose};

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

/// Kept histories pass, and those with a planted fault find it.
#[test]
fn histories_that_found_something() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("histories");
    let files = std::fs::read_dir(&directory).expect("histories").map(|entry| entry.expect("an entry").path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
    assert!(files.len() >= 30, "only {} histories", files.len());
    for file in files {
        if let Err(e) = History::read(&file).and_then(|history| history.check()) {
            panic!("{}: {e}", file.display());
        }
    }
}
