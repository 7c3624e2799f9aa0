//! [`BalancedList`]: the clusters of one list, which never change.

use crate::retrieval::cluster_choice::{ClusterList, Overlap, RepresentativeRows};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::clusters::{ClusterLists, ClusterStats, Representatives};

/// The clusters of one KV head, or of all heads together.
///
/// Invariants: no cluster is without a member, and no token is in two clusters.
pub(super) struct BalancedList {
    dim: usize,
    /// The members of all clusters, one cluster after the other.
    members: Vec<u32>,
    /// The index in `members` behind the last member of each cluster.
    ends: Vec<u32>,
    /// None if members are scored.
    centroids: Option<Representatives>,
}

impl BalancedList {
    /// Returns no clusters of keys of `dim` elements.
    pub(super) fn new(dim: usize, has_centroids: bool) -> Self {
        let centroids = has_centroids.then(|| Representatives::with_capacity(dim, 0));
        Self { dim, members: Vec::new(), ends: Vec::new(), centroids }
    }

    /// Adds clusters of the keys `[entries, dim]`, of which the first is that of token `first`.
    pub(super) fn add(&mut self, first: usize, clusters: &ClusterLists, keys: &[f32]) {
        reserve(&mut self.members, clusters.stored());
        reserve(&mut self.ends, clusters.len());
        let mut centroid = vec![0.0; self.dim];
        for cluster in clusters.iter() {
            self.push(cluster.iter().map(|at| first as u32 + at));
            if let Some(centroids) = &mut self.centroids {
                let mut stats = ClusterStats::default();
                centroid.fill(0.0);
                cluster.iter().for_each(|at| stats.add(&mut centroid, &keys[*at as usize * self.dim..][..self.dim]));
                centroids.push(&centroid);
            }
        }
    }

    fn push(&mut self, members: impl Iterator<Item = u32>) {
        self.members.extend(members);
        self.ends.push(self.members.len() as u32);
    }

    /// Forgets the tokens from `tokens` on, and clusters that are left without a member.
    pub(super) fn truncate(&mut self, tokens: usize) {
        let is_left = |token: &u32| (*token as usize) < tokens;
        let own = std::mem::replace(self, Self::new(self.dim, false));
        for cluster in 0..own.count() {
            let before = self.members.len();
            self.members.extend(own.members(cluster).iter().copied().filter(is_left));
            if self.members.len() > before {
                self.ends.push(self.members.len() as u32);
            }
        }
        self.members.shrink_to_fit();
        self.ends.shrink_to_fit();
        self.centroids = own.centroids.clone().map(|mut centroids| {
            centroids.retain(|cluster| own.members(cluster).iter().any(is_left));
            centroids
        });
    }

    /// Appends the clusters.
    pub(super) fn put_state(&self, out: &mut StateWriter) {
        out.put_u32s(&self.ends);
        out.put_u32s(&self.members);
        if let Some(centroids) = &self.centroids {
            centroids.put_state(out);
        }
    }

    /// Returns the clusters of a state, in which each token below `tokens` has one. A cluster has at most `size`
    /// members.
    ///
    /// # Errors
    /// A cluster is empty or too large, or a token is in no cluster or in two.
    pub(super) fn from_state(
        state: &mut StateReader<'_>,
        (dim, has_centroids): (usize, bool),
        (tokens, size): (usize, usize),
    ) -> Result<Self, StateError> {
        let ends = state.u32s("clusters", tokens)?;
        let members = state.u32s("members", tokens)?;
        let mut start = 0;
        for end in &ends {
            let own = (*end as usize).checked_sub(start).filter(|own| (1..=size).contains(own));
            require(own.is_some(), || {
                format!("a cluster ends at member {end} and starts at {start}; 1 to {size} fit")
            })?;
            start = *end as usize;
        }
        require(start == tokens && members.len() == tokens, || {
            format!("clusters of {start} entries have {} members of {tokens} tokens", members.len())
        })?;
        let mut is_found = vec![false; tokens];
        for token in &members {
            let is_new = is_found.get_mut(*token as usize).is_some_and(|found| !std::mem::replace(found, true));
            require(is_new, || format!("member {token} is no token of {tokens}, or is in two clusters"))?;
        }
        let centroids = match has_centroids {
            true => Some(Representatives::from_state(state, dim, ends.len())?),
            false => None,
        };
        Ok(Self { dim, members, ends, centroids })
    }

    /// Returns the most bytes that [`Self::put_state`] appends.
    pub(super) fn state_bytes(&self) -> usize {
        let centroids = self.centroids.as_ref().map_or(0, |own| own.bytes_for(own.len()) + 4 * size_of::<u64>());
        2 * size_of::<u64>() + (self.members.len() + self.ends.len()) * size_of::<u32>() + centroids
    }

    /// Returns the bytes that it takes in memory.
    pub(super) fn bytes(&self) -> usize {
        let centroids = self.centroids.as_ref().map_or(0, |own| own.bytes_for(own.len()));
        (self.members.capacity() + self.ends.capacity()) * size_of::<u32>() + centroids
    }

    /// Returns the most bytes that it takes with `clusters` more clusters and `entries` more members.
    pub(super) fn bytes_for(&self, clusters: usize, entries: usize) -> usize {
        let most = |list: &Vec<u32>, more: usize| {
            let len = list.len().saturating_add(more);
            if more == 0 { list.capacity() } else { list.capacity().max(len.saturating_add(len / 4)) }
        };
        let tables = most(&self.members, entries).saturating_add(most(&self.ends, clusters));
        let centroids = self.centroids.as_ref().map_or(0, |own| own.bytes_for(own.len().saturating_add(clusters)));
        tables.saturating_mul(size_of::<u32>()).saturating_add(centroids)
    }
}

/// Reserves room for `more` elements. The room grows by a quarter at least.
fn reserve(list: &mut Vec<u32>, more: usize) {
    if list.capacity() - list.len() < more {
        list.reserve_exact(more.max(list.len() / 4));
    }
}

impl ClusterList for BalancedList {
    fn count(&self) -> usize {
        self.ends.len()
    }

    fn members(&self, cluster: usize) -> &[u32] {
        let start = if cluster == 0 { 0 } else { self.ends[cluster - 1] };
        &self.members[start as usize..self.ends[cluster] as usize]
    }

    fn overlap(&self) -> Overlap {
        Overlap::None
    }

    fn representatives(&self) -> Option<RepresentativeRows<'_>> {
        self.centroids.as_ref().map(|centroids| RepresentativeRows::Halves(centroids.rows()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(clusters: &[&[u32]], has_centroids: bool) -> BalancedList {
        let mut list = BalancedList::new(1, has_centroids);
        let keys: Vec<f32> = (0..20).map(|at| at as f32).collect();
        list.add(0, &ClusterLists::of_clusters(clusters.iter()), &keys);
        list
    }

    fn members(list: &BalancedList) -> Vec<Vec<u32>> {
        (0..list.count()).map(|cluster| list.members(cluster).to_vec()).collect()
    }

    #[test]
    fn a_cut_takes_tokens_and_empty_clusters_out() {
        for has_centroids in [false, true] {
            let mut cut = list(&[&[0, 4], &[3, 5], &[1, 2]], has_centroids);
            cut.truncate(3);
            assert_eq!(members(&cut), [vec![0], vec![1, 2]]);
            assert_eq!(cut.centroids.as_ref().map(Representatives::len), has_centroids.then_some(2));
            cut.add(3, &ClusterLists::of_clusters([[1, 0]].iter()), &[7.0, 9.0]);
            assert_eq!(members(&cut), [vec![0], vec![1, 2], vec![4, 3]]);
        }
    }

    #[test]
    fn a_state_keeps_every_rule_or_is_an_error() {
        for has_centroids in [false, true] {
            let own = list(&[&[0, 3], &[1, 2]], has_centroids);
            let mut out = StateWriter::new();
            own.put_state(&mut out);
            let bytes = out.into_bytes();
            assert!(bytes.len() <= own.state_bytes());
            let read = |tokens, size| {
                let found = BalancedList::from_state(&mut StateReader::new(&bytes), (1, has_centroids), (tokens, size));
                found.map(|list| members(&list)).map_err(|error| error.to_string())
            };
            assert_eq!(read(4, 2).unwrap(), members(&own));
            assert!(read(4, 1).unwrap_err().contains("1 to 1 fit"));
            assert!(read(5, 2).unwrap_err().contains("of 5 tokens"));
        }
        let read = |ends: &[u32], members: &[u32]| {
            let mut out = StateWriter::new();
            [ends, members].into_iter().for_each(|table| out.put_u32s(table));
            let bytes = out.into_bytes();
            let found = BalancedList::from_state(&mut StateReader::new(&bytes), (1, false), (members.len(), 2));
            found.map(|list| list.count()).map_err(|error| error.to_string())
        };
        assert_eq!(read(&[2, 3], &[0, 2, 1]), Ok(2));
        assert!(read(&[2, 3], &[0, 2, 2]).unwrap_err().contains("member 2"));
        assert!(read(&[2, 3], &[0, 2, 3]).unwrap_err().contains("member 3"));
        assert!(read(&[2, 1], &[0, 2, 1]).unwrap_err().contains("ends at member 1"));
        assert!(read(&[0, 2], &[0, 1]).unwrap_err().contains("starts at 0"));
        assert!(read(&[2], &[0, 1, 2]).unwrap_err().contains("of 3 tokens"));
    }

    #[test]
    fn bytes_stay_below_what_was_said_before() {
        let mut list = list(&[&[0, 3], &[1, 2]], true);
        for round in 0..40_u32 {
            let clusters = ClusterLists::of_clusters((0..round % 7).map(|at| [2 * at, 2 * at + 1]));
            let most = list.bytes_for(clusters.len(), clusters.stored());
            list.add(4, &clusters, &vec![1.0; clusters.stored()]);
            assert!(list.bytes() <= most, "{} {most}", list.bytes());
        }
    }
}
