//! The options of `kvrun calibrate`.

use std::path::PathBuf;

use clap::Args;
use stratakv::Durability;

use super::plain_options;
use crate::kv::KvDType;
use crate::kv::backend::KvOptions;

pub(super) const CALIBRATE_EXAMPLES: &str = "Examples:
  # adapters as files, for --adapters of the other commands
  kvrun calibrate --out adapters
  # one low-rank adapter and one codebook, stored in a store
  kvrun calibrate --sigmas 8 --bits 64 --device /mnt/ssd/kv";

/// The options of `kvrun calibrate`.
#[derive(Debug, Args)]
#[command(after_help = CALIBRATE_EXAMPLES)]
pub struct CalibrateArgs {
    /// Model directory or GGUF file [default: recall-tiny of this source tree]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Calibration prompts, as JSON lines, plain or gzip [default: calibration.jsonl.gz in the model directory]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Context lengths
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks [default: all]
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// Rank ratios of low-rank adapters: joint key dimensions over the rank, KVSwap's sigma
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [8, 16, 32])]
    pub sigmas: Vec<usize>,
    /// Bits per token and layer of codebooks
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [16, 32, 64, 128])]
    pub bits: Vec<usize>,
    /// Element type of stored keys
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// Directory to write adapters to, as safetensors
    #[arg(long, value_name = "DIR", required_unless_present = "devices")]
    pub out: Option<PathBuf>,
    /// Directory of a store to put adapters into; repeat it for several SSDs
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Tokens per group of the sequences in that store
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: u32,
}

impl CalibrateArgs {
    /// Returns the options of the store that receives the adapters.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        KvOptions { durability: Durability::Sync, ..plain_options(self.group_tokens as usize, &self.devices) }
    }
}
