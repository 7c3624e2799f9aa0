//! Processes that are killed at any moment: a short run of `crash kill`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use stratakv_tests::count_from_env;
use stratakv_tests::real::kill::{KillPlan, run};

#[test]
fn processes_are_killed_at_any_moment() {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let plan = KillPlan {
        cycles: count_from_env("STRATAKV_TEST_KILLS", 60) as u64,
        dir: scratch.path().to_path_buf(),
        seed: count_from_env("STRATAKV_TEST_KILL_SEED", 7) as u64,
        jobs: 2,
        program: PathBuf::from(env!("CARGO_BIN_EXE_crash")),
    };
    let outcome = run(&plan, &AtomicBool::new(false));
    assert!(outcome.failures.is_empty(), "{}", outcome.failures.join("\n"));
    assert_eq!(outcome.passed, plan.cycles);
    assert!(outcome.commits > plan.cycles / 4, "{} commits", outcome.commits);
}
