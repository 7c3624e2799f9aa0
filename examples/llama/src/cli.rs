//! The command line of `kvrun`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use stratakv::retrieval::HeadAggregation;
use stratakv::{Durability, PlaneCodec, SummaryResidency};

use crate::budget::Budget;
use crate::kv::KvDType;
use crate::kv::backend::{KvOptions, Policy};
use crate::kv::method::{Method, MethodName};

const EXAMPLES: &str = "Examples:
  kvrun recall
  kvrun recall --policy window --contexts 1024 --tasks S,MK --limit 5 --json
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt 'Once upon a time' --max-tokens 64
  kvrun generate --model ~/models/Qwen2.5-0.5B --prompt-file book.txt --max-tokens 200 --session book --device /mnt/ssd/kv";

/// A small Llama-family runtime whose KV cache is a stratakv store.
#[derive(Debug, Parser)]
#[command(name = "kvrun", version, about, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer recall prompts and compare with full attention in memory
    Recall(RecallArgs),
    /// Fit adapters and codebooks to a model on calibration prompts
    Calibrate(CalibrateArgs),
    /// Compare retrieval methods on the same stored bytes
    Compare(CompareArgs),
    /// Continue a text
    Generate(GenerateArgs),
}

/// How scores of query heads become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Score {
    /// Their sum.
    Raw,
    /// Softmax over tokens per head, then the sum.
    Softmax,
    /// Softmax over groups per head, each with its best token, then the sum.
    GroupSoftmax,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// Options of the KV cache.
#[derive(Clone, Debug, Args)]
pub struct CacheArgs {
    /// Which tokens a decode step attends
    #[arg(long, value_enum, default_value_t = Policy::Minmax)]
    pub policy: Policy,
    /// Attended tokens per step: a share of the context (1/13) or a number (400t); `full` ignores it
    #[arg(long, value_name = "SHARE|Nt", default_value = "1/13")]
    pub budget: Budget,
    /// Rank of kvswap and infinigen: joint key dimensions over this
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sigma: u32,
    /// Bits per token and layer of tck
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=2048))]
    pub bits: u32,
    /// Rank of the keys of shadowkv before rotation: values alone are read, keys are rebuilt; without it both are read
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rank: Option<u32>,
    /// How scores of query heads are added up [default: raw for minmax, otherwise softmax]
    #[arg(long, value_enum)]
    pub score: Option<Score>,
    /// First layers that attend to everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dense_layers: u32,
    /// Blocks kept in memory, within the memory limit: those asked for at most steps, first layers that attend to everything before all
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub cache_mib: u32,
    /// Where summaries of keys are: in memory, or on disk, read for each selection
    #[arg(long, value_enum, default_value_t = SummaryHome::Resident)]
    pub summaries: SummaryHome,
    /// Directory of the adapters that kvrun calibrate made; those of the store where none is given
    #[arg(long, value_name = "DIR")]
    pub adapters: Option<PathBuf>,
    /// Tokens per group, the unit of selection and reading
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: u32,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// How groups are stored: as they are, or in 8 or 4 bits per element; the newest tokens, which fill no group, stay as they are
    #[arg(long, value_enum, default_value_t = Codec::Raw)]
    pub codec: Codec,
    /// Directory on an SSD that holds keys and values; repeat for several SSDs; a temporary one where none is given
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Read ahead what predicted queries of the next layer select; answers are the same
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub pipeline: Switch,
    /// Bound on the store's memory (buffers, tails, summaries, tables), such as 64MiB [default: 512MiB; recall: 16MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory_limit: Option<u64>,
}

/// Places of `--summaries`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SummaryHome {
    /// In memory.
    Resident,
    /// On disk.
    Streamed,
}

impl From<SummaryHome> for SummaryResidency {
    fn from(home: SummaryHome) -> Self {
        match home {
            SummaryHome::Resident => Self::Resident,
            SummaryHome::Streamed => Self::Streamed,
        }
    }
}

/// Codecs of `--codec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Codec {
    /// As they are.
    Raw,
    /// 256 levels over a channel's or a token's range.
    Int8,
    /// 16 levels.
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
    /// The same for a backend.
    #[must_use]
    pub fn options(&self, durability: Durability) -> KvOptions {
        KvOptions {
            policy: self.policy,
            method: self.method(),
            adapters: self.adapters.clone(),
            dense_layers: self.dense_layers as usize,
            cache_mib: u64::from(self.cache_mib),
            summaries: self.summaries.into(),
            budget: self.budget,
            group_tokens: self.group_tokens as usize,
            codec: self.codec.into(),
            devices: self.devices.clone(),
            memory_limit: self.memory_limit,
            read_ahead: self.pipeline == Switch::On,
            durability,
        }
    }

    /// The method that needs a selector; none for `full`, `window` and raw `minmax`, which stored sequences do by themselves.
    #[must_use]
    pub fn method(&self) -> Option<Method> {
        let form = match self.score {
            Some(Score::Raw) => HeadAggregation::Sum,
            Some(Score::Softmax) => HeadAggregation::Softmax,
            Some(Score::GroupSoftmax) => HeadAggregation::GroupSoftmax,
            None if self.policy == Policy::Minmax => HeadAggregation::Sum,
            None => HeadAggregation::Softmax,
        };
        let (name, parameter) = match self.policy {
            Policy::Full | Policy::Window => return None,
            Policy::Minmax if form == HeadAggregation::Sum => return None,
            Policy::Minmax => (MethodName::Minmax, 0),
            Policy::Kvswap => (MethodName::Kvswap, self.sigma as usize),
            Policy::Leoam => (MethodName::Leoam, 0),
            Policy::Shadowkv => (MethodName::Shadowkv, self.rank.unwrap_or(0) as usize),
            Policy::TransformCoded => (MethodName::TransformCoded, self.bits as usize),
            Policy::Signs => (MethodName::Signs, 0),
            Policy::Infinigen => (MethodName::Infinigen, self.sigma as usize),
            Policy::Oracle => (MethodName::Oracle, 0),
        };
        Some(Method { name, parameter, form })
    }

    /// The budget as reports show it.
    #[must_use]
    pub fn budget_name(&self) -> String {
        if self.policy == Policy::Full { "1".to_owned() } else { self.budget.to_string() }
    }
}

/// Options of `kvrun recall`.
#[derive(Debug, Args)]
pub struct RecallArgs {
    /// Options of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Context lengths; 0 or none matching is an error
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [1024, 2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks; all where none is given
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LIMIT, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// Prompt file (JSON lines, plain or gzip); that of the model directory where none is given
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Leave the sequences in the store
    #[arg(long, requires = "devices")]
    pub keep: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Model directory; recall-tiny of this source tree where none is given
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
}

/// Options of `kvrun calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Model directory; recall-tiny of this source tree where none is given
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Calibration prompts (JSON lines, plain or gzip); calibration.jsonl.gz of the model directory where none is given
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Context lengths
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks; all where none is given
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// Sigmas of low-rank adapters
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [8, 16, 32])]
    pub sigmas: Vec<usize>,
    /// Bits per token and layer of codebooks
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [16, 32, 64, 128])]
    pub bits: Vec<usize>,
    /// Element type of stored keys
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// Directory the adapters are written to, as safetensors
    #[arg(long, value_name = "DIR", required_unless_present = "devices")]
    pub out: Option<PathBuf>,
    /// Directory of a store that the adapters are put into; repeat for several SSDs
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Tokens per group of the sequences in that store
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: u32,
}

impl CalibrateArgs {
    /// Options of the store that takes the adapters.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        KvOptions {
            policy: Policy::Full,
            method: None,
            adapters: None,
            dense_layers: 0,
            cache_mib: 0,
            summaries: SummaryResidency::Resident,
            budget: Budget::Tokens(1),
            group_tokens: self.group_tokens as usize,
            codec: PlaneCodec::Raw,
            devices: self.devices.clone(),
            memory_limit: None,
            read_ahead: false,
            durability: Durability::Sync,
        }
    }
}

/// Options of `kvrun compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Model directory; recall-tiny of this source tree where none is given
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Prompt file; that of the model directory where none is given
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Context lengths
    #[arg(long, value_delimiter = ',', value_name = "N,N", default_values_t = [1024, 2048, 4096])]
    pub contexts: Vec<usize>,
    /// Tasks; all where none is given
    #[arg(long, value_delimiter = ',', value_name = "T,T")]
    pub tasks: Vec<String>,
    /// Prompts per task and context
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    /// Methods, each `name[:sigma, bits or rank][:raw]`; softmax per head where raw is not said
    #[arg(long, value_delimiter = ',', value_name = "M,M", default_value = DEFAULT_METHODS)]
    pub methods: Vec<Method>,
    /// Budgets
    #[arg(long, value_delimiter = ',', value_name = "B,B", default_value = "1/34,1/13,400t")]
    pub budgets: Vec<Budget>,
    /// Tokens per group
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: u32,
    /// First layers that attend to everything
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dense_layers: u32,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// Directory of the adapters that kvrun calibrate made; those of the store where none is given
    #[arg(long, value_name = "DIR")]
    pub adapters: Option<PathBuf>,
    /// Measure attention mass and output error too, by full attention on the same queries
    #[arg(long)]
    pub probe: bool,
    /// Directory on an SSD; a temporary one where none is given
    #[arg(long = "device", value_name = "DIR")]
    pub devices: Vec<PathBuf>,
    /// Bound on the store's memory, summaries of all methods included
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256MiB")]
    pub memory_limit: u64,
    /// Also print the difference of pairs of methods, `a-b,c-d`, per prompt with a 95 % interval
    #[arg(long, value_delimiter = ',', value_name = "A-B")]
    pub pairs: Vec<String>,
    /// Run nothing: put together what earlier runs wrote to these directories, each of other contexts, methods or budgets
    #[arg(long, value_delimiter = ',', value_name = "DIR,DIR")]
    pub merge: Vec<PathBuf>,
    /// Write compare.csv, prompts.csv and compare.svg to this directory
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

const DEFAULT_METHODS: &str = "window,minmax:raw,minmax,leoam:raw,leoam,shadowkv,kvswap:8:raw,kvswap:8,kvswap:16,kvswap:32,\
infinigen:8,tck:16,tck:32,tck:64,signs,oracle:raw,oracle";

impl CompareArgs {
    /// Options for the backend: policies are set method by method.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        KvOptions {
            policy: Policy::Full,
            method: None,
            adapters: None,
            dense_layers: 0,
            cache_mib: 0,
            summaries: SummaryResidency::Resident,
            budget: Budget::Tokens(1),
            group_tokens: self.group_tokens as usize,
            codec: PlaneCodec::Raw,
            devices: self.devices.clone(),
            memory_limit: Some(self.memory_limit),
            read_ahead: false,
            durability: Durability::Lazy,
        }
    }
}

/// The model directory given, or recall-tiny of this source tree.
#[must_use]
pub fn model_or_default(model: Option<&Path>) -> PathBuf {
    model.map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny"),
        Path::to_path_buf,
    )
}

/// Prompts per cell of a plain `kvrun recall`: 300 prompts in all.
pub const DEFAULT_LIMIT: u32 = 20;

/// The store's memory in a plain `kvrun recall`: the keys and values of one prompt of 4096 tokens are 8 MiB, their bounds 2 MiB more.
pub const RECALL_MEMORY_LIMIT: u64 = 16 << 20;

impl RecallArgs {
    /// Options for the backend. What is deleted at the end need not be durable before.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        let durability = if self.keep { Durability::Sync } else { Durability::Lazy };
        let options = self.cache.options(durability);
        KvOptions { memory_limit: options.memory_limit.or(Some(RECALL_MEMORY_LIMIT)), ..options }
    }

    /// The model directory.
    #[must_use]
    pub fn model_dir(&self) -> PathBuf {
        self.model
            .clone()
            .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/recall-tiny"))
    }

    /// The prompt file.
    #[must_use]
    pub fn prompt_file(&self) -> PathBuf {
        self.prompts.clone().unwrap_or_else(|| self.model_dir().join("prompts.jsonl.gz"))
    }
}

/// Options of `kvrun generate`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("input").required(false).multiple(false))]
pub struct GenerateArgs {
    /// Model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", group = "input")]
    pub prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_file: Option<PathBuf>,
    /// File with token ids to continue (numbers separated by blanks, or a JSON array)
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_ids: Option<PathBuf>,
    /// Tokens to generate for this prompt, those of an interrupted run included
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// 0 takes the most likely token
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Draw from the smallest set of tokens with this probability
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Seed of the random draws
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Name under which the sequence stays in the store; a later run with it continues without prefilling again
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
    /// Options for the backend.
    #[must_use]
    pub fn backend_options(&self) -> KvOptions {
        self.cache.options(if self.session.is_some() { Durability::Sync } else { Durability::Lazy })
    }
}

/// Bytes of `64MiB`, `64M`, `64MB`, `65536`, ...; units are powers of 1024, except `kB`, `MB`, `GB`.
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
        other => anyhow::bail!("{other:?} is no unit of size; give bytes, or KiB, MiB, GiB"),
    };
    let number: u64 = digits.trim().parse().with_context(|| format!("{text:?} is no size such as 64MiB"))?;
    ensure!(number > 0, "a size of 0");
    number.checked_mul(unit).with_context(|| format!("{text:?} is beyond 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn error(args: &[&str]) -> String {
        Cli::try_parse_from(std::iter::once("kvrun").chain(args.iter().copied())).unwrap_err().to_string()
    }

    #[test]
    fn the_definition_is_sound_and_defaults_are_documented_ones() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["kvrun", "recall"]).unwrap();
        let Command::Recall(args) = cli.command else { panic!("not recall") };
        assert_eq!((args.cache.policy, args.cache.budget_name().as_str()), (Policy::Minmax, "1/13"));
        assert_eq!((args.cache.group_tokens, args.contexts.as_slice()), (4, [1024, 2048, 4096].as_slice()));
        assert!(args.prompt_file().is_file(), "{}", args.prompt_file().display());
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        assert!(error(&["recall", "--budget", "0"]).contains("attends no token"));
        assert!(error(&["recall", "--budget", "0t"]).contains("attends no token"));
        assert!(error(&["recall", "--dtype", "int3"]).contains("bf16"));
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
    fn sizes() {
        assert_eq!(parse_size("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_size("1 GB").unwrap(), 1_000_000_000);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        for bad in ["", "MiB", "-1", "0", "1XB", "99999999999GiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
