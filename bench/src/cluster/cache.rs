//! `kvbench cluster cache` measures hit rates of the engine's cache policies on clusters.
//!
//! 1. Cluster the entries of a layer, by k-means of its keys or by the co-activation of the first half of its queries.
//! 2. Lay out the clusters (`cluster_blocks`): a cluster is one block, or its entries are in groups that clusters
//!    share.
//! 3. Replay the clusters that each query retrieves against each policy ([`PolicyReplay`], the engine's own code). The
//!    first half of the queries fills the cache, or only gives the policies their first frequencies.
//! 4. Count the hits of the second half, and the time that a device takes for the misses.
//!
//! `best-fixed` is no policy. It always holds the blocks with the most uses per byte in the measured half. It bounds
//! what a policy can reach if queries do not depend on the queries before them.
//!
//! Source: SWARM, equation 6 and figure 15.

use crate::cluster::args::{COVERED, TraceArgs, count};
use crate::cluster::cluster_blocks::{ClusterBlocks, ClusterPlace};
use crate::cluster::clustered::{ClusterKind, cluster};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::layers::{PlantedSizes, layers};
use crate::cluster::retrievals::RetrievableUnits;
use crate::support::args::{between, share};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, ratio, rounded};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use stratakv::options::{CachePolicy, ReadCost};
use stratakv::retrieval::clusters::ClusterLists;
use stratakv::store::{PolicyReplay, ReplayedCluster};

/// The name of the bound in results.
const BEST_FIXED: &str = "best-fixed";

/// Arguments of `kvbench cluster cache`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster cache --json
          kvbench cluster cache --policy lru,cost --power 1.5 --capacity 0.05,0.4
          kvbench cluster cache --file profile.safetensors --layer 4 --place groups

`ratio_lru` is the hit rate over that of `lru`, `ratio_lru_time` the time of the misses of `lru` over that of the
policy. `best-fixed` is no policy, but the best content that never changes.")]
pub(crate) struct ClusterCacheArgs {
    #[command(flatten)]
    trace: TraceArgs,
    /// Entries of a planted layer.
    #[arg(long, default_value_t = 16384, value_parser = count())]
    entries: u32,
    /// Queries, of a file at most. The first half fills the cache, the others are measured.
    #[arg(long, default_value_t = 512, value_parser = between(2, 1 << 15))]
    queries: u32,
    /// Clusters, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "medoids")]
    kind: Vec<ClusterKind>,
    /// Mean size of clusters.
    #[arg(long, default_value_t = 8, value_parser = count())]
    mean_size: u32,
    /// Share of the entries that a query retrieves at most.
    #[arg(long, default_value_t = 1.0 / 13.0, value_parser = share)]
    budget: f64,
    /// Cache policies, separated by commas, with the names of the engine.
    #[arg(long, value_name = "POLICY", value_delimiter = ',', default_value = "lru,fifo,cost,cluster-aligned,s3-fifo")]
    policy: Vec<CachePolicy>,
    /// Do not name clusters, so that every policy ranks blocks. `cost` then ages uses as the paper says.
    #[arg(long)]
    by_block: bool,
    /// Begin to measure with an empty cache. The first half of the queries only gives first frequencies.
    #[arg(long)]
    cold: bool,
    /// Where the entries of a cluster are.
    #[arg(long, value_enum, default_value = "clusters")]
    place: ClusterPlace,
    /// Entries of a group.
    #[arg(long, default_value_t = 8, value_parser = count())]
    group: u32,
    /// Sizes of the cache as shares of the bytes of all blocks, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.2,0.4", value_parser = share)]
    capacity: Vec<f64>,
    /// Bytes of an entry.
    #[arg(long, default_value_t = 4096, value_parser = count())]
    entry_bytes: u32,
    /// Microseconds that a request adds to a batch [default: the engine's estimate of an ordinary drive]
    #[arg(long, requires = "mib_per_s", value_parser = count())]
    request_us: Option<u32>,
    /// Bandwidth of the device, in MiB per second [default: the engine's estimate of an ordinary drive]
    #[arg(long, requires = "request_us", value_parser = count())]
    mib_per_s: Option<u32>,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 64, value_parser = between(1, 4096))]
    dim: u32,
}

impl ClusterCacheArgs {
    /// Returns the cost of a read, if the arguments give one.
    fn read_cost(&self) -> Option<ReadCost> {
        let (request_us, mib_per_s) = self.request_us.zip(self.mib_per_s)?;
        Some(ReadCost { request_us, mib_per_s })
    }

    /// Returns a policy with the cost of reads that the arguments give.
    fn priced(&self, policy: CachePolicy) -> CachePolicy {
        match policy {
            CachePolicy::CostEffective { read_cost: None } => {
                CachePolicy::CostEffective { read_cost: self.read_cost() }
            }
            other => other,
        }
    }
}

/// Hits of one policy.
#[derive(Debug, Serialize)]
struct ClusterCacheResult<'a> {
    policy: &'a str,
    kind: &'static str,
    place: &'static str,
    trace: &'a str,
    entries: usize,
    clusters: usize,
    /// The size of the cache as a share of the bytes of all blocks.
    capacity: f64,
    capacity_bytes: usize,
    steps: usize,
    /// Blocks that a step requests.
    requests_per_step: f64,
    hit_rate: f64,
    /// Hits by bytes.
    byte_hit_rate: f64,
    /// The time of the misses of a step, in one batch.
    miss_us_per_step: f64,
    ratio_lru: Option<f64>,
    ratio_lru_time: Option<f64>,
}

/// Hits and misses of one policy.
#[derive(Clone, Copy, Debug, Default)]
struct ReplayCounts {
    requests: usize,
    hits: usize,
    bytes: usize,
    hit_bytes: usize,
}

impl ReplayCounts {
    fn add(&mut self, bytes: usize, hit: bool) {
        self.requests += 1;
        self.bytes += bytes;
        self.hits += usize::from(hit);
        self.hit_bytes += if hit { bytes } else { 0 };
    }

    fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.requests.max(1) as f64
    }

    /// Returns the microseconds of reading the misses.
    fn miss_us(&self, args: &ClusterCacheArgs) -> f64 {
        PolicyReplay::read_us(args.read_cost(), self.requests - self.hits, self.bytes - self.hit_bytes)
    }
}

/// Runs `kvbench cluster cache`.
pub(super) fn run(args: &ClusterCacheArgs) -> Result<()> {
    let (entries, queries) = (args.entries as usize, args.queries as usize);
    let sizes = PlantedSizes { entries, queries, heads: 1, dim: args.dim as usize, covered: COVERED };
    for layer in layers(&args.trace, sizes)? {
        ensure!(layer.activated.len() >= 2, "{}: {} queries; at least 2 are needed", layer.name, layer.activated.len());
        for kind in &args.kind {
            measure(args, &layer, *kind)?;
        }
    }
    Ok(())
}

/// The steps of a trace, and what all policies share.
struct CacheTrace<'a> {
    args: &'a ClusterCacheArgs,
    layer: &'a LayerTrace,
    kind: ClusterKind,
    clusters: usize,
    steps: Vec<Vec<ReplayedCluster>>,
    /// The number of steps before those that are measured.
    first: usize,
}

/// Measures and prints every policy and capacity on one kind of clusters.
fn measure(args: &ClusterCacheArgs, layer: &LayerTrace, kind: ClusterKind) -> Result<()> {
    check_interrupt()?;
    eprintln!("kvbench: {}: {kind:?} of {} entries", layer.name, layer.entries);
    let half = layer.activated.len() / 2;
    let lists = cluster(layer, &layer.activated[..half], kind, (args.mean_size as usize, args.trace.planted.seed))?;
    let blocks = ClusterBlocks::new(&lists, args.place, (args.group as usize, args.entry_bytes as usize));
    let trace = CacheTrace {
        args,
        layer,
        kind,
        clusters: lists.len(),
        steps: steps(args, layer, &lists, &blocks),
        first: half,
    };
    for &capacity in &args.capacity {
        let bytes = (capacity * blocks.total_bytes(layer.entries) as f64) as usize;
        let lru = trace.replay(CachePolicy::Lru, bytes);
        for &policy in &args.policy {
            check_interrupt()?;
            let policy = args.priced(policy);
            trace.print(&policy.to_string(), (capacity, bytes), trace.replay(policy, bytes), lru)?;
        }
        trace.print(BEST_FIXED, (capacity, bytes), trace.best_fixed(bytes), lru)?;
    }
    Ok(())
}

/// Returns the clusters that each query retrieves, with the share of the first half that retrieves each of them.
fn steps(
    args: &ClusterCacheArgs,
    layer: &LayerTrace,
    lists: &ClusterLists,
    blocks: &ClusterBlocks,
) -> Vec<Vec<ReplayedCluster>> {
    let units = RetrievableUnits::new(lists, layer.entries);
    let budget = ((args.budget * layer.entries as f64) as usize).max(1);
    let retrieved: Vec<Vec<u32>> = layer.activated.iter().map(|query| units.retrieve(query, budget).units).collect();
    let half = layer.activated.len() / 2;
    let mut profiled = vec![0.0_f32; lists.len()];
    for unit in retrieved[..half].iter().flatten() {
        profiled[*unit as usize] += 1.0 / half as f32;
    }
    let cluster = |unit: &u32| ReplayedCluster {
        cluster: *unit,
        profiled: profiled[*unit as usize],
        blocks: blocks.of(*unit).to_vec(),
    };
    retrieved.iter().map(|units| units.iter().map(cluster).collect()).collect()
}

impl CacheTrace<'_> {
    /// Replays the steps, and counts those that are measured.
    fn replay(&self, choice: CachePolicy, capacity: usize) -> ReplayCounts {
        let (mut replay, mut counts) = (PolicyReplay::new(choice, capacity), ReplayCounts::default());
        for (at, clusters) in self.steps.iter().enumerate().skip(if self.args.cold { self.first } else { 0 }) {
            let requested = match self.args.by_block {
                false => replay.step_of_clusters(clusters, &[]),
                true => {
                    let blocks = distinct_blocks(clusters);
                    let hits = replay.step(&blocks);
                    blocks.into_iter().zip(hits).map(|((block, bytes), hit)| (block, bytes, hit)).collect()
                }
            };
            if at >= self.first {
                requested.into_iter().for_each(|(_, bytes, hit)| counts.add(bytes, hit));
            }
        }
        counts
    }

    /// Counts the hits of the blocks with the most uses per byte in the measured steps, as many as fit.
    fn best_fixed(&self, capacity: usize) -> ReplayCounts {
        let measured: Vec<_> = self.steps[self.first..].iter().map(|clusters| distinct_blocks(clusters)).collect();
        let mut uses: HashMap<u64, (usize, usize)> = HashMap::new();
        for (block, bytes) in measured.iter().flatten() {
            uses.entry(*block).or_insert((0, *bytes)).0 += 1;
        }
        let mut order: Vec<(u64, (usize, usize))> = uses.into_iter().collect();
        let worth = |(uses, bytes): (usize, usize)| uses as f64 / bytes.max(1) as f64;
        order.sort_by(|a, b| worth(b.1).total_cmp(&worth(a.1)).then(a.0.cmp(&b.0)));
        let (mut held, mut free) = (HashSet::new(), capacity);
        for (block, (_, bytes)) in order {
            if bytes <= free {
                free -= bytes;
                held.insert(block);
            }
        }
        let mut counts = ReplayCounts::default();
        measured.iter().flatten().for_each(|(block, bytes)| counts.add(*bytes, held.contains(block)));
        counts
    }

    fn print(
        &self,
        policy: &str,
        (capacity, capacity_bytes): (f64, usize),
        counts: ReplayCounts,
        lru: ReplayCounts,
    ) -> Result<()> {
        let (args, measured) = (self.args, self.steps.len() - self.first);
        let result = ClusterCacheResult {
            policy,
            kind: self.kind.name(),
            place: args.place.name(),
            trace: &self.layer.name,
            entries: self.layer.entries,
            clusters: self.clusters,
            capacity,
            capacity_bytes,
            steps: measured,
            requests_per_step: rounded(counts.requests as f64 / measured as f64),
            hit_rate: rounded(counts.hit_rate()),
            byte_hit_rate: rounded(counts.hit_bytes as f64 / counts.bytes.max(1) as f64),
            miss_us_per_step: rounded(counts.miss_us(args) / measured as f64),
            ratio_lru: ratio(counts.hit_rate(), lru.hit_rate()),
            ratio_lru_time: ratio(lru.miss_us(args), counts.miss_us(args)),
        };
        print(args.trace.json, &format!("cluster cache {} {policy} {capacity}", self.layer.name), &result)
    }
}

/// Returns the blocks of clusters, each once, in the order in which clusters name them.
fn distinct_blocks(clusters: &[ReplayedCluster]) -> Vec<(u64, usize)> {
    let mut seen = HashSet::new();
    clusters
        .iter()
        .flat_map(|cluster| cluster.blocks.iter().copied())
        .filter(|(block, _)| seen.insert(*block))
        .collect()
}
