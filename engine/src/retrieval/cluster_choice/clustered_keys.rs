//! The clusters of waiting keys by k-means, for each list of a layer.
//!
//! There is one cluster per `mean_size` tokens. Clusters above the limit of the options are halved.

use crate::error::Result;
use crate::retrieval::cluster_choice::key_space::KeySpace;
use crate::retrieval::clusters::{ClusterLists, KMeans, KMeansOptions};
use crate::retrieval::sealed_keys::SealedKeys;
use std::ops::Range;

/// The fewest tokens that are clustered at first.
pub(crate) const FIRST_ENTRIES: usize = 256;

/// The vectors of one list and their clusters.
pub(crate) struct ClusteredKeys {
    /// `[entries, dim]`.
    pub(crate) rows: Vec<f32>,
    /// The members of each cluster, as indices of `rows`.
    pub(crate) lists: ClusterLists,
}

/// Clusters tokens, of which `keys` has all vectors of the space, for each list.
///
/// # Errors
/// The errors of k-means.
pub(crate) fn cluster_keys(
    keys: &SealedKeys,
    tokens: Range<usize>,
    space: &KeySpace,
    seed: u64,
) -> Result<Vec<ClusteredKeys>> {
    let (dim, entries) = (space.dim(), tokens.len());
    let mut rows = vec![Vec::new(); space.heads().len()];
    for (head, rows) in space.heads().into_iter().zip(&mut rows) {
        rows.reserve_exact(entries * dim);
        keys.rows(tokens.clone(), head, rows);
    }
    let views: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let fitted = KMeans::fit_heads(&views, dim, &k_means(entries, space, seed), threads)?;
    let mut clustered = Vec::with_capacity(rows.len());
    for (rows, fitted) in rows.into_iter().zip(fitted) {
        let lists = fitted.capped_lists(&rows, space.options().max_size(), seed)?;
        clustered.push(ClusteredKeys { rows, lists });
    }
    Ok(clustered)
}

/// Returns the most bytes that [`cluster_keys`] takes for this many tokens, its result included.
pub(crate) fn cluster_keys_bytes(entries: usize, space: &KeySpace) -> usize {
    if entries == 0 {
        return 0;
    }
    let (lists, rows) = (space.heads().len(), entries * space.dim() * size_of::<f32>());
    let fit = KMeans::bytes_for(entries, space.dim(), &k_means(entries, space, 0));
    space.scratch_bytes() + lists * (rows + fit + ClusterLists::bytes_for(entries, entries))
}

fn k_means(entries: usize, space: &KeySpace, seed: u64) -> KMeansOptions<'static> {
    KMeansOptions { clusters: (entries / space.options().mean_size).clamp(1, entries), seed, metric: None }
}
