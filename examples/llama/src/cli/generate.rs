//! The options of `kvrun generate`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use stratakv::Durability;

use super::{CacheArgs, SamplerArgs, with_policies};
use crate::kv::backend::KvOptions;

pub(super) const GENERATE_EXAMPLES: &str = "Examples:
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Once upon a time' --max-tokens 64
  # a GGUF file, on four threads
  kvrun --threads 4 generate --model qwen2.5-1.5b-q4_k_m.gguf --prompt 'Once upon a time' --max-tokens 64
  # a session stays in the store: the same command continues it after a restart or a kill
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt-file book.txt --max-tokens 99 --session s --device /mnt/ssd/kv
  # a chat: another prompt in the same session is the next turn
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Why?' --max-tokens 99 --session s --device /mnt/ssd/kv";

/// The options of `kvrun generate`.
#[derive(Debug, Args)]
#[command(after_help = with_policies(GENERATE_EXAMPLES))]
#[command(group = clap::ArgGroup::new("input").required(false).multiple(false))]
pub struct GenerateArgs {
    /// Model directory or GGUF file
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", group = "input")]
    pub prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_file: Option<PathBuf>,
    /// File with token ids to continue: numbers separated by blanks, or a JSON array
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_ids: Option<PathBuf>,
    /// Tokens to generate for this prompt, including tokens of an interrupted run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// Options of random draws.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Name of the sequence in the store; a later run with this name continues it without another prefill
    #[arg(long, value_name = "NAME", requires = "devices")]
    pub session: Option<String>,
    /// Options of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Print JSON instead of the text
    #[arg(long)]
    pub json: bool,
}

impl GenerateArgs {
    /// Returns the options of the store, for a model with this number of joint key dimensions.
    ///
    /// # Errors
    /// Fails as [`CacheArgs::options`] does.
    pub fn backend_options(&self, key_dimensions: usize) -> Result<KvOptions> {
        let durability = if self.session.is_some() { Durability::Sync } else { Durability::Lazy };
        self.cache.options(durability, Some(key_dimensions))
    }
}
