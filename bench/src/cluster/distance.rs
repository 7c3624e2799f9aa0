//! `kvbench cluster distance` measures how far new entries are from the medoids of the clusters that they join.
//!
//! 1. Cluster the first entries by the queries that were recorded before.
//! 2. In each maintenance step, `--window` queries also activate `--new` new entries. At its end these join clusters:
//!    - `swarm`: the clusters whose medoids were activated with them, at most `--memberships` ([`ClusterMaintenance`]).
//!    - `min_size`: the smallest cluster.
//!    - `min_diff`: the cluster whose medoid has the nearest key.
//! 3. Queries of the same topics, which no method has seen, say how far members are from their medoids by then. The
//!    distance is the share of the queries that activate the member without the medoid.
//! 4. Report the mean distance over that of the first clusters before the first step.
//!
//! `old` has the first entries alone, so it shows how far drift moves them. Source: SWARM, section 6.2 and table 5.

use crate::cluster::args::{ClusterLimit, PlantedArgs, count, limit};
use crate::support::args::between;
use crate::support::interrupt::check_interrupt;
use crate::support::report::{print, ratio, rounded};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::collections::HashMap;
use stratakv::retrieval::clusters::{
    ClusterLists, ClusterMaintenance, CoActivation, MaintenanceRadius, MedoidClustering, MedoidOptions, PlantedTopics,
};

/// Arguments of `kvbench cluster distance`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster distance --json
          kvbench cluster distance --drift 0.000001 --recall 0.95 --overlap 1 --memberships 1 --spread 1.5

Every entry has a topic, unless --covered says otherwise. The numbers of topics follow from --entries. A result has the
ratios after one number of steps.")]
pub(crate) struct ClusterDistanceArgs {
    #[command(flatten)]
    planted: PlantedArgs,
    /// Entries before the first step.
    #[arg(long, default_value_t = 4096, value_parser = count())]
    entries: u32,
    /// Queries that are recorded before the first step.
    #[arg(long, default_value_t = 256, value_parser = between(1, 1 << 15))]
    queries: u32,
    /// New entries of a step.
    #[arg(long, default_value_t = 256, value_parser = between(1, 1 << 16))]
    new: u32,
    /// Queries of a step.
    #[arg(long, default_value_t = 256, value_parser = between(1, 1 << 15))]
    window: u32,
    /// Numbers of steps to report, rising, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32", value_parser = between(1, 10_000))]
    steps: Vec<u32>,
    /// Queries that say how far members are from their medoids.
    #[arg(long, default_value_t = 512, value_parser = between(1, 1 << 15))]
    judges: u32,
    /// Mean size of the first clusters.
    #[arg(long, default_value_t = 8.0)]
    mean_size: f64,
    /// Most clusters of an entry, old or new, or none.
    #[arg(long, default_value = "2", value_parser = limit)]
    memberships: ClusterLimit,
    /// Elements of a key.
    #[arg(long, default_value_t = 64, value_parser = between(1, 4096))]
    dim: u32,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    json: bool,
}

/// The mean distances after some steps, over that before the first step.
#[derive(Debug, Serialize)]
struct ClusterDistanceResult {
    steps: u32,
    entries: usize,
    clusters: usize,
    drift: f64,
    initial_distance: Option<f64>,
    swarm: Option<f64>,
    min_size: Option<f64>,
    min_diff: Option<f64>,
    old: Option<f64>,
    /// Clusters of an old entry that is no medoid.
    memberships_old: f64,
    /// Clusters that a new entry joins by `swarm`.
    memberships_new: f64,
    /// New entries that no step activated with a medoid. They join by key.
    joined_by_key: usize,
    largest: usize,
}

/// Clusters that grow by one method: members without the medoid.
#[derive(Clone, Debug)]
struct GrowingLists {
    medoids: Vec<u32>,
    members: Vec<Vec<u32>>,
}

impl GrowingLists {
    fn new(lists: &ClusterLists) -> Self {
        let split = lists.iter().filter_map(<[u32]>::split_first);
        let (medoids, members) = split.map(|(medoid, members)| (*medoid, members.to_vec())).unzip();
        Self { medoids, members }
    }

    fn smallest(&self) -> usize {
        (0..self.members.len()).min_by_key(|cluster| self.members[*cluster].len()).unwrap_or(0)
    }

    fn stored(&self) -> usize {
        self.members.iter().map(Vec::len).sum()
    }

    fn largest(&self) -> usize {
        self.members.iter().map(|members| members.len() + 1).max().unwrap_or(0)
    }

    /// Returns the mean distance of members to their medoid. Members that no query activates do not count.
    fn distance(&self, judges: &CoActivation) -> f64 {
        let (mut sum, mut counted) = (0.0, 0_usize);
        for (medoid, members) in self.medoids.iter().zip(&self.members) {
            for member in members.iter().filter(|member| judges.count(**member) > 0) {
                sum += 1.0 - f64::from(judges.common(*member, *medoid)) / f64::from(judges.count(*member));
                counted += 1;
            }
        }
        sum / counted.max(1) as f64
    }
}

/// The clusters of each method, and the generator.
struct MaintainedClusters {
    topics: PlantedTopics,
    keys: Vec<f32>,
    dim: usize,
    cluster_of_medoid: HashMap<u32, u32>,
    radius: MaintenanceRadius,
    memberships: f64,
    old: GrowingLists,
    swarm: GrowingLists,
    min_size: GrowingLists,
    min_diff: GrowingLists,
    new_entries: usize,
    joined_by_key: usize,
}

/// Runs `kvbench cluster distance`.
pub(super) fn run(args: &ClusterDistanceArgs) -> Result<()> {
    let mut clusters = MaintainedClusters::new(args)?;
    let initial = clusters.old.distance(&clusters.judges(args)?);
    for step in 1..=args.steps.iter().copied().max().unwrap_or(0) {
        check_interrupt()?;
        clusters.step(args)?;
        if !args.steps.contains(&step) {
            continue;
        }
        let judges = clusters.judges(args)?;
        let over_initial = |lists: &GrowingLists| ratio(lists.distance(&judges), initial);
        let added = clusters.swarm.stored() - clusters.old.stored();
        let result = ClusterDistanceResult {
            steps: step,
            entries: args.entries as usize + clusters.new_entries,
            clusters: clusters.old.medoids.len(),
            drift: args.planted.drift,
            initial_distance: ratio(initial, 1.0),
            swarm: over_initial(&clusters.swarm),
            min_size: over_initial(&clusters.min_size),
            min_diff: over_initial(&clusters.min_diff),
            old: over_initial(&clusters.old),
            memberships_old: rounded(clusters.memberships),
            memberships_new: rounded(added as f64 / clusters.new_entries as f64),
            joined_by_key: clusters.joined_by_key,
            largest: clusters.swarm.largest(),
        };
        print(args.json, &format!("cluster distance after {step} steps"), &result)?;
    }
    Ok(())
}

impl MaintainedClusters {
    /// Plants topics and clusters the first entries.
    fn new(args: &ClusterDistanceArgs) -> Result<Self> {
        let (entries, dim) = (args.entries as usize, args.dim as usize);
        let steps = args.steps.iter().copied().max().unwrap_or(0) as usize;
        let mut topics = args.planted.topics_for(entries + steps * args.new as usize, entries, 1.0)?;
        let keys = topics.keys(dim, args.planted.spread);
        let mut queries: Vec<Vec<u32>> = (0..args.queries).map(|_| topics.next_query()).collect();
        queries.iter_mut().for_each(|query| query.retain(|entry| *entry < args.entries));
        let mut profile = CoActivation::new(entries, queries.len())?;
        queries.iter().try_for_each(|query| profile.record(query))?;
        eprintln!("kvbench: clusters of {entries} entries, then {steps} steps of {} new ones", args.new);
        let options = MedoidOptions { memberships: args.memberships.0, ..MedoidOptions::default() };
        let (_, mut clusters) = MedoidClustering::new(&profile, options)?.cluster_to_mean_size(args.mean_size)?;
        clusters.assign_by_key(&keys[..entries * dim], dim)?;
        let old = GrowingLists::new(clusters.lists());
        let cluster_of_medoid: HashMap<u32, u32> = old.medoids.iter().copied().zip(0..).collect();
        let others: Vec<u32> = (0..args.entries).filter(|entry| !cluster_of_medoid.contains_key(entry)).collect();
        let memberships = (old.stored() as f64 / others.len().max(1) as f64).max(1.0);
        let mut sample = ClusterMaintenance::new(old.medoids.len(), entries, args.window as usize)?;
        for query in &queries {
            sample.record(&medoids_of(&cluster_of_medoid, query), query)?;
        }
        let radius = sample.calibrate(&others, memberships)?;
        let (swarm, min_size, min_diff) = (old.clone(), old.clone(), old.clone());
        let (new_entries, joined_by_key) = (0, 0);
        Ok(Self {
            topics,
            keys,
            dim,
            cluster_of_medoid,
            radius,
            memberships,
            old,
            swarm,
            min_size,
            min_diff,
            new_entries,
            joined_by_key,
        })
    }

    /// Takes in the entries of one maintenance step.
    fn step(&mut self, args: &ClusterDistanceArgs) -> Result<()> {
        let first = args.entries + self.new_entries as u32;
        let mut maintenance = ClusterMaintenance::new(self.old.medoids.len(), args.new as usize, args.window as usize)?;
        for _ in 0..args.window {
            let query = self.topics.next_query();
            let fresh = query.iter().filter(|entry| (first..first + args.new).contains(entry));
            let slots: Vec<u32> = fresh.map(|entry| entry - first).collect();
            maintenance.record(&medoids_of(&self.cluster_of_medoid, &query), &slots)?;
        }
        let most = args.memberships.0.unwrap_or(usize::MAX);
        for slot in 0..args.new {
            let entry = first + slot;
            let nearest = self.nearest_medoid(entry);
            let mut joined = maintenance.assign_with_room(slot, self.radius, most, |_| true)?;
            if joined.is_empty() {
                joined.push(nearest as u32);
                self.joined_by_key += 1;
            }
            joined.iter().for_each(|cluster| self.swarm.members[*cluster as usize].push(entry));
            let smallest = self.min_size.smallest();
            self.min_size.members[smallest].push(entry);
            self.min_diff.members[nearest].push(entry);
        }
        self.new_entries += args.new as usize;
        Ok(())
    }

    /// Returns the cluster of the medoid with the nearest key.
    fn nearest_medoid(&self, entry: u32) -> usize {
        let key = |entry: u32| &self.keys[entry as usize * self.dim..][..self.dim];
        let own = key(entry);
        let distance = |medoid: u32| key(medoid).iter().zip(own).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
        let distances = self.old.medoids.iter().map(|medoid| distance(*medoid)).enumerate();
        distances.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(cluster, _)| cluster)
    }

    /// Records queries of the topics at this moment, without moving the generator.
    fn judges(&self, args: &ClusterDistanceArgs) -> Result<CoActivation> {
        let mut topics = self.topics.clone();
        let mut judges = CoActivation::new(self.keys.len() / self.dim, args.judges as usize)?;
        for _ in 0..args.judges {
            judges.record(&topics.next_query())?;
        }
        Ok(judges)
    }
}

/// Returns the clusters whose medoids a query activates.
fn medoids_of(cluster_of_medoid: &HashMap<u32, u32>, query: &[u32]) -> Vec<u32> {
    query.iter().filter_map(|entry| cluster_of_medoid.get(entry)).copied().collect()
}
