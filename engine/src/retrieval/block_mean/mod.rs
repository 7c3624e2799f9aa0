//! Mean keys (MoBA, Lu et al. 2025, section 2.2): a group's score is the product of the query with the mean of its
//! keys.
//!
//! The means are those that ShadowKV's landmarks keep, so that both methods share one summary and one record on a
//! device. MoBA trains models to attend by these scores. On other models the mean hides single tokens that matter: see
//! the figures that `kvrun compare` prints beside the other methods.

use crate::error::Result;
use crate::kernels::RowQuery;
use crate::retrieval::method::{AdapterFit, ChosenUnit, Method, MethodParameter, without_adapter};
use crate::retrieval::score_tiles::score_tiles;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::shadowkv::summary::{LandmarkSpec, Landmarks};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;

/// MoBA's gate.
pub(crate) const BLOCK_MEAN: Method = Method {
    name: "mean",
    alias: "moba",
    about: "MoBA: the product of the query with the mean key of a group",
    parameter: MethodParameter::None,
    adapter: AdapterFit::None,
    reconstructs_keys: false,
    unit: ChosenUnit::Groups,
    make: without_adapter::<BlockMean>,
};

/// Selection by the mean key of each group.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockMean;

impl Selector for BlockMean {
    fn name(&self) -> &str {
        "mean"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(LandmarkSpec) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let landmarks: &Landmarks = summary_as(summaries)?;
        let heads = ask.query.len() / ask.shape.key_dim;
        let (columns, width) = (heads.next_multiple_of(8), ask.shape.width());
        let mut query = RowQuery::new(ask.query, ask.shape.kv_heads, ask.shape.key_dim);
        let fill = move |groups: Range<usize>, out: &mut [f32]| {
            query.put(landmarks.means(groups), (width, 0), DType::F16, out, columns);
        };
        score_tiles(ask, 1, (heads, columns), fill, scores, |tile, scores| tile.best(1, scores));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::selector::HeadAggregation;
    use crate::retrieval::summary::{KeyGroup, KeyShape};

    const SHAPE: KeyShape = KeyShape { kv_heads: 2, key_dim: 8, group_tokens: 4, dtype: DType::F32 };
    const GROUPS: usize = 37;

    /// Keys `[groups, kv_heads, group_tokens, key_dim]` of whole sixteenths, whose means f16 holds exactly.
    fn keys() -> Vec<f32> {
        let mut random = 0x9e37_79b9_u32;
        let elements = GROUPS * SHAPE.width() * SHAPE.group_tokens;
        let next = |_| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((random >> 24) as f32 - 128.0) / 16.0
        };
        (0..elements).map(next).collect()
    }

    /// Scores by the definition: `scores[head][group]` is the query head times the mean key of its KV head.
    fn products(keys: &[f32], query: &[f32]) -> Vec<Vec<f32>> {
        let (dim, tokens) = (SHAPE.key_dim, SHAPE.group_tokens);
        let ratio = query.len() / dim / SHAPE.kv_heads;
        let group_elements = SHAPE.width() * tokens;
        let product = |head: usize, group: usize| -> f32 {
            let plane = &keys[group * group_elements + head / ratio * tokens * dim..][..tokens * dim];
            let mean = |i: usize| plane.iter().skip(i).step_by(dim).sum::<f32>() / tokens as f32;
            (0..dim).map(|i| query[head * dim + i] * mean(i)).sum()
        };
        (0..query.len() / dim).map(|head| (0..GROUPS).map(|group| product(head, group)).collect()).collect()
    }

    #[test]
    fn mean_scores_are_products_with_the_mean_key() {
        let keys = keys();
        let mut summary = LandmarkSpec.layer(0, SHAPE).unwrap();
        let group_elements = SHAPE.width() * SHAPE.group_tokens;
        for (index, group) in keys.chunks_exact(group_elements).enumerate() {
            let plane: Vec<u8> = group.iter().flat_map(|x| x.to_le_bytes()).collect();
            summary.push(&KeyGroup::new(SHAPE, &plane, index as u64).unwrap());
        }
        let query: Vec<f32> = (0..4 * SHAPE.key_dim).map(|i| (i as f32 * 0.37).sin()).collect();
        let expected = products(&keys, &query);
        for aggregation in [HeadAggregation::Sum, HeadAggregation::Softmax] {
            let groups = 3..GROUPS - 2;
            let forced = [groups.start..groups.start, groups.end..groups.end];
            let count = groups.len();
            let ask = ScoreRequest {
                query: &query,
                shape: SHAPE,
                scale: 0.5,
                aggregation,
                groups,
                forced,
                count,
                threads: None,
            };
            let mut scores = vec![0.0; ask.groups.len()];
            BlockMean.score(&[&*summary], &ask, &mut scores).unwrap();
            for (score, group) in scores.iter().zip(ask.groups.clone()) {
                let weight = |head: &Vec<f32>| match aggregation {
                    HeadAggregation::Sum => head[group],
                    _ => {
                        let all = ask.groups.clone().map(|group| (0.5 * head[group]).exp()).sum::<f32>();
                        (0.5 * head[group]).exp() / all
                    }
                };
                let want: f32 = expected.iter().map(weight).sum();
                assert!((score - want).abs() <= 2e-3 * want.abs().max(1.0), "{aggregation:?} {group}: {score} {want}");
            }
        }
    }
}
