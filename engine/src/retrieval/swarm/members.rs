//! The members of clusters that grow: a slot of equal size for each cluster.
//!
//! Invariants:
//! - A cluster has at least one member and at most as many as its slot.
//! - The medoid of a cluster is a token, or [`CUT`] if a truncation removed it and left other members.

use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::clusters::ClusterLists;

/// The medoid of a cluster whose medoid was cut off.
pub(super) const CUT: u32 = u32::MAX;

/// The members and the medoid of each cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Members {
    slot: usize,
    /// `[clusters, slot]`.
    slots: Vec<u32>,
    sizes: Vec<u32>,
    medoids: Vec<u32>,
    stored: usize,
}

impl Members {
    /// Returns the members of `lists`, whose first members are the medoids. No list has more than `slot` members.
    pub(super) fn new(lists: &ClusterLists, slot: usize) -> Self {
        let mut members = Self::with_capacity(slot, lists.len());
        for list in lists.iter().filter(|list| !list.is_empty()) {
            members.push(list[0], list);
        }
        members
    }

    fn with_capacity(slot: usize, clusters: usize) -> Self {
        Self {
            slot,
            slots: Vec::with_capacity(clusters * slot),
            sizes: Vec::with_capacity(clusters),
            medoids: Vec::with_capacity(clusters),
            stored: 0,
        }
    }

    fn push(&mut self, medoid: u32, list: &[u32]) {
        let size = list.len().min(self.slot);
        self.slots.extend_from_slice(&list[..size]);
        self.slots.resize(self.slots.len() + self.slot - size, 0);
        self.sizes.push(size as u32);
        self.medoids.push(medoid);
        self.stored += size;
    }

    /// Appends the clusters.
    pub(super) fn put_state(&self, out: &mut StateWriter) {
        out.put_u32s(&self.sizes);
        out.put_u32s(&self.medoids);
        let members: Vec<u32> = (0..self.len()).flat_map(|cluster| self.of(cluster)).copied().collect();
        out.put_u32s(&members);
    }

    /// Returns the clusters of a state. The tokens below `tokens` are in one to `memberships` clusters each.
    ///
    /// # Errors
    /// A cluster is empty or larger than a slot, its medoid is no member, or a token is in it twice. A token is in too
    /// many clusters or none.
    pub(super) fn from_state(
        state: &mut StateReader<'_>,
        slot: usize,
        (tokens, memberships): (usize, usize),
    ) -> Result<Self, StateError> {
        let most = tokens.saturating_mul(memberships);
        let sizes = state.u32s("sizes", most)?;
        let medoids = state.u32s("medoids", most)?;
        let all = state.u32s("members", most)?;
        let sum: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
        require(medoids.len() == sizes.len() && sum == all.len() as u64, || {
            format!("{} clusters have {} medoids and {} members", sizes.len(), medoids.len(), all.len())
        })?;
        require(all.len() >= tokens, || format!("{} members of {tokens} tokens", all.len()))?;
        let mut own = Self::with_capacity(slot, sizes.len());
        // Of each token, the clusters that hold it, and the last of them plus one.
        let (mut left, mut clusters) = (&all[..], vec![(0_u32, 0_u32); tokens]);
        for (size, (medoid, cluster)) in sizes.iter().zip(medoids.into_iter().zip(1..)) {
            let (list, rest) = left.split_at(*size as usize);
            left = rest;
            require((1..=slot).contains(&list.len()), || format!("a cluster has {size} members; 1 to {slot} fit"))?;
            let is_member = medoid == CUT || list.contains(&medoid);
            require(is_member, || format!("medoid {medoid} is no member of its cluster"))?;
            for token in list {
                let beyond = || StateError::new(format!("member {token} is no token of {tokens}"));
                let (count, last) = clusters.get_mut(*token as usize).ok_or_else(beyond)?;
                require(*last != cluster, || format!("token {token} is in a cluster twice"))?;
                (*count, *last) = (*count + 1, cluster);
            }
            own.push(medoid, list);
        }
        let wrong = clusters.iter().position(|(count, _)| !(1..=memberships).contains(&(*count as usize)));
        require(wrong.is_none(), || format!("token {} is in too many clusters, or in none", wrong.unwrap_or(0)))?;
        Ok(own)
    }

    /// Returns the bytes of the slots of the clusters whose state begins here, as their number says.
    pub(super) fn slot_bytes(state: &mut StateReader<'_>, slot: usize) -> usize {
        let clusters = state.u64().ok().and_then(|clusters| usize::try_from(clusters).ok()).unwrap_or(0);
        clusters.saturating_mul(slot).saturating_mul(size_of::<u32>())
    }

    /// Returns the number of clusters.
    pub(super) fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the members of a cluster that exists.
    pub(super) fn of(&self, cluster: usize) -> &[u32] {
        &self.slots[cluster * self.slot..][..self.sizes[cluster] as usize]
    }

    /// Returns the medoid of each cluster.
    pub(super) fn medoids(&self) -> &[u32] {
        &self.medoids
    }

    pub(super) fn has_room(&self, cluster: usize) -> bool {
        (self.sizes[cluster] as usize) < self.slot
    }

    /// Adds a token to a cluster that has room.
    pub(super) fn add(&mut self, cluster: usize, token: u32) {
        self.slots[cluster * self.slot + self.sizes[cluster] as usize] = token;
        self.sizes[cluster] += 1;
        self.stored += 1;
    }

    /// Adds a cluster with one token, which is its medoid.
    pub(super) fn open(&mut self, token: u32) {
        let clusters = self.len();
        if self.slots.capacity() < (clusters + 1) * self.slot {
            self.slots.reserve_exact(self.slot.max(clusters / 4 * self.slot));
            self.sizes.reserve_exact(1.max(clusters / 4));
            self.medoids.reserve_exact(1.max(clusters / 4));
        }
        self.push(token, &[token]);
    }

    /// Forgets the tokens from `tokens` on. Returns which clusters are left.
    pub(super) fn truncate(&mut self, tokens: u32) -> Vec<bool> {
        let is_left: Vec<bool> = (0..self.len()).map(|at| self.of(at).iter().any(|token| *token < tokens)).collect();
        let mut left = Self::with_capacity(self.slot, is_left.iter().filter(|left| **left).count());
        for cluster in (0..self.len()).filter(|cluster| is_left[*cluster]) {
            let list: Vec<u32> = self.of(cluster).iter().copied().filter(|token| *token < tokens).collect();
            let medoid = self.medoids[cluster];
            left.push(if medoid < tokens { medoid } else { CUT }, &list);
        }
        *self = left;
        is_left
    }

    /// Returns the most clusters once `tokens` more tokens are added, if a cluster is opened only when the one that was
    /// opened before has at least `size` members.
    pub(super) fn clusters_by_age(&self, tokens: usize, size: usize) -> usize {
        self.len() + tokens.min(tokens / size.max(1) + 1)
    }

    /// Returns the most clusters once `tokens` more tokens are added to at most `most` clusters each, if a cluster is
    /// opened only when all others are full.
    pub(super) fn clusters_for(&self, tokens: usize, most: usize) -> usize {
        let room = self.len() * self.slot - self.stored;
        self.len() + tokens.saturating_mul(most).saturating_sub(room).div_ceil(self.slot)
    }

    /// Returns the most bytes once there are `clusters` clusters.
    pub(super) fn bytes_for(&self, clusters: usize) -> usize {
        let most = match clusters > self.sizes.capacity().min(self.slots.capacity() / self.slot) {
            true => (clusters + clusters / 4 + 1) * (self.slot + 2),
            false => self.slots.capacity() + self.sizes.capacity() + self.medoids.capacity(),
        };
        most * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_state_of_members_keeps_every_rule_or_is_an_error() {
        let state = |sizes: &[u32], medoids: &[u32], members: &[u32]| {
            let mut out = StateWriter::new();
            [sizes, medoids, members].into_iter().for_each(|table| out.put_u32s(table));
            out.into_bytes()
        };
        let read = |bytes: &[u8], tokens| Members::from_state(&mut StateReader::new(bytes), 4, (tokens, 2));
        let good = state(&[2, 3], &[1, CUT], &[0, 1, 1, 2, 3]);
        let members = read(&good, 4).unwrap();
        assert_eq!((members.of(1), members.medoids()), (&[1, 2, 3][..], &[1, CUT][..]));
        assert_eq!(Members::slot_bytes(&mut StateReader::new(&good), 4), 2 * 4 * 4);
        let text = |sizes: &[u32], medoids: &[u32], members: &[u32]| {
            read(&state(sizes, medoids, members), 4).unwrap_err().to_string()
        };
        assert!(text(&[2, 3], &[1, 2], &[0, 1, 3, 2, 3]).contains("token 3 is in a cluster twice"));
        assert!(text(&[2, 2], &[2, 2], &[0, 1, 2, 3]).contains("medoid 2 is no member"));
        assert!(text(&[2, 1], &[0, 2], &[0, 1, 2]).contains("3 members of 4 tokens"));
        assert!(text(&[2, 2], &[0, 2], &[0, 1, 2, 4]).contains("member 4 is no token"));
        assert!(text(&[4, 0], &[0, CUT], &[0, 1, 2, 3]).contains("has 0 members"));
    }

    proptest! {
        #[test]
        fn members_are_what_was_added_and_not_cut(
            steps in prop::collection::vec((0_u8..12, 0_u32..60), 0..200), slot in 1_usize..6,
        ) {
            let mut found = Members::new(&ClusterLists::new(), slot);
            let mut expected: Vec<(u32, Vec<u32>)> = Vec::new();
            for (action, number) in steps {
                let full = expected.iter().all(|(_, list)| list.len() == slot);
                let most = found.clusters_for(1, 1);
                let bytes = found.bytes_for(most);
                let room = expected.iter().position(|(_, list)| list.len() < slot);
                match (action, room) {
                    (0, _) => {
                        let is_left = found.truncate(number);
                        expected.iter_mut().for_each(|(_, list)| list.retain(|token| *token < number));
                        prop_assert_eq!(is_left, expected.iter().map(|e| !e.1.is_empty()).collect::<Vec<_>>());
                        expected.retain(|(_, list)| !list.is_empty());
                        expected.iter_mut().filter(|e| e.0 >= number).for_each(|e| e.0 = CUT);
                    }
                    (_, Some(cluster)) => {
                        prop_assert!(found.has_room(cluster));
                        found.add(cluster, number);
                        expected[cluster].1.push(number);
                        prop_assert!(!full && found.len() <= most);
                    }
                    (_, None) => {
                        found.open(number);
                        expected.push((number, vec![number]));
                        prop_assert!(found.len() <= most);
                    }
                }
                prop_assert!(action == 0 || found.bytes_for(found.len()) <= bytes);
                let lists: Vec<(u32, Vec<u32>)> =
                    (0..found.len()).map(|at| (found.medoids()[at], found.of(at).to_vec())).collect();
                prop_assert_eq!(&lists, &expected);
                prop_assert_eq!(found.stored, expected.iter().map(|(_, list)| list.len()).sum::<usize>());
            }
        }
    }
}
