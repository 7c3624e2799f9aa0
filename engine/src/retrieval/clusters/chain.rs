//! An order of clusters in which neighbours are retrieved together.
//!
//! Source: DynaKV, section 5.1 and equation 8. The probability that two clusters are retrieved together is the count
//! of queries that retrieve both, divided by the sum over all pairs. The divisor is the same for all pairs, so the
//! counts decide. The paper counts once, over the initial input, and co-locates the most correlated clusters.
//! 1. The pair of clusters with the highest count is joined, ties by the lower clusters. It becomes part of a chain.
//! 2. So is the next pair, if both clusters are ends of chains, and of different ones.
//! 3. If no pair is left that was retrieved together, the chains follow each other by their lowest cluster.
//!
//! Each end of a chain knows its best partner. A partner that became invalid is looked for again when it is the best of
//! all. The memory is therefore that of the clusters, not of their pairs.
//!
//! Invariant: the order is a permutation of the clusters, and depends on the counts alone.

use super::coactivation::CoActivation;
use super::ranked::common_with_all;
use crate::error::{Error, ErrorKind, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Returns an order of the clusters of a profile, in which a "query" records the clusters that it retrieves.
#[must_use]
pub fn chain(retrieved: &CoActivation) -> Vec<u32> {
    let mut chains = Chains::new(retrieved);
    let mut best: BinaryHeap<Pair> =
        (0..retrieved.entries() as u32).filter_map(|cluster| chains.best_partner(cluster)).collect();
    while let Some(Pair { seeker: Reverse(of), partner, .. }) = best.pop() {
        if chains.may_join(of, partner) {
            chains.join(of, partner);
        }
        best.extend(chains.best_partner(of));
    }
    chains.in_order()
}

/// Returns the bytes of scratch and result for this number of clusters.
#[must_use]
pub fn chain_bytes_for(clusters: usize) -> usize {
    clusters.saturating_mul(size_of::<Pair>() * 2 + 5 * size_of::<u32>())
}

/// Returns how many runs of neighbours of an order a set of clusters makes: the requests that read it.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `order` is not a permutation of the clusters, or a cluster of `chosen` is not among
/// them.
pub fn runs_in_order(order: &[u32], chosen: &[u32]) -> Result<usize> {
    let clusters = order.len();
    let refused = |what: String| Err(Error::new(ErrorKind::InvalidArgument, format!("runs in order: {what}")));
    let mut place = vec![None; clusters];
    for (at, cluster) in order.iter().enumerate() {
        match place.get_mut(*cluster as usize) {
            Some(place @ None) => *place = Some(at),
            Some(Some(first)) => return refused(format!("cluster {cluster} is both at {first} and at {at}")),
            None => return refused(format!("cluster {cluster} is in an order of {clusters} clusters")),
        }
    }
    if let Some(cluster) = chosen.iter().find(|cluster| **cluster as usize >= clusters) {
        return refused(format!("cluster {cluster} was chosen, but there are {clusters}"));
    }
    let mut places: Vec<usize> = chosen.iter().filter_map(|cluster| place[*cluster as usize]).collect();
    places.sort_unstable();
    places.dedup();
    Ok(places.len() - places.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count())
}

/// Two ends that may be joined. The greatest is joined first: most common retrievals, then the lowest numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    /// Retrievals that had both clusters.
    common: u32,
    lower: Reverse<u32>,
    higher: Reverse<u32>,
    /// The cluster that looked for a partner.
    seeker: Reverse<u32>,
    partner: u32,
}

/// Chains that grow by joining ends.
struct Chains<'a> {
    retrieved: &'a CoActivation,
    /// The neighbours of each cluster in its chain.
    links: Vec<[Option<u32>; 2]>,
    /// For each end of a chain, the other end. A cluster on its own is both.
    other_end: Vec<u32>,
    common: Vec<u16>,
}

impl<'a> Chains<'a> {
    fn new(retrieved: &'a CoActivation) -> Self {
        let clusters = retrieved.entries() as u32;
        Self {
            retrieved,
            links: vec![[None; 2]; clusters as usize],
            other_end: (0..clusters).collect(),
            common: Vec::new(),
        }
    }

    fn is_end(&self, cluster: u32) -> bool {
        self.links[cluster as usize][1].is_none()
    }

    fn may_join(&self, a: u32, b: u32) -> bool {
        a != b && self.is_end(a) && self.is_end(b) && self.other_end[a as usize] != b
    }

    /// Returns the best pair of an end with a cluster that it may join, if any was retrieved together with it.
    fn best_partner(&mut self, of: u32) -> Option<Pair> {
        if !self.is_end(of) || self.retrieved.count(of) == 0 {
            return None;
        }
        let mut common = std::mem::take(&mut self.common);
        common_with_all(self.retrieved, of, &mut common);
        let mut best: Option<Pair> = None;
        let mut highest = 1;
        for (other, &count) in (0..).zip(&common[..self.links.len()]) {
            if count >= highest && self.may_join(of, other) {
                highest = count;
                let (lower, higher) = (Reverse(of.min(other)), Reverse(of.max(other)));
                let pair = Pair { common: u32::from(count), lower, higher, seeker: Reverse(of), partner: other };
                best = best.max(Some(pair));
            }
        }
        self.common = common;
        best
    }

    /// Joins the chains of two ends.
    fn join(&mut self, a: u32, b: u32) {
        for (at, other) in [(a, b), (b, a)] {
            let links = &mut self.links[at as usize];
            let free = usize::from(links[0].is_some());
            links[free] = Some(other);
        }
        let (first, last) = (self.other_end[a as usize], self.other_end[b as usize]);
        self.other_end[first as usize] = last;
        self.other_end[last as usize] = first;
    }

    /// Returns the clusters of all chains. Each chain begins with its lower end.
    fn in_order(&self) -> Vec<u32> {
        let clusters = self.links.len();
        let (mut order, mut is_placed) = (Vec::with_capacity(clusters), vec![false; clusters]);
        for cluster in 0..clusters as u32 {
            if is_placed[cluster as usize] {
                continue;
            }
            let mut at = Some(self.lower_end(cluster));
            while let Some(next) = at {
                is_placed[next as usize] = true;
                order.push(next);
                at = self.links[next as usize].into_iter().flatten().find(|other| !is_placed[*other as usize]);
            }
        }
        order
    }

    /// Returns the lower of the two ends of a cluster's chain.
    fn lower_end(&self, cluster: u32) -> u32 {
        let (mut before, mut at) = (None, cluster);
        while !self.is_end(at) {
            let next = self.links[at as usize].into_iter().flatten().find(|other| Some(*other) != before);
            let Some(next) = next else { break };
            (before, at) = (Some(at), next);
        }
        at.min(self.other_end[at as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn recorded(clusters: usize, retrievals: &[BTreeSet<u32>]) -> CoActivation {
        let mut profile = CoActivation::new(clusters, retrievals.len().max(1)).unwrap();
        for retrieval in retrievals {
            profile.record(&retrieval.iter().copied().collect::<Vec<_>>()).unwrap();
        }
        profile
    }

    /// Takes all pairs by falling count, and keeps those that extend chains.
    fn by_definition(profile: &CoActivation) -> Vec<BTreeSet<u32>> {
        let clusters = profile.entries() as u32;
        let mut pairs: Vec<(u32, u32)> = (0..clusters).flat_map(|a| (a + 1..clusters).map(move |b| (a, b))).collect();
        pairs.retain(|(a, b)| profile.common(*a, *b) > 0);
        pairs.sort_by_key(|(a, b)| Reverse(profile.common(*a, *b)));
        let mut chain_of: Vec<u32> = (0..clusters).collect();
        let mut degree = vec![0; clusters as usize];
        let mut kept = Vec::new();
        for (a, b) in pairs {
            let (of_a, of_b) = (chain_of[a as usize], chain_of[b as usize]);
            if of_a != of_b && degree[a as usize] < 2 && degree[b as usize] < 2 {
                kept.push(BTreeSet::from([a, b]));
                degree[a as usize] += 1;
                degree[b as usize] += 1;
                chain_of.iter_mut().filter(|of| **of == of_b).for_each(|of| *of = of_a);
            }
        }
        kept
    }

    proptest! {
        #[test]
        fn the_order_has_the_pairs_of_the_greedy_choice(
            retrievals in prop::collection::vec(prop::collection::btree_set(0_u32..23, 0..8), 0..60),
        ) {
            let profile = recorded(23, &retrievals);
            let order = chain(&profile);
            let neighbours: Vec<BTreeSet<u32>> = order.windows(2).map(|pair| pair.iter().copied().collect()).collect();
            for pair in by_definition(&profile) {
                prop_assert!(neighbours.contains(&pair), "{pair:?} in {order:?}");
            }
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..23));
            for retrieval in &retrievals {
                let runs = runs_in_order(&order, &retrieval.iter().copied().collect::<Vec<_>>()).unwrap();
                prop_assert!(runs <= retrieval.len());
                prop_assert_eq!(runs == 0, retrieval.is_empty());
            }
        }
    }

    #[test]
    fn clusters_that_are_retrieved_together_are_neighbours() {
        let retrievals: Vec<BTreeSet<u32>> = [&[0, 5, 9][..], &[0, 5, 9], &[1, 7], &[1, 7], &[5, 9], &[7, 1], &[3]]
            .map(|r| r.iter().copied().collect())
            .into();
        let order = chain(&recorded(10, &retrievals));
        assert_eq!(order, [0, 5, 9, 1, 7, 2, 3, 4, 6, 8]);
        let runs = |chosen: &[u32]| runs_in_order(&order, chosen).unwrap();
        assert_eq!((runs(&[9, 0, 5]), runs(&[0, 9, 3]), runs(&[])), (1, 3, 0));
        assert!(chain(&recorded(0, &[])).is_empty());
    }

    #[test]
    fn runs_of_an_order_that_is_not_a_permutation_are_refused() {
        for (order, chosen, context) in [
            (&[0, 3, 1][..], &[][..], "cluster 3 is in an order of 3"),
            (&[0, 1, 1], &[], "cluster 1 is both at 1 and at 2"),
            (&[2, 0, 1], &[1, 3], "cluster 3 was chosen, but there are 3"),
            (&[], &[u32::MAX], "there are 0"),
        ] {
            let error = runs_in_order(order, chosen).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains(context), "{error}");
        }
    }
}
