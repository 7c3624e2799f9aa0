//! Faults planted in the engine: the simulator must find each within its budget.

use super::case::Case;
use super::coverage::Coverage;
use super::run::{Failure, run};
use stratakv::sim::{Mutant, set_mutant};

/// Each planted fault, with the cases within which it must be found.
const BUDGETS: [(Mutant, u64); 29] = [
    (Mutant::DataSyncSkipped, 2_000),
    (Mutant::ManifestSyncSkipped, 2_000),
    (Mutant::ManifestBeforeData, 10_000),
    (Mutant::TornBatchAccepted, 20_000),
    (Mutant::TailBatchDropped, 2_000),
    (Mutant::DeleteNotDurable, 5_000),
    (Mutant::GenerationNotBumped, 20_000),
    (Mutant::SyncedThroughIgnored, 20_000),
    (Mutant::CheckpointNotSynced, 10_000),
    (Mutant::SyncRetried, 10_000),
    (Mutant::SplitNotAtomic, 10_000),
    (Mutant::PayloadChecksumIgnored, 10_000),
    (Mutant::SegmentNameNotSynced, 5_000),
    (Mutant::SyncBeforeCompletion, 5_000),
    (Mutant::ShortAccepted, 5_000),
    (Mutant::ChecksumOfHalf, 20_000),
    (Mutant::ReuseBeforeFlush, 20_000),
    (Mutant::NotReadAgain, 20_000),
    (Mutant::ReplicaNotHealed, 5_000),
    (Mutant::ReleasedFirst, 10_000),
    (Mutant::ForkFreedWithParent, 5_000),
    (Mutant::PinsIgnored, 5_000),
    (Mutant::EvictionNotDurable, 20_000),
    (Mutant::EvictedByHalves, 20_000),
    (Mutant::EvictionOrderIgnored, 20_000),
    (Mutant::ExpiredEarly, 5_000),
    (Mutant::CapacityIgnored, 5_000),
    (Mutant::ImportVisible, 5_000),
    (Mutant::StaleTail, 10_000),
];

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
        let failing = |seed| run(&Case::generate(seed), &mut Coverage::default()).err();
        let search = || (0..budget).find_map(|n| failing(first.wrapping_add(n)).map(|failure| (n + 1, failure)));
        MutantOutcome { mutant, budget, found: with_mutant(mutant, search) }
    };
    BUDGETS.into_iter().map(search).collect()
}

/// Does something with a fault planted.
pub fn with_mutant<T>(mutant: Mutant, f: impl FnOnce() -> T) -> T {
    set_mutant(Some(mutant));
    let out = f();
    set_mutant(None);
    out
}

/// The planted fault of this name.
#[must_use]
pub fn named(name: &str) -> Option<Mutant> {
    BUDGETS.into_iter().map(|(mutant, _)| mutant).find(|mutant| format!("{mutant:?}") == name)
}
