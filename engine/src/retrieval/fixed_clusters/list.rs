//! [`FixedClusters`]: the clusters of one list, whose centroids never change.

use crate::kernels::lower_distances;
use crate::retrieval::cluster_choice::{ClusterList, ClusteredKeys};
use crate::retrieval::clusters::ClusterStats;
use crate::retrieval::summary_records::Records;

/// The clusters of one KV head, or of all heads together.
pub(super) struct FixedClusters {
    dim: usize,
    centroids: Records<f32>,
    /// No cluster is without a member.
    members: Vec<Vec<u32>>,
    /// The sum of the members.
    entries: usize,
}

impl FixedClusters {
    pub(super) fn new(dim: usize) -> Self {
        Self { dim, centroids: Records::new(dim), members: Vec::new(), entries: 0 }
    }

    /// Adds clusters. `first` is the token of the first row.
    pub(super) fn add(&mut self, first: usize, clustered: &ClusteredKeys) {
        for members in clustered.lists.iter() {
            let (centroid, mut stats) = (self.centroids.add(), ClusterStats::default());
            members.iter().for_each(|at| stats.add(centroid, &clustered.rows[*at as usize * self.dim..][..self.dim]));
            self.members.push(members.iter().map(|at| first as u32 + at).collect());
            self.entries += members.len();
        }
    }

    /// Adds a token to the cluster with the nearest centroid, ties by the lower cluster. There is a cluster.
    pub(super) fn join(&mut self, token: usize, key: &[f32], distances: &mut Vec<f32>) {
        distances.clear();
        distances.resize(self.members.len(), f32::INFINITY);
        lower_distances(self.representatives(), key, distances);
        let nearest = distances.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
        if let Some((cluster, _)) = nearest {
            self.members[cluster].push(token as u32);
            self.entries += 1;
        }
    }

    /// Forgets the tokens from `tokens` on, and clusters that are left without a member.
    pub(super) fn truncate(&mut self, tokens: usize) {
        let (old, members) = (std::mem::replace(self, Self::new(self.dim)), &mut self.members);
        for (centroid, own) in old.representatives().chunks_exact(old.dim).zip(&old.members) {
            let left: Vec<u32> = own.iter().filter(|token| (**token as usize) < tokens).copied().collect();
            if !left.is_empty() {
                self.centroids.add().copy_from_slice(centroid);
                self.entries += left.len();
                members.push(left);
            }
        }
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.centroids.bytes() + member_bytes(self.members.len(), self.entries)
    }

    /// Returns the most bytes that it takes with `clusters` more clusters and `entries` more members.
    pub(super) fn bytes_for(&self, clusters: usize, entries: usize) -> usize {
        self.centroids.bytes_for(clusters) + member_bytes(self.members.len() + clusters, self.entries + entries)
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

    fn representatives(&self) -> &[f32] {
        self.centroids.slice(0..self.centroids.count())
    }
}
