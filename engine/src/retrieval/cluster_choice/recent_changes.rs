//! The newest changes of the clusters of one list: tokens that joined, and splits.

use crate::retrieval::entry_selector::ClusterChange;

/// The number of changes that are known.
const CHANGES: usize = 64;

/// The newest changes, at most [`CHANGES`].
#[derive(Clone, Debug)]
pub(crate) struct RecentChanges {
    /// The changed clusters. Change `n` is at index `n % CHANGES`.
    clusters: [u32; CHANGES],
    /// The number of the newest change.
    newest: u64,
    /// The number of the oldest change that is known, less 1.
    before: u64,
}

impl RecentChanges {
    pub(crate) fn new() -> Self {
        Self { clusters: [0; CHANGES], newest: 0, before: 0 }
    }

    /// Adds a change.
    pub(crate) fn add(&mut self, cluster: u32) {
        self.newest += 1;
        self.clusters[(self.newest % CHANGES as u64) as usize] = cluster;
        self.before = self.before.max(self.newest.saturating_sub(CHANGES as u64));
    }

    /// Forgets all changes, because clusters get other numbers.
    pub(crate) fn clear(&mut self) {
        self.before = self.newest;
    }

    /// Returns the changes of list `list`, from the oldest on.
    pub(crate) fn of_list(&self, list: usize) -> impl Iterator<Item = ClusterChange> + '_ {
        let cluster = |number: u64| self.clusters[(number % CHANGES as u64) as usize];
        (self.before + 1..=self.newest).map(move |number| ClusterChange { list, cluster: cluster(number), number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_changes_are_known_and_numbers_never_repeat() {
        let mut changes = RecentChanges::new();
        let known =
            |changes: &RecentChanges| changes.of_list(3).map(|c| (c.list, c.cluster, c.number)).collect::<Vec<_>>();
        assert_eq!(known(&changes), []);
        (0..100).for_each(|cluster| changes.add(cluster));
        assert_eq!(known(&changes), (36..100).map(|at| (3, at, u64::from(at) + 1)).collect::<Vec<_>>());
        changes.clear();
        changes.add(7);
        assert_eq!(known(&changes), [(3, 7, 101)]);
    }
}
