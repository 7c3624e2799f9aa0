//! Selection of single tokens by product-quantised keys.

use super::summary::{ProductCodeSpec, ProductCodes};
use crate::error::Result;
use crate::retrieval::cluster_choice::{take_tokens, token_choice_bytes};
use crate::retrieval::entry_selector::{ChosenEntries, EntryRequest, EntrySelector};
use crate::retrieval::selector::{ScoreRequest, Selector, no_group_scores, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// Selection of the best single tokens of each KV head, by product-quantised keys.
#[derive(Clone, Copy, Debug)]
pub struct PqCache {
    centroids: usize,
}

impl PqCache {
    /// Makes the selector, with codebooks of `centroids` centroids.
    pub(super) fn new(centroids: usize) -> Self {
        Self { centroids }
    }
}

impl Selector for PqCache {
    fn name(&self) -> &str {
        "pqcache"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(ProductCodeSpec { centroids: self.centroids }) as _]
    }

    fn score(&self, _: &[&dyn LayerSummary], _: &ScoreRequest<'_>, _: &mut [f32]) -> Result<()> {
        no_group_scores("pqcache")
    }

    fn entries(&self) -> Option<&dyn EntrySelector> {
        Some(self)
    }
}

impl EntrySelector for PqCache {
    fn covered_groups(&self, summaries: &[&dyn LayerSummary]) -> Result<usize> {
        summary_as::<ProductCodes>(summaries).map(ProductCodes::covered)
    }

    fn choose_bytes(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<usize> {
        let codes: &ProductCodes = summary_as(summaries)?;
        Ok(token_choice_bytes(ask) + codes.table_bytes(ask.query.len() / (ask.shape.width()).max(1)))
    }

    fn choose(&self, summaries: &[&dyn LayerSummary], ask: &EntryRequest<'_>) -> Result<ChosenEntries> {
        let codes: &ProductCodes = summary_as(summaries)?;
        Ok(take_tokens(ask, |query, raw| codes.score_head(&ask.tokens, query.head, (&query.weights, query.lanes), raw)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::clusters::SeededRandom;
    use crate::retrieval::{HeadAggregation, KeyGroup, KeyShape};
    use proptest::prelude::*;
    use std::any::Any;
    use stratakv_format::DType;

    /// Pushes the groups of `keys` `[groups][kv_heads, group_tokens, key_dim]` from the layer's own end on.
    fn push(layer: &mut dyn LayerSummary, shape: KeyShape, keys: &[f32], end: usize) {
        for index in layer.groups()..end {
            let len = shape.group_tokens * shape.width();
            let plane: Vec<u8> = keys[index * len..][..len].iter().flat_map(|x| x.to_le_bytes()).collect();
            layer.push(&KeyGroup::new(shape, &plane, index as u64).unwrap());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_best_tokens_of_each_head_are_those_of_the_definition(
            (kv_heads, per_head, key_dim, group_tokens) in (1_usize..4, 1_usize..4, 1_usize..6, 1_usize..10),
            (first, more, cut) in (0_usize..400, 0_usize..400, 0_usize..800),
            (start, len, budget) in (0_usize..300, 1_usize..500, 0_usize..90),
            centroids in prop_oneof![1_usize..40, 250_usize..300], raw in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut random = SeededRandom::new(seed);
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype: DType::F32 };
            let groups = (first + more).div_ceil(group_tokens).max(1);
            let mut element = || random.unit() as f32 * 4.0 - 2.0;
            let mut rows = |count: usize| -> Vec<f32> { (0..count).map(|_| element()).collect() };
            let keys = rows(groups * group_tokens * shape.width());
            let query = rows(kv_heads * per_head * key_dim);
            let selector = PqCache::new(centroids);
            let mut layer = selector.summaries()[0].layer(0, shape).unwrap();
            push(layer.as_mut(), shape, &keys, (first / group_tokens).min(groups));
            layer.attached();
            layer.advance().unwrap();
            push(layer.as_mut(), shape, &keys, groups);
            layer.advance().unwrap();
            layer.truncate(cut / group_tokens);
            push(layer.as_mut(), shape, &keys, groups);
            layer.advance().unwrap();
            let covered = selector.covered_groups(&[layer.as_ref()]).unwrap();
            // The newest tokens do not count for the first codes.
            let ready = (groups * group_tokens).saturating_sub(64_usize.next_multiple_of(group_tokens));
            prop_assert_eq!(covered, if ready < 256 { 0 } else { groups });
            let tokens = start.min(covered * group_tokens)..(start + len).min(covered * group_tokens);
            prop_assume!(!tokens.is_empty());
            let codes = (layer.as_ref() as &dyn Any).downcast_ref::<ProductCodes>().unwrap();
            let aggregation = if raw { HeadAggregation::Sum } else { HeadAggregation::Softmax };
            let ask = EntryRequest { query: &query, shape, scale: 0.7, aggregation, tokens: tokens.clone(), budget };
            let chosen = selector.choose(&[layer.as_ref()], &ask).unwrap();
            prop_assert_eq!(chosen.heads.len(), kv_heads);
            prop_assert!(chosen.runs <= kv_heads * budget.min(tokens.len()));
            for (head, own) in chosen.heads.iter().enumerate() {
                // The key that the codes of a token stand for.
                let quantised = |token: usize| -> Vec<f32> {
                    let (group, within) = (token / group_tokens, token % group_tokens);
                    let key = &keys[((group * kv_heads + head) * group_tokens + within) * key_dim..][..key_dim];
                    let record = codes.heads[head].codes.slice(token..token + 1);
                    let mut whole = Vec::new();
                    for (at, elements) in codes.subspaces.iter().enumerate() {
                        let book: Vec<&[f32]> = codes.heads[head].books[at].chunks_exact(elements.len()).collect();
                        assert!(book.len() <= centroids);
                        let distance = |part: &[f32]| -> f32 {
                            part.iter().zip(&key[elements.clone()]).map(|(a, b)| (a - b).powi(2)).sum()
                        };
                        let part = book[codes.code(record, at)];
                        let least = book.iter().map(|part| distance(part)).fold(f32::MAX, f32::min);
                        assert!(distance(part) <= least * 1.0001 + 1e-9, "{} {least}", distance(part));
                        whole.extend_from_slice(part);
                    }
                    whole
                };
                let logits: Vec<Vec<f64>> = tokens.clone().map(|token| {
                    let key = quantised(token);
                    let dot = |at: usize| {
                        let q = &query[(head * per_head + at) * key_dim..][..key_dim];
                        key.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
                    };
                    (0..per_head).map(dot).collect()
                }).collect();
                let weight = |logit: f64| (0.7 * logit).exp();
                let sums: Vec<f64> = (0..per_head).map(|at| logits.iter().map(|own| weight(own[at])).sum()).collect();
                let scores: Vec<f64> = logits.iter().map(|own| {
                    own.iter().zip(&sums).map(|(logit, sum)| if raw { *logit } else { weight(*logit) / sum }).sum()
                }).collect();
                let mut expected = scores.clone();
                expected.sort_by(|a, b| b.total_cmp(a));
                prop_assert_eq!(own.len(), budget.min(tokens.len()));
                // Rounding may order tokens of equal weight in another way.
                for (token, best) in own.iter().zip(expected) {
                    let found = scores[*token as usize - tokens.start];
                    let margin = 1e-4 * if raw { best.abs().max(1.0) } else { best };
                    prop_assert!((found - best).abs() <= margin, "{found} {best}");
                }
                let distinct: std::collections::BTreeSet<u32> = own.iter().copied().collect();
                prop_assert_eq!(distinct.len(), own.len());
            }
        }
    }

    #[test]
    fn codebooks_above_two_bytes_are_refused() {
        for (name, fits) in [("pqcache", true), ("pqcache:65536", true), ("pqcache:65537", false)] {
            let spec: crate::retrieval::MethodSpec = name.parse().unwrap();
            assert_eq!(spec.selector(None).is_ok(), fits, "{name}");
        }
    }
}
