//! Selection by sign bits of randomly rotated keys, which needs no calibration.

use crate::error::Result;
use crate::retrieval::score_tiles::by_tokens;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::sign_bits::summary::{SignSpec, Signs};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// Selection by sign bits.
#[derive(Clone, Copy, Debug, Default)]
pub struct SignBits;

impl Selector for SignBits {
    fn name(&self) -> &str {
        "signs"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(SignSpec) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &Signs = summary_as(summaries)?;
        by_tokens(ask, scores, |lanes| keys.scorer(lanes));
        Ok(())
    }
}
