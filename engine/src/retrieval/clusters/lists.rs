//! [`ClusterLists`]: the members of each cluster.

use crate::error::{Error, ErrorKind, Result};

/// The members of clusters, one list after the other. An entry may be a member of several clusters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterLists {
    /// The index in `members` behind each cluster's last member.
    ends: Vec<u32>,
    members: Vec<u32>,
}

impl ClusterLists {
    /// Returns lists without a cluster.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns lists without a cluster, with room for `clusters` clusters and `stored` members in all.
    pub(super) fn with_capacity(clusters: usize, stored: usize) -> Self {
        Self { ends: Vec::with_capacity(clusters), members: Vec::with_capacity(stored) }
    }

    /// Returns lists from the cluster of each entry. Every cluster of `assignment` is below `clusters`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a cluster of `assignment` is not below `clusters`, or there are more clusters or
    /// entries than `u32` counts.
    pub fn from_assignment(assignment: &[u32], clusters: usize) -> Result<Self> {
        let entries = assignment.len();
        if clusters.max(entries) > u32::MAX as usize {
            return refused(format!("{entries} entries in {clusters} clusters, but both are at most {}", u32::MAX));
        }
        let unknown = (0_u32..).zip(assignment).find(|(_, cluster)| **cluster as usize >= clusters);
        if let Some((entry, cluster)) = unknown {
            return refused(format!("entry {entry} is in cluster {cluster}, but there are {clusters} clusters"));
        }
        Ok(Self::of_partition(assignment, clusters))
    }

    /// Returns lists from the cluster of each entry, for an assignment that the room made itself.
    pub(super) fn of_partition(assignment: &[u32], clusters: usize) -> Self {
        let mut sizes = vec![0_u32; clusters];
        assignment.iter().for_each(|cluster| sizes[*cluster as usize] += 1);
        let mut next = 0;
        let starts = sizes.iter().map(|size| {
            let start = next;
            next += size;
            start
        });
        let mut ends: Vec<u32> = starts.collect();
        let mut members = vec![0; assignment.len()];
        for (entry, cluster) in (0..).zip(assignment) {
            let at = &mut ends[*cluster as usize];
            members[*at as usize] = entry;
            *at += 1;
        }
        Self { ends, members }
    }

    /// Returns the lists of these clusters.
    pub(crate) fn of_clusters<M: AsRef<[u32]>>(clusters: impl Iterator<Item = M>) -> Self {
        let mut lists = Self::new();
        clusters.for_each(|members| lists.push(members.as_ref()));
        lists
    }

    /// Returns the bytes of the lists of `clusters` clusters with `stored` members in all.
    #[must_use]
    pub fn bytes_for(clusters: usize, stored: usize) -> usize {
        (clusters.saturating_add(stored)).saturating_mul(size_of::<u32>())
    }

    /// Adds a cluster.
    pub fn push(&mut self, members: &[u32]) {
        self.members.extend_from_slice(members);
        self.ends.push(self.members.len() as u32);
    }

    /// Returns the number of clusters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there is no cluster.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the members of a cluster.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster.
    pub fn members(&self, cluster: usize) -> Result<&[u32]> {
        if cluster >= self.len() {
            return refused(format!("the members of cluster {cluster} of {}", self.len()));
        }
        Ok(self.list(cluster))
    }

    /// Returns the members of a cluster that exists.
    fn list(&self, cluster: usize) -> &[u32] {
        let start = if cluster == 0 { 0 } else { self.ends[cluster - 1] };
        &self.members[start as usize..self.ends[cluster] as usize]
    }

    /// Returns the members of each cluster.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        (0..self.len()).map(|cluster| self.list(cluster))
    }

    /// Returns the sum of the sizes of the clusters. An entry counts once for each of its clusters.
    #[must_use]
    pub fn stored(&self) -> usize {
        self.members.len()
    }

    /// Returns the mean size of the clusters, or 0 without a cluster.
    #[must_use]
    pub fn mean_size(&self) -> f64 {
        if self.is_empty() { 0.0 } else { self.stored() as f64 / self.len() as f64 }
    }
}

fn refused<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidArgument, format!("cluster lists: {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_lists_members_in_rising_order() {
        let lists = ClusterLists::from_assignment(&[2, 0, 2, 3, 0], 5).unwrap();
        let found: Vec<&[u32]> = lists.iter().collect();
        assert_eq!(found, [&[1, 4][..], &[], &[0, 2], &[3], &[]]);
        assert_eq!((lists.stored(), lists.mean_size()), (5, 1.0));
        assert!(ClusterLists::new().is_empty() && ClusterLists::new().mean_size() == 0.0);
    }

    #[test]
    fn an_assignment_to_a_cluster_that_does_not_exist_is_refused() {
        for (assignment, clusters) in [(&[0, 5][..], 5), (&[0], 0), (&[], usize::MAX)] {
            let error = ClusterLists::from_assignment(assignment, clusters).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(&clusters.to_string()), "{error}");
        }
    }

    #[test]
    fn members_of_a_cluster_that_does_not_exist_are_refused() {
        let lists = ClusterLists::from_assignment(&[1, 0], 2).unwrap();
        assert_eq!(lists.members(1).unwrap(), [0]);
        for (lists, cluster) in [(&lists, 2), (&lists, usize::MAX), (&ClusterLists::new(), 0)] {
            let error = lists.members(cluster).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(&format!("cluster {cluster} of {}", lists.len())), "{error}");
        }
    }
}
