//! Crash cases on simulated devices: a random history, the power cut in the middle of it, recovery by the product's own
//! code, and a full comparison with a model. One seed is one case.

mod case;
mod content;
mod coverage;
mod minimise;
mod model;
mod mutants;
mod run;

pub use case::{Case, Operation, Regime, Round};
pub use coverage::Coverage;
pub use minimise::minimise;
pub use mutants::{MutantOutcome, mutants};
pub use run::{Failure, Verdict, run, run_verbose};

/// Runs the cases of seeds `first..first + count`; the seeds that failed, with why.
#[must_use]
pub fn run_many(first: u64, count: u64, coverage: &mut Coverage, failures_max: usize) -> (u64, Vec<Failure>) {
    let (mut passed, mut failures) = (0, Vec::new());
    for seed in first..first.saturating_add(count) {
        match run(&Case::generate(seed), coverage) {
            Ok(_) => passed += 1,
            Err(failure) => failures.push(failure),
        }
        if failures.len() >= failures_max {
            break;
        }
    }
    (passed, failures)
}
