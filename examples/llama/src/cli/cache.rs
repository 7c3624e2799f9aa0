//! The options of the KV cache, which `recall`, `generate` and `chat` share.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use stratakv::layout::PlaneCodec;
use stratakv::options::CachePolicy;
use stratakv::{Durability, StoreOptions, SummaryResidency};

use super::StorageArgs;
use crate::budget::Budget;
use crate::kv::backend::KvOptions;
use crate::kv::method::{Policy, PolicyArgs};
use crate::kv::recorded::PROFILE_QUERIES;

/// A switch that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On
    On,
    /// Off
    Off,
}

/// Options of the KV cache.
#[derive(Clone, Debug, Args)]
pub struct CacheArgs {
    /// Options of the policy.
    #[command(flatten)]
    pub policy: PolicyArgs,
    /// Attended tokens per step: a share of the context (1/13), a number (400t), or a share with a floor (1/13:512t);
    /// `full` ignores it [default: 1/13:512t for text, 1/13 for recall prompts]
    #[arg(long, value_name = "SHARE|Nt|SHARE:Nt")]
    pub budget: Option<Budget>,
    /// Number of first layers that attend to everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dense_layers: u32,
    /// MiB of memory that cache blocks, as part of the memory limit [default: a quarter of the limit for text, 0 for
    /// recall prompts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub cache_mib: Option<u32>,
    /// Policy of the cache. `cost` evicts blocks last that every step asks for (LeoAM's table of frequencies)
    #[arg(long, value_name = "POLICY", default_value_t = CachePolicy::COST_EFFECTIVE)]
    pub cache_policy: CachePolicy,
    /// Store keys and values once more in the order of the policy's clusters: after the prompt, and at the end of a
    /// session. Steps then read fewer and longer stretches. It needs a policy with clusters, such as dynakv:16
    #[arg(long)]
    pub store_clusters: bool,
    /// Where the bounds of keys are: in memory, or on disk, where each selection reads them
    #[arg(long, value_enum, default_value_t = SummaryPlace::Auto)]
    pub summaries: SummaryPlace,
    /// How the store keeps the sequence.
    #[command(flatten)]
    pub storage: StorageArgs,
    /// Directory on an SSD for keys and values; repeat it for several SSDs [default: a temporary directory]
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Prefetch what predicted queries of the next layer select; it changes no answer
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub pipeline: Switch,
}

/// The values of `--summaries`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SummaryPlace {
    /// In memory what the policy selects by, and on disk the bounds that it does not need
    Auto,
    /// In memory
    Resident,
    /// On disk
    Streamed,
}

impl SummaryPlace {
    /// Returns the residency for a policy.
    fn residency(self, policy: Policy) -> SummaryResidency {
        match self {
            Self::Auto if policy.uses_stored_bounds() => SummaryResidency::Resident,
            Self::Auto => SummaryResidency::BoundsStreamed,
            Self::Resident => SummaryResidency::Resident,
            Self::Streamed => SummaryResidency::Streamed,
        }
    }
}

/// The values of `--codec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Codec {
    /// Unchanged
    Raw,
    /// 256 levels over the range of a channel or of a token
    Int8,
    /// 16 levels
    Int4,
}

impl From<Codec> for PlaneCodec {
    fn from(codec: Codec) -> Self {
        match codec {
            Codec::Raw => Self::Raw,
            Codec::Int8 => Self::Int8,
            Codec::Int4 => Self::Int4,
        }
    }
}

impl CacheArgs {
    /// Returns the options of the run's store. `key_dimensions` is as for [`PolicyArgs::policy`].
    ///
    /// # Errors
    /// Fails as [`PolicyArgs::policy`] does.
    pub fn options(&self, durability: Durability, key_dimensions: Option<usize>) -> Result<KvOptions> {
        let policy = self.policy.policy(key_dimensions)?;
        ensure!(
            !self.store_clusters || policy.has_clusters(),
            "--store-clusters needs a policy that chooses by clusters, such as dynakv:16; {policy} \
             has none"
        );
        Ok(KvOptions {
            policy,
            store_clusters: self.store_clusters,
            calibrate: key_dimensions.is_some(),
            adapters: self.storage.adapters.clone(),
            dense_layers: self.dense_layers as usize,
            cache_mib: self.cache_mib.map_or_else(|| self.default_cache(key_dimensions), u64::from),
            cache_policy: self.cache_policy,
            summaries: self.summaries.residency(policy),
            budget: self.budget.unwrap_or(if key_dimensions.is_some() { Budget::TEXT } else { Budget::RECALL }),
            group_tokens: self.storage.groups(key_dimensions),
            codec: self.storage.codec.into(),
            devices: self.devices.clone(),
            memory_limit: self.storage.memory_limit,
            read_ahead: self.pipeline == Switch::On,
            durability,
            profile_queries: PROFILE_QUERIES,
            read_only: false,
        })
    }

    /// Returns the MiB that cache blocks unless the command line says it: a quarter of the memory limit for text. A
    /// step selects most of what the last one did. Recall prompts are asked once, and their reports count reads.
    fn default_cache(&self, key_dimensions: Option<usize>) -> u64 {
        let limit = self.storage.memory_limit.unwrap_or(StoreOptions::DEFAULT_MEMORY_LIMIT.bytes());
        // Whole multiples of 2 MiB hold blocks.
        if key_dimensions.is_some() { (limit / 4) >> 21 << 1 } else { 0 }
    }
}
