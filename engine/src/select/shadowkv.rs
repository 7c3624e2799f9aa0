//! ShadowKV's choice of chunks: landmarks (mean keys), softmax, the maximum over the query heads of each KV head; chunks
//! whose tokens are unlike their mean are always chosen. Keys are read with the values, or rebuilt from low rank where the view
//! says so ([`Planes::Rebuilt`](super::Planes)).

use super::selector::{Ask, ScoreForm, Selector, softmax, summary_as};
use crate::attention::RowQuery;
use crate::error::Result;
use crate::summary::{KeySummary, LandmarkKeys, Landmarks, SummaryKind};
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

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::new(LandmarkKeys) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let landmarks: &Landmarks = summary_as(summaries)?;
        let heads = ask.query.len() / ask.shape.key_dim;
        let (lanes, width) = (heads.next_multiple_of(8), ask.shape.width());
        let mut units = vec![0.0; ask.groups.len() * lanes];
        let mut query = RowQuery::new(ask.query, ask.shape.kv_heads, ask.shape.key_dim);
        query.add(landmarks.means(ask.groups.clone()), (width, 0), DType::F16, &mut units, lanes);
        let weights = match ask.form {
            ScoreForm::Softmax => softmax(&mut units, heads, lanes, ask.scale),
            ScoreForm::Raw => vec![1.0; lanes],
        };
        let ratio = heads / ask.shape.kv_heads;
        for (score, unit) in scores.iter_mut().zip(units.chunks_exact(lanes)) {
            let by_head = unit[..heads].chunks_exact(ratio).zip(weights.chunks_exact(ratio));
            let best = by_head.map(|(x, w)| x.iter().zip(w).map(|(x, w)| x * w).fold(f32::NEG_INFINITY, f32::max));
            *score = best.sum();
        }
        let outliers = (ask.groups.len() as f64 * self.outlier_share.clamp(0.0, 1.0)).ceil() as usize;
        for group in landmarks.outliers(ask.groups.clone(), outliers.min(ask.count / 2)) {
            scores[group - ask.groups.start] = f32::INFINITY;
        }
        Ok(())
    }
}
