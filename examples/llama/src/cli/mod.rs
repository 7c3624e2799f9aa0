//! The command line of `kvrun`. Each subcommand's `--help` ends with examples.
//!
//! The options of policies are in [`crate::kv::method`], which parses everything that names a policy.

mod cache;
mod calibrate;
mod chat;
mod clusters;
mod compare;
mod convert;
mod generate;
mod parse;
mod recall;
mod storage;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};
use stratakv::layout::PlaneCodec;
use stratakv::options::CachePolicy;
use stratakv::{Durability, SummaryResidency};

use crate::budget::Budget;
use crate::kv::backend::KvOptions;
use crate::kv::method::{Policy, policies_help};
use crate::kv::recorded::PROFILE_QUERIES;

pub use cache::{CacheArgs, Codec, SummaryPlace, Switch};
pub use calibrate::CalibrateArgs;
pub use chat::{ChatArgs, SamplerArgs};
pub use clusters::{ClusterArgs, ProfileArgs};
pub use compare::CompareArgs;
pub use convert::ConvertArgs;
pub use generate::GenerateArgs;
pub use recall::{RECALL_MEMORY_LIMIT, RECALL_PROMPTS, RecallArgs};
pub use storage::{ProfileSourceArgs, StorageArgs};

const EXAMPLES: &str = "Examples:
  kvrun recall
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Once upon a time' --max-tokens 64
  kvrun compare --contexts 1024 --limit 1
  kvrun calibrate --out adapters

Each command has examples of its own: kvrun recall --help";

/// Returns the list of policies, followed by examples.
fn with_policies(examples: &str) -> String {
    format!("{}\n{examples}", policies_help())
}

/// A small runtime for Llama-family models whose KV cache is a stratakv store.
#[derive(Debug, Parser)]
#[command(name = "kvrun", version, about, after_help = EXAMPLES)]
pub struct Cli {
    /// Threads of prefill and of matrix products [default: as many as cores]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer recall prompts and compare the answers with full attention in memory
    Recall(RecallArgs),
    /// Fit adapters and codebooks to a model on calibration prompts
    Calibrate(CalibrateArgs),
    /// Compare retrieval methods on the same stored bytes
    Compare(CompareArgs),
    /// Record which tokens the queries of one prompt attend to, and its keys, in a file for other tools
    Profile(ProfileArgs),
    /// Build clusters of a stored session, and show their number, sizes and memory
    Cluster(ClusterArgs),
    /// Continue a text, or a session that an earlier run left in the store
    Generate(GenerateArgs),
    /// Chat with a model in a session that stays in the store
    Chat(ChatArgs),
    /// Make a GGUF file from a model directory, or with random weights
    Convert(ConvertArgs),
}

/// Returns options of a store without a policy of its own.
fn plain_options(group_tokens: usize, devices: &[PathBuf]) -> KvOptions {
    KvOptions {
        policy: Policy::Full,
        store_clusters: false,
        adapters: None,
        dense_layers: 0,
        cache_mib: 0,
        cache_policy: CachePolicy::COST_EFFECTIVE,
        summaries: SummaryResidency::Resident,
        budget: Budget::Tokens(1),
        group_tokens,
        codec: PlaneCodec::Raw,
        devices: devices.to_vec(),
        memory_limit: None,
        read_ahead: false,
        durability: Durability::Lazy,
        profile_queries: PROFILE_QUERIES,
        read_only: false,
        calibrate: false,
    }
}

/// Returns the given model directory, or recall-tiny of this source tree.
#[must_use]
pub fn model_or_default(model: Option<&Path>) -> PathBuf {
    model.map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny"),
        Path::to_path_buf,
    )
}
