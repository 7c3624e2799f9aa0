//! Profiles: which tokens the queries of one prompt attend to, for tools that cluster tokens by it.
//!
//! | File | What it does |
//! |---|---|
//! | `record` | runs a prompt with full attention and records queries |
//! | `file` | profiles as safetensors files |
//!
//! An entry is one token before the question, in one layer. The engine's [`ActivationRule`] says which entries a query
//! activates.

mod file;
mod record;

use serde::{Deserialize, Serialize};
use stratakv::retrieval::clusters::ActivationRule;

use crate::kv::KvDType;

pub use record::{ProfileOptions, QuerySource, record};

/// A profile of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The prompt, the queries and the rule.
    pub about: ProfileAbout,
    /// The element type of the keys.
    pub dtype: KvDType,
    /// The position of each query's token in its sequence.
    pub positions: Vec<u32>,
    /// For each query 0, or the number of the question that it belongs to, from 1 on.
    pub questions: Vec<u32>,
    /// One entry per layer.
    pub layers: Vec<ProfileLayer>,
}

/// The prompt, the queries and the rule of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileAbout {
    /// The name of the prompt.
    pub prompt: String,
    /// The entries: the tokens before the question.
    pub entries: usize,
    /// Which queries were recorded.
    pub source: String,
    /// The rule of activation.
    #[serde(with = "RuleFields")]
    pub rule: ActivationRule,
    /// Query heads.
    pub query_heads: usize,
    /// The factor of `q . k` in the softmax.
    pub scale: f32,
    /// The hash of the model's weights, in hexadecimal digits.
    pub model: String,
}

/// The fields of a rule in a file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ActivationRule")]
struct RuleFields {
    weight: f64,
    share: f64,
    sinks: usize,
    window: usize,
}

/// The recorded queries of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileLayer {
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a key and of a query head.
    pub head_dim: usize,
    /// The keys after RoPE, `[entries, kv_heads, head_dim]`.
    pub keys: Vec<f32>,
    /// The queries after RoPE, `[queries, query_heads, head_dim]`.
    pub queries: Vec<f32>,
    /// The activated entries of query `q` are elements `offsets[q]..offsets[q + 1]` of `activated`.
    pub offsets: Vec<u32>,
    /// Activated entries, in rising order per query.
    pub activated: Vec<u32>,
    /// The attention weight of each activated entry, as a sum over query heads.
    pub weights: Vec<f32>,
}

/// The figures of one layer of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ProfileSummary {
    /// The mean number of activated entries per query.
    pub activated_per_query: f64,
    /// The share of all entries that at least one query activates.
    pub entries_marked: f64,
    /// The mean share of a query's attention weight that its activated entries hold. Sinks, the newest tokens and
    /// tokens behind the entries hold the rest.
    pub weight_held: f64,
}

impl Profile {
    /// Returns the figures of a layer.
    #[must_use]
    pub fn summary(&self, layer: &ProfileLayer) -> ProfileSummary {
        let queries = self.positions.len().max(1) as f64;
        let mut marked = layer.activated.clone();
        marked.sort_unstable();
        marked.dedup();
        let weight: f64 = layer.weights.iter().map(|weight| f64::from(*weight)).sum();
        ProfileSummary {
            activated_per_query: layer.activated.len() as f64 / queries,
            entries_marked: marked.len() as f64 / self.about.entries.max(1) as f64,
            weight_held: weight / self.about.query_heads.max(1) as f64 / queries,
        }
    }
}
