//! KVSwap (section 3.2): low-rank keys of all heads together, summed over heads, with the maximum in each group.

use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::low_rank::summary::{LowRank, LowRankSpec, low_rank};
use crate::retrieval::score_tiles::by_tokens;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::sync::Arc;

/// KVSwap's selection, by an adapter that keeps `rank` numbers per token.
#[derive(Clone, Debug)]
pub struct KvSwap {
    keys: Arc<LowRankSpec>,
}

impl KvSwap {
    /// Makes the selector from its adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(LowRankSpec::new(adapter)) }
    }
}

impl Selector for KvSwap {
    fn name(&self) -> &str {
        "kvswap"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &LowRank = summary_as(summaries)?;
        by_tokens(ask, scores, |lanes| low_rank(keys, ask, lanes));
        Ok(())
    }
}
