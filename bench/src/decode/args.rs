//! Arguments of `kvbench decode`.

use crate::devices::ReadLimitArgs;
use crate::support::args::{CommonArgs, between, between_u16, share, size};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::str::FromStr;
use stratakv::ByteSize;
use stratakv::layout::PlaneCodec;
use stratakv::options::CachePolicy;

/// Arguments of `kvbench decode`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples: kvbench decode --device /nvme0 --read-bps 250M --policy none,lru --pipeline off,on --json
          kvbench decode --device /nvme0 --profile ufs4 --policy none,lru --json
          kvbench decode --device /nvme0 --policy none --codec int4 --codec-share auto --json

Each context and compute time is measured for every policy with every setting of --pipeline. `speedup` is the step time
of the first combination over each one's. With --profile, --read-bps or --read-iops the store is on a disk of that
speed, which kvbench makes of a file (root only). The limits are set after the store is written.

--codec-share auto chooses how many layers to store under the codec (theta in LeoAM):
1. kvbench writes the store without a codec, then with every layer under it.
2. It reads each store by a few steps that do not compute.
3. From their times, the speed of the codec and --layer-compute-us it solves for the share. This is the fewest
   layers under the codec with which a step is as fast as with the best number of them, if reads run one layer ahead.
4. It writes the store again with that many layers under the codec.
The result holds `share` and the values it was solved from (`share_...`). They differ by policy and compute time."
)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Tokens of each sequence, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "32768", value_parser = between(64, 1 << 24))]
    pub(crate) context: Vec<u32>,
    /// Sequences.
    #[arg(long, default_value_t = 8, value_parser = between(1, 64))]
    pub(crate) batch: u32,
    /// Layers.
    #[arg(long, default_value_t = 32, value_parser = between_u16(1, 128))]
    pub(crate) layers: u16,
    /// Tokens of a group.
    #[arg(long, default_value_t = 8, value_parser = between_u16(1, 128))]
    pub(crate) group: u16,
    /// Codec of the stored groups.
    #[arg(long, value_enum, default_value = "raw")]
    pub(crate) codec: DecodeCodec,
    /// Share of the layers that are stored under the codec. `auto` measures and solves for it, which needs a codec and
    /// --pipeline on.
    #[arg(long, value_name = "SHARE|auto", default_value = "1", value_parser = codec_share)]
    pub(crate) codec_share: CodecShare,
    /// Tokens selected per layer and sequence.
    #[arg(long, default_value_t = 400)]
    pub(crate) budget: u32,
    /// Replacement policies of the cache of resident blocks, separated by commas: `none` or names of the engine.
    #[arg(long, value_name = "POLICY", value_delimiter = ',', default_value = "none,lru")]
    pub(crate) policy: Vec<DecodePolicy>,
    /// Settings of prefetching for the next layer, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "on")]
    pub(crate) pipeline: Vec<Ahead>,
    /// Share of a step's selection that the next step keeps.
    #[arg(long, default_value_t = 0.78, value_parser = share)]
    pub(crate) overlap: f64,
    /// Share of a layer's selection that its prediction names. The rest is read on demand. KVSwap attends to the
    /// predicted groups themselves, which corresponds to 1.
    #[arg(long, default_value_t = 1.0, value_parser = share)]
    pub(crate) recall: f64,
    /// Methods, separated by commas. Each step scores every token of every sequence and layer. `kvbench select` lists
    /// the names; `:raw` asks for raw scores and `none` for no scoring. The trace decides what is read either way.
    #[arg(long, value_name = "METHOD", value_delimiter = ',', default_value = "none")]
    pub(crate) select: Vec<String>,
    /// Threads that score while the step waits, each a part of the sequences. Beside other work one thread scores.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) select_threads: u8,
    /// Microseconds that a layer computes for the whole batch, attention included, separated by commas. The time that
    /// attention leaves of it passes as if it were computed elsewhere.
    #[arg(long, value_delimiter = ',', default_value = "5000")]
    pub(crate) layer_compute_us: Vec<u64>,
    /// MiB of the cache for all sequences. `auto` is 1.25 times what a step selects.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = cache_mib)]
    pub(crate) cache_mib: CacheMib,
    #[command(flatten)]
    pub(crate) limits: ReadLimitArgs,
    /// Steps that are measured, after those that fill the caches.
    #[arg(long, default_value_t = 8, value_parser = between(1, 10_000))]
    pub(crate) steps: u32,
    /// Most bytes of keys and values on the device. Longer contexts select from the part that is stored.
    #[arg(long, default_value = "8GiB", value_parser = size)]
    pub(crate) stored: ByteSize,
    /// Seed of the selections.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// A setting of prefetching. Each layer prefetches for the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ahead {
    /// Nothing
    Off,
    /// The predicted selection of its query (--recall)
    On,
    /// The selection of the last step (--overlap), as a virtual cache of two layers
    Last,
}

/// A cache size in MiB; none stands for `auto`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheMib(pub(crate) Option<u64>);

/// The share of layers under a codec: given, or solved for from measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CodecShare {
    Given(f64),
    Auto,
}

/// A codec on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecodeCodec {
    Raw,
    Int8,
    Int4,
}

impl From<DecodeCodec> for PlaneCodec {
    fn from(codec: DecodeCodec) -> Self {
        match codec {
            DecodeCodec::Raw => Self::Raw,
            DecodeCodec::Int8 => Self::Int8,
            DecodeCodec::Int4 => Self::Int4,
        }
    }
}

/// A replacement policy of the cache, or none for no cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodePolicy(pub(crate) Option<CachePolicy>);

impl DecodePolicy {
    /// Returns the name that results use.
    pub(crate) fn name(self) -> String {
        self.0.map_or_else(|| "none".to_owned(), |policy| policy.to_string())
    }
}

impl FromStr for DecodePolicy {
    type Err = stratakv::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|policy| Self(Some(policy))) }
    }
}

fn codec_share(text: &str) -> Result<CodecShare, String> {
    if text == "auto" { Ok(CodecShare::Auto) } else { share(text).map(CodecShare::Given) }
}

fn cache_mib(text: &str) -> Result<CacheMib, String> {
    match text {
        "auto" => Ok(CacheMib(None)),
        _ => text.parse().map(|mib| CacheMib(Some(mib))).map_err(|_| format!("{text:?} is neither MiB nor auto")),
    }
}
