//! `kvbench cluster` measures clusters without a model: the algorithms of the engine, and reads of stored clusters.
//!
//! | file | subcommand | what it measures |
//! |---|---|---|
//! | `attach` | `attach` | attaching a method after a restart, with and without its state |
//! | `build` | `build` | medoid clusters from co-activation, and k-means |
//! | `adapt`, `growth`, `chosen_again` | `adapt` | the variance of clusters whose keys grow, and their retrievals |
//! | `cache` | `cache` | hit rates of cache policies on clusters |
//! | `costs` | `costs` | operations on sequences whose stored clusters are not used |
//! | `decode` | `decode` | requests, bytes and times of decode steps, from groups and from stored clusters |
//! | `grow` | `grow` | clusters that are stored again while a sequence grows |
//! | `idle` | `idle` | decode steps with splits of clusters between them |
//! | `radius` | `radius` | medoid clusters whose radius another task chose |
//! | `distance` | `distance` | the distance of new entries to the medoids of their clusters |
//! | `layout` | `layout` | the length of reads by the order of clusters |
//! | `methods` | `methods` | building, selecting, upkeep and memory of whole methods |
//! | `stripes` | `place`, `schedule` | stored clusters on several devices: placements, and the pages that are read |
//! | `select` | `select` | scoring representatives against scoring all keys |
//!
//! 1. A layer comes from the generator of planted topics, or from a file of `kvrun profile` (`layers`).
//! 2. The subcommand runs the algorithms of `stratakv::retrieval::clusters` on it (`layer_trace`).
//! 3. Each result is one line of JSON, or a block of text.
//!
//! Invariant: every figure but times depends on the arguments and `--seed` alone.

mod adapt;
mod args;
mod attach;
mod build;
mod cache;
mod chosen_again;
mod cluster_blocks;
mod clustered;
mod costs;
mod decode;
mod distance;
mod grow;
mod growth;
mod idle;
mod layer_trace;
mod layers;
mod layout;
mod methods;
mod profile_file;
mod radius;
mod retrievals;
mod select;
mod stripes;

use adapt::ClusterAdaptArgs;
use anyhow::Result;
use attach::ClusterAttachArgs;
use build::ClusterBuildArgs;
use cache::ClusterCacheArgs;
use clap::Subcommand;
use costs::ClusterCostsArgs;
use decode::ClusterDecodeArgs;
use distance::ClusterDistanceArgs;
use grow::ClusterGrowArgs;
use idle::ClusterIdleArgs;
use layout::ClusterLayoutArgs;
use methods::ClusterMethodsArgs;
use radius::ClusterRadiusArgs;
use select::ClusterSelectArgs;
use stripes::{ClusterPlaceArgs, ClusterScheduleArgs};

/// Subcommands of `kvbench cluster`.
#[derive(Subcommand, Debug)]
pub(crate) enum ClusterCommand {
    /// Measures co-activation density, medoid clusters and k-means of one layer.
    Build(ClusterBuildArgs),
    /// Measures attaching a method after a restart, from keys and from its stored state.
    Attach(ClusterAttachArgs),
    /// Measures the variance of clusters whose keys grow, by DynaKV and what it is compared with.
    Adapt(ClusterAdaptArgs),
    /// Measures hit rates of cache policies on the clusters that queries retrieve.
    Cache(ClusterCacheArgs),
    /// Measures operations on sequences whose stored clusters are not used.
    Costs(ClusterCostsArgs),
    /// Measures decode steps that read chosen clusters, from groups and from pages of stored clusters.
    Decode(ClusterDecodeArgs),
    /// Measures clusters that are stored again and again while a sequence grows.
    Grow(ClusterGrowArgs),
    /// Measures decode steps whose clusters are split in the idle time between them.
    Idle(Box<ClusterIdleArgs>),
    /// Measures how far new entries are from the medoids of the clusters that they join.
    Distance(ClusterDistanceArgs),
    /// Measures how long the reads of retrieved clusters are, by the order of clusters.
    Layout(ClusterLayoutArgs),
    /// Measures building, selecting, upkeep and memory of methods that choose entries, on one layer.
    Methods(ClusterMethodsArgs),
    /// Measures placements of stored clusters on several devices.
    Place(ClusterPlaceArgs),
    /// Measures which pages of stored clusters are read, if entries are in several clusters on several devices.
    Schedule(ClusterScheduleArgs),
    /// Measures medoid clusters whose radius was chosen on one task and is used on others.
    Radius(ClusterRadiusArgs),
    /// Measures scoring medoids and centroids against scoring all keys.
    Select(ClusterSelectArgs),
}

/// Runs `kvbench cluster`.
pub(crate) fn run(command: &ClusterCommand) -> Result<()> {
    match command {
        ClusterCommand::Build(args) => build::run(args),
        ClusterCommand::Attach(args) => attach::run(args),
        ClusterCommand::Costs(args) => costs::run(args),
        ClusterCommand::Adapt(args) => adapt::run(args),
        ClusterCommand::Cache(args) => cache::run(args),
        ClusterCommand::Decode(args) => decode::run(args),
        ClusterCommand::Distance(args) => distance::run(args),
        ClusterCommand::Grow(args) => grow::run(args),
        ClusterCommand::Idle(args) => idle::run(args),
        ClusterCommand::Layout(args) => layout::run(args),
        ClusterCommand::Methods(args) => methods::run(args),
        ClusterCommand::Place(args) => stripes::run_place(args),
        ClusterCommand::Schedule(args) => stripes::run_schedule(args),
        ClusterCommand::Radius(args) => radius::run(args),
        ClusterCommand::Select(args) => select::run(args),
    }
}
