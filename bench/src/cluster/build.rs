//! `kvbench cluster build` measures building clusters of one layer.
//!
//! 1. Record the co-activation of the layer's queries.
//! 2. Find the radius of medoid clusters (SWARM, Algorithm 1) for a mean size, by bisection.
//! 3. Build the clusters of that radius once more: this is the time of one radius.
//! 4. Add the entries that no query activated to the cluster of the nearest medoid.
//! 5. Cluster the keys of each head by k-means, and some heads by ten full passes of Lloyd's algorithm, as reference.
//!
//! Times are medians over the rounds.

use crate::cluster::args::{COVERED, ClusterLimit, NormalisationArg, TraceArgs, count, limit};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::layers::{PlantedSizes, layers};
use crate::support::args::between;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::{cpu_seconds, thread_cpu_seconds};
use crate::support::report::{median, print, ratio, rounded};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::time::Instant;
use stratakv::retrieval::clusters::{
    CoActivation, KMeans, KMeansOptions, MedoidClustering, MedoidClusters, MedoidOptions,
};

/// Arguments of `kvbench cluster build`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster build --json
          kvbench cluster build --entries 131072 --queries 256 --heads 0
          kvbench cluster build --sweep --heads 0 --json
          kvbench cluster build --file profile.safetensors --layer 3 --mean-size 8

A result of kind `medoids` has the clusters of one combination of limits, one of kind `kmeans` those of all heads.
`build_bytes` is beside the profile and includes the result. CPU seconds of medoids are of one core.")]
pub(crate) struct ClusterBuildArgs {
    #[command(flatten)]
    trace: TraceArgs,
    /// Entries of a planted layer.
    #[arg(long, default_value_t = 32768, value_parser = count())]
    entries: u32,
    /// Recorded queries, of a file at most.
    #[arg(long, default_value_t = 128, value_parser = between(1, 1 << 15))]
    queries: u32,
    /// Mean size of medoid clusters.
    #[arg(long, default_value_t = 8.0)]
    mean_size: f64,
    /// Most entries of a medoid cluster, or none; several separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "16", value_parser = limit)]
    max_size: Vec<ClusterLimit>,
    /// Most clusters of an entry, or none; several separated by commas. 1 means no replicas.
    #[arg(long, value_delimiter = ',', default_value = "2", value_parser = limit)]
    memberships: Vec<ClusterLimit>,
    /// Measure the paper's clusters without limits and ours side by side, instead of these limits.
    #[arg(long, conflicts_with_all = ["max_size", "memberships"])]
    sweep: bool,
    /// How counts of common queries become distances, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "frequency")]
    normalisation: Vec<NormalisationArg>,
    /// KV heads of a planted layer. 0 leaves k-means out.
    #[arg(long, default_value_t = 8, value_parser = between(0, 256))]
    heads: u32,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    dim: u32,
    /// Mean size of the clusters of k-means.
    #[arg(long, default_value_t = 16, value_parser = count())]
    kmeans_size: u32,
    /// Heads that full passes of Lloyd's algorithm are run on, the first ones.
    #[arg(long, default_value_t = 1, value_parser = between(0, 256))]
    lloyd_heads: u32,
    /// Threads of k-means.
    #[arg(long, default_value_t = 1, value_parser = between(1, 256))]
    threads: u32,
    /// Rounds. Times are medians over them.
    #[arg(long, default_value_t = 1, value_parser = between(1, 1000))]
    rounds: u32,
}

/// Limits of memberships and sizes that `--sweep` compares. The first are the paper's.
const SWEEP: [(Option<usize>, Option<usize>); 6] =
    [(None, None), (None, Some(16)), (Some(1), None), (Some(2), None), (Some(1), Some(16)), (Some(2), Some(16))];

/// Medoid clusters of one layer.
#[derive(Debug, Serialize)]
struct MedoidBuildResult<'a> {
    kind: &'static str,
    trace: &'a str,
    entries: usize,
    queries: usize,
    activated_per_query: f64,
    normalisation: &'static str,
    /// None without a limit.
    memberships: Option<usize>,
    max_size: Option<usize>,
    target_mean_size: f64,
    /// The mean size before entries that no query activated are added.
    mean_size: f64,
    largest: usize,
    clusters: usize,
    clusters_per_entry: f64,
    /// Memberships over activated entries.
    stored_per_activated: f64,
    /// Memberships over all entries, each of which has one at least.
    stored_per_entry: f64,
    never_activated: usize,
    /// Clusters that an entry opened because no query activated it and all clusters were full.
    opened_by_key: usize,
    #[serde(flatten)]
    cost: MedoidBuildCost,
}

/// The cost of medoid clusters.
#[derive(Debug, Serialize)]
struct MedoidBuildCost {
    /// Density and clusters of one radius.
    one_radius_cpu_s: f64,
    /// The search for the radius.
    bisection_cpu_s: f64,
    /// None without keys.
    by_key_cpu_s: Option<f64>,
    profile_bytes: usize,
    build_bytes: usize,
}

/// k-means of all heads of one layer.
#[derive(Debug, Serialize)]
struct KMeansBuildResult<'a> {
    kind: &'static str,
    trace: &'a str,
    entries: usize,
    heads: usize,
    dim: usize,
    /// Clusters of each head.
    clusters: usize,
    threads: u32,
    fit_s: f64,
    fit_cpu_s: f64,
    /// Mean squared distance to the centroid, over all heads.
    variance: f64,
    lloyd_heads: usize,
    /// Ten full passes over one head.
    lloyd_cpu_s: Option<f64>,
    /// The variance of these heads over that of ten full passes.
    ratio_lloyd: Option<f64>,
    /// Of each thread, beside the keys.
    build_bytes: usize,
}

/// Passes of Lloyd's algorithm that k-means is compared with.
const LLOYD_PASSES: usize = 10;

/// Runs `kvbench cluster build`.
pub(super) fn run(args: &ClusterBuildArgs) -> Result<()> {
    let sizes = PlantedSizes {
        entries: args.entries as usize,
        queries: args.queries as usize,
        heads: args.heads as usize,
        dim: args.dim as usize,
        covered: COVERED,
    };
    for layer in layers(&args.trace, sizes)? {
        let profile = layer.co_activation()?;
        for options in combinations(args) {
            check_interrupt()?;
            eprintln!("kvbench: {}: medoids of {} entries, {options:?}", layer.name, layer.entries);
            let result = medoids(args, &layer, &profile, options)?;
            print(args.trace.json, &format!("cluster build {} medoids", layer.name), &result)?;
        }
        if args.heads > 0 {
            let result = kmeans(args, &layer)?;
            print(args.trace.json, &format!("cluster build {} k-means", layer.name), &result)?;
        }
    }
    Ok(())
}

/// Returns the combinations of normalisation and limits to measure.
fn combinations(args: &ClusterBuildArgs) -> Vec<(NormalisationArg, MedoidOptions)> {
    let mut limits = if args.sweep { SWEEP.to_vec() } else { Vec::new() };
    if !args.sweep {
        for memberships in &args.memberships {
            limits.extend(args.max_size.iter().map(|size| (memberships.0, size.0)));
        }
    }
    let mut combinations = Vec::new();
    for name in &args.normalisation {
        for &(memberships, max_size) in &limits {
            combinations.push((*name, MedoidOptions { normalisation: (*name).into(), max_size, memberships }));
        }
    }
    combinations
}

/// Builds the medoid clusters of one combination.
fn medoids<'a>(
    args: &ClusterBuildArgs,
    layer: &'a LayerTrace,
    profile: &CoActivation,
    (normalisation, options): (NormalisationArg, MedoidOptions),
) -> Result<MedoidBuildResult<'a>> {
    let (mut one_radius, mut bisection, mut last) = (Vec::new(), Vec::new(), None);
    for _ in 0..args.rounds {
        check_interrupt()?;
        let start = thread_cpu_seconds();
        let (radius, _) = MedoidClustering::new(profile, options)?.cluster_to_mean_size(args.mean_size)?;
        bisection.push(thread_cpu_seconds() - start);
        let start = thread_cpu_seconds();
        let clusters = MedoidClustering::new(profile, options)?.cluster(radius);
        one_radius.push(thread_cpu_seconds() - start);
        last = Some(clusters);
    }
    let Some(mut clusters) = last else { anyhow::bail!("--rounds 0: nothing was measured") };
    let (mean_size, stored, never_activated) =
        (clusters.lists().mean_size(), clusters.lists().stored(), clusters.never_activated().len());
    let by_key_cpu_s = add_by_key(&mut clusters, layer)?;
    let activated = layer.entries - never_activated;
    let lists = clusters.lists();
    Ok(MedoidBuildResult {
        kind: "medoids",
        trace: &layer.name,
        entries: layer.entries,
        queries: profile.queries(),
        activated_per_query: rounded(layer.activated_per_query()),
        normalisation: normalisation.name(),
        memberships: options.memberships,
        max_size: options.max_size,
        target_mean_size: args.mean_size,
        mean_size: rounded(mean_size),
        largest: lists.iter().map(<[u32]>::len).max().unwrap_or(0),
        clusters: lists.len(),
        clusters_per_entry: rounded(lists.len() as f64 / layer.entries as f64),
        stored_per_activated: rounded(stored as f64 / activated.max(1) as f64),
        stored_per_entry: rounded(lists.stored() as f64 / layer.entries as f64),
        never_activated,
        opened_by_key: clusters.opened_by_key(),
        cost: MedoidBuildCost {
            one_radius_cpu_s: rounded(median(&one_radius)),
            bisection_cpu_s: rounded(median(&bisection)),
            by_key_cpu_s: by_key_cpu_s.map(rounded),
            profile_bytes: CoActivation::bytes_for(layer.entries, profile.queries()),
            build_bytes: MedoidClustering::bytes_for(
                layer.entries,
                profile.queries(),
                stored.div_ceil(layer.entries.max(1)),
            ),
        },
    })
}

/// Adds the entries that no query activated by their keys. Returns the CPU seconds, or none if the layer has no keys.
fn add_by_key(clusters: &mut MedoidClusters, layer: &LayerTrace) -> Result<Option<f64>> {
    if layer.heads.is_empty() {
        return Ok(None);
    }
    let keys = layer.joined_keys();
    let start = thread_cpu_seconds();
    clusters.assign_by_key(&keys, layer.heads.len() * layer.dim)?;
    Ok(Some(thread_cpu_seconds() - start))
}

/// Clusters the keys of each head.
fn kmeans<'a>(args: &ClusterBuildArgs, layer: &'a LayerTrace) -> Result<KMeansBuildResult<'a>> {
    ensure!(layer.entries > 0, "{}: there are no entries", layer.name);
    let clusters = (layer.entries / args.kmeans_size as usize).max(1);
    let options = KMeansOptions { clusters, seed: args.trace.planted.seed, metric: None };
    let heads: Vec<&[f32]> = layer.heads.iter().map(Vec::as_slice).collect();
    eprintln!("kvbench: {}: k-means of {} heads, {clusters} clusters each", layer.name, heads.len());
    let (mut seconds, mut cpu, mut variances) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        check_interrupt()?;
        let (start, cpu_start) = (Instant::now(), cpu_seconds());
        let fitted = KMeans::fit_heads(&heads, layer.dim, &options, args.threads as usize)?;
        seconds.push(start.elapsed().as_secs_f64());
        cpu.push(cpu_seconds() - cpu_start);
        variances = fitted.iter().zip(&heads).map(|(found, keys)| found.variance(keys)).collect();
    }
    let (mut lloyd_cpu, mut lloyd_variance, mut own_variance) = (Vec::new(), 0.0, 0.0);
    for (keys, own) in heads.iter().zip(&variances).take(args.lloyd_heads as usize) {
        check_interrupt()?;
        eprintln!("kvbench: {}: ten full passes over a head", layer.name);
        let start = thread_cpu_seconds();
        let full = KMeans::lloyd(keys, layer.dim, &options, LLOYD_PASSES)?;
        lloyd_cpu.push(thread_cpu_seconds() - start);
        lloyd_variance += full.variance(keys);
        own_variance += own;
    }
    Ok(KMeansBuildResult {
        kind: "kmeans",
        trace: &layer.name,
        entries: layer.entries,
        heads: heads.len(),
        dim: layer.dim,
        clusters,
        threads: args.threads,
        fit_s: rounded(median(&seconds)),
        fit_cpu_s: rounded(median(&cpu)),
        variance: rounded(variances.iter().sum::<f64>() / variances.len().max(1) as f64),
        lloyd_heads: lloyd_cpu.len(),
        lloyd_cpu_s: (!lloyd_cpu.is_empty()).then(|| rounded(median(&lloyd_cpu))),
        ratio_lloyd: ratio(own_variance, lloyd_variance),
        build_bytes: KMeans::bytes_for(layer.entries, layer.dim, &options),
    })
}
