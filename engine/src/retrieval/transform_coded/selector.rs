//! Transform-coded keys: a code of a few bytes per token, scored by table look-ups.

use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::score_tiles::by_tokens;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::transform_coded::summary::{CodeSpec, Codes};
use std::sync::Arc;

/// Selection by transform-coded keys. Its adapter has codebooks.
#[derive(Clone, Debug)]
pub struct TransformCoded {
    keys: Arc<CodeSpec>,
}

impl TransformCoded {
    /// Makes the selector from its adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(CodeSpec::new(adapter)) }
    }
}

impl Selector for TransformCoded {
    fn name(&self) -> &str {
        "tck"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &Codes = summary_as(summaries)?;
        by_tokens(ask, scores, |lanes| keys.scorer(lanes));
        Ok(())
    }
}
