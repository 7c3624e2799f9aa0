//! `kvbench cluster radius` measures medoid clusters whose radius another task chose.
//!
//! 1. Record the first half of the queries of each layer of a task. Find the radius of its clusters for a mean size.
//! 2. Cluster the layers of each task by the radius of each task.
//! 3. Let the other half of the queries retrieve clusters. Report sizes, requests and weight over those of the own
//!    radius.
//!
//! Source: SWARM, figure 19.

use crate::cluster::args::{COVERED, ClusterLimit, PlantedArgs, count, limit};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::layers::{PlantedSizes, planted};
use crate::cluster::profile_file;
use crate::cluster::retrievals::{RetrievableUnits, UnitRetrieval};
use crate::support::args::{between, share};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, ratio, rounded};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use stratakv::retrieval::clusters::{ClusterLists, ClusterRadius, CoActivation, MedoidClustering, MedoidOptions};

/// Arguments of `kvbench cluster radius`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster radius --tasks a.safetensors,b.safetensors,planted --json
          kvbench cluster radius --tasks a.safetensors,planted --mean-size 16 --max-size 32 --budget 0.03

A task is a file of `kvrun profile`, or `planted`. Each pair of tasks gives a result: `task` is clustered by the radius
of `radius_of`. Layer by layer if both have as many; otherwise the layers of the shorter one repeat. `weight_kept` is
the share of the activated entries' weight that queries retrieve. Planted entries have equal weights. `ratio_requests`,
`ratio_entries` and `ratio_weight` compare with the own radius of `task`. Figures are means over the layers.")]
pub(crate) struct ClusterRadiusArgs {
    /// Tasks, separated by commas.
    #[arg(long, value_name = "FILE|planted", value_delimiter = ',', required = true)]
    tasks: Vec<RadiusTask>,
    #[command(flatten)]
    planted: PlantedArgs,
    /// Entries of the planted layer.
    #[arg(long, default_value_t = 8192, value_parser = count())]
    entries: u32,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 64, value_parser = between(1, 4096))]
    dim: u32,
    /// Queries, of a file at most. The first half is recorded, the others retrieve.
    #[arg(long, default_value_t = 256, value_parser = between(2, 1 << 15))]
    queries: u32,
    /// Mean size of the clusters of the own radius.
    #[arg(long, default_value_t = 8.0)]
    mean_size: f64,
    /// Most entries of a cluster, or none.
    #[arg(long, default_value = "16", value_parser = limit)]
    max_size: ClusterLimit,
    /// Most clusters of an entry, or none.
    #[arg(long, default_value = "1", value_parser = limit)]
    memberships: ClusterLimit,
    /// Share of the entries that a query retrieves at most.
    #[arg(long, default_value_t = 1.0 / 13.0, value_parser = share)]
    budget: f64,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    json: bool,
}

/// A task on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RadiusTask {
    Planted,
    File(PathBuf),
}

impl std::str::FromStr for RadiusTask {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(if text == "planted" { Self::Planted } else { Self::File(text.into()) })
    }
}

/// A layer of a task.
struct WeightedLayer {
    trace: LayerTrace,
    /// The weights of the activated entries of each query.
    weights: Vec<Vec<f32>>,
}

/// A layer of a task with the radius that it chooses.
struct RadiusLayer {
    layer: WeightedLayer,
    clustering: MedoidClustering,
    radius: ClusterRadius,
}

/// The clusters of one task by the radius of another one.
#[derive(Debug, Serialize)]
struct RadiusResult<'a> {
    task: &'a str,
    radius_of: &'a str,
    /// Pairs of layers, over which the figures are means.
    layers: usize,
    #[serde(flatten)]
    figures: RadiusFigures,
    ratio_requests: Option<f64>,
    ratio_entries: Option<f64>,
    ratio_weight: Option<f64>,
}

/// Figures of the clusters of one layer, or their means.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct RadiusFigures {
    clusters: f64,
    /// The mean size before entries that no query activated are added.
    mean_size: f64,
    /// Clusters of one entry, over all clusters, before these entries are added.
    single_share: f64,
    /// Runs of neighbouring clusters that a query reads.
    requests: f64,
    /// Distinct entries that a query reads.
    entries: f64,
    weight_kept: f64,
}

impl RadiusFigures {
    /// Returns the figures, each by `change` of itself and of the same figure of `other`.
    fn zip(self, other: Self, change: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            clusters: change(self.clusters, other.clusters),
            mean_size: change(self.mean_size, other.mean_size),
            single_share: change(self.single_share, other.single_share),
            requests: change(self.requests, other.requests),
            entries: change(self.entries, other.entries),
            weight_kept: change(self.weight_kept, other.weight_kept),
        }
    }
}

/// Runs `kvbench cluster radius`.
pub(super) fn run(args: &ClusterRadiusArgs) -> Result<()> {
    let mut tasks = Vec::new();
    for task in &args.tasks {
        let (name, layers) = load(args, task)?;
        eprintln!("kvbench: the radius of {name}, {} layers", layers.len());
        tasks.push((name, layers.into_iter().map(|layer| with_radius(args, layer)).collect::<Result<Vec<_>>>()?));
    }
    for (name, layers) in &tasks {
        let own = mean(args, layers, layers)?;
        for (radius_of, others) in &tasks {
            let figures = mean(args, layers, others)?;
            let result = RadiusResult {
                task: name,
                radius_of,
                layers: layers.len().max(others.len()),
                figures: figures.zip(figures, |figure, _| rounded(figure)),
                ratio_requests: ratio(figures.requests, own.requests),
                ratio_entries: ratio(figures.entries, own.entries),
                ratio_weight: ratio(figures.weight_kept, own.weight_kept),
            };
            print(args.json, &format!("cluster radius {name} by the radius of {radius_of}"), &result)?;
        }
    }
    Ok(())
}

/// Returns the name of a task and its layers, each with the weights of activated entries.
fn load(args: &ClusterRadiusArgs, task: &RadiusTask) -> Result<(String, Vec<WeightedLayer>)> {
    let queries = args.queries as usize;
    let RadiusTask::File(path) = task else {
        let (entries, dim) = (args.entries as usize, args.dim as usize);
        let trace = planted(&args.planted, PlantedSizes { entries, queries, heads: 1, dim, covered: COVERED })?;
        let weights = trace.activated.iter().map(|query| vec![1.0; query.len()]).collect();
        return Ok(("planted".into(), vec![WeightedLayer { trace, weights }]));
    };
    let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let mut layers = Vec::new();
    let weights = profile_file::load_weights(path, &[])?;
    for (mut trace, mut weights) in profile_file::load(path, &[])?.into_iter().zip(weights) {
        trace.activated.truncate(queries);
        weights.truncate(queries);
        let is_whole = trace.activated.iter().zip(&weights).all(|(query, weights)| query.len() == weights.len());
        ensure!(is_whole && trace.activated.len() >= 2, "{name}, {}: at least two queries with weights", trace.name);
        layers.push(WeightedLayer { trace, weights });
    }
    Ok((name, layers))
}

/// Finds the radius of a layer.
fn with_radius(args: &ClusterRadiusArgs, layer: WeightedLayer) -> Result<RadiusLayer> {
    check_interrupt()?;
    let trace = &layer.trace;
    let first = &trace.activated[..trace.activated.len() / 2];
    let mut recorded = CoActivation::new(trace.entries, first.len())?;
    first.iter().try_for_each(|query| recorded.record(query))?;
    let (max_size, memberships) = (args.max_size.0, args.memberships.0);
    let options = MedoidOptions { max_size, memberships, ..MedoidOptions::default() };
    let clustering = MedoidClustering::new(&recorded, options)?;
    let (radius, _) = clustering.cluster_to_mean_size(args.mean_size)?;
    Ok(RadiusLayer { layer, clustering, radius })
}

/// Returns the mean figures of layers by the radii of others.
fn mean(args: &ClusterRadiusArgs, layers: &[RadiusLayer], others: &[RadiusLayer]) -> Result<RadiusFigures> {
    let pairs = layers.len().max(others.len());
    let mut sum = RadiusFigures::default();
    for at in 0..pairs {
        check_interrupt()?;
        let own = figures(args, &layers[at % layers.len()], others[at % others.len()].radius)?;
        sum = sum.zip(own, |sum, own| sum + own);
    }
    Ok(sum.zip(sum, |sum, _| sum / pairs as f64))
}

/// Returns the figures of a layer by a radius.
fn figures(args: &ClusterRadiusArgs, layer: &RadiusLayer, radius: ClusterRadius) -> Result<RadiusFigures> {
    let RadiusLayer { layer: WeightedLayer { trace, weights }, clustering, .. } = layer;
    let mut found = clustering.cluster(radius);
    let single = found.lists().iter().filter(|members| members.len() == 1).count();
    let (mean_size, clustered) = (found.lists().mean_size(), found.lists().len());
    found.assign_by_key(&trace.joined_keys(), trace.heads.len() * trace.dim)?;
    let units = RetrievableUnits::new(found.lists(), trace.entries);
    let budget = ((args.budget * trace.entries as f64) as usize).max(1);
    let half = trace.activated.len() / 2;
    let (mut requests, mut entries, mut kept, mut all) = (0, 0, 0.0, 0.0);
    for (query, weights) in trace.activated[half..].iter().zip(&weights[half..]) {
        let retrieval = units.retrieve(query, budget);
        requests += runs(&retrieval);
        entries += retrieval.entries;
        let is_read = members(found.lists(), &retrieval);
        for (entry, weight) in query.iter().zip(weights) {
            all += f64::from(*weight);
            kept += if is_read.binary_search(entry).is_ok() { f64::from(*weight) } else { 0.0 };
        }
    }
    let judged = (trace.activated.len() - half) as f64;
    Ok(RadiusFigures {
        clusters: found.lists().len() as f64,
        mean_size,
        single_share: single as f64 / clustered.max(1) as f64,
        requests: requests as f64 / judged,
        entries: entries as f64 / judged,
        weight_kept: if all > 0.0 { kept / all } else { 0.0 },
    })
}

/// Returns the runs of neighbours among the clusters of a retrieval.
fn runs(retrieval: &UnitRetrieval) -> usize {
    let ends = retrieval.units.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
    ends + usize::from(!retrieval.units.is_empty())
}

/// Returns the members of the clusters of a retrieval, in rising order.
fn members(lists: &ClusterLists, retrieval: &UnitRetrieval) -> Vec<u32> {
    let of_unit = |unit: &u32| lists.members(*unit as usize).unwrap_or_default();
    let mut members: Vec<u32> = retrieval.units.iter().flat_map(of_unit).copied().collect();
    members.sort_unstable();
    members
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct TestArgs {
        #[command(flatten)]
        own: ClusterRadiusArgs,
    }

    #[test]
    fn a_wider_radius_gives_larger_clusters() {
        let line = "radius --tasks planted,a.safetensors --entries 1024 --queries 128 --dim 8";
        let TestArgs { own: args } = TestArgs::parse_from(line.split(' '));
        assert_eq!(args.tasks, [RadiusTask::Planted, RadiusTask::File("a.safetensors".into())]);
        let layer = |mean_size| {
            let args = ClusterRadiusArgs { mean_size, ..TestArgs::parse_from(line.split(' ')).own };
            let (name, mut layers) = load(&args, &RadiusTask::Planted).unwrap();
            assert_eq!((&name[..], layers.len()), ("planted", 1));
            with_radius(&args, layers.remove(0)).unwrap()
        };
        let (small, large) = (layer(3.0), layer(10.0));
        let [own, wider] = [&small, &large].map(|other| figures(&args, &small, other.radius).unwrap());
        assert!(own.mean_size < 3.3 && wider.mean_size > 9.0, "{own:?} {wider:?}");
        assert!(own.clusters > wider.clusters && own.requests > wider.requests, "{own:?} {wider:?}");
        assert!(own.weight_kept > 0.5 && own.entries <= 1024.0 / 13.0, "{own:?}");
        // Layers repeat, and the mean of equal layers is theirs.
        let both = [layer(3.0), layer(3.0)];
        assert_eq!(mean(&args, &both, &[small]).unwrap().clusters, own.clusters);
    }

    #[test]
    fn runs_are_neighbouring_clusters() {
        let of = |units: &[u32]| runs(&UnitRetrieval { units: units.to_vec(), ..UnitRetrieval::default() });
        assert_eq!((of(&[]), of(&[4]), of(&[1, 2, 3, 7, 9, 10])), (0, 1, 3));
    }
}
