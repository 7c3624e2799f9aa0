//! `kvbench cluster select` measures scoring the representatives of clusters against scoring all keys, on one core.
//!
//! 1. Count the medoids per entry on planted topics, with one membership and with replicas. The share is taken at
//!    `--clustered` entries and scaled, because topics are planted in proportion to the entries.
//! 2. Fill an index with f16 keys for all entries, for the medoids, and for the centroids of k-means. There are enough
//!    layers of each that all keys exceed the caches.
//! 3. In each round, score every layer of every index by the exact selector of the engine.
//!
//! Rows are in groups of 8, because the exact selector scores them fastest. Each group keeps its best score. The keys
//! are random, because the cost of a score does not depend on them. Source: SWARM, table 4.

use crate::cluster::args::{COVERED, ClusterLimit, PlantedArgs, count, limit};
use crate::cluster::layers::{PlantedSizes, planted};
use crate::support::args::{between, size};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, print, ratio, rounded};
use anyhow::Result;
use clap::Args;
use half::f16;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;
use stratakv::retrieval::clusters::{MedoidClustering, MedoidOptions};
use stratakv::retrieval::{
    ExactSpec, HeadAggregation, KeyGroup, KeyShape, LayerSummary, Oracle, ScoreRequest, Selector, SummarySpec,
};
use stratakv::{ByteSize, DType};

/// Arguments of `kvbench cluster select`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster select --json
          kvbench cluster select --entries 131072 --memberships none --mean-size 16

A result of index `keys` scores all entries. Those of `medoids` and `centroids` have the ratio of both times.")]
pub(crate) struct ClusterSelectArgs {
    #[command(flatten)]
    planted: PlantedArgs,
    /// Entries, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072,1048576", value_parser = count())]
    entries: Vec<u32>,
    /// Entries that the medoids per entry are counted on, at most.
    #[arg(long, default_value_t = 32768, value_parser = count())]
    clustered: u32,
    /// Recorded queries of the medoid clusters.
    #[arg(long, default_value_t = 128, value_parser = between(1, 1 << 15))]
    queries: u32,
    /// Mean size of medoid clusters.
    #[arg(long, default_value_t = 8.0)]
    mean_size: f64,
    /// Most clusters of an entry, or none, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = limit)]
    memberships: Vec<ClusterLimit>,
    /// Mean size of the clusters of k-means.
    #[arg(long, default_value_t = 16, value_parser = count())]
    kmeans_size: u32,
    /// KV heads whose keys an entry joins.
    #[arg(long, default_value_t = 1, value_parser = between(1, 64))]
    heads: u32,
    /// Elements of a key.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    dim: u32,
    /// Query heads of each KV head.
    #[arg(long, default_value_t = 4, value_parser = between(1, 64))]
    query_heads: u32,
    /// Bytes of all keys in memory. A step scores layer after layer, so give more than the caches hold.
    #[arg(long, default_value = "256MiB", value_parser = size)]
    working_set: ByteSize,
    /// Rounds. Times are medians over the layers of all rounds.
    #[arg(long, default_value_t = 9, value_parser = between(1, 1000))]
    rounds: u32,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    json: bool,
}

/// The time of scoring one index.
#[derive(Debug, Serialize)]
struct ClusterSelectResult {
    index: &'static str,
    /// The limit of medoids; none without one.
    memberships: Option<usize>,
    entries: usize,
    /// Rows that are scored.
    rows: usize,
    rows_per_entry: f64,
    /// Bytes of the rows of one layer.
    index_bytes: usize,
    /// Layers that are scored one after another.
    layers: usize,
    score_us: f64,
    /// The time of all keys over this one.
    ratio_time: Option<f64>,
}

/// Rows to score, in as many layers as the working set has.
struct ScoredIndex {
    kind: &'static str,
    memberships: Option<usize>,
    rows: usize,
    layers: Vec<Box<dyn LayerSummary>>,
    times_us: Vec<f64>,
}

/// Rows that are scored together.
const GROUP: usize = 8;

/// Runs `kvbench cluster select`.
pub(super) fn run(args: &ClusterSelectArgs) -> Result<()> {
    let clustered = args.entries.iter().copied().max().unwrap_or(1).min(args.clustered);
    let per_entry = medoids_per_entry(args, clustered as usize)?;
    for &entries in &args.entries {
        let entries = entries as usize;
        let mut indexes = indexes(args, entries, &per_entry)?;
        score_rounds(args, &mut indexes)?;
        let all_keys_us = median(&indexes[0].times_us);
        for index in &indexes {
            let score_us = median(&index.times_us);
            let result = ClusterSelectResult {
                index: index.kind,
                memberships: index.memberships,
                entries,
                rows: index.rows,
                rows_per_entry: rounded(index.rows as f64 / entries as f64),
                index_bytes: index.rows * row_bytes(args),
                layers: index.layers.len(),
                score_us: rounded(score_us),
                ratio_time: ratio(all_keys_us, score_us),
            };
            print(args.json, &format!("cluster select {} of {entries} entries", index.kind), &result)?;
        }
    }
    Ok(())
}

/// Returns the medoids per entry for each limit of memberships, of clusters of at most 16 entries.
fn medoids_per_entry(args: &ClusterSelectArgs, entries: usize) -> Result<Vec<(Option<usize>, f64)>> {
    let sizes = PlantedSizes { entries, queries: args.queries as usize, heads: 1, dim: 16, covered: COVERED };
    let layer = planted(&args.planted, sizes)?;
    let profile = layer.co_activation()?;
    let of_limit = |limit: &ClusterLimit| {
        check_interrupt()?;
        eprintln!("kvbench: medoids of {entries} entries, memberships {:?}", limit.0);
        let options = MedoidOptions { memberships: limit.0, ..MedoidOptions::default() };
        let (_, mut clusters) = MedoidClustering::new(&profile, options)?.cluster_to_mean_size(args.mean_size)?;
        clusters.assign_by_key(&layer.heads[0], layer.dim)?;
        Ok((limit.0, clusters.lists().len() as f64 / entries as f64))
    };
    args.memberships.iter().map(of_limit).collect()
}

fn row_bytes(args: &ClusterSelectArgs) -> usize {
    (args.heads * args.dim) as usize * size_of::<f16>()
}

/// Returns the indexes to score. The first one has all keys.
fn indexes(args: &ClusterSelectArgs, entries: usize, per_entry: &[(Option<usize>, f64)]) -> Result<Vec<ScoredIndex>> {
    let layers = args.working_set.0.div_ceil((entries * row_bytes(args)) as u64).clamp(1, 64) as usize;
    eprintln!("kvbench: {layers} layers of {entries} entries");
    let scaled = |share: f64| ((share * entries as f64).round() as usize).max(1);
    let mut rows = vec![("keys", None, entries)];
    rows.extend(per_entry.iter().map(|(memberships, share)| ("medoids", *memberships, scaled(*share))));
    rows.push(("centroids", None, (entries / args.kmeans_size as usize).max(1)));
    let mut random = fastrand::Rng::with_seed(args.planted.seed);
    let mut found = Vec::new();
    for (kind, memberships, rows) in rows {
        let layer = |_| random_layer(args, rows, &mut random);
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        found.push(ScoredIndex { kind, memberships, rows, layers, times_us: Vec::new() });
    }
    Ok(found)
}

/// Returns the shape of groups of rows.
fn shape(args: &ClusterSelectArgs) -> KeyShape {
    KeyShape { kv_heads: args.heads as usize, key_dim: args.dim as usize, group_tokens: GROUP, dtype: DType::F16 }
}

fn random_layer(args: &ClusterSelectArgs, rows: usize, random: &mut fastrand::Rng) -> Result<Box<dyn LayerSummary>> {
    check_interrupt()?;
    let mut layer = ExactSpec.layer(0, shape(args))?;
    let mut plane = vec![0; row_bytes(args) * GROUP];
    for group in 0..rows.div_ceil(GROUP) {
        for element in plane.chunks_exact_mut(2) {
            // The highest bit of the exponent is never set, so that every value is finite and below 2.
            element.copy_from_slice(&(random.u16(..) & 0xbfff).to_le_bytes());
        }
        layer.push(&KeyGroup::new(shape(args), &plane, group as u64)?);
    }
    Ok(layer)
}

/// Scores every layer of every index, round by round. The first round faults pages in and does not count.
fn score_rounds(args: &ClusterSelectArgs, indexes: &mut [ScoredIndex]) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(args.planted.seed);
    let elements = (args.heads * args.query_heads * args.dim) as usize;
    let mut scores = Vec::new();
    for round in 0..=args.rounds {
        for index in indexes.iter_mut() {
            for layer in &index.layers {
                check_interrupt()?;
                let query: Vec<f32> = (0..elements).map(|_| random.f32() - 0.5).collect();
                scores.clear();
                scores.resize(index.rows.div_ceil(GROUP), 0.0);
                let start = Instant::now();
                let request = ScoreRequest {
                    query: &query,
                    shape: shape(args),
                    scale: (args.dim as f32).sqrt().recip(),
                    aggregation: HeadAggregation::Softmax,
                    groups: 0..scores.len(),
                    forced: [0..0, 0..0],
                    count: scores.len(),
                    threads: None,
                };
                Oracle.score(&[&**layer], &request, &mut scores)?;
                black_box(&scores);
                if round > 0 {
                    index.times_us.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
    }
    Ok(())
}
