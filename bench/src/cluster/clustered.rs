//! The clusters of a layer that `layout` and `cache` retrieve.

use crate::cluster::layer_trace::LayerTrace;
use anyhow::Result;
use clap::ValueEnum;
use stratakv::retrieval::clusters::{
    ClusterLists, CoActivation, KMeans, KMeansOptions, MedoidClustering, MedoidOptions, bisect,
};

/// A kind of clusters on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ClusterKind {
    /// k-means of the keys of all heads joined.
    Kmeans,
    /// Medoid clusters of at most twice the mean size, each entry in one.
    Medoids,
    /// Clusters of equal size, by bisection of the keys of all heads joined.
    Equal,
}

impl ClusterKind {
    /// Returns the name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Kmeans => "kmeans",
            Self::Medoids => "medoids",
            Self::Equal => "equal",
        }
    }
}

/// Clusters the entries of a layer by its keys, or by the queries of a profile.
///
/// # Errors
/// The layer has no keys or no queries, or medoid clusters cannot have the mean size.
pub(super) fn cluster(
    layer: &LayerTrace,
    profile: &[Vec<u32>],
    kind: ClusterKind,
    (mean_size, seed): (usize, u64),
) -> Result<ClusterLists> {
    let (keys, dim) = (layer.joined_keys(), layer.heads.len() * layer.dim);
    match kind {
        ClusterKind::Kmeans => {
            let options = KMeansOptions { clusters: (layer.entries / mean_size).max(1), seed, metric: None };
            return Ok(KMeans::fit(&keys, dim, &options)?.lists());
        }
        ClusterKind::Equal => return Ok(bisect(&keys, dim, mean_size, seed)?),
        ClusterKind::Medoids => {}
    }
    let mut recorded = CoActivation::new(layer.entries, profile.len())?;
    profile.iter().try_for_each(|query| recorded.record(query))?;
    let options = MedoidOptions { max_size: Some(2 * mean_size), memberships: Some(1), ..MedoidOptions::default() };
    let (_, mut clusters) = MedoidClustering::new(&recorded, options)?.cluster_to_mean_size(mean_size as f64)?;
    clusters.assign_by_key(&keys, dim)?;
    Ok(clusters.lists().clone())
}
