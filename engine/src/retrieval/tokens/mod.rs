//! No clusters: each KV head attends to its best single tokens by exact scores.
//!
//! The papers about clusters call this baseline "No Cluster". It bounds from above what their methods can choose, and
//! it reads scattered tokens. It keeps every key in memory, so it is for evaluation.
//!
//! Sources: SWARM and DynaKV, the baselines of their evaluations.

mod selector;

use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};
pub use selector::ExactTokens;

/// No clusters.
pub(crate) const TOKENS: Method = Method {
    name: "tokens",
    alias: "",
    about: "the best single tokens of each KV head by exact scores of all keys: for evaluation",
    parameter: MethodParameter::None,
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Tokens,
    make: without_adapter::<ExactTokens>,
};
