//! Faults planted in the engine: the simulator must find each within its budget.

use super::case::Case;
use super::coverage::Coverage;
use super::run::{Failure, run};
use stratakv::sim::{Mutant, set_mutant};

/// Each planted fault, with the cases within which it must be found.
const BUDGETS: [(Mutant, u64); 1] = [(Mutant::DataSyncSkipped, 2_000)];

/// How the search for one of them went.
#[derive(Clone, Debug)]
pub struct MutantOutcome {
    /// The fault.
    pub mutant: Mutant,
    /// Cases allowed.
    pub budget: u64,
    /// Cases run until it was found, and how it showed.
    pub found: Option<(u64, Failure)>,
}

/// Searches for every planted fault from this seed on.
#[must_use]
pub fn mutants(first: u64) -> Vec<MutantOutcome> {
    let search = |(mutant, budget)| {
        set_mutant(Some(mutant));
        let failing = |seed| run(&Case::generate(seed), &mut Coverage::default()).err();
        let found = (0..budget).find_map(|n| failing(first.wrapping_add(n)).map(|failure| (n + 1, failure)));
        set_mutant(None);
        MutantOutcome { mutant, budget, found }
    };
    BUDGETS.into_iter().map(search).collect()
}
