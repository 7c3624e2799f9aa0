//! InfLLM: blocks of consecutive tokens, each found by a few representative tokens.
//!
//! Source: InfLLM, section 3.2, a baseline of SWARM. How the method works here:
//! 1. [`Sequence::profile`](crate::Sequence::profile) takes recorded queries. The representatives of a block are the
//!    four tokens with the highest attention weight, summed over these queries.
//! 2. The score of a block is the sum of its representatives' `q . k`. With a softmax, it is the sum of the weights in
//!    the softmax of each query head over all representatives.
//! 3. A block that is appended later gets its representatives when the next block is complete. The queries of the
//!    selections since then count; without any, the mean query of the newest profile.
//!
//! Blocks are not tied to groups: a block may begin and end inside a group.

mod selector;
mod summary;

use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter};
pub use selector::InfLlm;
use std::sync::Arc;

/// InfLLM.
pub(crate) const INFLLM: Method = Method {
    name: "infllm",
    alias: "",
    about: "blocks of consecutive tokens, found by their four most attended tokens; the number is the block's tokens",
    parameter: MethodParameter::Default(128),
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Blocks,
    make: |choice, _| Ok(Arc::new(InfLlm::new(choice.parameter.unwrap_or(128))?)),
};
