//! Medoid clustering: SWARM's Algorithm 1 over exact co-activation counts.
//!
//! Source: SWARM, section 5.1, Algorithm 1, equations 2 to 5.
//! 1. The density of an entry is the number of other entries within the radius (line 8, equation 4).
//! 2. Entries are queued by falling density, ties by age (line 10).
//! 3. Each entry of the queue that no cluster covers becomes a medoid (line 12).
//! 4. Its candidates are the other entries within its radius, by rising distance to it, ties by age (lines 14 and 15).
//! 5. A candidate joins if its mean distance to the members is below the radius (line 16, equation 5). A candidate that
//!    does not join does not stop those behind it.
//! 6. The members are covered (line 20). A covered entry may join later clusters: it is a replica.
//! 7. Entries that no query activated join the cluster of the medoid with the nearest key, if the caller asks for it
//!    ([`MedoidClusters::assign_by_key`]). The paper does not mention them.
//!
//! Beyond the paper, [`MedoidOptions`] limits the size of a cluster and the memberships of an entry. Without limits the
//! result is that of the paper. The mean distance of a candidate comes from the cluster's number of members per query,
//! not from its members. `Jaccard` is the exception, because its distances are not sums over queries.
//!
//! Invariants:
//! - The first member of each cluster is its medoid. An entry is the medoid of at most one cluster.
//! - Each entry that some query activated is in at least one cluster and in at most `memberships` clusters.
//! - All comparisons are in integers, so the result does not depend on the order of additions.

use super::closeness::{ClusterRadius, Normalisation, ONE};
use super::coactivation::CoActivation;
use super::key_matrix::check_keys;
use super::lists::ClusterLists;
use super::nearest_key::{ReadKey, assign_bytes_for, assign_nearest};
use super::ranked::{NeighbourScan, RankedEntries};
use crate::error::{Error, ErrorKind, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Limits of medoid clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MedoidOptions {
    /// How counts become distances.
    pub normalisation: Normalisation,
    /// The most entries of a cluster, or none for the paper's clusters.
    pub max_size: Option<usize>,
    /// The most clusters of an entry, or none for the paper's clusters. 1 means no replicas.
    pub memberships: Option<usize>,
}

impl Default for MedoidOptions {
    fn default() -> Self {
        Self { normalisation: Normalisation::Frequency, max_size: Some(16), memberships: Some(2) }
    }
}

/// Clusters around medoids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MedoidClusters {
    lists: ClusterLists,
    never_activated: Vec<u32>,
    by_key: usize,
    opened: usize,
    max_size: Option<usize>,
}

impl MedoidClusters {
    /// Returns the most bytes that adding entries by their keys takes beside the keys, for `entries` entries in
    /// `clusters` clusters.
    pub(crate) fn assign_bytes_for(clusters: usize, entries: usize, dim: usize) -> usize {
        assign_bytes_for(clusters, entries, dim)
    }

    /// Returns the members of each cluster. The first member is the medoid.
    #[must_use]
    pub fn lists(&self) -> &ClusterLists {
        &self.lists
    }

    /// Returns the medoid of a cluster.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no such cluster.
    pub fn medoid(&self, cluster: usize) -> Result<u32> {
        Ok(self.lists.members(cluster)?[0])
    }

    /// Returns the entries that no query activated and that no cluster has, in rising order.
    #[must_use]
    pub fn never_activated(&self) -> &[u32] {
        &self.never_activated
    }

    /// Returns how many entries joined a cluster by key, because no query activated them.
    #[must_use]
    pub fn assigned_by_key(&self) -> usize {
        self.by_key
    }

    /// Returns how many clusters were opened by an entry that no query activated, because all clusters were full.
    #[must_use]
    pub fn opened_by_key(&self) -> usize {
        self.opened
    }

    /// Puts each entry that no query activated into the cluster of the medoid with the nearest key that has room.
    ///
    /// `keys` is `[entries, dim]` for all entries of the profile. If every cluster is full, the entry becomes the
    /// medoid of a new one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the keys have another size, or a key is not finite or above 1e15. Nothing
    /// changed.
    pub fn assign_by_key(&mut self, keys: &[f32], dim: usize) -> Result<()> {
        let entries = check_keys("medoid clusters", keys, dim)?;
        let last = self.lists.iter().flatten().chain(&self.never_activated).max();
        if let Some(last) = last.filter(|last| **last as usize >= entries) {
            let context =
                format!("medoid clusters: there are keys of {entries} entries, but a cluster has entry {last}");
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        self.assign_by(dim, &mut |entry, row| row.extend_from_slice(&keys[entry as usize * dim..][..dim]))
    }

    /// Does the same with keys that are read when they are needed. A key has `dim` elements.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a key is not finite or above 1e15. Nothing changed.
    pub(crate) fn assign_by(&mut self, dim: usize, key: &mut ReadKey<'_>) -> Result<()> {
        let limit = self.max_size.unwrap_or(usize::MAX);
        let assigned = assign_nearest(&self.lists, &self.never_activated, (key, dim), limit)?;
        self.opened = assigned.len() - self.lists.len();
        self.by_key = self.never_activated.len() - self.opened;
        self.lists = assigned;
        self.never_activated = Vec::new();
        Ok(())
    }
}

/// Builds medoid clusters of one profile, for one radius after the other.
#[derive(Debug)]
pub struct MedoidClustering {
    ranked: RankedEntries,
    options: MedoidOptions,
    never_activated: Vec<u32>,
    largest_count: u32,
}

impl MedoidClustering {
    /// Returns the clustering of a profile.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a limit of `options` is 0.
    pub fn new(profile: &CoActivation, options: MedoidOptions) -> Result<Self> {
        if options.max_size == Some(0) || options.memberships == Some(0) {
            let context = format!("medoid clusters: {options:?} leaves no room for a medoid");
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let never_activated = (0..).zip(profile.counts()).filter(|(_, count)| **count == 0).map(|(entry, _)| entry);
        Ok(Self {
            ranked: RankedEntries::new(profile),
            options,
            never_activated: never_activated.collect(),
            largest_count: profile.counts().iter().copied().max().unwrap_or(0),
        })
    }

    /// Returns the bytes that clustering `entries` entries takes beside the profile, its result included if each entry
    /// is stored `stored` times.
    #[must_use]
    pub fn bytes_for(entries: usize, queries: usize, stored: usize) -> usize {
        let scratch = entries.saturating_mul(size_of::<(u64, u32)>() + 2 * size_of::<Candidate>());
        let lists = ClusterLists::bytes_for(entries, entries.saturating_mul(stored));
        RankedEntries::bytes_for(entries, queries).saturating_add(scratch).saturating_add(lists)
    }

    /// Returns the clusters of a radius.
    #[must_use]
    pub fn cluster(&self, radius: ClusterRadius) -> MedoidClusters {
        self.cluster_by(radius, &self.ranked.densities(self.options.normalisation, radius))
    }

    /// Returns the clusters of a radius from the densities of the ranks.
    fn cluster_by(&self, radius: ClusterRadius, densities: &[u64]) -> MedoidClusters {
        let mut queue: Vec<u32> = (0..self.ranked.len() as u32).collect();
        queue.sort_unstable_by_key(|rank| (Reverse(densities[*rank as usize]), self.ranked.entry(*rank as usize)));
        let mut growth = Growth::new(&self.ranked, self.options, radius);
        let mut lists = ClusterLists::new();
        for rank in queue {
            if growth.memberships[rank as usize] == 0 {
                growth.expand(rank, densities[rank as usize] > 0);
                lists.push(&growth.entries());
            }
        }
        MedoidClusters {
            lists,
            never_activated: self.never_activated.clone(),
            by_key: 0,
            opened: 0,
            max_size: self.options.max_size,
        }
    }

    /// Returns the radius whose clusters have the mean size nearest to `mean_size`, found by bisection, and the
    /// clusters.
    ///
    /// Only entries that some query activated count. The search stops within 2 % of the mean size.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the mean size is not finite, below 1, or above the largest size.
    pub fn cluster_to_mean_size(&self, mean_size: f64) -> Result<(ClusterRadius, MedoidClusters)> {
        let largest = self.options.max_size.map_or(f64::INFINITY, |size| size as f64);
        if !(mean_size.is_finite() && mean_size >= 1.0 && mean_size <= largest) {
            let context = format!("medoid clusters: a mean size of {mean_size} is not from 1 to {largest}");
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let top = match self.options.normalisation {
            Normalisation::Frequency => u64::from(self.largest_count) * ONE,
            Normalisation::Conditional | Normalisation::Jaccard => ONE,
        };
        // The widest radius has threshold 0, the narrowest `top`. A wider radius gives larger clusters.
        let (mut wide, mut narrow) = (0, top);
        let mut best: Option<(f64, ClusterRadius, MedoidClusters)> = None;
        let mut last: Option<(ClusterRadius, Vec<u64>)> = None;
        for _ in 0..MAX_PROBES {
            let radius = ClusterRadius::above(wide + (narrow - wide) / 2);
            let normalisation = self.options.normalisation;
            last = last.filter(|(other, _)| RankedEntries::has_equal_densities(normalisation, *other, radius));
            let (_, densities) = last.get_or_insert_with(|| (radius, self.ranked.densities(normalisation, radius)));
            let clusters = self.cluster_by(radius, densities);
            let found = clusters.lists.mean_size();
            let error = (found / mean_size).ln().abs();
            if best.as_ref().is_none_or(|(least, ..)| error < *least) {
                best = Some((error, radius, clusters));
            }
            if error < MEAN_SIZE_TOLERANCE || narrow - wide <= 1 {
                break;
            }
            if found > mean_size { wide = radius.threshold() } else { narrow = radius.threshold() }
        }
        let none = || Error::new(ErrorKind::InvalidArgument, "medoid clusters: no radius was tried");
        best.map(|(_, radius, clusters)| (radius, clusters)).ok_or_else(none)
    }
}

/// Radii that the bisection tries: 7 for the count of common queries out of 128, and 5 for its fraction.
const MAX_PROBES: usize = 12;
/// The logarithm of the factor by which the mean size may differ.
const MEAN_SIZE_TOLERANCE: f64 = 0.02;

/// The growth of clusters, one after the other.
struct Growth<'a> {
    ranked: &'a RankedEntries,
    options: MedoidOptions,
    radius: ClusterRadius,
    /// The clusters of each rank.
    memberships: Vec<u32>,
    /// The members of the growing cluster, as ranks.
    members: Vec<u32>,
    /// The sum of weights of the members that each query activated.
    per_query: Vec<u64>,
    row: Vec<u64>,
    other_row: Vec<u64>,
    scan: NeighbourScan,
    candidates: BinaryHeap<Candidate>,
}

/// A candidate of a medoid: its closeness, its entry and its rank. The largest is the first in the queue.
type Candidate = (u64, Reverse<u32>, u32);

impl<'a> Growth<'a> {
    fn new(ranked: &'a RankedEntries, options: MedoidOptions, radius: ClusterRadius) -> Self {
        let words = ranked.words();
        Self {
            ranked,
            options,
            radius,
            memberships: vec![0; ranked.len()],
            members: Vec::new(),
            per_query: vec![0; words * 64],
            row: vec![0; words],
            other_row: vec![0; words],
            scan: NeighbourScan::default(),
            candidates: BinaryHeap::new(),
        }
    }

    /// Returns the members of the cluster, the medoid first.
    fn entries(&self) -> Vec<u32> {
        self.members.iter().map(|rank| self.ranked.entry(*rank as usize)).collect()
    }

    /// Grows the cluster of a medoid (lines 13 to 20 of Algorithm 1).
    fn expand(&mut self, medoid: u32, has_neighbours: bool) {
        self.members.clear();
        self.per_query.fill(0);
        self.join(medoid);
        if !has_neighbours {
            return;
        }
        let (options, threshold) = (self.options, self.radius.threshold());
        let levels = self.ranked.scan(options.normalisation, self.radius, medoid as usize, &mut self.scan);
        for common in levels {
            self.add_candidates(medoid, common);
            // Closeness rises with the common count, except for `Jaccard`, where the whole queue comes first.
            if options.normalisation != Normalisation::Jaccard {
                self.join_candidates(threshold);
            }
            if self.is_full() {
                break;
            }
        }
        self.join_candidates(threshold);
        self.candidates.clear();
    }

    fn is_full(&self) -> bool {
        self.options.max_size.is_some_and(|most| self.members.len() >= most)
    }

    /// Queues the neighbours with `common` queries in common that may join another cluster.
    fn add_candidates(&mut self, medoid: u32, common: u16) {
        let most = self.options.memberships.map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX));
        let mut queue = std::mem::take(&mut self.candidates).into_vec();
        self.scan.for_each_with(common, |rank| {
            if self.memberships[rank as usize] < most {
                let closeness =
                    self.ranked.closeness(self.options.normalisation, common, medoid as usize, rank as usize);
                if closeness > self.radius.threshold() {
                    queue.push((closeness, Reverse(self.ranked.entry(rank as usize)), rank));
                }
            }
        });
        self.candidates = queue.into();
    }

    /// Takes candidates from the queue while the cluster has room.
    fn join_candidates(&mut self, threshold: u64) {
        while !self.is_full() {
            let Some((_, _, rank)) = self.candidates.pop() else { break };
            if self.closeness_to_members(rank) > u128::from(threshold) * self.members.len() as u128 {
                self.join(rank);
            }
        }
    }

    /// Makes a rank a member.
    fn join(&mut self, rank: u32) {
        self.memberships[rank as usize] += 1;
        self.members.push(rank);
        let weight = match self.options.normalisation {
            Normalisation::Conditional => ONE / u64::from(self.ranked.count(rank as usize)),
            Normalisation::Frequency | Normalisation::Jaccard => 1,
        };
        self.ranked.copy_words(rank as usize, &mut self.row);
        for_each_bit(&self.row, |query| self.per_query[query] += weight);
    }

    /// Returns the sum of the closeness of a rank to each member.
    fn closeness_to_members(&mut self, rank: u32) -> u128 {
        self.ranked.copy_words(rank as usize, &mut self.row);
        if self.options.normalisation == Normalisation::Jaccard {
            return self.jaccard_to_members(rank);
        }
        let mut sum = 0;
        for_each_bit(&self.row, |query| sum += self.per_query[query]);
        match self.options.normalisation {
            Normalisation::Frequency => u128::from(sum) * u128::from(ONE),
            Normalisation::Conditional | Normalisation::Jaccard => u128::from(sum),
        }
    }

    /// Returns the sum of the Jaccard closeness of a rank, whose words are in `row`, to each member.
    fn jaccard_to_members(&mut self, rank: u32) -> u128 {
        let count = self.ranked.count(rank as usize);
        let mut sum = 0;
        for member in &self.members {
            self.ranked.copy_words(*member as usize, &mut self.other_row);
            let common = self.row.iter().zip(&self.other_row).map(|(a, b)| (a & b).count_ones()).sum();
            sum += u128::from(Normalisation::Jaccard.closeness(common, self.ranked.count(*member as usize), count));
        }
        sum
    }
}

/// Calls `visit` with the index of each set bit.
fn for_each_bit(words: &[u64], mut visit: impl FnMut(usize)) {
    for (first, &word) in (0..).step_by(64).zip(words) {
        let mut rest = word;
        while rest != 0 {
            visit(first + rest.trailing_zeros() as usize);
            rest &= rest - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ENTRIES: usize = 40;

    fn profile(queries: &[Vec<u32>]) -> CoActivation {
        let mut profile = CoActivation::new(ENTRIES, queries.len().max(1)).unwrap();
        queries.iter().for_each(|query| profile.record(query).unwrap());
        profile
    }

    /// Queries that activate entries of a few overlapping topics.
    fn queries() -> impl Strategy<Value = Vec<Vec<u32>>> {
        let query = (0_u32..5, any::<u64>(), 0_u32..4).prop_map(|(topic, bits, extra)| {
            let of_topic = (0..12).filter(|i| bits >> i & 3 != 0).map(|i| topic * 7 + i);
            let others = (0..extra).map(|i| (bits >> (20 + 8 * i) & 31) as u32);
            let all: std::collections::BTreeSet<u32> = of_topic.chain(others).filter(|e| *e < ENTRIES as u32).collect();
            all.into_iter().collect()
        });
        prop::collection::vec(query, 1..140)
    }

    /// Algorithm 1 over the dense matrix of distances, with exact fractions as (common, divisor).
    fn by_definition(profile: &CoActivation, options: MedoidOptions, radius: ClusterRadius) -> Vec<Vec<u32>> {
        let active: Vec<u32> = (0..ENTRIES as u32).filter(|e| profile.count(*e) > 0).collect();
        let close = |member: u32, other: u32| {
            let common = profile.common(member, other);
            options.normalisation.closeness(common, profile.count(member), profile.count(other))
        };
        let within =
            |medoid: u32| active.iter().filter(move |e| **e != medoid && close(medoid, **e) > radius.threshold());
        let mut queue = active.clone();
        queue.sort_by_key(|medoid| Reverse(within(*medoid).count()));
        let mut covered = [0; ENTRIES];
        let mut clusters = Vec::new();
        for medoid in queue {
            if covered[medoid as usize] > 0 {
                continue;
            }
            let mut members = vec![medoid];
            let mut candidates: Vec<u32> = within(medoid).copied().collect();
            candidates.retain(|e| options.memberships.is_none_or(|most| covered[*e as usize] < most));
            candidates.sort_by_key(|e| Reverse(close(medoid, *e)));
            for candidate in candidates {
                let sum: u128 = members.iter().map(|member| u128::from(close(*member, candidate))).sum();
                let has_room = options.max_size.is_none_or(|most| members.len() < most);
                if has_room && sum > u128::from(radius.threshold()) * members.len() as u128 {
                    members.push(candidate);
                }
            }
            members.iter().for_each(|member| covered[*member as usize] += 1);
            clusters.push(members);
        }
        clusters
    }

    fn options() -> impl Strategy<Value = MedoidOptions> {
        let normalisation =
            prop::sample::select(vec![Normalisation::Frequency, Normalisation::Conditional, Normalisation::Jaccard]);
        (normalisation, prop::option::of(1_usize..18), prop::option::of(1_usize..4))
            .prop_map(|(normalisation, max_size, memberships)| MedoidOptions { normalisation, max_size, memberships })
    }

    proptest! {
        #[test]
        fn clusters_are_those_of_algorithm_1(queries in queries(), options in options(), part in 0.0_f64..1.0) {
            let profile = profile(&queries);
            let clustering = MedoidClustering::new(&profile, options).unwrap();
            let top = if options.normalisation == Normalisation::Frequency { 12 * ONE } else { ONE };
            let radius = ClusterRadius::above((part.powi(2) * top as f64) as u64);
            let found = clustering.cluster(radius);
            let lists: Vec<Vec<u32>> = found.lists().iter().map(<[u32]>::to_vec).collect();
            prop_assert_eq!(&lists, &by_definition(&profile, options, radius));
            // Each activated entry is covered, and no entry more often than it may be.
            let mut covered = vec![0; ENTRIES];
            lists.iter().flatten().for_each(|e| covered[*e as usize] += 1);
            for (entry, times) in (0..).zip(covered) {
                let is_active = profile.count(entry) > 0;
                prop_assert_eq!(times > 0, is_active);
                prop_assert_eq!(found.never_activated().contains(&entry), !is_active);
                prop_assert!(options.memberships.is_none_or(|most| times <= most));
            }
        }

        #[test]
        fn the_radius_is_that_of_the_paper(queries in queries(), distance in 0.0_f64..1.0) {
            // Equation 2 in floats is exact enough for a few queries.
            let profile = profile(&queries);
            let distance = 1.0 - (1.0 - distance) * 30.0 / profile.total().max(30) as f64;
            let options = MedoidOptions { max_size: None, memberships: None, ..MedoidOptions::default() };
            let radius = ClusterRadius::from_distance(distance, options.normalisation, &profile).unwrap();
            let found = MedoidClustering::new(&profile, options).unwrap().cluster(radius);
            for members in found.lists().iter() {
                let far = |a: u32, b: u32| 1.0 - f64::from(profile.common(a, b)) / profile.total() as f64;
                prop_assert!(members[1..].iter().all(|e| far(members[0], *e) < distance + 1e-9));
                for (at, entry) in members.iter().enumerate().skip(1) {
                    let mean = members[..at].iter().map(|m| far(*m, *entry)).sum::<f64>() / at as f64;
                    prop_assert!(mean < distance + 1e-9);
                }
            }
        }

        #[test]
        fn the_bisection_is_no_worse_than_any_whole_count(queries in queries(), mean_size in 1.0_f64..10.0) {
            let profile = profile(&queries);
            let clustering = MedoidClustering::new(&profile, MedoidOptions::default()).unwrap();
            let (radius, found) = clustering.cluster_to_mean_size(mean_size).unwrap();
            prop_assert_eq!(&clustering.cluster(radius), &found);
            prop_assert!(found.lists().iter().all(|members| members.len() <= 16));
        }
    }

    #[test]
    fn entries_that_no_query_activated_join_by_key() {
        let profile = profile(&[vec![0, 1, 2], vec![0, 1, 2], vec![30, 31], vec![30, 31]]);
        let options = MedoidOptions { max_size: Some(20), ..MedoidOptions::default() };
        let clustering = MedoidClustering::new(&profile, options).unwrap();
        let mut found = clustering.cluster(ClusterRadius::above_common(1));
        assert_eq!(found.lists().iter().collect::<Vec<_>>(), [&[0, 1, 2][..], &[30, 31]]);
        assert_eq!((found.never_activated().len(), found.medoid(1).unwrap()), (35, 30));
        assert_eq!(found.medoid(2).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let keys: Vec<f32> = (0..ENTRIES).map(|at| at as f32).collect();
        let too_large = [&keys[1..], &[2e15]].concat();
        for (keys, dim) in [(&keys[1..], 1), (&keys[..], 3), (&keys[..], 2), (&[], 0), (&too_large, 1)] {
            assert_eq!(found.assign_by_key(keys, dim).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        found.assign_by_key(&keys, 1).unwrap();
        assert_eq!((found.assigned_by_key(), found.opened_by_key()), (35, 0));
        assert_eq!(found.lists().iter().map(<[u32]>::len).collect::<Vec<_>>(), [20, 20]);
        assert!(found.lists().members(0).unwrap()[3..].iter().eq((3..=15).chain(36..40).collect::<Vec<_>>().iter()));
    }

    #[test]
    fn wrong_options_are_refused() {
        let profile = profile(&[vec![0, 1]]);
        let none = MedoidOptions::default();
        for options in [MedoidOptions { max_size: Some(0), ..none }, MedoidOptions { memberships: Some(0), ..none }] {
            assert_eq!(MedoidClustering::new(&profile, options).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        let clustering = MedoidClustering::new(&profile, none).unwrap();
        for mean_size in [0.5, 16.5, f64::NAN, f64::INFINITY] {
            let error = clustering.cluster_to_mean_size(mean_size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        let empty = CoActivation::new(0, 1).unwrap();
        let (_, found) = MedoidClustering::new(&empty, none).unwrap().cluster_to_mean_size(8.0).unwrap();
        assert!(found.lists().is_empty() && found.never_activated().is_empty());
    }
}
