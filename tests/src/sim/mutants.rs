//! Faults planted in the engine. The simulator must find each within its budget.

use super::case::Case;
use super::coverage::Coverage;
use super::run::{Failure, run};
use stratakv::sim::{Mutant, set_mutant};

/// Each planted fault with its budget: the number of cases within which the simulator must find it.
const BUDGETS: [(Mutant, u64); 46] = [
    (Mutant::DataSyncSkipped, 2_000),
    (Mutant::EarlySyncSkipped, 5_000),
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
    (Mutant::CopyNotHealed, 10_000),
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
    (Mutant::PoolsNotSynced, 5_000),
    (Mutant::PagesExchanged, 2_000),
    (Mutant::StaleClustersKept, 10_000),
    (Mutant::PageIdentityIgnored, 10_000),
    (Mutant::PageRebuiltWrong, 5_000),
    (Mutant::PoolFreedEarly, 10_000),
    (Mutant::EvictedBeforeClusters, 20_000),
    (Mutant::DirectoryChecksumIgnored, 2_000),
    (Mutant::LostClustersKept, 10_000),
    (Mutant::KeptEntriesExchanged, 5_000),
    (Mutant::LooseEntriesLost, 5_000),
    (Mutant::StaleStateKept, 2_000),
    (Mutant::UncommittedStateStored, 2_000),
    (Mutant::PageFilledTwice, 2_000),
    (Mutant::ReplicaCountedTwice, 2_000),
    (Mutant::DerivedFrameCounted, 2_000),
];

/// The result of the search for one fault.
#[derive(Clone, Debug)]
pub struct MutantOutcome {
    /// The fault.
    pub mutant: Mutant,
    /// The largest number of cases.
    pub budget: u64,
    /// The cases run until one failed, and its failure.
    pub found: Option<(u64, Failure)>,
}

/// Searches for the planted faults of these names, or for all if there are none, starting at this seed.
#[must_use]
pub fn mutants(first: u64, names: &[String]) -> Vec<MutantOutcome> {
    let is_wanted = |(mutant, _): &(Mutant, u64)| names.is_empty() || names.contains(&format!("{mutant:?}"));
    let search = |(mutant, budget)| {
        let failing = |seed| run(&Case::generate(seed), &mut Coverage::default()).err();
        let search = || (0..budget).find_map(|n| failing(first.wrapping_add(n)).map(|failure| (n + 1, failure)));
        MutantOutcome { mutant, budget, found: with_mutant(mutant, search) }
    };
    BUDGETS.into_iter().filter(is_wanted).map(search).collect()
}

/// Calls `f` with a fault planted.
pub fn with_mutant<T>(mutant: Mutant, f: impl FnOnce() -> T) -> T {
    set_mutant(Some(mutant));
    let out = f();
    set_mutant(None);
    out
}

/// Returns the planted fault of this name.
#[must_use]
pub fn named(name: &str) -> Option<Mutant> {
    BUDGETS.into_iter().map(|(mutant, _)| mutant).find(|mutant| format!("{mutant:?}") == name)
}
