//! The options of `kvrun recall`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use stratakv::Durability;

use super::{CacheArgs, ProfileSourceArgs, model_or_default, with_policies};
use crate::kv::backend::KvOptions;
use crate::recall::ModeArgs;
use crate::text::beside;

pub(super) const RECALL_EXAMPLES: &str = "Examples:
  # the built-in model and prompts, all tasks and contexts
  kvrun recall
  # two tasks at one context under another policy, as JSON
  kvrun recall --policy window --contexts 1024 --tasks S,MK --limit 5 --json
  # long decoding: 256 tokens by prefill, all others as decode steps with full attention
  kvrun recall --prefill 256 --contexts 1024
  # a change of distribution: a haystack of task S before those of MK and MKD
  kvrun recall --shift --contexts 1024
  kvrun recall --shift=1024 --contexts 2048 --memory-limit 32MiB
  # a document that is asked many times: 16 questions about each haystack, each from a fork
  kvrun recall --questions 16 --contexts 1024 --limit 2 --json
  # clusters of tokens that calibration questions attend to together, with the first layer dense
  kvrun recall --policy swarm --dense-layers 1 --questions 16 --profile questions:8 --memory-limit 64MiB
  # keys and values on two SSDs, selected by low-rank keys
  kvrun recall --policy kvswap --sigma 8 --adapters adapters --device /mnt/a/kv --device /mnt/b/kv";

/// Prompts per task and context of a plain `kvrun recall`: 300 prompts together.
pub const RECALL_PROMPTS: u32 = 20;

/// The limit of the store's memory in a plain `kvrun recall`. A prompt of 4096 tokens has 8 MiB of keys and values,
/// and 2 MiB of bounds.
pub const RECALL_MEMORY_LIMIT: u64 = 16 << 20;

/// The options of `kvrun recall`.
#[derive(Debug, Args)]
#[command(after_help = with_policies(RECALL_EXAMPLES))]
pub struct RecallArgs {
    /// Options of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Context lengths
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [1024, 2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks [default: all]
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = RECALL_PROMPTS, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// Prompt file, as JSON lines, plain or gzip [default: prompts.jsonl.gz in the model directory]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// How prompts are run.
    #[command(flatten)]
    pub modes: ModeArgs,
    /// The queries that clusters are made of.
    #[command(flatten)]
    pub profile: ProfileSourceArgs,
    /// Leave the sequences in the store
    #[arg(long, requires = "devices")]
    pub keep: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Model directory or GGUF file [default: recall-tiny of this source tree]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
}

impl RecallArgs {
    /// Returns the options of the store. Sequences that are deleted at the end need no durable commit.
    ///
    /// # Errors
    /// Fails as [`CacheArgs::options`] does.
    pub fn backend_options(&self) -> Result<KvOptions> {
        let durability = if self.keep { Durability::Sync } else { Durability::Lazy };
        let options = self.cache.options(durability, None)?;
        let memory_limit = options.memory_limit.or(Some(RECALL_MEMORY_LIMIT));
        Ok(KvOptions { memory_limit, profile_queries: self.profile.source.newest(), ..options })
    }

    /// Returns the model directory.
    #[must_use]
    pub fn model_dir(&self) -> PathBuf {
        model_or_default(self.model.as_deref())
    }

    /// Returns the prompt file.
    #[must_use]
    pub fn prompt_file(&self) -> PathBuf {
        self.prompts.clone().unwrap_or_else(|| beside(&self.model_dir(), "prompts.jsonl.gz"))
    }
}
