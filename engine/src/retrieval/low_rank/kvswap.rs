//! KVSwap (section 3.2): low-rank keys of all heads together; sum over heads, maximum in the group.

use crate::error::Result;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::low_rank::summary::{LowRank, LowRankKeys};
use crate::retrieval::selector::{Ask, Selector, by_tokens, low_rank, summary_as};
use crate::retrieval::summary::{KeySummary, SummaryKind};
use std::sync::Arc;

/// KVSwap's selection by an adapter of `rank` numbers per token.
#[derive(Clone, Debug)]
pub struct KvSwap {
    keys: Arc<LowRankKeys>,
}

impl KvSwap {
    /// With this adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(LowRankKeys::new(adapter)) }
    }
}

impl Selector for KvSwap {
    fn name(&self) -> &str {
        "kvswap"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &LowRank = summary_as(summaries)?;
        by_tokens(ask, scores, |lanes| low_rank(keys, ask, lanes));
        Ok(())
    }
}
