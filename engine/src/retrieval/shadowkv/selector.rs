//! ShadowKV's choice of chunks: landmarks (mean keys), softmax, the maximum over the query heads of each KV head; chunks
//! whose tokens are unlike their mean are always chosen. Keys are read with the values, or rebuilt from low rank where the view
//! says so ([`PlaneSet::Reconstructed`](super::Planes)).

use crate::error::Result;
use crate::kernels::{RowQuery, multiversion};
use crate::retrieval::selector::{ScoreRequest, Selector, each_tile, summary_as};
use crate::retrieval::shadowkv::summary::{LandmarkSpec, Landmarks};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;

/// Selection by landmarks and outliers.
#[derive(Clone, Copy, Debug)]
pub struct ShadowKv {
    /// Share of the groups that are outliers (the paper: 0.002 to 0.003). They count in the budget, of which they take half
    /// at most.
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
        let fill = |groups: Range<usize>, out: &mut [f32]| {
            query.put(landmarks.means(groups), (width, 0), DType::F16, out, lanes);
        };
        each_tile(ask, 1, (heads, lanes), fill, |groups, mut tile| {
            let (units, weights) = tile.units();
            let scores = &mut scores[groups.start - ask.groups.start..groups.end - ask.groups.start];
            best_query_heads(units, weights, (heads, lanes), heads / ask.shape.kv_heads, scores);
        });
        let outliers = (ask.groups.len() as f64 * self.outlier_share.clamp(0.0, 1.0)).ceil() as usize;
        for group in landmarks.outliers(ask.groups.clone(), outliers.min(ask.count / 2)) {
            scores[group - ask.groups.start] = f32::INFINITY;
        }
        Ok(())
    }
}

multiversion! {
    /// The sum over KV heads of the best of their query heads, `ratio` each.
    fn best_query_heads(
        units: &[f32],
        weights: &[f32],
        lanes: (usize, usize),
        ratio: usize,
        scores: &mut [f32],
    ) = sums_of_best;
}

#[inline(always)]
fn sums_of_best(units: &[f32], weights: &[f32], (heads, lanes): (usize, usize), ratio: usize, scores: &mut [f32]) {
    match ratio {
        1 => sums_of::<1>(units, weights, (heads, lanes), scores),
        2 => sums_of::<2>(units, weights, (heads, lanes), scores),
        4 => sums_of::<4>(units, weights, (heads, lanes), scores),
        8 => sums_of::<8>(units, weights, (heads, lanes), scores),
        _ => {
            for (score, unit) in scores.iter_mut().zip(units.chunks_exact(lanes)) {
                let mut sum = 0.0;
                for (x, w) in unit[..heads].chunks_exact(ratio).zip(weights.chunks_exact(ratio)) {
                    sum += x.iter().zip(w).fold(f32::NEG_INFINITY, |best, (x, w)| best.max(x * w));
                }
                *score = sum;
            }
        }
    }
}

#[inline(always)]
fn sums_of<const R: usize>(units: &[f32], weights: &[f32], (heads, lanes): (usize, usize), scores: &mut [f32]) {
    for (score, unit) in scores.iter_mut().zip(units.chunks_exact(lanes)) {
        let mut sum = 0.0;
        for (x, w) in unit[..heads].as_chunks::<R>().0.iter().zip(weights.as_chunks::<R>().0) {
            let mut best = f32::NEG_INFINITY;
            for i in 0..R {
                let x = x[i] * w[i];
                best = if x > best { x } else { best };
            }
            sum += best;
        }
        *score = sum;
    }
}
