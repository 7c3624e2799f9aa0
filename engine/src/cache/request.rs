//! Requests that name clusters: which clusters a selection activated, and which of its blocks each one needs.
//!
//! A cluster is a set of blocks. Today its tokens are in groups, which several clusters share. A layout that stores
//! clusters by page has blocks of one cluster alone. Policies see no difference.

use super::key::ClusterKey;

/// A block that a cluster needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterBlock {
    /// The index of the block in its request.
    pub(crate) index: u32,
    /// True if one request of a device reads it with the cluster's block before it.
    pub(crate) joins: bool,
}

/// The clusters of one selection.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActivatedClusters {
    /// Each cluster, the share of profiled queries that activated it, and the end of its blocks.
    clusters: Vec<(ClusterKey, f32, usize)>,
    blocks: Vec<ClusterBlock>,
    changed: Vec<(ClusterKey, u64)>,
}

/// One cluster of a selection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivatedCluster<'a> {
    pub(crate) key: ClusterKey,
    /// The share of the queries of a profile that activated it; 0 without a profile.
    pub(crate) profiled: f32,
    /// Its blocks, in rising order.
    pub(crate) blocks: &'a [ClusterBlock],
}

impl ActivatedClusters {
    /// Adds a cluster. `blocks` are its blocks, in rising order.
    pub(crate) fn push(&mut self, key: ClusterKey, profiled: f32, blocks: impl Iterator<Item = ClusterBlock>) {
        self.blocks.extend(blocks);
        self.clusters.push((key, profiled, self.blocks.len()));
    }

    /// Takes note that a cluster took in tokens or was split. Later changes of a selector have higher numbers, so that
    /// a change may be named in several selections.
    pub(crate) fn change(&mut self, key: ClusterKey, number: u64) {
        self.changed.push((key, number));
    }

    /// Returns the clusters that were changed, with the numbers of the changes.
    pub(crate) fn changed(&self) -> &[(ClusterKey, u64)] {
        &self.changed
    }

    /// Returns the clusters.
    pub(crate) fn iter(&self) -> impl Iterator<Item = ActivatedCluster<'_>> {
        let starts = std::iter::once(0).chain(self.clusters.iter().map(|(.., end)| *end));
        let cut = |((key, profiled, end), start): (&(ClusterKey, f32, usize), usize)| ActivatedCluster {
            key: *key,
            profiled: *profiled,
            blocks: &self.blocks[start..*end],
        };
        self.clusters.iter().zip(starts).map(cut)
    }
}

/// A request that names clusters.
pub(super) struct ClusterRequest<'a, K> {
    /// The blocks of the request, each with the bytes that it takes of the capacity. `None` for a block that is not
    /// looked up here.
    pub(super) blocks: &'a [Option<(K, usize)>],
    pub(super) clusters: &'a ActivatedClusters,
}
