//! Crash cases on simulated devices: a random history, the power cut in the middle of it, recovery by the product's own
//! code, and a full comparison with a model. One seed is one case.

mod case;
mod content;
mod coverage;
mod history;
mod minimise;
mod model;
mod mutants;
mod operation;
mod run;

pub use case::{Case, End, Regime, Round};
pub use coverage::Coverage;
pub use history::History;
pub use minimise::minimise;
pub use mutants::{MutantOutcome, mutants, named, with_mutant};
pub use operation::Operation;
pub use run::{Failure, Verdict, run, run_verbose};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Cases that a thread takes at a time.
const CHUNK: u64 = 64;

/// Runs the cases of seeds `first..first + count` on `jobs` threads; how many passed, and the seeds that failed, with
/// why. What a case does and finds depends on its seed alone.
#[must_use]
pub fn run_many(
    first: u64,
    count: u64,
    coverage: &mut Coverage,
    failures_max: usize,
    jobs: usize,
) -> (u64, Vec<Failure>) {
    let next = AtomicU64::new(0);
    let results = Mutex::new((0, Vec::new(), Coverage::default()));
    let work = || {
        let mut own = Coverage::default();
        let lock = || results.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let start = next.fetch_add(CHUNK, Ordering::Relaxed);
            if start >= count || lock().1.len() >= failures_max {
                break;
            }
            for seed in first.saturating_add(start)..first.saturating_add(count.min(start + CHUNK)) {
                match run(&Case::generate(seed), &mut own) {
                    Ok(_) => lock().0 += 1,
                    Err(failure) => {
                        lock().1.push(failure);
                        break;
                    }
                }
            }
        }
        lock().2.merge(own);
    };
    if jobs <= 1 {
        work();
    } else {
        std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    }
    let (passed, mut failures, seen) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    coverage.merge(seen);
    failures.sort_by_key(|failure| failure.seed);
    (passed, failures)
}
