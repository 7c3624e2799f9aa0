//! The most bytes that a choice allocates, part by part. The engine reserves them before the choice.
//!
//! A vector that grows by doubling counts three times: its elements, the room it grew to, and the old copy meanwhile.

use crate::kernels::SCRATCH;
use crate::retrieval::entry_selector::EntryRequest;
use crate::retrieval::transform_coded::summary::Codes;

/// Copies of a vector that grows by doubling.
const GROWING: usize = 3;
/// Small vectors that do not depend on the request.
const CONSTANT: usize = 4096;

/// Returns the lanes of one list: the query heads of a KV head, or all of them, and padding.
fn lanes(ask: &EntryRequest<'_>, is_joint: bool) -> usize {
    let heads = ask.query.len() / ask.shape.key_dim.max(1);
    let own = if is_joint { heads } else { heads / ask.shape.kv_heads.max(1) };
    own.next_multiple_of(16)
}

/// Returns the bytes of a query as kernels read it, and of its scratch.
fn query_bytes(ask: &EntryRequest<'_>) -> usize {
    let row = ask.shape.key_dim.next_multiple_of(16);
    let heads = lanes(ask, true);
    (2 * heads * row + SCRATCH) * size_of::<f32>() + CONSTANT
}

/// Returns the bytes of the products of `rows` representatives with the query, and of their scores.
pub(crate) fn product_bytes(rows: usize, ask: &EntryRequest<'_>, is_joint: bool) -> usize {
    // The products of two lists are joined, groups of a softmax are copied, and rows that do not count are listed.
    let products = rows * lanes(ask, is_joint) * (GROWING + 1);
    (products + (2 + GROWING) * rows + 16 * lanes(ask, is_joint)) * size_of::<f32>() + query_bytes(ask)
}

/// Returns the bytes of the keys of `tokens` recent tokens in 16 bits per element.
pub(crate) fn recent_bytes(tokens: usize, ask: &EntryRequest<'_>, is_joint: bool) -> usize {
    let dim = if is_joint { ask.shape.width() } else { ask.shape.key_dim };
    tokens * (dim * size_of::<u16>() + size_of::<i8>() + size_of::<u32>()) + GROWING * dim * size_of::<f32>()
}

/// Returns the bytes of the weights of tokens by their codes, for `lists` lists.
pub(crate) fn coded_bytes(codes: &Codes, ask: &EntryRequest<'_>, lists: usize) -> usize {
    let group_tokens = ask.shape.group_tokens;
    let tokens = ask.tokens.len() + 2 * group_tokens;
    let lanes = lanes(ask, true);
    // A tile has at most 4096 scores, or one group. Its maxima are kept.
    let tile = 4096.max(group_tokens * lanes);
    let per_tile = ((4096 / lanes).clamp(1, 256) / 2).max(group_tokens);
    let maxima = (tokens / per_tile + 2) * lanes;
    let parts = tokens * lanes * size_of::<u16>();
    let weights = tokens * lists * size_of::<f32>();
    parts + weights + (tile + maxima + 16 * lanes) * size_of::<f32>() + codes.scorer_bytes(lanes) + query_bytes(ask)
}

/// Returns the bytes of the scores of `clusters` clusters, of taking the best of them, and of the result.
pub(crate) fn take_bytes(clusters: usize, ask: &EntryRequest<'_>) -> usize {
    let tokens = ask.tokens.len();
    let is_taken = tokens;
    // The members of one cluster that are not taken yet.
    let own = GROWING * tokens * size_of::<u32>();
    let scores = clusters * (size_of::<f32>() + size_of::<u64>());
    is_taken + own + scores + result_bytes(clusters, ask) + CONSTANT
}

/// Returns the bytes of what is taken from a list of `clusters` clusters.
pub(crate) fn result_bytes(clusters: usize, ask: &EntryRequest<'_>) -> usize {
    GROWING * (ask.budget.min(ask.tokens.len()) + 2 * clusters) * size_of::<u32>()
}

/// Returns the bytes of choosing from lists of `clusters` clusters each, one list after the other.
///
/// `recent` is the number of recent tokens. Without `codes`, representatives are scored.
pub(crate) fn list_choice_bytes(
    clusters: &[usize],
    recent: usize,
    codes: Option<&Codes>,
    ask: &EntryRequest<'_>,
) -> usize {
    let is_joint = clusters.len() == 1;
    let results: usize = clusters.iter().map(|clusters| result_bytes(clusters + recent, ask)).sum();
    let most = clusters.iter().max().map_or(0, |clusters| clusters + recent);
    let scoring = match codes {
        Some(codes) => coded_bytes(codes, ask, clusters.len()),
        None => product_bytes(most, ask, is_joint) + recent_bytes(recent, ask, is_joint),
    };
    results + scoring + take_bytes(most, ask) + recent * size_of::<u32>() + CONSTANT
}

/// Returns the bytes of the choice of single tokens ([`take_tokens`](super::take_tokens)).
pub(crate) fn token_choice_bytes(ask: &EntryRequest<'_>) -> usize {
    let (tokens, lanes) = (ask.tokens.len(), lanes(ask, false));
    let scores = tokens * (2 * lanes + 1) * size_of::<f32>();
    let best = (2 * GROWING * ask.budget.min(tokens) + 256) * size_of::<(f32, u64)>();
    scores + best + ask.shape.kv_heads * 2 * result_bytes(0, ask) + query_bytes(ask) + CONSTANT
}
