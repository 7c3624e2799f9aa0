//! Selection of single tokens by exact scores.

use crate::error::Result;
use crate::retrieval::cluster_choice::{take_tokens, token_choice_bytes};
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest, EntrySelector};
use crate::retrieval::exact::summary::{Exact, ExactSpec};
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// Selection of the best single tokens of each KV head, by exact scores of all keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExactTokens;

impl Selector for ExactTokens {
    fn name(&self) -> &str {
        "tokens"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(ExactSpec) as _]
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("tokens")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for ExactTokens {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        summary_as::<Exact>(summaries).map(LayerSummary::groups)
    }

    fn choose_bytes(&self, _: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let group = ask.shape.key_dim * ask.shape.group_tokens * size_of::<f32>();
        Ok(token_choice_bytes(ask) + group)
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let keys: &Exact = summary_as(summaries)?;
        Ok(take_tokens(ask, |query, raw| keys.score_head(&ask.tokens, query.head, (&query.weights, query.lanes), raw)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::clusters::SeededRandom;
    use crate::retrieval::{HeadAggregation, KeyGroup, KeyShape};
    use proptest::prelude::*;
    use stratakv_format::DType;

    proptest! {
        #[test]
        fn the_best_tokens_of_each_head_are_those_of_the_definition(
            (kv_heads, per_head, key_dim, group_tokens) in (1_usize..4, 1_usize..4, 1_usize..6, 1_usize..6),
            groups in 1_usize..20, start in 0_usize..20, len in 1_usize..90, budget in 0_usize..40,
            raw in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut random = SeededRandom::new(seed);
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype: DType::F32 };
            let tokens = start.min(groups * group_tokens - 1)..(start + len).min(groups * group_tokens);
            prop_assume!(!tokens.is_empty());
            // Small whole numbers: raw scores are exact in any order of addition.
            let mut rows = |count: usize| -> Vec<f32> { (0..count).map(|_| random.below(9) as f32 - 4.0).collect() };
            let keys = rows(groups * group_tokens * shape.width());
            let query = rows(kv_heads * per_head * key_dim);
            let mut exact = ExactSpec.layer(0, shape).unwrap();
            for (index, group) in keys.chunks_exact(group_tokens * shape.width()).enumerate() {
                let plane: Vec<u8> = group.iter().flat_map(|x| x.to_le_bytes()).collect();
                exact.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
            }
            let aggregation = if raw { HeadAggregation::Sum } else { HeadAggregation::Softmax };
            let ask = EntryRequest { query: &query, shape, scale: 0.4, aggregation, tokens: tokens.clone(), budget };
            prop_assert_eq!(ExactTokens.covered_groups(&[exact.as_ref()]).unwrap(), groups);
            let chosen = ExactTokens.choose(&[exact.as_ref()], &ask).unwrap();
            prop_assert_eq!(chosen.heads.len(), kv_heads);
            prop_assert!(chosen.runs <= kv_heads * budget.min(tokens.len()));
            for (head, own) in chosen.heads.iter().enumerate() {
                // The logit of a token and a query head, and the score of a token.
                let logit = |token: usize, at: usize| -> f64 {
                    let (group, within) = (token / group_tokens, token % group_tokens);
                    let key = &keys[((group * kv_heads + head) * group_tokens + within) * key_dim..][..key_dim];
                    let q = &query[(head * per_head + at) * key_dim..][..key_dim];
                    // The sum begins with 0, because a total order puts -0 below it.
                    key.iter().zip(q).fold(0.0, |sum, (k, q)| sum + f64::from(k * q))
                };
                let weight = |token: usize, at: usize| (0.4 * logit(token, at)).exp();
                let sums: Vec<f64> = (0..per_head).map(|at| tokens.clone().map(|t| weight(t, at)).sum()).collect();
                let score = |token: usize| -> f64 {
                    let of = |at: usize| if raw { logit(token, at) } else { weight(token, at) / sums[at] };
                    (0..per_head).map(of).fold(0.0, |sum, score| sum + score)
                };
                let mut expected: Vec<(f64, usize)> = tokens.clone().map(|token| (score(token), token)).collect();
                expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                expected.truncate(budget);
                prop_assert_eq!(own.len(), expected.len());
                // Rounding may order tokens of equal weight in another way.
                let margin = if raw { 0.0 } else { 1e-5 };
                for (token, (least, at)) in own.iter().zip(expected) {
                    let found = score(*token as usize);
                    prop_assert!((found - least).abs() <= margin * least.abs(), "{found} {least}");
                    prop_assert!(!raw || at == *token as usize, "{token} {at}");
                }
            }
        }
    }
}
