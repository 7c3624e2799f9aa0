//! Shrinks a failing case.

use super::case::Case;
use super::coverage::Coverage;
use super::run::{Failure, run, run_verbose};

/// The largest number of runs.
const RUNS_MAX: usize = 400;

/// Removes operations, rounds and crashes from a failing case as long as it fails. Runs the result once more for its
/// history. Returns none if the case does not fail.
#[must_use]
pub fn minimise(case: &Case) -> Option<(Case, Failure)> {
    let fails = |case: &Case| run(case, &mut Coverage::default()).err();
    let failure = fails(case)?;
    let mut best = case.clone();
    best.rounds.truncate(failure.place.0 + 1);
    if fails(&best).is_none() {
        best = case.clone();
    }
    let mut runs = 0;
    let mut changed = true;
    while changed && runs < RUNS_MAX {
        changed = false;
        for smaller in candidates(&best) {
            runs += 1;
            if runs > RUNS_MAX {
                break;
            }
            if fails(&smaller).is_some() {
                best = smaller;
                changed = true;
                break;
            }
        }
    }
    let failure = run_verbose(&best, &mut Coverage::default()).1.err()?;
    Some((best, failure))
}

fn candidates(case: &Case) -> Vec<Case> {
    let mut all = Vec::new();
    if case.entries.is_some() {
        all.push(Case { entries: None, ..case.clone() });
    }
    for round in 0..case.rounds.len() {
        if case.rounds.len() > 1 {
            let mut smaller = case.clone();
            smaller.rounds.remove(round);
            all.push(smaller);
        }
        if !case.rounds[round].again.is_empty() {
            let mut smaller = case.clone();
            smaller.rounds[round].again.pop();
            all.push(smaller);
        }
        for step in 0..case.rounds[round].operations.len() {
            let mut smaller = case.clone();
            let own = &mut smaller.rounds[round];
            own.operations.remove(step);
            own.crash.0 -= usize::from(own.crash.0 > step);
            if let Some((at, _)) = &mut own.faults {
                *at -= usize::from(*at > step);
            }
            all.push(smaller);
        }
    }
    all
}
