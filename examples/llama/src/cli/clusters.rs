//! The arguments of `kvrun profile` and `kvrun cluster`.

use std::path::PathBuf;

use clap::Args;

use super::parse::parse_share;
use super::{StorageArgs, plain_options};
use crate::budget::Budget;
use crate::kv::KvDType;
use crate::kv::backend::KvOptions;
use crate::kv::method::{Policy, parse_clustered};
use crate::profile::QuerySource;
use crate::recall::ModeArgs;

pub(super) const PROFILE_EXAMPLES: &str = "Examples:
  # the newest 128 queries before the question of the first prompt of task MK with 1024 tokens
  kvrun profile --out mk.safetensors
  # the decode steps behind a prefill of 512 tokens
  kvrun profile --queries decode --prefill 512 --out decode.safetensors
  # the first half of 32 questions about a dense haystack
  kvrun profile --task MKD --context 4096 --queries questions --questions 32 --out questions.safetensors";

pub(super) const CLUSTER_EXAMPLES: &str = "Examples:
  # a session, and the clusters that two methods make of it
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt-file book.txt --max-tokens 9 --session s --device /mnt/ssd/kv
  kvrun cluster --model ~/models/Qwen2.5-0.5B --session s --device /mnt/ssd/kv
  # other methods, which need no queries
  kvrun cluster --model ~/models/Qwen2.5-0.5B --session s --device /mnt/ssd/kv --methods kmeans:32,dynakv:8 --queries 0
  # clusters that are chosen by the codes of their members, as JSON
  kvrun cluster --model ~/models/Qwen2.5-0.5B --session s --device kv --methods swarm:8:members --adapters a --json";

/// The options of `kvrun profile`.
#[derive(Debug, Args)]
#[command(after_help = PROFILE_EXAMPLES)]
pub struct ProfileArgs {
    /// Model directory [default: recall-tiny of this source tree]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Prompt file, as JSON lines, plain or gzip [default: prompts.jsonl.gz in the model directory]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Context length of the prompt
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub context: usize,
    /// Task of the prompt
    #[arg(long, value_name = "T", default_value = "MK")]
    pub task: String,
    /// Number of the prompt within its task and context, from 1 on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub number: u32,
    /// How the prompt is run.
    #[command(flatten)]
    pub modes: ModeArgs,
    /// Recorded queries: last:N for the newest N tokens before the question, decode for decode steps, questions for the
    /// first half of --questions (default 16)
    #[arg(long, value_name = "last:N|decode|questions", default_value = "last:128")]
    pub queries: QuerySource,
    /// Share of a query's attention weight that its activated tokens hold together
    #[arg(long, value_name = "SHARE", default_value = "0.95", value_parser = parse_share)]
    pub weight: f64,
    /// Largest share of the tokens that a query activates
    #[arg(long, value_name = "SHARE", default_value = "1/34", value_parser = parse_share)]
    pub share: f64,
    /// First tokens that are never activated
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sinks: usize,
    /// Newest tokens before the question that are never activated
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub newest: usize,
    /// Element type of keys and values
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// File to write, as safetensors
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// The options of `kvrun cluster`.
#[derive(Debug, Args)]
#[command(after_help = CLUSTER_EXAMPLES)]
pub struct ClusterArgs {
    /// Model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Name of the session, as kvrun generate stored it
    #[arg(long, value_name = "NAME")]
    pub session: String,
    /// Directory of the store, which is not written to; repeat it for several SSDs
    #[arg(long = "device", value_name = "DIR", required = true)]
    pub devices: Vec<PathBuf>,
    /// Methods that make clusters, such as swarm:8 or dynakv:16:members
    #[arg(long, value_name = "M,M", value_delimiter = ',', value_parser = parse_clustered)]
    #[arg(default_value = "dynakv:16,swarm:8,infllm:128")]
    pub methods: Vec<Policy>,
    /// Newest queries of the session to make clusters of, and to measure the kept weight with; they are computed again
    /// from the token ids [default: 128, or all]
    #[arg(long, value_name = "N")]
    pub queries: Option<usize>,
    /// Attended tokens of a query, for the kept weight
    #[arg(long, value_name = "SHARE|Nt", default_value = "1/13")]
    pub budget: Budget,
    /// How the store keeps the session.
    #[command(flatten)]
    pub storage: StorageArgs,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

impl ClusterArgs {
    /// Returns the options of the store, which is opened without writing to it, for a model with this number of joint
    /// key dimensions.
    #[must_use]
    pub fn backend_options(&self, key_dimensions: usize) -> KvOptions {
        let (codec, memory_limit) = (self.storage.codec.into(), self.storage.memory_limit);
        let group_tokens = self.storage.groups(Some(key_dimensions));
        KvOptions { codec, memory_limit, read_only: true, ..plain_options(group_tokens, &self.devices) }
    }
}
