//! `kvbench cluster place` compares placements of clusters on several devices.

use crate::cluster::stripes::args::{ClusterPlaceArgs, StripeArg};
use crate::cluster::stripes::rig::{StripeSide, compare, on_devices};
use crate::cluster::stripes::steps::PlantedSteps;
use anyhow::{Result, ensure};
use std::num::NonZeroU32;
use stratakv::options::{BalancePolicy, ClusterStripe};

/// The most entries of a stored cluster.
const CLUSTER_ENTRIES_MAX: usize = 1 << 16;

/// Runs `kvbench cluster place`.
pub(crate) fn run(args: &ClusterPlaceArgs) -> Result<()> {
    ensure!(!args.stripes.is_empty(), "--stripes: at least one is needed");
    let planted = PlantedSteps::new(&args.own)?;
    let steps = planted.entries();
    let tokens: Vec<u32> = (0..args.own.entries).collect();
    let in_order: Vec<Vec<u32>> = tokens.chunks(CLUSTER_ENTRIES_MAX).map(<[u32]>::to_vec).collect();
    let side = |name: String, stripe, clusters| {
        let policy = BalancePolicy::EarliestFinish;
        StripeSide { name, stripe, policy, clusters, steps: &steps }
    };
    let mut sides: Vec<StripeSide<'_>> =
        args.stripes.iter().map(|own| side(own.name(), own.0, &planted.clusters[..])).collect();
    sides.push(side(StripeArg(ClusterStripe::Stretch).name(), ClusterStripe::Stretch, &planted.clusters));
    sides.push(side("sequential".to_owned(), ClusterStripe::Pages(NonZeroU32::MIN), &in_order));
    on_devices(&args.own, args.own.entries as usize, &mut |rig| compare(rig, &sides, args.own.common.json))
}
