//! `kvbench cluster adapt` measures the variance of clusters whose keys grow.
//!
//! 1. Order the keys: a file's by token, planted ones by `--shift` between token and topic.
//! 2. Cluster the prefill of each head, and take in all other keys by each method. With `--recorded`, the query of each
//!    of these tokens retrieves clusters before its key is taken in.
//! 3. Report the mean squared distance to the mean of the cluster, the entries that splits had to load, and the share
//!    of changed clusters that later steps retrieve.
//!
//! Source: DynaKV, table 2, table 5 and figure 11.

use crate::cluster::args::{COVERED, ClusterLimit, PlantedArgs, TraceArgs, count, limit};
use crate::cluster::chosen_again::ChosenAgain;
use crate::cluster::growth::{
    AdaptSettings, GrowingKeys, GrownClusters, adaptive_clusters, clusters_of_all, local_clusters, static_clusters,
};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::layers::{PlantedSizes, layers};
use crate::cluster::profile_file;
use crate::support::args::{between, share};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, ratio, rounded};
use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::Serialize;

/// Arguments of `kvbench cluster adapt`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster adapt --json
          kvbench cluster adapt --shift 1 --heads 4
          kvbench cluster adapt --file profile.safetensors --layer 5 --prefill 1024
          kvbench cluster adapt --file decode.safetensors --recorded --buffer 16

Methods: `static` adds keys to the nearest centroid of the prefill, `local` clusters every 320 new keys, `dynakv`
splits, `all` clusters all keys at the end. `all-equal` makes as many clusters as `dynakv` with the first buffer.
`ratio_static` is the variance of `static` over that of the method. `chosen_again_4` is the share of the clusters that a
step appended to or split, and that one of the next 4 steps retrieves. Figures are means or sums over the heads.")]
pub(crate) struct ClusterAdaptArgs {
    #[command(flatten)]
    trace: TraceArgs,
    /// Entries of a planted layer.
    #[arg(long, default_value_t = 16384, value_parser = count())]
    entries: u32,
    /// Entries that are clustered first. Without it, half of them.
    #[arg(long, value_parser = count())]
    prefill: Option<u32>,
    /// How much planted keys are ordered by topic: 0 not at all, 1 family after family.
    #[arg(long, default_value_t = 0.5, value_parser = share)]
    shift: f64,
    /// KV heads of a planted layer.
    #[arg(long, default_value_t = 1, value_parser = between(1, 256))]
    heads: u32,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    dim: u32,
    /// Mean size of clusters.
    #[arg(long, default_value_t = 16, value_parser = count())]
    mean_size: u32,
    /// Most entries of a cluster that adapts, or none. Without it, four times the mean size.
    #[arg(long, value_parser = limit)]
    max_size: Option<ClusterLimit>,
    /// Entries in buffers at which a cluster is loaded (`B_max`), separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0,1,4,16,64")]
    buffer: Vec<usize>,
    /// Quantile of the first variances that is the threshold of a split.
    #[arg(long, default_value_t = 0.9, value_parser = share)]
    quantile: f64,
    /// Share of the clusters that a step retrieves.
    #[arg(long, default_value_t = 1.0 / 13.0, value_parser = share)]
    retrieved: f64,
    /// Retrieve by the recorded query of each new token. The first of these tokens ends the prefill. Without it,
    /// queries are earlier keys.
    #[arg(long, requires = "file", conflicts_with = "prefill")]
    recorded: bool,
}

/// Clusters of one method, over all heads.
#[derive(Debug, Serialize)]
struct ClusterAdaptResult<'a> {
    method: &'static str,
    trace: &'a str,
    heads: usize,
    prefill: usize,
    entries: usize,
    /// `B_max` of `dynakv`.
    buffer: Option<usize>,
    /// Clusters per head.
    clusters: f64,
    largest: usize,
    variance: f64,
    ratio_static: Option<f64>,
    /// Entries that wait in buffers at the end.
    buffered: usize,
    splits: usize,
    loads: usize,
    loaded_entries: usize,
    loaded_entries_per_token: f64,
    #[serde(flatten)]
    again: ChosenAgainResult,
    /// The time of taking in a key of one head. For `all`, the time of clustering once, over the new keys.
    token_us: f64,
}

/// Changes of clusters, and the share of them whose cluster is retrieved within some steps. None without such changes.
#[derive(Debug, Serialize)]
struct ChosenAgainResult {
    /// Clusters that a step appended to or split, each once per step.
    changes: usize,
    chosen_again_1: Option<f64>,
    chosen_again_2: Option<f64>,
    chosen_again_4: Option<f64>,
    chosen_again_8: Option<f64>,
    chosen_again_16: Option<f64>,
}

impl ChosenAgainResult {
    fn new(again: ChosenAgain) -> Self {
        let share = |nth| again.share(nth).map(rounded);
        Self {
            changes: again.changes(),
            chosen_again_1: share(0),
            chosen_again_2: share(1),
            chosen_again_4: share(2),
            chosen_again_8: share(3),
            chosen_again_16: share(4),
        }
    }
}

/// Runs `kvbench cluster adapt`.
pub(super) fn run(args: &ClusterAdaptArgs) -> Result<()> {
    let (heads, dim) = (args.heads as usize, args.dim as usize);
    let sizes = PlantedSizes { entries: args.entries as usize, queries: 0, heads, dim, covered: COVERED };
    let recorded = match (&args.trace.file, args.recorded) {
        (Some(file), true) => profile_file::load_queries(file, &args.trace.layer)?,
        _ => Vec::new(),
    };
    for (at, mut layer) in layers(&args.trace, sizes)?.into_iter().enumerate() {
        if args.trace.file.is_none() {
            order_by_shift(args, &mut layer)?;
        }
        match (&args.trace.file, recorded.get(at)) {
            (Some(file), Some(queries)) => {
                let (prefill, queries) = queries_of_heads(&layer, queries, &profile_file::load_positions(file)?)?;
                measure(args, &layer, prefill, &queries)?;
            }
            _ => {
                let prefill = args.prefill.map_or(layer.entries / 2, |prefill| prefill as usize);
                measure(args, &layer, prefill, &vec![Vec::new(); layer.heads.len()])?;
            }
        }
    }
    Ok(())
}

/// Returns the first token with a query, and for each KV head the queries of this token and all later ones.
///
/// # Errors
/// The queries are not those of the last tokens, one each, or not of the heads of the layer.
fn queries_of_heads(
    layer: &LayerTrace,
    queries: &[Vec<f32>],
    positions: &[u32],
) -> Result<(usize, Vec<Vec<Vec<f32>>>)> {
    let first = positions.first().map_or(layer.entries, |first| *first as usize);
    let is_each = positions.iter().enumerate().all(|(at, position)| *position as usize == first + at);
    let reaches = first < layer.entries && first + queries.len() >= layer.entries;
    ensure!(
        is_each && reaches && positions.len() == queries.len(),
        "--recorded: {} needs a query of each of its last tokens; use `kvrun profile --queries decode`",
        layer.name
    );
    let (heads, width) = (layer.heads.len(), queries[0].len());
    let per_head = width / heads;
    let is_whole = per_head * heads == width && per_head.is_multiple_of(layer.dim) && per_head > 0;
    ensure!(is_whole, "--recorded: queries of {width} elements for {heads} heads of {}", layer.dim);
    let own = &queries[..layer.entries - first];
    let of_head = |head: usize| own.iter().map(|query| query[head * per_head..][..per_head].to_vec()).collect();
    Ok((first, (0..heads).map(of_head).collect()))
}

/// Measures and prints every method on a layer. `queries` are those of the new keys, for each head.
fn measure(args: &ClusterAdaptArgs, layer: &LayerTrace, prefill: usize, queries: &[Vec<Vec<f32>>]) -> Result<()> {
    if prefill == 0 || prefill >= layer.entries {
        bail!("--prefill {prefill}: {} has {} entries; give fewer, and at least 1", layer.name, layer.entries);
    }
    let of_heads = |grow: &dyn Fn(GrowingKeys<'_>) -> Result<GrownClusters>| {
        let head = |(seed, (keys, queries)): (u64, (&Vec<f32>, &Vec<Vec<f32>>))| {
            check_interrupt()?;
            let seed = args.trace.planted.seed.wrapping_add(seed);
            grow(GrowingKeys { keys, dim: layer.dim, prefill, mean_size: args.mean_size as usize, seed, queries })
        };
        (0..).zip(layer.heads.iter().zip(queries)).map(head).collect::<Result<Vec<_>>>()
    };
    let report = |method, buffer, base: &[GrownClusters], found: &[GrownClusters]| {
        let result = summed(layer, prefill, (method, buffer), (base, found));
        print(args.trace.json, &format!("cluster adapt {} {method}", layer.name), &result)
    };
    eprintln!("kvbench: {}: {} keys after {prefill}, {} heads", layer.name, layer.entries, layer.heads.len());
    let base = of_heads(&static_clusters)?;
    report("static", None, &base, &base)?;
    report("local", None, &base, &of_heads(&local_clusters)?)?;
    let max_size = args.max_size.map_or(Some(4 * args.mean_size as usize), |limit| limit.0);
    let mut adapted = 0;
    for &buffer_limit in &args.buffer {
        eprintln!("kvbench: {}: dynakv with a buffer of {buffer_limit}", layer.name);
        let settings = AdaptSettings { buffer_limit, max_size, quantile: args.quantile, retrieved: args.retrieved };
        let found = of_heads(&|keys| adaptive_clusters(keys, settings))?;
        report("dynakv", Some(buffer_limit), &base, &found)?;
        if adapted == 0 {
            adapted = found.iter().map(|head| head.clusters).sum::<usize>() / found.len().max(1);
        }
    }
    let all = layer.entries / args.mean_size as usize;
    report("all", None, &base, &of_heads(&|keys| clusters_of_all(keys, all))?)?;
    if adapted > 0 {
        report("all-equal", None, &base, &of_heads(&|keys| clusters_of_all(keys, adapted))?)?;
    }
    Ok(())
}

/// Returns the mean squared distance of all members.
fn variance(heads: &[GrownClusters]) -> f64 {
    let members: usize = heads.iter().map(|head| head.members).sum();
    heads.iter().map(|head| head.squares).sum::<f64>() / members.max(1) as f64
}

/// Adds up the heads of one method. `base` has the heads of static clusters.
fn summed<'a>(
    layer: &'a LayerTrace,
    prefill: usize,
    (method, buffer): (&'static str, Option<usize>),
    (base, found): (&[GrownClusters], &[GrownClusters]),
) -> ClusterAdaptResult<'a> {
    let sum = |figure: fn(&GrownClusters) -> usize| found.iter().map(figure).sum::<usize>();
    let tokens = ((layer.entries - prefill) * found.len()) as f64;
    let seconds: f64 = found.iter().map(|head| head.seconds).sum();
    ClusterAdaptResult {
        method,
        trace: &layer.name,
        heads: found.len(),
        prefill,
        entries: layer.entries,
        buffer,
        clusters: rounded(sum(|head| head.clusters) as f64 / found.len().max(1) as f64),
        largest: found.iter().map(|head| head.largest).max().unwrap_or(0),
        variance: rounded(variance(found)),
        ratio_static: ratio(variance(base), variance(found)),
        buffered: layer.entries * found.len() - sum(|head| head.members),
        splits: sum(|head| head.splits),
        loads: sum(|head| head.loads),
        loaded_entries: sum(|head| head.loaded_entries),
        loaded_entries_per_token: rounded(sum(|head| head.loaded_entries) as f64 / tokens),
        again: ChosenAgainResult::new(found.iter().map(|head| head.again).sum()),
        token_us: rounded(seconds * 1e6 / tokens),
    }
}

/// Orders the planted keys of each head, so that families of topics follow each other the more, the larger the shift.
fn order_by_shift(args: &ClusterAdaptArgs, layer: &mut LayerTrace) -> Result<()> {
    let planted = &args.trace.planted;
    let mut random = fastrand::Rng::with_seed(planted.seed);
    for (head, keys) in (0..).zip(&mut layer.heads) {
        let seed = planted.seed.wrapping_add(head);
        let topics = PlantedArgs { seed, ..*planted }.topics(layer.entries, COVERED)?;
        let mut place: Vec<f64> = (0..layer.entries).map(|_| random.f64()).collect();
        for family in topics.topics().chunks(FAMILY_TOPICS) {
            let rank = random.f64();
            for entry in family.iter().flatten() {
                let place = &mut place[*entry as usize];
                *place = (1.0 - args.shift) * *place + args.shift * rank;
            }
        }
        let mut order: Vec<usize> = (0..layer.entries).collect();
        order.sort_by(|a, b| place[*a].total_cmp(&place[*b]));
        *keys = order.iter().flat_map(|entry| &keys[entry * layer.dim..][..layer.dim]).copied().collect();
    }
    Ok(())
}

/// Topics of a family, as the generator plants them.
const FAMILY_TOPICS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_queries_are_those_of_the_last_tokens() {
        let heads = vec![vec![0.0; 12]; 2];
        let layer = LayerTrace { name: "layer 0".into(), entries: 6, dim: 2, heads, activated: Vec::new() };
        // Two query heads of each KV head. The last query is of a token whose key is not in the file.
        let queries: Vec<Vec<f32>> = (0..4).map(|at| (0..8).map(|x| (10 * at + x) as f32).collect()).collect();
        let (prefill, found) = queries_of_heads(&layer, &queries, &[3, 4, 5, 6]).unwrap();
        assert_eq!((prefill, found.len(), found[0].len()), (3, 2, 3));
        assert_eq!(
            (&found[0][1][..], &found[1][2][..]),
            (&[10.0, 11.0, 12.0, 13.0][..], &[24.0, 25.0, 26.0, 27.0][..])
        );
        for positions in [&[3, 4, 5, 7][..], &[1, 2, 3, 4], &[6, 7, 8, 9], &[3, 4, 5], &[]] {
            assert!(queries_of_heads(&layer, &queries, positions).is_err(), "{positions:?}");
        }
        let short = vec![vec![0.0; 6]; 4];
        assert!(queries_of_heads(&layer, &short, &[3, 4, 5, 6]).unwrap_err().to_string().contains("6 elements"));
    }
}
