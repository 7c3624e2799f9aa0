//! k-means of keys: the clusters of DynaKV, PQCache and ClusterKV.
//!
//! Sources: DynaKV, section 4.1 (clusters per layer and KV head, with the centroid as representative); Lloyd, 1982;
//! k-means++ for the first centroids.
//! 1. If there is a metric, keys are transformed so that their distances are those of the metric.
//! 2. The keys are clustered by full passes and relocations of centroids. See `passes` and `relocation`.
//! 3. Each centroid is the mean of its members, in the space of the keys.
//!
//! [`KMeans::lloyd`] runs full passes over all centroids instead, as the reference for quality.
//!
//! Invariants:
//! - Each cluster has a member, and no centroid is NaN, also if all keys are equal.
//! - The result depends on the keys, the options and the seed alone. It does not depend on the number of threads.

mod metric;
mod passes;
mod points;
mod refine;
mod relocation;
mod seeding;
mod two_level;

use super::key_matrix::check_keys;
use super::lists::ClusterLists;
use super::random::SeededRandom;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{lower_distances, nearest_bytes};
use passes::{Partition, means, one_level, relocated, two_clusters};
use points::PointRows;
use std::borrow::Cow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How keys are clustered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KMeansOptions<'a> {
    /// The number of clusters, from 1 to the number of keys.
    pub clusters: usize,
    /// The seed of all random choices.
    pub seed: u64,
    /// The second moment of the queries `[dim, dim]`, or none for plain distances.
    pub metric: Option<&'a [f32]>,
}

/// Clusters of keys.
#[derive(Clone, Debug, PartialEq)]
pub struct KMeans {
    dim: usize,
    centroids: Vec<f32>,
    assignment: Vec<u32>,
}

impl KMeans {
    /// Clusters keys `[entries, dim]` by passes over all centroids and relocations.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the keys are not whole, finite and at most 1e15, there are no clusters or more
    /// than keys, or the metric is not a symmetric, positive matrix `[dim, dim]`.
    pub fn fit(keys: &[f32], dim: usize, options: &KMeansOptions<'_>) -> Result<Self> {
        Self::fit_by(keys, dim, options, |points, random| clusters(points, options.clusters, random))
    }

    /// Clusters keys `[entries, dim]` by k-means++ and `passes` passes of Lloyd's algorithm.
    ///
    /// # Errors
    /// As [`Self::fit`].
    pub fn lloyd(keys: &[f32], dim: usize, options: &KMeansOptions<'_>, passes: usize) -> Result<Self> {
        Self::fit_by(keys, dim, options, |points, random| one_level(points, options.clusters, passes, random))
    }

    /// Clusters the keys `[entries, dim]` of each KV head, on at most `threads` threads. Head `h` has the metric
    /// `[dim, dim]` at `h` of the options' metric.
    ///
    /// # Errors
    /// As [`Self::fit`], or there is no thread.
    pub fn fit_heads(heads: &[&[f32]], dim: usize, options: &KMeansOptions<'_>, threads: usize) -> Result<Vec<Self>> {
        let metric_len = options.metric.map_or(0, <[f32]>::len);
        if threads == 0 || metric_len != options.metric.map_or(0, |_| heads.len() * dim * dim) {
            let context = format!(
                "k-means: {threads} threads, and metrics of {metric_len} elements for {} heads of dimension {dim}",
                heads.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let (next, fitted) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(heads.len())));
        let work = || {
            loop {
                let head = next.fetch_add(1, Ordering::Relaxed);
                let Some(keys) = heads.get(head) else { return };
                let seed = SeededRandom::of_part(options.seed, head as u64).bits();
                let metric = options.metric.map(|metrics| &metrics[head * dim * dim..][..dim * dim]);
                let found = Self::fit(keys, dim, &KMeansOptions { seed, metric, ..*options });
                fitted.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((head, found));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(heads.len()) {
                scope.spawn(work);
            }
            work();
        });
        let mut fitted = fitted.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        fitted.sort_unstable_by_key(|(head, _)| *head);
        fitted.into_iter().map(|(_, found)| found).collect()
    }

    fn fit_by(
        keys: &[f32],
        dim: usize,
        options: &KMeansOptions<'_>,
        cluster: impl FnOnce(PointRows<'_>, &mut SeededRandom) -> Partition,
    ) -> Result<Self> {
        let entries = check_keys("k-means", keys, dim)?;
        if options.clusters == 0 || options.clusters > entries {
            let context = format!("k-means: {} clusters of {entries} keys", options.clusters);
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let points = match options.metric {
            None => Cow::Borrowed(keys),
            Some(metric) => Cow::Owned(metric::in_metric(keys, dim, metric)?),
        };
        check_keys("k-means, keys in the metric", &points, dim)?;
        let found = cluster(PointRows::new(&points, dim), &mut SeededRandom::new(options.seed));
        let centroids = match options.metric {
            None => found.centroids,
            Some(_) => means(PointRows::new(keys, dim), &found.assignment, options.clusters),
        };
        Ok(Self { dim, centroids, assignment: found.assignment })
    }

    /// Returns the bytes that clustering takes beside the keys, the result included. Each thread takes them.
    #[must_use]
    pub fn bytes_for(entries: usize, dim: usize, options: &KMeansOptions<'_>) -> usize {
        let rows = |count: usize| count.saturating_mul(dim).saturating_mul(size_of::<f32>());
        let transformed = if options.metric.is_some() { rows(entries) } else { 0 };
        let per_entry = entries.saturating_mul(32);
        passes::bytes_for(entries, dim, options.clusters).saturating_add(transformed).saturating_add(per_entry)
    }

    /// Returns the centroids `[clusters, dim]`.
    #[must_use]
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }

    /// Returns the cluster of each entry.
    #[must_use]
    pub fn assignment(&self) -> &[u32] {
        &self.assignment
    }

    /// Returns the members of each cluster, in rising order.
    #[must_use]
    pub fn lists(&self) -> ClusterLists {
        ClusterLists::of_partition(&self.assignment, self.centroids.len() / self.dim)
    }

    /// Returns the members of each cluster, in rising order. Clusters of more than `max_size` keys are halved by
    /// 2-means until every part is small enough. `keys` are the keys that were clustered, `[entries, dim]`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the keys are of other entries, or clusters may have no key.
    pub fn capped_lists(&self, keys: &[f32], max_size: usize, seed: u64) -> Result<ClusterLists> {
        if max_size == 0 || keys.len() != self.assignment.len() * self.dim {
            let context = format!("k-means: clusters of at most {max_size} of {} elements of keys", keys.len());
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let mut lists = ClusterLists::new();
        let mut random = SeededRandom::new(seed);
        for members in self.lists().iter() {
            let mut open = vec![members.to_vec()];
            while let Some(part) = open.pop() {
                if part.len() <= max_size {
                    lists.push(&part);
                    continue;
                }
                let rows: Vec<f32> =
                    part.iter().flat_map(|at| &keys[*at as usize * self.dim..][..self.dim]).copied().collect();
                let halves = two_means(&rows, self.dim, &mut random);
                for half in [1, 0] {
                    open.push(part.iter().zip(&halves).filter(|(_, of)| **of == half).map(|(at, _)| *at).collect());
                }
            }
        }
        Ok(lists)
    }

    /// Returns the mean squared distance of the keys `[entries, dim]` that were clustered to their centroids.
    #[must_use]
    pub fn variance(&self, keys: &[f32]) -> f64 {
        let mut sum = 0.0;
        for (key, cluster) in keys.chunks_exact(self.dim).zip(&self.assignment) {
            let mut distance = [f32::INFINITY];
            lower_distances(key, &self.centroids[*cluster as usize * self.dim..][..self.dim], &mut distance);
            sum += f64::from(distance[0]);
        }
        sum / self.assignment.len().max(1) as f64
    }
}

/// Finds `count` clusters as this processor does.
fn clusters(points: PointRows<'_>, count: usize, random: &mut SeededRandom) -> Partition {
    match nearest_bytes() {
        Some(nearest) => relocated(nearest, points, count, random),
        None => two_level::two_level(points, count, random),
    }
}

/// Returns the half, 0 or 1, of each of at least two keys `[entries, dim]`. No half is empty.
///
/// Equal keys are halved in their order, because distances say nothing about them.
pub(super) fn two_means(keys: &[f32], dim: usize, random: &mut SeededRandom) -> Vec<u32> {
    let points = PointRows::new(keys, dim);
    if keys.chunks_exact(dim).all(|key| key == points.row(0)) {
        return (0..points.len()).map(|at| u32::from(at >= points.len().div_ceil(2))).collect();
    }
    two_clusters(points, TWO_MEANS_PASSES, random)
}

/// Passes of [`two_means`].
const TWO_MEANS_PASSES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::clusters::{PlantedOptions, PlantedTopics};
    use proptest::prelude::*;

    fn planted(entries: usize, topics: usize, dim: usize, spread: f32) -> Vec<f32> {
        let options = PlantedOptions { entries, topics, ..PlantedOptions::default() };
        PlantedTopics::new(options).unwrap().keys(dim, spread)
    }

    const EXTREMES: [f32; 7] = [-1e15, -3.0, -1e-30, 0.0, 1.0, 2.0, 7e14];

    fn options(clusters: usize, seed: u64) -> KMeansOptions<'static> {
        KMeansOptions { clusters, seed, metric: None }
    }

    fn check(found: &KMeans, keys: &[f32], clusters: usize) {
        let dim = found.dim;
        assert!(found.centroids.iter().all(|x| x.is_finite()));
        let lists = found.lists();
        assert_eq!((lists.len(), lists.stored()), (clusters, keys.len() / dim));
        for (members, centroid) in lists.iter().zip(found.centroids.chunks(dim)) {
            assert!(!members.is_empty());
            for d in 0..dim {
                let sum: f64 = members.iter().map(|at| f64::from(keys[*at as usize * dim + d])).sum();
                let largest = members.iter().map(|at| keys[*at as usize * dim + d].abs()).fold(1e-6, f32::max);
                assert!((sum / members.len() as f64 - f64::from(centroid[d])).abs() <= 1e-5 * f64::from(largest));
            }
        }
    }

    /// Returns the variance over that of ten full passes, of the clusters of this processor and of two levels.
    fn against_full_passes(topics: usize, spread: f32, covered: f64) -> [f64; 2] {
        let topics = PlantedOptions { entries: 6000, topics, covered, ..PlantedOptions::default() };
        let keys = PlantedTopics::new(topics).unwrap().keys(24, spread);
        let options = options(375, 5);
        let by_levels = |points: PointRows<'_>, random: &mut SeededRandom| two_level::two_level(points, 375, random);
        let own = [KMeans::fit(&keys, 24, &options).unwrap(), KMeans::fit_by(&keys, 24, &options, by_levels).unwrap()];
        let full = KMeans::lloyd(&keys, 24, &options, 10).unwrap();
        own.iter().chain([&full]).for_each(|found| check(found, &keys, 375));
        own.map(|found| found.variance(&keys) / full.variance(&keys))
    }

    #[test]
    fn clusters_are_within_three_per_cent_of_ten_passes_of_lloyd() {
        for (topics, spread, covered) in [(600, 1.0, 0.7), (1000, 0.5, 1.0), (100, 0.5, 1.0), (1, 1.0, 0.7)] {
            let found = against_full_passes(topics, spread, covered);
            assert!(found.iter().all(|ratio| *ratio <= 1.03), "{topics} topics, spread {spread}: {found:?}");
        }
    }

    #[test]
    fn dense_topics_among_scattered_keys_are_within_six_per_cent() {
        // 1,800 keys have no topic, and their centres are far from each other and from all topics.
        for (topics, spread) in [(60, 0.3), (300, 0.5)] {
            let found = against_full_passes(topics, spread, 0.7);
            assert!(found.iter().all(|ratio| *ratio <= 1.06), "{topics} topics, spread {spread}: {found:?}");
        }
    }

    #[test]
    fn halves_are_those_of_full_passes() {
        for (count, seed) in (2..60).zip(1..) {
            let keys = planted(60, 9, 7, 0.5);
            let points = PointRows::new(&keys[..count * 7], 7);
            let full = one_level(points, 2, TWO_MEANS_PASSES, &mut SeededRandom::new(seed)).assignment;
            assert_eq!(two_means(points.rows, 7, &mut SeededRandom::new(seed)), full, "{count} keys");
        }
    }

    #[test]
    fn threads_change_nothing_and_seeds_repeat() {
        let keys = planted(3000, 100, 8, 0.4);
        let heads: Vec<&[f32]> = keys.chunks(1000 * 8).collect();
        let one = KMeans::fit_heads(&heads, 8, &options(80, 9), 1).unwrap();
        assert_eq!(one, KMeans::fit_heads(&heads, 8, &options(80, 9), 3).unwrap());
        assert_ne!(one, KMeans::fit_heads(&heads, 8, &options(80, 8), 1).unwrap());
        assert!(KMeans::fit_heads(&heads, 8, &options(80, 9), 0).is_err());
        assert!(KMeans::fit_heads(&[], 8, &options(80, 9), 2).unwrap().is_empty());
    }

    #[test]
    fn equal_keys_make_clusters_with_members() {
        for (entries, clusters) in [(1, 1), (5, 5), (300, 100), (4000, 500)] {
            let keys = vec![2.5; entries * 3];
            let found = KMeans::fit(&keys, 3, &options(clusters, 1)).unwrap();
            check(&found, &keys, clusters);
            assert_eq!(found.variance(&keys), 0.0);
            let levels = two_level::two_level(PointRows::new(&keys, 3), clusters, &mut SeededRandom::new(1));
            assert_eq!(levels.centroids, found.centroids);
        }
        // Two distinct keys, one of them rare.
        let mut keys = vec![1.0; 2000];
        keys[77] = 9.0;
        let found = KMeans::fit(&keys, 1, &options(200, 1)).unwrap();
        check(&found, &keys, 200);
        assert_eq!(found.variance(&keys), 0.0);
    }

    #[test]
    fn the_metric_decides_which_keys_are_near() {
        // The queries have only the first coordinate.
        let keys: Vec<f32> = (0..40).flat_map(|at| [(at % 2) as f32, (at / 20) as f32 * 9.0]).collect();
        let metric = [4.0, 0.0, 0.0, 1e-4];
        let found = KMeans::fit(&keys, 2, &KMeansOptions { metric: Some(&metric), ..options(2, 3) }).unwrap();
        check(&found, &keys, 2);
        assert!(found.assignment().iter().enumerate().all(|(at, of)| *of == found.assignment()[at % 2]));
        let plain = KMeans::fit(&keys, 2, &options(2, 3)).unwrap();
        assert!(plain.assignment().iter().enumerate().all(|(at, of)| *of == plain.assignment()[at / 20 * 20]));
    }

    #[test]
    fn wrong_input_is_refused() {
        let refused = |keys: &[f32], dim, options: &KMeansOptions<'_>| {
            assert_eq!(KMeans::fit(keys, dim, options).unwrap_err().kind(), ErrorKind::InvalidArgument);
        };
        refused(&[1.0; 4], 2, &options(0, 1));
        refused(&[1.0; 4], 2, &options(3, 1));
        refused(&[1.0; 5], 2, &options(1, 1));
        refused(&[1.0; 4], 0, &options(1, 1));
        refused(&[], 2, &options(1, 1));
        for wrong in [f32::NAN, f32::INFINITY, -2e15] {
            refused(&[1.0, wrong], 1, &options(1, 1));
        }
        refused(&[1e15; 4], 2, &KMeansOptions { metric: Some(&[1e30, 0.0, 0.0, 1e30]), ..options(1, 1) });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn any_keys_make_clusters_with_members(
            keys in prop::collection::vec(prop::sample::select(EXTREMES.to_vec()), 2..900),
            part in 0.0_f64..1.0, seed in any::<u64>(),
        ) {
            let keys = &keys[..keys.len() / 2 * 2];
            let clusters = 1 + (part * (keys.len() / 2 - 1) as f64) as usize;
            let found = KMeans::fit(keys, 2, &options(clusters, seed)).unwrap();
            prop_assert!(found.centroids().iter().all(|x| x.is_finite()));
            prop_assert!(found.lists().iter().all(|members| !members.is_empty()));
        }
    }
}
