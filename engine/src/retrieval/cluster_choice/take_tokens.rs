//! The choice of single tokens: the best of each KV head by a score of every token.
//!
//! 1. The raw scores of the query heads of a KV head are computed for all tokens that may be chosen.
//! 2. They are aggregated: a softmax over these tokens per query head, then the sum; or the sum of raw scores.
//! 3. The highest scores are taken, ties by the lower token.

use crate::retrieval::cluster_choice::take::runs_of_neighbours;
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest};
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::selector::aggregate;
use crate::retrieval::top_k::{highest, score_order};

/// The query heads of one KV head, as the columns of a matrix.
pub(crate) struct HeadQuery {
    /// The KV head.
    pub(crate) head: usize,
    /// `[key_dim, lanes]`. A raw score is the product of a key with a column.
    pub(crate) weights: Vec<f32>,
    /// The number of columns, a multiple of 8.
    pub(crate) lanes: usize,
}

/// Returns the best `ask.budget` tokens of each KV head. `score` writes the raw scores of all tokens of `ask.tokens`
/// for a head, `[tokens, lanes]`.
pub(crate) fn take_tokens(ask: &EntryRequest<'_>, mut score: impl FnMut(&HeadQuery, &mut [f32])) -> ChosenEntries {
    let (dim, kv_heads) = (ask.shape.key_dim, ask.shape.kv_heads);
    let mut scores = vec![0.0; ask.tokens.len()];
    let mut raw = Vec::new();
    let mut heads = Vec::with_capacity(kv_heads);
    for (head, query) in ask.query.chunks_exact(ask.query.len() / kv_heads).enumerate() {
        let batch = match ask.aggregation {
            HeadAggregation::Sum => QueryBatch::kv_heads(query, 1, dim),
            HeadAggregation::Softmax | HeadAggregation::GroupSoftmax => QueryBatch::query_heads(query, 1, dim),
        };
        let lanes = batch.padded();
        let mut weights = vec![0.0; dim * lanes];
        for (lane, _, row) in batch.rows() {
            row.iter().enumerate().for_each(|(at, q)| weights[at * lanes + lane] = *q);
        }
        raw.clear();
        raw.resize(scores.len() * lanes, 0.0);
        score(&HeadQuery { head, weights, lanes }, &mut raw);
        aggregate(&mut raw, (batch.count(), lanes), 1, ask.aggregation, ask.scale, &mut scores);
        // A token without a score is taken last.
        scores.iter_mut().filter(|score| score.is_nan()).for_each(|score| *score = f32::NEG_INFINITY);
        let mut best = highest(&scores, ask.budget, |_| true);
        best.sort_unstable_by(|a, b| score_order(*a, *b));
        heads.push(best.into_iter().map(|(_, at)| (ask.tokens.start + at as usize) as u32).collect());
    }
    let runs = heads.iter().map(|tokens: &Vec<u32>| runs_of_neighbours(tokens)).sum();
    ChosenEntries { heads, runs, clusters: Vec::new() }
}
