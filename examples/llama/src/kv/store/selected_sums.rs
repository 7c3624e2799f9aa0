//! Sums over selections: entries, runs of groups, and runs of clusters.

use stratakv::Selection;

/// Sums over the selections that a cache attended to, without layers that attend to everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct SelectedSums {
    /// Selections.
    pub selections: u64,
    /// The entries per KV head, as a mean over heads.
    pub entries: f64,
    /// Runs of neighbouring groups: the requests of a store that keeps groups in the order of tokens.
    pub runs: u64,
    /// Runs of neighbouring clusters, or runs of groups for a method of groups. A store that keeps the entries of a
    /// cluster together, and clusters in the method's order, makes one request of each.
    pub cluster_runs: u64,
}

impl SelectedSums {
    /// Takes in a selection.
    pub(super) fn add(&mut self, selection: &Selection, kv_heads: usize) {
        let entries: usize = (0..kv_heads).map(|head| selection.entries(head).count()).sum();
        let groups: Vec<u64> = selection.groups().collect();
        let runs = groups.chunk_by(|a, b| a + 1 == *b).count() as u64;
        self.selections += 1;
        self.entries += entries as f64 / kv_heads.max(1) as f64;
        self.runs += runs;
        self.cluster_runs += selection.cluster_runs().map_or(runs, |own| own as u64);
    }

    /// Returns the sums since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            selections: self.selections - before.selections,
            entries: self.entries - before.entries,
            runs: self.runs - before.runs,
            cluster_runs: self.cluster_runs - before.cluster_runs,
        }
    }
}
