//! Clusters of one KV head whose keys grow: static, local and adaptive ones, and clusters of all keys at the end.
//!
//! | function | method | source |
//! |---|---|---|
//! | `static_clusters` | new keys join the nearest centroid of the prefill | PQCache |
//! | `local_clusters` | every 320 new keys become clusters of their own | ClusterKV |
//! | `adaptive_clusters` | clusters that split, late if they are not in memory | DynaKV, Algorithm 1 |
//! | `clusters_of_all` | all keys are clustered once more at the end | |

use crate::cluster::chosen_again::{ChosenAgain, ClusterSteps};
use crate::support::interrupt::check_interrupt;
use anyhow::Result;
use std::time::Instant;
use stratakv::retrieval::clusters::{
    AdaptOptions, Adaptation, AdaptiveClusters, ClusterLists, ClusterStats, KMeans, KMeansOptions,
};

/// New keys that ClusterKV clusters together.
const LOCAL_KEYS: usize = 320;
/// The newest keys, which half of the queries of [`adaptive_clusters`] resemble.
const RECENT_KEYS: usize = 256;

/// The keys of one head in the order of their tokens, with the sizes of their clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrowingKeys<'a> {
    /// `[entries, dim]`.
    pub(super) keys: &'a [f32],
    pub(super) dim: usize,
    /// The entries that are clustered first. There is at least one.
    pub(super) prefill: usize,
    pub(super) mean_size: usize,
    pub(super) seed: u64,
    /// The query of each new key, `[query_heads, dim]`. Without queries, steps retrieve by earlier keys.
    pub(super) queries: &'a [Vec<f32>],
}

/// How clusters adapt.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdaptSettings {
    pub(super) buffer_limit: usize,
    /// None without a limit.
    pub(super) max_size: Option<usize>,
    /// The quantile of the first variances that is the threshold.
    pub(super) quantile: f64,
    /// The share of the clusters that a step retrieves.
    pub(super) retrieved: f64,
}

/// Clusters after growth, and the cost of adapting them.
#[derive(Clone, Debug, Default)]
pub(super) struct GrownClusters {
    pub(super) clusters: usize,
    pub(super) largest: usize,
    /// Members of clusters. Other entries wait in buffers.
    pub(super) members: usize,
    /// The sum of squared distances of the members to the mean of their cluster.
    pub(super) squares: f64,
    pub(super) splits: usize,
    /// Splits of clusters that were not in memory.
    pub(super) loads: usize,
    pub(super) loaded_entries: usize,
    /// The clusters that steps changed, and how soon later steps retrieved them. Adaptive clusters alone have them.
    pub(super) again: ChosenAgain,
    /// The time of taking in new keys.
    pub(super) seconds: f64,
}

impl<'a> GrowingKeys<'a> {
    fn entries(&self) -> usize {
        self.keys.len() / self.dim
    }

    fn key(&self, entry: usize) -> &'a [f32] {
        &self.keys[entry * self.dim..][..self.dim]
    }

    /// Clusters consecutive entries by k-means.
    fn cluster(&self, entries: std::ops::Range<usize>, clusters: usize) -> Result<KMeans> {
        let options = KMeansOptions { clusters: clusters.clamp(1, entries.len()), seed: self.seed, metric: None };
        Ok(KMeans::fit(&self.keys[entries.start * self.dim..entries.end * self.dim], self.dim, &options)?)
    }

    /// Returns the figures of clusters with these members.
    fn figures<'l>(&self, lists: impl Iterator<Item = &'l [u32]>) -> GrownClusters {
        let mut found = GrownClusters::default();
        let mut centroid = vec![0.0; self.dim];
        for members in lists {
            let mut stats = ClusterStats::default();
            centroid.fill(0.0);
            members.iter().for_each(|entry| stats.add(&mut centroid, self.key(*entry as usize)));
            found.clusters += 1;
            found.largest = found.largest.max(members.len());
            found.members += members.len();
            found.squares += stats.variance() * f64::from(stats.size());
        }
        found
    }
}

/// Returns the clusters of the prefill, to whose nearest centroid each new key was added. Centroids do not move.
pub(super) fn static_clusters(keys: GrowingKeys<'_>) -> Result<GrownClusters> {
    let first = keys.cluster(0..keys.prefill, keys.prefill / keys.mean_size)?;
    let mut lists: Vec<Vec<u32>> = first.lists().iter().map(<[u32]>::to_vec).collect();
    let start = Instant::now();
    for entry in keys.prefill..keys.entries() {
        let key = keys.key(entry);
        let distances = first.centroids().chunks_exact(keys.dim).map(|centroid| squared_distance(centroid, key));
        let nearest = distances.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(cluster, _)| cluster);
        lists[nearest].push(entry as u32);
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(GrownClusters { seconds, ..keys.figures(lists.iter().map(Vec::as_slice)) })
}

/// Returns the clusters of the prefill, and of each run of new keys.
pub(super) fn local_clusters(keys: GrowingKeys<'_>) -> Result<GrownClusters> {
    let mut lists = keys.cluster(0..keys.prefill, keys.prefill / keys.mean_size)?.lists();
    let began = Instant::now();
    for start in (keys.prefill..keys.entries()).step_by(LOCAL_KEYS) {
        check_interrupt()?;
        let end = keys.entries().min(start + LOCAL_KEYS);
        for members in keys.cluster(start..end, (end - start) / keys.mean_size)?.lists().iter() {
            lists.push(&members.iter().map(|at| start as u32 + at).collect::<Vec<_>>());
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    Ok(GrownClusters { seconds, ..keys.figures(lists.iter()) })
}

/// Returns `clusters` clusters of all keys.
pub(super) fn clusters_of_all(keys: GrowingKeys<'_>, clusters: usize) -> Result<GrownClusters> {
    let start = Instant::now();
    let found = keys.cluster(0..keys.entries(), clusters)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(GrownClusters { seconds, ..keys.figures(found.lists().iter()) })
}

/// Returns clusters that adapted to each new key.
///
/// A step retrieves the clusters whose centroids have the highest product with a query. Several query heads add up
/// their softmax over the clusters. Without queries, the key of an earlier token is the query: of a recent one in half
/// of the steps, and of any one in the others.
pub(super) fn adaptive_clusters(keys: GrowingKeys<'_>, settings: AdaptSettings) -> Result<GrownClusters> {
    let first: ClusterLists = keys.cluster(0..keys.prefill, keys.prefill / keys.mean_size)?.lists();
    let options = AdaptOptions {
        max_size: settings.max_size.unwrap_or(usize::MAX),
        buffer_limit: settings.buffer_limit,
        seed: keys.seed,
        ..AdaptOptions::default()
    };
    let mut clusters = AdaptiveClusters::new(&keys.keys[..keys.prefill * keys.dim], keys.dim, &first, options)?;
    clusters.set_threshold(clusters.quantile_of_variances(settings.quantile)?)?;
    let mut random = fastrand::Rng::with_seed(keys.seed);
    let (mut found, mut steps) = (GrownClusters::default(), ClusterSteps::default());
    for entry in keys.prefill..keys.entries() {
        check_interrupt()?;
        let query = keys.queries.get(entry - keys.prefill).map_or_else(
            || {
                let oldest = if random.bool() { entry.saturating_sub(RECENT_KEYS) } else { 0 };
                keys.key(random.usize(oldest..entry))
            },
            Vec::as_slice,
        );
        let retrieved = retrieve(&clusters, query, (keys.dim, settings.retrieved));
        let start = Instant::now();
        clusters.begin_step(&retrieved)?;
        // A cluster that was flagged before and is retrieved now is split before the new key arrives.
        let mut changed = split_all(&mut clusters, keys, &mut found)?;
        match clusters.append(entry as u32, keys.key(entry))? {
            Adaptation::Joined(cluster) => changed.push(cluster),
            Adaptation::SplitDue(_) | Adaptation::Buffered(_) => {
                changed.extend(split_all(&mut clusters, keys, &mut found)?);
            }
        }
        found.seconds += start.elapsed().as_secs_f64();
        steps.add(&retrieved, changed);
    }
    let lists = (0..clusters.len() as u32).map(|cluster| clusters.members(cluster));
    let lists = lists.collect::<stratakv::Result<Vec<_>>>()?;
    let GrownClusters { splits, loads, loaded_entries, seconds, .. } = found;
    let again = steps.chosen_again();
    Ok(GrownClusters { splits, loads, loaded_entries, again, seconds, ..keys.figures(lists.into_iter()) })
}

/// Splits clusters while one is due. Returns the clusters that splits made.
fn split_all(clusters: &mut AdaptiveClusters, keys: GrowingKeys<'_>, found: &mut GrownClusters) -> Result<Vec<u32>> {
    let mut made = Vec::new();
    while let Some(request) = clusters.next_split() {
        let entries = clusters.entries_to_split(request.cluster)?;
        let rows: Vec<f32> = entries.iter().flat_map(|entry| keys.key(*entry as usize)).copied().collect();
        found.splits += 1;
        if request.must_load {
            found.loads += 1;
            found.loaded_entries += clusters.members(request.cluster)?.len();
        }
        made.extend(clusters.split(request.cluster, &rows)?);
    }
    Ok(made)
}

/// Returns the clusters with the highest scores by a query `[query_heads, dim]`: a share of all of them.
fn retrieve(clusters: &AdaptiveClusters, query: &[f32], (dim, share): (usize, f64)) -> Vec<u32> {
    let scores = scores(&clusters.centroids(), query, dim);
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let count = ((share * scores.len() as f64).ceil() as usize).clamp(1, scores.len());
    let falling = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, falling);
    }
    order.truncate(count);
    order.sort_unstable_by(falling);
    order
}

/// Returns the scores of centroids: the product with the query, or the sum of the softmax of several query heads.
fn scores(centroids: &[f32], query: &[f32], dim: usize) -> Vec<f64> {
    let products = |query: &[f32]| -> Vec<f64> {
        let product = |centroid: &[f32]| f64::from(centroid.iter().zip(query).map(|(a, b)| a * b).sum::<f32>());
        centroids.chunks_exact(dim).map(product).collect()
    };
    if query.len() == dim {
        return products(query);
    }
    let (scale, mut scores) = ((dim as f64).sqrt().recip(), vec![0.0; centroids.len() / dim]);
    for head in query.chunks_exact(dim) {
        let products = products(head);
        let most = products.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = products.iter().map(|product| ((product - most) * scale).exp()).collect();
        let sum: f64 = weights.iter().sum();
        scores.iter_mut().zip(&weights).for_each(|(score, weight)| *score += weight / sum);
    }
    scores
}

fn squared_distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_query_heads_add_up_their_softmax() {
        let centroids = [1.0, 0.0, 0.0, 1.0, 0.8, 0.8];
        // One head: products, whatever their size.
        assert_eq!(scores(&centroids, &[2.0, 0.5], 2), [2.0, 0.5, 2.0]);
        // The first head has one clear favourite. The second one is nearly indifferent, so it does not decide.
        let found = scores(&centroids, &[90.0, 0.0, 0.0, 0.1], 2);
        assert!(found[0] > 1.3 && found[0] < 1.4 && found[1] < 0.4 && found[2] < 0.4, "{found:?}");
        assert!((found.iter().sum::<f64>() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn steps_retrieve_by_the_queries_of_new_keys() {
        // Two clusters on a line. Every new key joins the right one, and each step retrieves one of both.
        let new = (0..40).map(|at| 10.0 + at as f32 / 400.0);
        let keys: Vec<f32> = [0.0, 0.1, 10.0, 10.1].into_iter().chain(new).collect();
        let settings = AdaptSettings { buffer_limit: 16, max_size: None, quantile: 1.0, retrieved: 0.5 };
        let share = |query: f32| {
            let queries = vec![vec![query]; 40];
            let keys = GrowingKeys { keys: &keys, dim: 1, prefill: 4, mean_size: 2, seed: 1, queries: &queries };
            let found = adaptive_clusters(keys, settings).unwrap();
            assert_eq!((found.clusters, found.members, found.again.changes()), (2, 44, 39));
            found.again.share(0)
        };
        assert_eq!((share(1.0), share(-1.0)), (Some(1.0), Some(0.0)));
    }
}
