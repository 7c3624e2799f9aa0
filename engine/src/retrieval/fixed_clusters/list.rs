//! [`FixedClusters`]: the clusters of one list, whose centroids never change.

use crate::retrieval::cluster_choice::{ClusterList, ClusteredKeys, Overlap, RepresentativeRows};
use crate::retrieval::clusters::{ClusterStats, Representatives};

/// Keys that are compared with all centroids at once.
const JOINED_KEYS: usize = 64;

/// The clusters of one KV head, or of all heads together.
pub(super) struct FixedClusters {
    dim: usize,
    centroids: Representatives,
    /// No cluster is without a member.
    members: Vec<Vec<u32>>,
    /// The sum of the members.
    entries: usize,
}

impl FixedClusters {
    pub(super) fn new(dim: usize) -> Self {
        Self { dim, centroids: Representatives::with_capacity(dim, 0), members: Vec::new(), entries: 0 }
    }

    /// Adds clusters. `first` is the token of the first row.
    pub(super) fn add(&mut self, first: usize, clustered: &ClusteredKeys) {
        let mut centroid = vec![0.0; self.dim];
        for members in clustered.lists.iter() {
            let mut stats = ClusterStats::default();
            centroid.fill(0.0);
            let key = |at: u32| &clustered.rows[at as usize * self.dim..][..self.dim];
            members.iter().for_each(|at| stats.add(&mut centroid, key(*at)));
            self.centroids.push(&centroid);
            self.members.push(members.iter().map(|at| first as u32 + at).collect());
            self.entries += members.len();
        }
    }

    /// Adds tokens from `first` on to the clusters with the nearest centroids, ties by the lower cluster. There is a
    /// cluster. `keys` is `[tokens, dim]`.
    pub(super) fn join(&mut self, first: usize, keys: &[f32]) {
        let keys: Vec<&[f32]> = keys.chunks_exact(self.dim).collect();
        for (batch, first) in keys.chunks(JOINED_KEYS).zip((first..).step_by(JOINED_KEYS)) {
            let products = self.centroids.products(batch);
            for (column, key) in batch.iter().enumerate() {
                if let Some(cluster) = self.centroids.nearest((&products, column), key, |_| true) {
                    self.members[cluster].push((first + column) as u32);
                    self.entries += 1;
                }
            }
        }
    }

    /// Returns the most bytes of scratch that [`Self::join`] takes once there are `clusters` clusters.
    pub(super) fn join_bytes(&self, clusters: usize) -> usize {
        self.centroids.product_bytes(clusters, JOINED_KEYS)
    }

    /// Forgets the tokens from `tokens` on, and clusters that are left without a member.
    pub(super) fn truncate(&mut self, tokens: usize) {
        for own in &mut self.members {
            own.retain(|token| (*token as usize) < tokens);
            own.shrink_to_fit();
        }
        self.centroids.retain(|cluster| !self.members[cluster].is_empty());
        self.members.retain(|own| !own.is_empty());
        self.entries = self.members.iter().map(Vec::len).sum();
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.centroids.bytes_for(self.members.len()) + member_bytes(self.members.len(), self.entries)
    }

    /// Returns the centroids.
    #[cfg(test)]
    pub(super) fn centroids(&self) -> &crate::retrieval::scaled_rows::ScaledRows {
        self.centroids.rows()
    }

    /// Returns the most bytes that it takes with `clusters` more clusters and `entries` more members.
    pub(super) fn bytes_for(&self, clusters: usize, entries: usize) -> usize {
        self.centroids.bytes_for(self.members.len() + clusters)
            + member_bytes(self.members.len() + clusters, self.entries + entries)
    }
}

/// Returns the most bytes of the lists of members. A list that grows doubles, from four members on.
fn member_bytes(clusters: usize, entries: usize) -> usize {
    let lists = 2 * clusters * size_of::<Vec<u32>>();
    lists + (2 * entries + 4 * clusters) * size_of::<u32>()
}

impl ClusterList for FixedClusters {
    fn count(&self) -> usize {
        self.members.len()
    }

    fn members(&self, cluster: usize) -> &[u32] {
        &self.members[cluster]
    }

    fn overlap(&self) -> Overlap {
        Overlap::None
    }

    fn representatives(&self) -> Option<RepresentativeRows<'_>> {
        Some(RepresentativeRows::Halves(self.centroids.rows()))
    }
}
