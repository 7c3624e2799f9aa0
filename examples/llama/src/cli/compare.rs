//! The options of `kvrun compare`.

use std::path::PathBuf;

use clap::Args;

use super::parse::parse_size;
use super::{ProfileSourceArgs, plain_options, with_policies};
use crate::budget::Budget;
use crate::kv::KvDType;
use crate::kv::backend::KvOptions;
use crate::kv::method::{DEFAULT_POLICIES, Policy, parse_compared};
use crate::recall::ModeArgs;

pub(super) const COMPARE_EXAMPLES: &str = "Examples:
  # methods that need no adapter, one prompt per task
  kvrun compare --methods window,minmax:raw,signs --contexts 1024 --limit 1
  # a number after the name is the method's parameter; raw and group choose the score
  kvrun compare --methods kvswap:8,kvswap:8:raw,tck:64:group --adapters adapters --out results
  # clusters that are made of the queries of 64 generated tokens
  kvrun compare --methods swarm:8,infllm --profile decode:64 --contexts 1024 --out decode
  # put the results of two runs together, and compare two methods prompt by prompt
  kvrun compare --merge results,more-results --pairs kvswap:8-tck:64";

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
