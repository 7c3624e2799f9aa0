//! Builds the clusters of a stored sequence and describes them, for `kvrun cluster`.
//!
//! 1. [`session_queries`] computes the newest queries of a sequence again, by a prefill of its token ids with full
//!    attention.
//! 2. [`describe`] attaches a method, gives it the queries if it takes a profile, and describes the clusters of each
//!    layer.
//! 3. Each query then selects within a budget. The kept weight is the share of full attention on the selected tokens.
//!
//! Invariant: the same tokens, method and queries give the same clusters, because all random choices have a fixed seed.
//! [`LayerClusters::hash`] shows it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use stratakv::retrieval::clusters::ClusterLists;
use stratakv::retrieval::{Selector, SelectorId};
use stratakv::{Budget as EngineBudget, SelectOptions, SelectRequest, Sequence};

use crate::budget::Budget;
use crate::kv::memory::MemoryPolicy;
use crate::kv::method::Policy;
use crate::kv::probe::kept_weight;
use crate::kv::recorded::RecordedQueries;
use crate::kv::recording::RecordingKv;
use crate::kv::{KvCache, KvDType, MemoryKv, engine_error};
use crate::model::{LogitPositions, Model};

/// The clusters of one method.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MethodClusters {
    /// The method.
    pub method: String,
    /// Seconds that building the clusters of all layers took. The keys are read from the store meanwhile.
    pub build_seconds: f64,
    /// The clusters of each layer.
    pub layers: Vec<LayerClusters>,
}

/// The clusters of one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerClusters {
    /// The number of the layer.
    pub layer: usize,
    /// Lists of clusters: one per KV head, or one for all heads.
    pub lists: usize,
    /// Clusters of all lists together.
    pub clusters: usize,
    /// The mean number of members of a cluster.
    pub mean_size: f64,
    /// The members of the largest cluster.
    pub largest: usize,
    /// Clusters by size.
    pub sizes: Vec<SizeCount>,
    /// Tokens that are in a cluster, as a mean over the lists. The method chooses other tokens one by one, or attends
    /// to all of them.
    pub covered_tokens: f64,
    /// The clusters that a covered token is in, as a mean.
    pub clusters_per_token: f64,
    /// Bytes of the layer's summary in memory.
    pub bytes: u64,
    /// The share of full attention's weight that selections keep, as a mean over queries and query heads. `None`
    /// without queries.
    pub weight_kept: Option<f64>,
    /// A hash of the members of all clusters.
    pub hash: String,
}

/// The clusters of similar size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SizeCount {
    /// The most members of these clusters, a power of 2. They have more members than half of it.
    pub at_most: usize,
    /// The number of clusters.
    pub clusters: usize,
}

/// Computes the newest `limit` queries of a sequence again. Returns its keys and values too, as full attention gives
/// them.
///
/// # Errors
/// Fails if there is no token id, or more than the model takes.
pub fn session_queries(
    model: &Model,
    ids: &[u32],
    dtype: KvDType,
    limit: usize,
    progress: &dyn Fn(usize),
) -> Result<(MemoryKv, RecordedQueries)> {
    let inner = MemoryKv::new(model.kv_geometry(dtype), MemoryPolicy::Full);
    let mut cache = RecordingKv::new(inner, limit);
    model.prefill(ids, &mut [&mut cache], LogitPositions::Queries, progress)?;
    Ok(cache.into_parts())
}

/// The queries of a sequence, and full attention over it.
#[derive(Clone, Copy)]
pub struct AskedQueries<'a> {
    /// A cache in memory with the same tokens.
    pub full: &'a MemoryKv,
    /// The queries.
    pub queries: &'a RecordedQueries,
    /// The tokens that a query attends to.
    pub budget: Budget,
}

/// Builds the clusters of a method and describes them. The sequence does not keep them.
///
/// # Errors
/// Fails if the method needs queries and there are none, and as [`Sequence::attach`] and [`Sequence::profile`] do.
pub fn describe(
    sequence: &mut Sequence,
    policy: &Policy,
    selector: Arc<dyn Selector>,
    asked: Option<AskedQueries<'_>>,
) -> Result<MethodClusters> {
    let method = policy.to_string();
    let begin = Instant::now();
    let id = sequence.attach(selector).map_err(engine_error).with_context(|| method.clone())?;
    let layers = sequence.layout().layers();
    for layer in 0..layers {
        profile(sequence, id, layer, asked).with_context(|| method.clone())?;
    }
    let build_seconds = begin.elapsed().as_secs_f64();
    let layers = (0..layers).map(|layer| describe_layer(sequence, policy, (id, layer), asked));
    let described = MethodClusters { method, build_seconds, layers: layers.collect::<Result<_>>()? };
    sequence.detach(id).map_err(engine_error)?;
    Ok(described)
}

/// Gives a layer the queries if its method makes clusters of them.
fn profile(sequence: &mut Sequence, id: SelectorId, layer: usize, asked: Option<AskedQueries<'_>>) -> Result<()> {
    let summaries = sequence.selector_summaries(id, layer).map_err(engine_error)?;
    if summaries.iter().all(|summary| summary.profile_bytes(1).is_none()) {
        return Ok(());
    }
    let asked = asked.context("the method makes its clusters of queries; give --queries above 0")?;
    let scale = asked.full.geometry().scale;
    sequence.profile(id, layer, &asked.queries.of(layer), Some(scale)).map_err(engine_error)
}

fn describe_layer(
    sequence: &Sequence,
    policy: &Policy,
    (id, layer): (SelectorId, usize),
    asked: Option<AskedQueries<'_>>,
) -> Result<LayerClusters> {
    let summaries = sequence.selector_summaries(id, layer).map_err(engine_error)?;
    let lists: Vec<ClusterLists> = summaries.iter().flat_map(|summary| summary.cluster_lists()).collect();
    let bytes: u64 = summaries.iter().map(|summary| summary.bytes() as u64).sum();
    let weight_kept = asked.map(|asked| weight_kept(sequence, policy, (id, layer), asked)).transpose()?;
    Ok(LayerClusters { layer, bytes, weight_kept, ..of_lists(&lists) })
}

/// Returns the figures of lists of clusters.
fn of_lists(lists: &[ClusterLists]) -> LayerClusters {
    let sizes: Vec<usize> = lists.iter().flat_map(|list| list.iter().map(<[u32]>::len)).collect();
    let stored: usize = sizes.iter().sum();
    let covered: usize = lists.iter().map(covered).sum();
    let mut hash = blake3::Hasher::new();
    for list in lists {
        hash.update(&(list.len() as u64).to_le_bytes());
        for members in list.iter() {
            hash.update(&(members.len() as u64).to_le_bytes());
            let bytes: Vec<u8> = members.iter().flat_map(|token| token.to_le_bytes()).collect();
            hash.update(&bytes);
        }
    }
    LayerClusters {
        lists: lists.len(),
        clusters: sizes.len(),
        mean_size: stored as f64 / sizes.len().max(1) as f64,
        largest: sizes.iter().copied().max().unwrap_or(0),
        sizes: by_size(&sizes),
        covered_tokens: covered as f64 / lists.len().max(1) as f64,
        clusters_per_token: stored as f64 / covered.max(1) as f64,
        hash: hash.finalize().to_hex()[..16].to_owned(),
        ..LayerClusters::default()
    }
}

/// Returns the number of tokens that are in a cluster of a list.
fn covered(list: &ClusterLists) -> usize {
    let mut tokens: Vec<u32> = list.iter().flatten().copied().collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens.len()
}

/// Counts sizes by the next power of 2.
fn by_size(sizes: &[usize]) -> Vec<SizeCount> {
    let mut powers: Vec<usize> = sizes.iter().map(|size| size.next_power_of_two()).collect();
    powers.sort_unstable();
    powers.chunk_by(|a, b| a == b).map(|own| SizeCount { at_most: own[0], clusters: own.len() }).collect()
}

/// Returns the mean share of full attention's weight that the selections of the queries keep.
fn weight_kept(
    sequence: &Sequence,
    policy: &Policy,
    (id, layer): (SelectorId, usize),
    asked: AskedQueries<'_>,
) -> Result<f64> {
    let tokens = usize::try_from(sequence.len()).unwrap_or(usize::MAX);
    let options = SelectOptions::new(EngineBudget::tokens(asked.budget.tokens(tokens)));
    let options = options.aggregation(policy.aggregation()).scale(asked.full.geometry().scale);
    let queries = asked.queries.of(layer);
    ensure!(!queries.is_empty(), "layer {layer} has no recorded query");
    let mut kept = 0.0;
    for query in &queries {
        let request = SelectRequest::query(query).options(options).selector(id);
        let selection = sequence.select(layer, request).map_err(engine_error)?;
        kept += kept_weight(asked.full, layer, query, |head| selection.entries(head).collect())?;
    }
    Ok(kept / queries.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_described_by_their_sizes_and_members() {
        let mut first = ClusterLists::new();
        [&[0, 1, 2][..], &[2, 3], &[4]].into_iter().for_each(|members| first.push(members));
        let mut second = ClusterLists::new();
        second.push(&[0, 1, 2, 3, 4]);
        let described = of_lists(&[first.clone(), second.clone()]);
        assert_eq!((described.lists, described.clusters, described.largest), (2, 4, 5));
        assert_eq!((described.mean_size, described.covered_tokens, described.clusters_per_token), (2.75, 5.0, 1.1));
        let sizes: Vec<(usize, usize)> = described.sizes.iter().map(|size| (size.at_most, size.clusters)).collect();
        assert_eq!(sizes, [(1, 1), (2, 1), (4, 1), (8, 1)]);
        assert_eq!(described.hash, of_lists(&[first.clone(), second.clone()]).hash);
        assert_ne!(described.hash, of_lists(&[second, first]).hash);
        let none = of_lists(&[]);
        assert_eq!((none.clusters, none.mean_size, none.largest, none.sizes.len()), (0, 0.0, 0, 0));
    }
}
