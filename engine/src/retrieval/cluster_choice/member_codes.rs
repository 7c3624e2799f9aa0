//! Scores of clusters by their members: the sum of the attention weights that transform-coded keys predict.
//!
//! A representative says little about its members, and the sum of the members' codes says nearly all. The codes take a
//! few bytes per token and serve all clusters of the layer.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::adapter::Adapter;
use crate::retrieval::cluster_choice::options::{ChosenBy, ClusterOptions};
use crate::retrieval::entry_selector::EntryRequest;
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::each_tile;
use crate::retrieval::selector::ScoreRequest;
use crate::retrieval::summary::LayerSummary;
use crate::retrieval::transform_coded::summary::{CodeSpec, Codes};
use std::any::Any;
use std::sync::Arc;

/// The predicted weight of each token.
pub(crate) struct CodedMembers {
    /// The first token.
    first: usize,
    /// The weights of each KV head, or of all heads together.
    heads: Vec<Vec<f32>>,
}

/// Returns the codes that members are scored by, or none if the options do not ask for them.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: the adapter is missing.
pub(crate) fn member_codes(
    method: &str,
    options: &ClusterOptions,
    adapter: Option<Arc<Adapter>>,
) -> Result<Option<Arc<CodeSpec>>> {
    match options.chosen_by {
        ChosenBy::Representative => Ok(None),
        ChosenBy::Members => {
            let text = || format!("{method}:members: an adapter with codes is needed");
            let none = || Error::new(ErrorKind::InvalidArgument, text());
            Ok(Some(Arc::new(CodeSpec::new(adapter.ok_or_else(none)?))))
        }
    }
}

/// Returns the codes among the summaries of a method that chooses by members.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: there are none.
pub(crate) fn codes_in<'a>(summaries: &[&'a dyn LayerSummary]) -> Result<&'a Codes> {
    let found = summaries.iter().find_map(|summary| (*summary as &dyn Any).downcast_ref::<Codes>());
    found.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "choose: the method needs codes of keys, and has none"))
}

/// Returns the weights of the tokens that may be chosen. The softmax of a query head goes over these tokens.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: no summary has codes.
pub(crate) fn coded_members(
    summaries: &[&dyn LayerSummary],
    ask: &EntryRequest<'_>,
    is_joint: bool,
) -> Result<CodedMembers> {
    let codes = codes_in(summaries)?;
    let (kv_heads, dim, group_tokens) = (ask.shape.kv_heads, ask.shape.key_dim, ask.shape.group_tokens);
    let groups = ask.tokens.start / group_tokens..ask.tokens.end.div_ceil(group_tokens).min(codes.groups());
    let sums = ask.aggregation == HeadAggregation::Sum;
    let batch = match (sums, is_joint) {
        (true, true) => QueryBatch::joint(ask.query, kv_heads, dim),
        (true, false) => QueryBatch::kv_heads(ask.query, kv_heads, dim),
        (false, _) => QueryBatch::query_heads(ask.query, kv_heads, dim),
    };
    let request = ScoreRequest {
        query: ask.query,
        shape: ask.shape,
        scale: ask.scale,
        aggregation: if sums { HeadAggregation::Sum } else { HeadAggregation::Softmax },
        groups: groups.clone(),
        forced: [0..0, 0..0],
        count: 0,
        threads: None,
    };
    let lists = if is_joint { 1 } else { kv_heads };
    let first = groups.start * group_tokens;
    let mut heads = vec![vec![0.0; groups.len() * group_tokens]; lists];
    let (columns, fill) = codes.scorer(&batch);
    let per_head = (batch.count() / lists).max(1);
    each_tile(&request, group_tokens, (batch.count(), columns), fill, |groups, mut tile| {
        let at = groups.start * group_tokens - first;
        let len = groups.len() * group_tokens;
        if let [all] = heads.as_mut_slice() {
            return tile.best(1, &mut all[at..at + len]);
        }
        let (units, weights) = tile.units();
        for (token, unit) in units.chunks_exact(columns).enumerate() {
            for (head, own) in heads.iter_mut().enumerate() {
                let lanes = head * per_head..(head + 1) * per_head;
                own[at + token] = unit[lanes.clone()].iter().zip(&weights[lanes]).map(|(x, w)| x * w).sum();
            }
        }
    });
    Ok(CodedMembers { first, heads })
}

impl CodedMembers {
    /// Returns the weight of a token in a list, or 0 if the weights do not include it.
    pub(crate) fn weight(&self, list: usize, token: usize) -> f32 {
        let at = token.checked_sub(self.first);
        at.and_then(|at| self.heads.get(list)?.get(at)).copied().unwrap_or(0.0)
    }

    /// Returns the score of a cluster in a list: the sum over its members that may be chosen, or negative infinity
    /// without one.
    pub(crate) fn score(&self, list: usize, members: &[u32], ask: &EntryRequest<'_>) -> f32 {
        let weights = &self.heads[list];
        let (Some(first), true) = (members.first(), self.first == ask.tokens.start) else {
            return self.score_of_some(list, members, ask);
        };
        // Most often all members may be chosen and have weights.
        let weights = &weights[..weights.len().min(ask.tokens.len())];
        let Some(first) = weights.get((*first as usize).wrapping_sub(self.first)) else {
            return self.score_of_some(list, members, ask);
        };
        let mut score = *first;
        for token in &members[1..] {
            let Some(weight) = weights.get((*token as usize).wrapping_sub(self.first)) else {
                return self.score_of_some(list, members, ask);
            };
            score += weight;
        }
        score
    }

    /// Returns the score of a cluster of which some members may not be chosen, or have no weight.
    fn score_of_some(&self, list: usize, members: &[u32], ask: &EntryRequest<'_>) -> f32 {
        let mut score = f32::NEG_INFINITY;
        for token in members.iter().filter(|token| ask.tokens.contains(&(**token as usize))) {
            let weight = self.weight(list, *token as usize);
            score = if score == f32::NEG_INFINITY { weight } else { score + weight };
        }
        score
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::summary::KeyShape;
    use proptest::prelude::*;
    use stratakv_format::DType;

    proptest! {
        #[test]
        fn a_score_is_the_sum_over_members_that_may_be_chosen(
            members in prop::collection::vec(0_u32..40, 0..12), first in 0_usize..9, before in 0_usize..5,
            tokens in 1_usize..30, weights in 0_usize..30,
        ) {
            let shape = KeyShape { kv_heads: 1, key_dim: 1, group_tokens: 4, dtype: DType::F16 };
            let tokens = first + before..first + before + tokens;
            let ask = EntryRequest {
                query: &[1.0], shape, scale: 1.0, aggregation: HeadAggregation::Sum, tokens: tokens.clone(), budget: 1,
            };
            let codes = CodedMembers { first, heads: vec![Vec::new(), (0..weights).map(|at| at as f32).collect()] };
            let counted = members.iter().map(|token| *token as usize).filter(|token| tokens.contains(token));
            let weight = |token: usize| if token - first < weights { (token - first) as f32 } else { 0.0 };
            let expected = counted.map(weight).reduce(|sum, weight| sum + weight).unwrap_or(f32::NEG_INFINITY);
            prop_assert_eq!(codes.score(1, &members, &ask), expected);
        }
    }
}
