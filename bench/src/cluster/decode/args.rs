//! Arguments of `kvbench cluster decode`.

use crate::cluster::args::{PlantedArgs, count};
use crate::devices::{DeviceLimits, DeviceProfile, ReadLimitArgs};
use crate::support::args::{CommonArgs, between, between_u16, size};
use crate::support::method::registered;
use clap::{Args, ValueEnum};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;
use stratakv::retrieval::MethodSpec;
use stratakv::{Budget, ByteSize};

/// Arguments of `kvbench cluster decode`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster decode --device /nvme0 --json
          kvbench cluster decode --device /nvme0 --profiles pm9a3,ufs4 --methods tck:64,swarm:8:members --budgets 1/13
          kvbench cluster decode --device /nvme0 --profiles ufs4 --count 4 --methods tck:64,tck:64@16,tokens@1,dynakv:8
          kvbench cluster decode --directories /ssd0,/ssd1 --budgets 1/34
          kvbench cluster decode --file profile.safetensors --budgets 1/34,1/13,48
          kvbench cluster decode --profiles pm9a3 --count 4 --batch 1,4,8 --budgets 1/13 --steps 8
          kvbench cluster decode --profiles ufs4 --lengths 1024,2048,4096,8192,16384 --budgets 1/13 --layers 1 --steps 8

METHOD@TOKENS reads from groups of TOKENS tokens, in a sequence of its own. The first method is the baseline.
`ratio_requests`, `ratio_bytes` and `ratio_step` compare each other result with it at the same budget and device. A
method of clusters is measured twice: its entries come from `groups`, then from `pages`. `weight_kept` is the share of
full attention that the selection keeps, as a mean over query heads. Figures are per step and layer, for all sequences
of a batch together, but `tokens_per_s` counts steps of all layers.

The sequences of a batch have the same keys, in places of their own. In each step they have different queries. Each is
selected by itself, and one read serves them all. With --lengths, each method gets one more result in the end:
`off_line` is the largest distance of `step_us` from a line of the lengths, as a share of that line.

With --profiles, --profile, --read-bps or --read-iops the store is on --count disks of that speed (root only). The
limits are set after everything is written. The kernel grants a limit in slices of 100 ms, so single steps are faster
than the limit or wait for the next slice. `step_us` is therefore the mean of a turn of at least --turn-ms, which begins
and ends behind such a wait. A turn begins with 120 ms of unmeasured steps.")]
pub(crate) struct ClusterDecodeArgs {
    #[command(flatten)]
    pub(in crate::cluster) common: CommonArgs,
    /// A file of `kvrun profile`. Without it, topics are planted.
    #[arg(long, value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    /// Layers of the file, separated by commas. Without it, all layers are measured.
    #[arg(long, value_delimiter = ',', requires = "file")]
    pub(super) layer: Vec<usize>,
    #[command(flatten)]
    pub(super) planted: PlantedArgs,
    #[command(flatten)]
    pub(super) limits: ReadLimitArgs,
    /// Profiles of `--profile`, separated by commas, that the same store is measured under one after the other.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["profile", "read_bps", "read_iops"])]
    pub(super) profiles: Vec<DeviceProfile>,
    /// Number of limited devices.
    #[arg(long, default_value_t = 1, value_parser = between(1, 16))]
    pub(super) count: u32,
    /// Directories that already exist, one per device, in place of --device. Their limits stay as they are.
    #[arg(long, value_name = "DIR", value_delimiter = ',',
        conflicts_with_all = ["profiles", "profile", "read_bps", "read_iops", "count"])]
    pub(super) directories: Vec<PathBuf>,
    /// Methods, separated by commas. The first one is the baseline, which reads groups.
    #[arg(long, value_delimiter = ',', default_value = "tck:64,swarm:8:members,dynakv:8:members,dynakv:16:members")]
    pub(in crate::cluster) methods: Vec<DecodeMethod>,
    /// Places that methods of clusters are read from, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "groups,pages")]
    pub(super) places: Vec<DecodePlace>,
    /// Budgets of a selection, separated by commas: tokens, or shares of the tokens.
    #[arg(long, value_delimiter = ',', default_value = "1/34,1/13,0.1,48")]
    pub(in crate::cluster) budgets: Vec<DecodeBudget>,
    /// Tokens of a planted layer.
    #[arg(long, default_value_t = 16384, value_parser = count())]
    pub(super) entries: u32,
    /// Tokens of planted layers, separated by commas, in place of --entries. Each has a store of its own.
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["file", "entries"], value_parser = count())]
    pub(super) lengths: Vec<u32>,
    /// Sequences that one read serves, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = between(1, 64))]
    pub(super) batch: Vec<u32>,
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
    /// Tokens of a group, of methods that name no other.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 128))]
    pub(in crate::cluster) group: u16,
    /// Most bytes between two blocks or pages that one request reads, or `auto`: as the engine estimates the device. 0
    /// makes requests depend on the arguments alone.
    #[arg(long, default_value = "0")]
    pub(in crate::cluster) gap_limit: GapLimit,
    /// Least milliseconds of a turn, in which one side repeats its steps. Without it, a turn has every step once, and
    /// at least 250 ms under a limit.
    #[arg(long, value_parser = between(0, 60_000))]
    pub(super) turn_ms: Option<u32>,
    /// Measured steps. Of a file, these are its last queries.
    #[arg(long, default_value_t = 16, value_parser = between(1, 10_000))]
    pub(super) steps: u32,
    /// Queries of the profile of methods that need one, and of the codes of `tck:64`. They precede the steps.
    #[arg(long, default_value_t = 128, value_parser = between(1, 4096))]
    pub(super) queries: u32,
}

impl ClusterDecodeArgs {
    /// Returns the limits to measure under, each with its name. The limits of directories that are given are not known.
    pub(super) fn conditions(&self) -> Vec<DeviceCondition> {
        let name =
            |profile: DeviceProfile| profile.to_possible_value().map_or_else(String::new, |v| v.get_name().into());
        if self.profiles.is_empty() {
            let limits = self.limits.limits();
            let own = match (self.directories.is_empty(), limits == DeviceLimits::NONE) {
                (false, _) => "given",
                (true, true) => "plain",
                (true, false) => "limited",
            };
            return vec![DeviceCondition { name: self.limits.profile.map_or_else(|| own.into(), name), limits }];
        }
        self.profiles.iter().map(|own| DeviceCondition { name: name(*own), limits: own.limits() }).collect()
    }

    /// Returns the largest batch.
    pub(super) fn largest_batch(&self) -> usize {
        self.batch.iter().copied().max().unwrap_or(1) as usize
    }

    /// Returns the tokens of the groups of a method.
    pub(super) fn group_of(&self, method: &DecodeMethod) -> u16 {
        method.group.unwrap_or(self.group)
    }

    /// Returns the group sizes of all methods, each once.
    pub(super) fn groups(&self) -> BTreeSet<u16> {
        self.methods.iter().map(|own| self.group_of(own)).collect()
    }
}

/// The limits that a store is measured under.
#[derive(Clone, Debug)]
pub(super) struct DeviceCondition {
    pub(super) name: String,
    pub(super) limits: DeviceLimits,
}

/// Where the entries of a method of clusters come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecodePlace {
    /// The groups of the sequence.
    Groups,
    /// The pages of its stored clusters.
    Pages,
}

/// A method on the command line, with the tokens of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodeMethod {
    pub(in crate::cluster) spec: MethodSpec,
    pub(in crate::cluster) group: Option<u16>,
}

impl DecodeMethod {
    /// Returns whether the method has clusters, which can be stored.
    pub(in crate::cluster) fn has_clusters(&self) -> bool {
        self.spec.sharing().is_some()
    }
}

impl FromStr for DecodeMethod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, group) = match text.split_once('@') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let parse = |own: &str| own.parse().ok().filter(|own| (1..=128).contains(own));
        let group = group.map(|own| parse(own).ok_or_else(|| format!("{text:?}: groups have 1 to 128 tokens")));
        Ok(Self { spec: registered(name).map_err(|e| e.to_string())?, group: group.transpose()? })
    }
}

/// The longest gap that a request covers; none for as long as the engine estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GapLimit(pub(in crate::cluster) Option<ByteSize>);

impl FromStr for GapLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" { Ok(Self(None)) } else { size(text).map(|own| Self(Some(own))) }
    }
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

    #[test]
    fn methods_may_name_the_tokens_of_their_groups() {
        let parse = |text: &str| text.parse::<DecodeMethod>();
        let (plain, own) = (parse("tck:64").unwrap(), parse("tck:64@16").unwrap());
        assert_eq!((plain.group, own.group, plain.spec == own.spec), (None, Some(16), true));
        assert!(!own.has_clusters() && parse("swarm:8:members@1").unwrap().has_clusters());
        for wrong in ["tck:64@0", "tck:64@129", "tck:64@", "tck:64@x"] {
            assert!(parse(wrong).unwrap_err().contains("1 to 128"), "{wrong}");
        }
        assert!(parse("best@8").unwrap_err().contains("unknown name"));
    }

    #[test]
    fn gaps_are_limited_by_bytes_or_by_the_engine() {
        assert_eq!(("auto".parse(), "8KiB".parse()), (Ok(GapLimit(None)), Ok(GapLimit(Some(ByteSize(8192))))));
        assert!("much".parse::<GapLimit>().is_err());
    }
}
