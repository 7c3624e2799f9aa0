//! Options that several subcommands share: how a store keeps a sequence, and the queries that clusters are made of.

use std::path::PathBuf;

use clap::Args;

use super::Codec;
use super::parse::parse_size;
use crate::kv::KvDType;
use crate::recall::ProfileSource;

/// The page of a device.
const PAGE_BYTES: usize = 4096;
/// The fewest tokens of a group, unless the user asks for fewer.
const LEAST_GROUP: usize = 4;

/// How a store keeps a sequence, and with how much memory.
#[derive(Clone, Debug, Args)]
pub struct StorageArgs {
    /// Directory of adapters that kvrun calibrate made [default: the adapters in the store]
    #[arg(long, value_name = "DIR")]
    pub adapters: Option<PathBuf>,
    /// Tokens per group, the unit of selection and reading [default: 4 to 32 for text, to fill 4 KiB; 4 for recall]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub group_tokens: Option<u32>,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t = KvDType::F16)]
    pub dtype: KvDType,
    /// How full groups are stored: unchanged, or in 8 or 4 bits per element
    #[arg(long, value_enum, default_value_t = Codec::Raw)]
    pub codec: Codec,
    /// Limit of the store's memory (buffers, summaries, tables), such as 64MiB [default: 512MiB; recall: 16MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory_limit: Option<u64>,
}

impl StorageArgs {
    /// Returns the tokens of a group, for text of a model with this number of joint key dimensions. `None` stands for
    /// recall prompts.
    ///
    /// A read of less than a page takes as long as one of a page, so groups of short keys have more tokens. Larger
    /// groups than that lose answers.
    #[must_use]
    pub fn groups(&self, key_dimensions: Option<usize>) -> usize {
        if let Some(given) = self.group_tokens {
            return given as usize;
        }
        let bits = match self.codec {
            Codec::Raw => 8 * self.dtype.bytes(),
            Codec::Int8 => 8,
            Codec::Int4 => 4,
        };
        let fills = |tokens: usize, dimensions: usize| 2 * tokens * dimensions * bits >= 8 * PAGE_BYTES;
        key_dimensions.map_or(LEAST_GROUP, |dimensions| {
            [LEAST_GROUP, 8, 16].into_iter().find(|&tokens| fills(tokens, dimensions)).unwrap_or(32)
        })
    }
}

/// The queries that clusters are made of.
#[derive(Clone, Copy, Debug, Args)]
pub struct ProfileSourceArgs {
    /// Queries that swarm and infllm make their clusters of: last:N for at most N newest tokens before the question,
    /// decode:N for N tokens that the model generates behind them, questions:N for N of --questions
    #[arg(long = "profile", value_name = "last:N|decode:N|questions:N", default_value = "last:128")]
    pub source: ProfileSource,
}
