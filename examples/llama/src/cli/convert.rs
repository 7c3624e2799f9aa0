//! The arguments of `kvrun convert`.

use std::path::PathBuf;

use candle_core::quantized::GgmlDType;
use clap::Args;

use crate::convert::parse_kind;

pub(super) const CONVERT_EXAMPLES: &str = "Examples:
  # a model directory as a GGUF file
  kvrun convert --model ~/models/Qwen2.5-0.5B --type q8_0 --out qwen.gguf
  # random weights with the geometry of a real model, for measurements
  kvrun convert --random llama-3.2-1b --type q4_k --out random.gguf";

/// The options of `kvrun convert`.
#[derive(Debug, Args)]
#[command(after_help = CONVERT_EXAMPLES)]
#[command(group = clap::ArgGroup::new("weights").required(true).multiple(false))]
pub struct ConvertArgs {
    /// Model directory
    #[arg(long, value_name = "DIR", group = "weights")]
    pub model: Option<PathBuf>,
    /// Random weights with this geometry: tiny, qwen2.5-1.5b, llama-3.2-1b, llama-3.2-3b, qwen3-4b or mistral-7b
    #[arg(long, value_name = "NAME", group = "weights")]
    pub random: Option<String>,
    /// Layers of random weights, instead of those of the geometry
    #[arg(long, value_name = "N", requires = "random", value_parser = clap::value_parser!(u32).range(1..))]
    pub layers: Option<u32>,
    /// Seed of random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Element type of matrices: f32, f16, bf16, q4_0, q5_0, q8_0, q2_k, q3_k, q4_k, q5_k or q6_k
    #[arg(long = "type", value_name = "TYPE", default_value = "q8_0", value_parser = parse_kind)]
    pub kind: GgmlDType,
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}
