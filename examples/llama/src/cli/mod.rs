//! The command line of `kvrun`. Each subcommand's `--help` ends with examples.
//!
//! The options of policies are in [`crate::kv::method`], which parses everything that names a policy.

mod chat;
mod clusters;
mod convert;
mod storage;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use stratakv::layout::PlaneCodec;
use stratakv::options::CachePolicy;
use stratakv::{Durability, StoreOptions, SummaryResidency};

use crate::budget::Budget;
use crate::kv::KvDType;
use crate::kv::backend::KvOptions;
use crate::kv::method::{DEFAULT_POLICIES, Policy, PolicyArgs, parse_compared, policies_help};
use crate::kv::recorded::PROFILE_QUERIES;
use crate::recall::ModeArgs;
use crate::text::beside;

pub use chat::{ChatArgs, SamplerArgs};
pub use clusters::{ClusterArgs, ProfileArgs};
pub use convert::ConvertArgs;
pub use storage::{ProfileSourceArgs, StorageArgs};

const EXAMPLES: &str = "Examples:
  kvrun recall
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Once upon a time' --max-tokens 64
  kvrun compare --contexts 1024 --limit 1
  kvrun calibrate --out adapters

Each command has examples of its own: kvrun recall --help";

const RECALL_EXAMPLES: &str = "Examples:
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

const CALIBRATE_EXAMPLES: &str = "Examples:
  # adapters as files, for --adapters of the other commands
  kvrun calibrate --out adapters
  # one low-rank adapter and one codebook, stored in a store
  kvrun calibrate --sigmas 8 --bits 64 --device /mnt/ssd/kv";

const COMPARE_EXAMPLES: &str = "Examples:
  # methods that need no adapter, one prompt per task
  kvrun compare --methods window,minmax:raw,signs --contexts 1024 --limit 1
  # a number after the name is the method's parameter; raw and group choose the score
  kvrun compare --methods kvswap:8,kvswap:8:raw,tck:64:group --adapters adapters --out results
  # clusters that are made of the queries of 64 generated tokens
  kvrun compare --methods swarm:8,infllm --profile decode:64 --contexts 1024 --out decode
  # put the results of two runs together, and compare two methods prompt by prompt
  kvrun compare --merge results,more-results --pairs kvswap:8-tck:64";

const GENERATE_EXAMPLES: &str = "Examples:
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Once upon a time' --max-tokens 64
  # a GGUF file, on four threads
  kvrun --threads 4 generate --model qwen2.5-1.5b-q4_k_m.gguf --prompt 'Once upon a time' --max-tokens 64
  # a session stays in the store: the same command continues it after a restart or a kill
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt-file book.txt --max-tokens 99 --session s --device /mnt/ssd/kv
  # a chat: another prompt in the same session is the next turn
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Why?' --max-tokens 99 --session s --device /mnt/ssd/kv";

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
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

/// The options of `kvrun compare`.
#[derive(Debug, Args)]
#[command(after_help = with_policies(COMPARE_EXAMPLES))]
pub struct CompareArgs {
    /// Model directory or GGUF file [default: recall-tiny of this source tree]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Prompt file, as JSON lines, plain or gzip [default: prompts.jsonl.gz in the model directory]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Context lengths
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [1024, 2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks [default: all]
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// How prompts are run.
    #[command(flatten)]
    pub modes: ModeArgs,
    /// The queries that clusters are made of.
    #[command(flatten)]
    pub profile: ProfileSourceArgs,
    /// Policies, listed below; a policy without raw or group takes the softmax
    #[arg(long, value_name = "P,P", value_delimiter = ',', value_parser = parse_compared)]
    #[arg(default_value = DEFAULT_POLICIES)]
    pub methods: Vec<Policy>,
    /// Budgets of attended tokens
    #[arg(long, value_delimiter = ',', value_name = "B,B", default_value = "1/34,1/13,400t")]
    pub budgets: Vec<Budget>,
    /// Tokens per group
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: u32,
    /// Number of first layers that attend to everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dense_layers: u32,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// Directory of adapters that kvrun calibrate made [default: the adapters in the store]
    #[arg(long, value_name = "DIR")]
    pub adapters: Option<PathBuf>,
    /// Also measure attention mass and output error, by full attention on the same queries
    #[arg(long)]
    pub probe: bool,
    /// Directory on an SSD; repeat it for several SSDs [default: a temporary directory]
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Limit of the store's memory, including the summaries of all methods
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256MiB")]
    pub memory_limit: u64,
    /// Also print the difference of pairs of methods, `a-b,c-d`, per prompt with a 95 % interval
    #[arg(long, value_delimiter = ',', value_name = "A-B")]
    pub pairs: Vec<String>,
    /// Run nothing: merge what earlier runs wrote to these directories, each with other contexts, methods or budgets
    #[arg(long, value_delimiter = ',', value_name = "DIR,DIR")]
    pub merge: Vec<PathBuf>,
    /// Write compare.csv, prompts.csv and compare.svg to this directory
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

impl CompareArgs {
    /// Returns the options of the store. The comparison itself sets the policies.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        KvOptions { memory_limit: Some(self.memory_limit), ..plain_options(self.group_tokens as usize, &self.devices) }
    }
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

/// Prompts per task and context of a plain `kvrun recall`: 300 prompts together.
pub const RECALL_PROMPTS: u32 = 20;

/// The limit of the store's memory in a plain `kvrun recall`. A prompt of 4096 tokens has 8 MiB of keys and values,
/// and 2 MiB of bounds.
pub const RECALL_MEMORY_LIMIT: u64 = 16 << 20;

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

/// Parses a share above 0 and at most 1, such as `1/34` or `0.95`.
fn parse_share(text: &str) -> Result<f64> {
    let (above, below) = text.split_once('/').unwrap_or((text, "1"));
    let share = above.trim().parse::<f64>().ok().zip(below.trim().parse::<f64>().ok()).map(|(a, b)| a / b);
    let share = share.with_context(|| format!("{text:?} is not a share such as 1/34 or 0.95"))?;
    ensure!(share > 0.0 && share <= 1.0, "the share {text} must be above 0 and at most 1");
    Ok(share)
}

/// Parses a size such as `64MiB`, `64M`, `64MB` or `65536`. Units are powers of 1024, except `kB`, `MB` and `GB`.
fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => anyhow::bail!("{other:?} is not a unit of size; give bytes, or KiB, MiB, GiB"),
    };
    let number: u64 = digits.trim().parse().with_context(|| format!("{text:?} is not a size such as 64MiB"))?;
    ensure!(number > 0, "the size must be at least 1 byte");
    number.checked_mul(unit).with_context(|| format!("{text:?} does not fit into 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn error(args: &[&str]) -> String {
        Cli::try_parse_from(std::iter::once("kvrun").chain(args.iter().copied())).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["kvrun", "recall"]).unwrap();
        let Command::Recall(args) = cli.command else { panic!("not recall") };
        let options = args.backend_options().unwrap();
        assert_eq!((options.policy.to_string().as_str(), options.budget_name().as_str()), ("minmax:raw", "1/13"));
        assert_eq!((options.group_tokens, args.contexts.as_slice()), (4, [1024, 2048, 4096].as_slice()));
        assert!(args.prompt_file().is_file(), "{}", args.prompt_file().display());
        let budget = |line: &str| {
            let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
            args.backend_options(192).unwrap().budget_name()
        };
        assert_eq!(budget("kvrun generate --model m --prompt x --max-tokens 9"), "1/13:512t");
        assert_eq!(budget("kvrun generate --model m --prompt x --max-tokens 9 --budget 1/34"), "1/34");
        let cache = |options: &str| {
            let line = format!("kvrun generate --model m --prompt x --max-tokens 9{options}");
            let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
            args.backend_options(192).unwrap().cache_mib
        };
        for (options, mib) in
            [("", 128), (" --memory-limit 64MiB", 16), (" --memory-limit 7MiB", 0), (" --cache-mib 3", 3)]
        {
            assert_eq!(cache(options), mib, "{options:?}");
        }
        assert_eq!(options.cache_mib, 0, "recall counts reads");
        let groups = |options: &str, key_dimensions| {
            let line = format!("kvrun generate --model m --prompt x --max-tokens 9{options}");
            let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
            args.backend_options(key_dimensions).unwrap().group_tokens
        };
        for (options, key_dimensions, tokens) in [
            ("", 1024, 4),
            ("", 512, 4),
            ("", 192, 8),
            ("", 64, 16),
            ("", 16, 32),
            (" --dtype f32", 192, 4),
            (" --codec int8", 1024, 4),
            (" --codec int4", 512, 8),
            (" --group-tokens 2", 192, 2),
        ] {
            assert_eq!(groups(options, key_dimensions), tokens, "{options:?}, {key_dimensions}");
        }
    }

    /// Parses a command line whose quoted arguments may hold blanks.
    fn parses(line: &str) {
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        if let Err(error) = Cli::try_parse_from(words) {
            panic!("{line}: {error}");
        }
    }

    #[test]
    fn examples_of_every_help_parse() {
        let texts = [
            EXAMPLES,
            RECALL_EXAMPLES,
            CALIBRATE_EXAMPLES,
            COMPARE_EXAMPLES,
            clusters::PROFILE_EXAMPLES,
            clusters::CLUSTER_EXAMPLES,
            GENERATE_EXAMPLES,
            chat::CHAT_EXAMPLES,
            convert::CONVERT_EXAMPLES,
        ];
        let lines = texts.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix("  "));
        let commands: Vec<&str> = lines.filter(|line| !line.starts_with('#')).collect();
        assert_eq!(commands.len(), 33);
        commands.into_iter().for_each(parses);
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("kvrun {}", command.get_name())), "{}", command.get_name());
        }
    }

    #[test]
    fn commands_of_the_documents_parse() {
        let readme = [include_str!("../../README.md"), include_str!("../../CLUSTERS.md")].concat().replace("\\\n", " ");
        let commands = readme.lines().filter(|line| line.starts_with("kvrun "));
        let commands: Vec<&str> = commands.map(|line| line.split('#').next().unwrap_or_default()).collect();
        assert_eq!(commands.len(), 30);
        commands.into_iter().for_each(parses);
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        assert!(error(&["recall", "--budget", "0"]).contains("attends to no token"));
        assert!(error(&["recall", "--budget", "0t"]).contains("attends to no token"));
        assert!(error(&["recall", "--dtype", "int3"]).contains("bf16"));
        assert!(error(&["recall", "--prefill", "0"]).contains("1.."));
        for share in ["0", "2", "a", "1/0", "nan"] {
            assert!(error(&["profile", "--out", "x", "--share", share]).contains("share"), "{share}");
        }
        for queries in ["last:0", "last:", "last:x", "all"] {
            assert!(error(&["profile", "--out", "x", "--queries", queries]).contains("give last:N"), "{queries}");
        }
        assert!(error(&["profile"]).contains("--out"));
        for profile in ["last:0", "last:", "decode", "decode:x", "questions:0", "all"] {
            for command in ["recall", "compare"] {
                assert!(error(&[command, "--profile", profile]).contains("questions:N with N from 1 on"), "{profile}");
            }
        }
        let cluster = ["cluster", "--model", "x", "--session", "s", "--device", "d"];
        for method in ["tck:64", "pqcache", "tokens", "full", "window", "swarm:0", "best", ""] {
            assert!(error(&[&cluster[..], &["--methods", method]].concat()).contains("methods"), "{method}");
        }
        assert!(error(&cluster[..5]).contains("--device"));
        assert!(error(&["recall", "--keep"]).contains("--device"));
        assert!(error(&["recall", "--memory-limit", "5 parsecs"]).contains("parsecs"));
        assert!(error(&["generate", "--model", "x", "--prompt", "a", "--max-tokens", "0"]).contains("0"));
        assert!(
            error(&["generate", "--model", "x", "--prompt", "a", "--prompt-ids", "b", "--max-tokens", "1"])
                .contains("cannot be used with")
        );
        assert!(error(&["generate", "--model", "x", "--max-tokens", "1", "--session", "s"]).contains("--device"));
    }

    #[test]
    fn sizes_parse_with_their_units() {
        assert_eq!(parse_size("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_size("1 GB").unwrap(), 1_000_000_000);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        for bad in ["", "MiB", "-1", "0", "1XB", "99999999999GiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
