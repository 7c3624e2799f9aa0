//! Arguments of `kvbench cluster place` and `kvbench cluster schedule`.

use crate::cluster::args::{PlantedArgs, count};
use crate::devices::ReadLimitArgs;
use crate::support::args::{CommonArgs, between, between_u16};
use clap::Args;
use std::num::NonZeroU32;
use std::str::FromStr;
use stratakv::options::ClusterStripe;

/// Arguments that both subcommands share.
#[derive(Args, Debug)]
pub(crate) struct StripeArgs {
    #[command(flatten)]
    pub(super) common: CommonArgs,
    #[command(flatten)]
    pub(super) planted: PlantedArgs,
    #[command(flatten)]
    pub(super) limits: ReadLimitArgs,
    /// Devices of a store, separated by commas. Each number is measured.
    #[arg(long, value_delimiter = ',', default_value = "4", value_parser = between(1, 8))]
    pub(super) devices: Vec<u32>,
    /// Entries that are planted. Replicas come on top.
    #[arg(long, default_value_t = 8192, value_parser = count())]
    pub(super) entries: u32,
    /// Neighbouring topics that steps choose together. Entries with several topics have topics of one family.
    #[arg(long, default_value_t = 4, value_parser = between(1, 1024))]
    pub(super) family: u32,
    /// Most topics of a step. Without it, there are so many that a step chooses a 13th of the entries.
    #[arg(long, value_parser = count())]
    pub(super) step_topics: Option<u32>,
    /// KV heads. With the default head size, an entry has 512 bytes per head.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 64))]
    pub(super) kv_heads: u16,
    /// Elements of a head's key, and of its value.
    #[arg(long, default_value_t = 128, value_parser = between_u16(8, 1024))]
    pub(super) head_dim: u16,
    /// Measured steps.
    #[arg(long, default_value_t = 64, value_parser = between(1, 10_000))]
    pub(super) steps: u32,
}

/// Arguments of `kvbench cluster place`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster place --device /nvme0 --profile pm9a3 --json
          kvbench cluster place --device /nvme0 --profile pm9a3 --devices 1,2,4,8 --stripes 1
          kvbench cluster place --device /nvme0 --profile ufs4 --kv-heads 2 --stripes 1,2,4,8,cluster

`sequential` has the entries in the order of tokens, page by page over the devices. `unbalanced` has the clusters of a
layer on the device that has least. The others deal each cluster in units of this many pages. Topics overlap by
--overlap, and steps read by the default schedule. `bound_us` is the time that the busiest device needs for its bytes
and requests at the limits. With --profile, --read-bps or --read-iops every device has that speed (root only). Such
devices are made below --device and removed at the end.")]
pub(crate) struct ClusterPlaceArgs {
    #[command(flatten)]
    pub(super) own: StripeArgs,
    /// Placements by clusters, separated by commas: pages of a stripe unit, or `cluster`.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,cluster")]
    pub(super) stripes: Vec<StripeArg>,
}

/// Arguments of `kvbench cluster schedule`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster schedule --device /nvme0 --profile pm9a3 --json
          kvbench cluster schedule --device /nvme0 --profile pm9a3 --stripe cluster --overlap 2 --devices 8

`balanced` is the engine's schedule. `counts` counts pages and knows no speeds. `static` reads the first place of each
entry. `no dedupe` reads every chosen cluster whole. `no balance` reads each entry once, from the first chosen cluster
that holds it. With --profile, --read-bps or --read-iops every device has that speed (root only).")]
pub(crate) struct ClusterScheduleArgs {
    #[command(flatten)]
    pub(super) own: StripeArgs,
    /// The placement: pages of a stripe unit, or `cluster`.
    #[arg(long, default_value = "1")]
    pub(super) stripe: StripeArg,
}

/// A stripe unit on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StripeArg(pub(super) ClusterStripe);

impl StripeArg {
    /// Returns the name in results.
    pub(super) fn name(self) -> String {
        match self.0 {
            ClusterStripe::Pages(pages) => format!("stripe {pages}"),
            ClusterStripe::Cluster => "stripe cluster".to_owned(),
            ClusterStripe::Stretch => "unbalanced".to_owned(),
        }
    }
}

impl FromStr for StripeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<NonZeroU32>() {
            Ok(pages) => Ok(Self(ClusterStripe::Pages(pages))),
            _ if text == "cluster" => Ok(Self(ClusterStripe::Cluster)),
            _ => Err(format!("{text:?} is no stripe unit; give pages as 1, or cluster")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_pages_or_clusters() {
        let name = |text: &str| text.parse::<StripeArg>().map(StripeArg::name);
        assert_eq!((name("8"), name("cluster")), (Ok("stripe 8".into()), Ok("stripe cluster".into())));
        for wrong in ["0", "", "-1", "x", "1.5"] {
            assert!(name(wrong).unwrap_err().contains("no stripe unit"), "{wrong}");
        }
    }
}
