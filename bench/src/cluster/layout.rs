//! `kvbench cluster layout` measures how long the reads of retrieved clusters are, by the order of clusters on flash.
//!
//! 1. Cluster the entries of a layer, by k-means of its keys or by the co-activation of the first half of its queries.
//! 2. Find the chain of clusters from what the first half of the queries retrieves (DynaKV, equation 8).
//! 3. Let the other queries retrieve, and count runs of neighbours in each layout:
//!    - `tokens`: the activated tokens alone, in token order.
//!    - `groups`: groups of 8 tokens, in token order.
//!    - `scattered`: the tokens of retrieved clusters, in token order.
//!    - `clusters`: clusters one after the other, by number.
//!    - `chained`: clusters in the order of the chain.
//!
//! Source: DynaKV, section 5.1 and figure 12.

use crate::cluster::args::{COVERED, TraceArgs, count};
use crate::cluster::clustered::{ClusterKind, cluster};
use crate::cluster::layer_trace::LayerTrace;
use crate::cluster::layers::{PlantedSizes, layers};
use crate::cluster::retrievals::{RetrievableUnits, UnitRetrieval};
use crate::support::args::{between, share};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, ratio, rounded};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use stratakv::retrieval::clusters::{ClusterLists, CoActivation, chain};

/// Arguments of `kvbench cluster layout`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster layout --json
          kvbench cluster layout --kind medoids --mean-size 8
          kvbench cluster layout --file profile.safetensors --layer 4 --budget 0.03

`mean_run` is entries over requests, `ratio_tokens` compares it with that of `tokens`. `activated_share` is the share of
a query's activated entries that it retrieves.")]
pub(crate) struct ClusterLayoutArgs {
    #[command(flatten)]
    trace: TraceArgs,
    /// Entries of a planted layer.
    #[arg(long, default_value_t = 32768, value_parser = count())]
    entries: u32,
    /// Queries, of a file at most. The first half makes the chain, the others are measured.
    #[arg(long, default_value_t = 256, value_parser = between(2, 1 << 15))]
    queries: u32,
    /// Clusters, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kmeans")]
    kind: Vec<ClusterKind>,
    /// Mean size of clusters.
    #[arg(long, default_value_t = 32, value_parser = count())]
    mean_size: u32,
    /// Share of the entries that a query retrieves at most.
    #[arg(long, default_value_t = 1.0 / 13.0, value_parser = share)]
    budget: f64,
    /// Elements of a planted key.
    #[arg(long, default_value_t = 64, value_parser = between(1, 4096))]
    dim: u32,
}

/// Runs of one layout.
#[derive(Debug, Serialize)]
struct ClusterLayoutResult<'a> {
    layout: &'static str,
    kind: &'static str,
    trace: &'a str,
    entries: usize,
    clusters: usize,
    mean_size: f64,
    queries: usize,
    /// Entries that a query reads.
    entries_per_query: f64,
    requests_per_query: f64,
    activated_share: f64,
    mean_run: f64,
    longest_run: usize,
    ratio_tokens: Option<f64>,
}

/// Runs of all measured queries in one layout.
#[derive(Clone, Copy, Debug, Default)]
struct RunCounts {
    entries: usize,
    requests: usize,
    longest: usize,
    activated: usize,
}

impl RunCounts {
    /// Adds the runs of one query: pieces by rising place, each with its place and its entries.
    fn add(&mut self, pieces: impl Iterator<Item = (usize, usize)>) {
        let (mut last, mut run) = (None, 0);
        for (place, entries) in pieces {
            let is_next = last.is_some_and(|last| last + 1 == place);
            self.requests += usize::from(!is_next);
            run = if is_next { run + entries } else { entries };
            self.longest = self.longest.max(run);
            self.entries += entries;
            last = Some(place);
        }
    }

    fn mean_run(&self) -> f64 {
        self.entries as f64 / self.requests.max(1) as f64
    }
}

/// Tokens of a group that clusters are compared with.
const GROUP: usize = 8;

/// Runs `kvbench cluster layout`.
pub(super) fn run(args: &ClusterLayoutArgs) -> Result<()> {
    let (entries, queries) = (args.entries as usize, args.queries as usize);
    let sizes = PlantedSizes { entries, queries, heads: 1, dim: args.dim as usize, covered: COVERED };
    for layer in layers(&args.trace, sizes)? {
        ensure!(layer.activated.len() >= 2, "{}: {} queries; at least 2 are needed", layer.name, layer.activated.len());
        for kind in &args.kind {
            check_interrupt()?;
            measure(args, &layer, *kind)?;
        }
    }
    Ok(())
}

/// Measures and prints every layout of one kind of clusters.
fn measure(args: &ClusterLayoutArgs, layer: &LayerTrace, kind: ClusterKind) -> Result<()> {
    let (first, judged) = layer.activated.split_at(layer.activated.len() / 2);
    let budget = ((args.budget * layer.entries as f64) as usize).max(1);
    eprintln!("kvbench: {}: {kind:?} of {} entries, and their chain", layer.name, layer.entries);
    let lists = cluster(layer, first, kind, (args.mean_size as usize, args.trace.planted.seed))?;
    let groups = groups(layer.entries);
    let units = RetrievableUnits::new(&lists, layer.entries);
    let mut retrieved = CoActivation::new(lists.len(), first.len())?;
    first.iter().try_for_each(|query| retrieved.record(&units.retrieve(query, budget).units))?;
    let order = chain(&retrieved);
    let (by_number, group_order) = (by_number(&lists), by_number(&groups));
    let of_groups = RetrievableUnits::new(&groups, layer.entries);
    let mut counts = [RunCounts::default(); 5];
    for query in judged {
        check_interrupt()?;
        let (clusters, groups_read) = (units.retrieve(query, budget), of_groups.retrieve(query, budget));
        counts[0].add(query.iter().map(|entry| (*entry as usize, 1)));
        counts[1].add(placed(&groups, &group_order, &groups_read).into_iter());
        counts[2].add(members(&lists, &clusters).into_iter().map(|entry| (entry as usize, 1)));
        counts[3].add(placed(&lists, &by_number, &clusters).into_iter());
        counts[4].add(placed(&lists, &order, &clusters).into_iter());
        let activated =
            [query.len(), groups_read.activated, clusters.activated, clusters.activated, clusters.activated];
        counts.iter_mut().zip(activated).for_each(|(counts, activated)| counts.activated += activated);
    }
    let asked: usize = judged.iter().map(Vec::len).sum();
    for (layout, counts_of) in ["tokens", "groups", "scattered", "clusters", "chained"].into_iter().zip(&counts) {
        let result = ClusterLayoutResult {
            layout,
            kind: kind.name(),
            trace: &layer.name,
            entries: layer.entries,
            clusters: lists.len(),
            mean_size: rounded(lists.mean_size()),
            queries: judged.len(),
            entries_per_query: rounded(counts_of.entries as f64 / judged.len() as f64),
            requests_per_query: rounded(counts_of.requests as f64 / judged.len() as f64),
            activated_share: rounded(counts_of.activated as f64 / asked.max(1) as f64),
            mean_run: rounded(counts_of.mean_run()),
            longest_run: counts_of.longest,
            ratio_tokens: ratio(counts_of.mean_run(), counts[0].mean_run()),
        };
        print(args.trace.json, &format!("cluster layout {} {layout}", layer.name), &result)?;
    }
    Ok(())
}

/// Returns groups of consecutive tokens. The last one may be short.
fn groups(entries: usize) -> ClusterLists {
    let mut groups = ClusterLists::new();
    for start in (0..entries).step_by(GROUP) {
        groups.push(&(start as u32..entries.min(start + GROUP) as u32).collect::<Vec<_>>());
    }
    groups
}

/// Returns units in the order of their numbers.
fn by_number(lists: &ClusterLists) -> Vec<u32> {
    (0..lists.len() as u32).collect()
}

/// Returns the distinct members of retrieved clusters, in token order.
fn members(lists: &ClusterLists, retrieval: &UnitRetrieval) -> Vec<u32> {
    let of_unit = |unit: &u32| lists.members(*unit as usize).unwrap_or_default();
    let mut members: Vec<u32> = retrieval.units.iter().flat_map(of_unit).copied().collect();
    members.sort_unstable();
    members.dedup();
    members
}

/// Returns the place in an order of each retrieved cluster, and its size, by rising place.
fn placed(lists: &ClusterLists, order: &[u32], retrieval: &UnitRetrieval) -> Vec<(usize, usize)> {
    let size = |unit: &u32| lists.members(*unit as usize).map_or(0, <[u32]>::len);
    let is_read = |unit: &u32| retrieval.units.binary_search(unit).is_ok();
    order.iter().enumerate().filter(|(_, unit)| is_read(unit)).map(|(place, unit)| (place, size(unit))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv::retrieval::clusters::runs_in_order;

    #[test]
    fn requests_are_the_runs_of_the_order() {
        let lists = groups(80);
        let order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7];
        for units in [&[0, 4, 5][..], &[1, 3, 6, 7], &[2], &[]] {
            let mut counts = RunCounts::default();
            let retrieval = UnitRetrieval { units: units.to_vec(), ..UnitRetrieval::default() };
            counts.add(placed(&lists, &order, &retrieval).into_iter());
            assert_eq!(counts.requests, runs_in_order(&order, units).unwrap());
            assert_eq!(counts.entries, 8 * units.len());
        }
    }

    #[test]
    fn runs_end_where_a_place_is_left_out() {
        let mut counts = RunCounts::default();
        counts.add([(0, 4), (1, 5), (3, 7)].into_iter());
        counts.add([(4, 1)].into_iter());
        assert_eq!((counts.requests, counts.entries, counts.longest), (3, 17, 9));
    }
}
