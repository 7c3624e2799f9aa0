//! The newest tokens, which are in no cluster yet. Each is chosen by itself, as a cluster of one.
//!
//! Source: the recent window of SWARM (256 tokens) and DynaKV (16 tokens), which both papers attend to whole. A budget
//! of 30 tokens has no room for that. Here each of these tokens has a score of its own, like a cluster. SWARM can still
//! attend to its window whole (`swarm:window`).

use crate::retrieval::sealed_keys::SealedKeys;

/// The fewest newest tokens that no cluster takes in, in whole groups.
pub(super) const RECENT_TOKENS: usize = 64;

/// The tokens of one list that are in no cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentTokens {
    tokens: Vec<u32>,
    /// Their keys `[tokens, dim]`; empty if codes are scored.
    rows: Vec<f32>,
}

impl RecentTokens {
    /// Returns the waiting tokens from `first` on, with their keys of `head` or of all heads.
    pub(crate) fn new(waiting: &SealedKeys, first: usize, head: Option<usize>, with_keys: bool) -> Self {
        let tokens = first.max(waiting.tokens().start)..waiting.tokens().end;
        let mut rows = Vec::new();
        if with_keys {
            waiting.rows(tokens.clone(), head, &mut rows);
        }
        Self { tokens: tokens.map(|token| token as u32).collect(), rows }
    }

    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the keys `[tokens, dim]`.
    pub(crate) fn keys(&self) -> &[f32] {
        &self.rows
    }
}
