//! Arguments of `kvbench codec`.

use crate::support::args::{CommonArgs, between, between_u16, size};
use clap::Args;
use std::path::PathBuf;
use stratakv::ByteSize;

/// Arguments of `kvbench codec`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench codec --kv tests/fixtures/recall-tiny/reference.safetensors --json

Results of lossy codecs include their errors. A plane that a codec cannot make 5 % smaller stays raw and counts as raw.
For the share to compress, the clock emulates the reads. Decoding is real.")]
pub(crate) struct CodecArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Keys and values: a safetensors file with f32 tensors `k_*` and `v_*` of `[kv_heads, tokens, head_dim]`.
    #[arg(long, value_name = "FILE")]
    pub(crate) kv: PathBuf,
    /// Tokens of a group, separated by commas. The share to compress is solved for the first.
    #[arg(long, value_delimiter = ',', default_value = "8,16,64", value_parser = between_u16(1, 128))]
    pub(crate) group: Vec<u16>,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) seconds: f64,
    /// Bytes per second to solve the share to compress for, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "250M,500M,1G,2G,4G", value_parser = size)]
    pub(crate) bandwidth: Vec<ByteSize>,
    /// Bytes of keys and values that a layer reads.
    #[arg(long, default_value = "4MiB", value_parser = size)]
    pub(crate) layer_bytes: ByteSize,
    /// Microseconds that a layer computes, emulated by the clock.
    #[arg(long, default_value_t = 2000)]
    pub(crate) compute_us: u64,
    /// Layers of each point of the sweep in each of `--rounds`. The time is the median of all but the first of each.
    #[arg(long, default_value_t = 12, value_parser = between(2, 1000))]
    pub(crate) layers: u32,
}
