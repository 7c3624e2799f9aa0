//! The newest tokens, which are in no cluster yet. Each is chosen by itself, as a cluster of one, or in runs.
//!
//! Source: the recent window of SWARM (256 tokens) and DynaKV (16 tokens), which both papers attend to whole. A budget
//! of 30 tokens has no room for that. Here each of these tokens has a score of its own, like a cluster. SWARM can still
//! attend to its window whole (`swarm:window`).
//!
//! These tokens are read from their groups. A run of tokens that fill a page costs no more bytes than one of them.

use crate::retrieval::cluster_choice::representatives::RepresentativeRows;
use crate::retrieval::scaled_rows::ScaledRows;
use crate::retrieval::sealed_keys::{HalfRows, SealedKeys};

/// The fewest newest tokens that no cluster takes in, in whole groups.
pub(super) const RECENT_TOKENS: usize = 64;

/// The tokens of one list that are in no cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentTokens<'a> {
    tokens: Vec<u32>,
    /// The tokens that are chosen together, less 1.
    others_of_run: usize,
    keys: RecentKeys<'a>,
}

/// The keys of the tokens.
#[derive(Clone, Debug, Default)]
enum RecentKeys<'a> {
    /// None, because codes are scored.
    #[default]
    None,
    /// As they wait.
    InPlace(HalfRows<'a>),
    Copied(ScaledRows),
}

impl<'a> RecentTokens<'a> {
    /// Returns the waiting tokens from `first` on, with their keys of `head` or of all heads.
    pub(crate) fn new(waiting: &'a SealedKeys, first: usize, head: Option<usize>, with_keys: bool) -> Self {
        let tokens = first.max(waiting.tokens().start)..waiting.tokens().end;
        let keys = match (with_keys, waiting.half_rows(tokens.clone(), head)) {
            (false, _) => RecentKeys::None,
            (true, Some(rows)) => RecentKeys::InPlace(rows),
            (true, None) => RecentKeys::Copied(waiting.scaled_rows(tokens.clone(), head)),
        };
        Self { tokens: tokens.map(|token| token as u32).collect(), others_of_run: 0, keys }
    }

    /// Returns the tokens, chosen in runs of `run` from the first one on. Only scores by codes know runs.
    pub(crate) fn in_runs(self, run: usize) -> Self {
        Self { others_of_run: run.saturating_sub(1), ..self }
    }

    /// Returns these tokens without their keys, for a method whose codes are scored.
    pub(crate) fn without_keys(tokens: std::ops::Range<usize>) -> Self {
        Self { tokens: tokens.map(|token| token as u32).collect(), others_of_run: 0, keys: RecentKeys::None }
    }

    /// Returns the number of tokens that are chosen together.
    pub(crate) fn run(&self) -> usize {
        self.others_of_run + 1
    }

    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns their keys, if there are any.
    pub(crate) fn rows(&self) -> Option<RepresentativeRows<'_>> {
        match &self.keys {
            RecentKeys::None => None,
            RecentKeys::InPlace(rows) => Some(RepresentativeRows::Waiting(rows)),
            RecentKeys::Copied(rows) => Some(RepresentativeRows::Halves(rows)),
        }
    }
}
