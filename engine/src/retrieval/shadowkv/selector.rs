//! ShadowKV's choice of groups.
//!
//! 1. Score the landmarks (mean keys) with each query head, and take a softmax over the groups.
//! 2. Take the maximum over the query heads of each KV head as the score of a group.
//! 3. Give outliers, the groups whose tokens are least like their mean, the highest score.
//!
//! The keys of selected groups are read with the values, or reconstructed from low rank
//! ([`PlaneSet::ReconstructedKeys`](crate::PlaneSet)).

use crate::error::Result;
use crate::kernels::{RowQuery, best_query_heads};
use crate::retrieval::score_tiles::score_tiles;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::shadowkv::summary::{LandmarkSpec, Landmarks};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;

/// Selection by landmarks and outliers.
#[derive(Clone, Copy, Debug)]
pub struct ShadowKv {
    /// The share of groups that are outliers (0.002 to 0.003 in the paper). They count in the budget, and take at most
    /// half of it.
    pub outlier_share: f64,
}

impl Default for ShadowKv {
    fn default() -> Self {
        Self { outlier_share: 0.003 }
    }
}

impl Selector for ShadowKv {
    fn name(&self) -> &str {
        "shadowkv"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(LandmarkSpec) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let landmarks: &Landmarks = summary_as(summaries)?;
        let heads = ask.query.len() / ask.shape.key_dim;
        let (lanes, width) = (heads.next_multiple_of(8), ask.shape.width());
        let mut query = RowQuery::new(ask.query, ask.shape.kv_heads, ask.shape.key_dim);
        let fill = move |groups: Range<usize>, out: &mut [f32]| {
            query.put(landmarks.means(groups), (width, 0), DType::F16, out, lanes);
        };
        score_tiles(ask, 1, (heads, lanes), fill, scores, |tile, scores| {
            let (units, weights) = tile.units();
            best_query_heads(units, weights, (heads, lanes), heads / ask.shape.kv_heads, scores);
        });
        let outliers = (ask.groups.len() as f64 * self.outlier_share.clamp(0.0, 1.0)).ceil() as usize;
        for group in landmarks.outliers(ask.groups.clone(), outliers.min(ask.count / 2)) {
            scores[group - ask.groups.start] = f32::INFINITY;
        }
        Ok(())
    }
}
