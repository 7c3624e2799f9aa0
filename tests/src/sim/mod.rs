//! Crash cases on simulated devices. One seed is one case.
//!
//! 1. `case` and `operation` generate a random history and its faults from the seed.
//! 2. `run` executes the history with the engine, cuts the power, and lets the engine recover.
//! 3. `model` says which states the recovery may produce. Every byte is compared with one of them.
//! 4. `minimise` shrinks a failing case, and `history` keeps it as a file.
//! 5. `mutants` plants faults in the engine. `coverage` counts the events that a run must have seen.
//!
//! Everything that a case does and finds depends on its seed alone. A hash over all device operations shows it.

mod case;
pub(crate) mod content;
mod coverage;
mod history;
mod minimise;
mod model;
mod mutants;
mod operation;
mod run;

pub use case::{Case, Lifetime, Regime, Round};
pub use coverage::Coverage;
pub use history::History;
pub use minimise::minimise;
pub use mutants::{MutantOutcome, mutants, named, with_mutant};
pub use operation::Operation;
pub use run::{Failure, Verdict, run, run_verbose};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The cases that a thread takes at a time.
const CHUNK: u64 = 64;

/// Runs the cases of seeds `first..first + count` on `jobs` threads. Returns the number that passed, and the failures
/// in order of their seeds.
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
