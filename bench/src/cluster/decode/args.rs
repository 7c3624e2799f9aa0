//! Arguments of `kvbench cluster decode`.

use crate::cluster::args::{PlantedArgs, count};
use crate::devices::ReadLimitArgs;
use crate::support::args::{CommonArgs, between, between_u16, size};
use crate::support::method::registered;
use clap::Args;
use std::path::PathBuf;
use std::str::FromStr;
use stratakv::retrieval::MethodSpec;
use stratakv::{Budget, ByteSize};

/// Arguments of `kvbench cluster decode`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster decode --device /nvme0 --json
          kvbench cluster decode --device /nvme0 --profile ufs4 --methods tck:64,swarm:8:members --budgets 1/13
          kvbench cluster decode --file profile.safetensors --budgets 1/34,1/13,48

The first method reads groups and is the baseline. `ratio_requests`, `ratio_bytes` and `ratio_step` compare each other
result with it at the same budget. A method of clusters is measured twice: its entries come from `groups`, then from
`pages`. `weight_kept` is the share of full attention that the selection keeps, as a mean over query heads. Figures are
per step and layer. With --profile, --read-bps or --read-iops the store is on a disk of that speed (root only), and the
limits are set before each method is measured.")]
pub(crate) struct ClusterDecodeArgs {
    #[command(flatten)]
    pub(in crate::cluster) common: CommonArgs,
    /// A file of `kvrun profile`. Without it, topics are planted.
    #[arg(long, value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    #[command(flatten)]
    pub(super) planted: PlantedArgs,
    #[command(flatten)]
    pub(super) limits: ReadLimitArgs,
    /// Methods, separated by commas. The first one is the baseline, which reads groups.
    #[arg(long, value_delimiter = ',', value_parser = registered,
        default_value = "tck:64,swarm:8:members,dynakv:8:members,dynakv:16:members")]
    pub(in crate::cluster) methods: Vec<MethodSpec>,
    /// Budgets of a selection, separated by commas: tokens, or shares of the tokens.
    #[arg(long, value_delimiter = ',', default_value = "1/34,1/13,0.1,48")]
    pub(in crate::cluster) budgets: Vec<DecodeBudget>,
    /// Tokens of a planted layer.
    #[arg(long, default_value_t = 16384, value_parser = count())]
    pub(super) entries: u32,
    /// Planted layers.
    #[arg(long, default_value_t = 2, value_parser = between_u16(1, 128))]
    pub(super) layers: u16,
    /// KV heads of a planted layer.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 64))]
    pub(super) kv_heads: u16,
    /// Elements of a planted head's key, and of its value.
    #[arg(long, default_value_t = 128, value_parser = between_u16(8, 1024))]
    pub(super) head_dim: u16,
    /// Query heads of each KV head of a planted layer.
    #[arg(long, default_value_t = 4, value_parser = between(1, 64))]
    pub(super) query_heads: u32,
    /// Consecutive tokens of a planted topic. 1 spreads a topic over the whole sequence.
    #[arg(long, default_value_t = 4, value_parser = between(1, 1024))]
    pub(super) topic_run: u32,
    /// Length of a planted query over that of the two keys that it is made of.
    #[arg(long, default_value_t = 0.5)]
    pub(super) focus: f32,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 128))]
    pub(in crate::cluster) group: u16,
    /// Most bytes between two blocks or pages that one request reads. 0 makes requests depend on the arguments alone.
    #[arg(long, default_value = "0", value_parser = size)]
    pub(in crate::cluster) gap_limit: ByteSize,
    /// Measured steps. Of a file, these are its last queries.
    #[arg(long, default_value_t = 16, value_parser = between(1, 10_000))]
    pub(super) steps: u32,
    /// Queries of the profile of methods that need one, and of the codes of `tck:64`. They precede the steps.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    pub(super) queries: u32,
}

/// A budget on the command line, with its text.
#[derive(Clone, Debug)]
pub(crate) struct DecodeBudget {
    pub(super) text: String,
    pub(in crate::cluster) budget: Budget,
}

impl FromStr for DecodeBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no budget; give tokens as 48, or a share as 1/13 or 0.1");
        let number = |text: &str| text.parse::<f64>().map_err(|_| wrong());
        let budget = match (text.parse::<usize>(), text.split_once('/')) {
            (Ok(tokens), _) if tokens > 0 => Budget::tokens(tokens),
            (_, Some((part, whole))) => Budget::share(number(part)? / number(whole)?),
            _ => Budget::share(number(text)?),
        };
        match budget {
            Budget::Share(share) if !(share > 0.0 && share <= 1.0) => Err(wrong()),
            _ => Ok(Self { text: text.to_owned(), budget }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_tokens_or_shares() {
        let parse = |text: &str| text.parse::<DecodeBudget>().map(|own| own.budget);
        assert_eq!(parse("48"), Ok(Budget::Tokens(48)));
        assert_eq!(parse("1/4"), Ok(Budget::Share(0.25)));
        assert_eq!(parse("0.1"), Ok(Budget::Share(0.1)));
        for wrong in ["0", "", "-1", "2/1", "1/0", "x", "1.5", "NaN", "0/0"] {
            assert!(parse(wrong).unwrap_err().contains("no budget"), "{wrong}");
        }
    }
}
