//! `kvbench cluster cache` measures hit rates of the engine's cache policies on clusters.
//!
//! 1. Cluster the entries of a layer, by k-means of its keys or by the co-activation of the first half of its queries.
//! 2. Replay the clusters that each query retrieves against each policy ([`PolicyReplay`]). A cluster is one block, as
//!    large as its entries. The first half of the queries fills the cache.
//! 3. Count hits of the second half, and the time that a device takes for the misses by its latency and bandwidth.
//!
//! Source: SWARM, equation 6 and figure 15.

use crate::cluster::args::{COVERED, TraceArgs, count};
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
use stratakv::options::CachePolicy;
use stratakv::store::PolicyReplay;

/// Arguments of `kvbench cluster cache`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster cache --json
          kvbench cluster cache --kind medoids --power 1.5 --capacity 0.05,0.4
          kvbench cluster cache --file profile.safetensors --layer 4

Policies: `fifo`, `lru`, `cost` (SWARM) and `s3-fifo`. `ratio_lru` is the hit rate over that of `lru`, `ratio_lru_time`
the time of the misses of `lru` over that of the policy.")]
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
    /// Bytes of the cache over those of all clusters, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.2,0.4", value_parser = share)]
    capacity: Vec<f64>,
    /// Bytes of an entry.
    #[arg(long, default_value_t = 4096, value_parser = count())]
    entry_bytes: u32,
    /// Latency of one read of the device, in microseconds.
    #[arg(long, default_value_t = 80, value_parser = count())]
    base_us: u32,
    /// Bandwidth of the device, in MiB per second.
    #[arg(long, default_value_t = 1000, value_parser = count())]
    mib_per_s: u32,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 64, value_parser = between(1, 4096))]
    dim: u32,
}

/// Hits of one policy.
#[derive(Debug, Serialize)]
struct ClusterCacheResult<'a> {
    policy: &'static str,
    kind: &'static str,
    trace: &'a str,
    entries: usize,
    clusters: usize,
    /// Bytes of the cache over those of all clusters.
    capacity: f64,
    capacity_bytes: usize,
    steps: usize,
    requests_per_step: f64,
    hit_rate: f64,
    /// Hits by bytes.
    byte_hit_rate: f64,
    /// The time of the misses of a step, one read after the other.
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
    fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.requests.max(1) as f64
    }

    /// Returns the microseconds of reading the misses one after the other.
    fn miss_us(&self, args: &ClusterCacheArgs) -> f64 {
        let per_byte = 1e6 / (f64::from(args.mib_per_s) * f64::from(1 << 20));
        (self.requests - self.hits) as f64 * f64::from(args.base_us) + (self.bytes - self.hit_bytes) as f64 * per_byte
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

/// Measures and prints every policy and capacity on one kind of clusters.
fn measure(args: &ClusterCacheArgs, layer: &LayerTrace, kind: ClusterKind) -> Result<()> {
    check_interrupt()?;
    eprintln!("kvbench: {}: {kind:?} of {} entries", layer.name, layer.entries);
    let half = layer.activated.len() / 2;
    let lists = cluster(layer, &layer.activated[..half], kind, (args.mean_size as usize, args.trace.planted.seed))?;
    let sizes: Vec<usize> = lists.iter().map(|members| members.len() * args.entry_bytes as usize).collect();
    let units = RetrievableUnits::new(&lists, layer.entries);
    let budget = ((args.budget * layer.entries as f64) as usize).max(1);
    let block = |unit: &u32| (u64::from(*unit), sizes[*unit as usize]);
    let steps = layer.activated.iter().map(|query| units.retrieve(query, budget).units.iter().map(block).collect());
    let steps: Vec<Vec<(u64, usize)>> = steps.collect();
    let cost = CachePolicy::CostEffective { base_us: args.base_us, mib_per_s: args.mib_per_s };
    let policies =
        [("lru", CachePolicy::Lru), ("fifo", CachePolicy::Fifo), ("cost", cost), ("s3-fifo", CachePolicy::S3Fifo)];
    for &capacity in &args.capacity {
        let capacity_bytes = (capacity * sizes.iter().sum::<usize>() as f64) as usize;
        let mut lru = ReplayCounts::default();
        for (policy, choice) in policies {
            check_interrupt()?;
            let counts = replay(choice, capacity_bytes, &steps, half);
            lru = if policy == "lru" { counts } else { lru };
            let measured = steps.len() - half;
            let result = ClusterCacheResult {
                policy,
                kind: kind.name(),
                trace: &layer.name,
                entries: layer.entries,
                clusters: lists.len(),
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
            print(args.trace.json, &format!("cluster cache {} {policy} {capacity}", layer.name), &result)?;
        }
    }
    Ok(())
}

/// Replays all steps, and counts those from `first` on.
fn replay(choice: CachePolicy, capacity: usize, steps: &[Vec<(u64, usize)>], first: usize) -> ReplayCounts {
    let (mut replay, mut counts) = (PolicyReplay::new(choice, capacity), ReplayCounts::default());
    for (at, blocks) in steps.iter().enumerate() {
        let hits = replay.step(blocks);
        if at < first {
            continue;
        }
        for ((_, bytes), hit) in blocks.iter().zip(hits) {
            counts.requests += 1;
            counts.bytes += bytes;
            counts.hits += usize::from(hit);
            counts.hit_bytes += if hit { *bytes } else { 0 };
        }
    }
    counts
}
