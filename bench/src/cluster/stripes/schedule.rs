//! `kvbench cluster schedule` compares which pages are read for entries that several clusters hold.
//!
//! The engine attends to an entry once. A side that reads it more than once, or from a fixed cluster, has members that
//! are tokens of their own: its clusters share no token, so that the engine has nothing to choose.

use crate::cluster::stripes::args::ClusterScheduleArgs;
use crate::cluster::stripes::rig::{StripeSide, compare, on_devices};
use crate::cluster::stripes::steps::PlantedSteps;
use anyhow::Result;
use stratakv::options::BalancePolicy;

/// Runs `kvbench cluster schedule`.
pub(crate) fn run(args: &ClusterScheduleArgs) -> Result<()> {
    let planted = PlantedSteps::new(&args.own)?;
    let apart = planted.apart();
    let (entries, first_members) = (planted.entries(), planted.first_members());
    let all_members = apart.entries();
    let stripe = args.stripe.0;
    let side = |name: &str, policy, clusters, steps| {
        let name = name.to_owned();
        StripeSide { name, stripe, policy, clusters, steps }
    };
    let sides = [
        side("balanced", BalancePolicy::EarliestFinish, &planted.clusters[..], &entries[..]),
        side("counts", BalancePolicy::FewestReads, &planted.clusters, &entries),
        side("static", BalancePolicy::FirstCopy, &planted.clusters, &entries),
        side("no balance", BalancePolicy::EarliestFinish, &apart.clusters, &first_members),
        side("no dedupe", BalancePolicy::EarliestFinish, &apart.clusters, &all_members),
    ];
    on_devices(&args.own, planted.memberships(), &mut |rig| compare(rig, &sides, args.own.common.json))
}
