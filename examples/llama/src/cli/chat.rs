//! The arguments of `kvrun chat`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use stratakv::Durability;

use super::{CacheArgs, with_policies};
use crate::kv::backend::KvOptions;
use crate::sampler::SamplerState;

pub(super) const CHAT_EXAMPLES: &str = "Examples:
  # a chat that goes on after a restart: run the same command again
  kvrun chat --model ~/models/qwen2.5-1.5b-q4_k_m.gguf --device /mnt/ssd/kv
  # another session in the same store, with a system message and random draws
  kvrun chat --model qwen.gguf --device /mnt/ssd/kv --session work --system 'Answer briefly.' --temperature 0.7";

/// The options of random draws.
#[derive(Clone, Debug, Args)]
pub struct SamplerArgs {
    /// Temperature of the random draws; 0 takes the most likely token
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Draw from the smallest set of tokens with this probability
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Seed of the random draws
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl SamplerArgs {
    /// Returns the sampler, or `None` if no option asks for one.
    ///
    /// # Errors
    /// Fails if a number is out of range.
    pub fn sampler(&self) -> Result<Option<SamplerState>> {
        if self.temperature.is_none() && self.top_p.is_none() && self.seed.is_none() {
            return Ok(None);
        }
        // A nucleus or a seed without a temperature means random draws at temperature 1.
        let temperature = self.temperature.unwrap_or(1.0);
        SamplerState::new(temperature, self.top_p.unwrap_or(1.0), self.seed.unwrap_or(0)).map(Some)
    }
}

/// The options of `kvrun chat`.
#[derive(Debug, Args)]
#[command(after_help = with_policies(CHAT_EXAMPLES))]
pub struct ChatArgs {
    /// Model directory or GGUF file
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Name of the session in the store
    #[arg(long, value_name = "NAME", default_value = "chat")]
    pub session: String,
    /// Message of the system, at the beginning of a new session
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// Options of random draws.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Options of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
}

impl ChatArgs {
    /// Returns the options of the store, for a model with this number of joint key dimensions.
    ///
    /// # Errors
    /// Fails without a device, and as [`CacheArgs::options`] does.
    pub fn backend_options(&self, key_dimensions: usize) -> Result<KvOptions> {
        ensure!(!self.cache.devices.is_empty(), "a chat stays in a store; give its directory with --device");
        self.cache.options(Durability::Sync, Some(key_dimensions))
    }
}
