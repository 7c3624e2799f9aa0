//! [`ClusterLists`]: the members of each cluster.

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

    /// Returns lists from the cluster of each entry. Every cluster of `assignment` is below `clusters`.
    ///
    /// # Panics
    /// A cluster of `assignment` is not below `clusters`.
    #[must_use]
    pub fn from_assignment(assignment: &[u32], clusters: usize) -> Self {
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
    /// # Panics
    /// There is no such cluster.
    #[must_use]
    pub fn members(&self, cluster: usize) -> &[u32] {
        let start = if cluster == 0 { 0 } else { self.ends[cluster - 1] };
        &self.members[start as usize..self.ends[cluster] as usize]
    }

    /// Returns the members of each cluster.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        (0..self.len()).map(|cluster| self.members(cluster))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_lists_members_in_rising_order() {
        let lists = ClusterLists::from_assignment(&[2, 0, 2, 3, 0], 5);
        let found: Vec<&[u32]> = lists.iter().collect();
        assert_eq!(found, [&[1, 4][..], &[], &[0, 2], &[3], &[]]);
        assert_eq!((lists.stored(), lists.mean_size()), (5, 1.0));
        assert!(ClusterLists::new().is_empty() && ClusterLists::new().mean_size() == 0.0);
    }
}
