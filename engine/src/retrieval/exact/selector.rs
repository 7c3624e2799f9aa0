//! The exact oracle: it scores all keys. It keeps every key in memory, so it is for evaluation only.

use crate::error::Result;
use crate::retrieval::exact::summary::{Exact, ExactSpec};
use crate::retrieval::score_tiles::by_tokens;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// Selection by exact scores.
#[derive(Clone, Copy, Debug, Default)]
pub struct Oracle;

impl Selector for Oracle {
    fn name(&self) -> &str {
        "oracle"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(ExactSpec) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &Exact = summary_as(summaries)?;
        by_tokens(ask, scores, |lanes| keys.scorer(lanes));
        Ok(())
    }
}
