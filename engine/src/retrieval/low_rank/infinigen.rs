//! After InfiniGen: every KV head ranks tokens by partial keys of its own.
//!
//! Whole groups are read, so a group gets the best rank that any of its tokens has in the list of any head.

use crate::error::Result;
use crate::kernels::best_by_head;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::low_rank::summary::{LowRank, LowRankSpec, low_rank};
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::score_tiles::each_tile;
use crate::retrieval::selector::{ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::top_k::{highest, score_order};
use std::sync::Arc;

/// Selection by token and head. Each column of its adapter belongs to one head.
#[derive(Clone, Debug)]
pub struct InfiniGen {
    keys: Arc<LowRankSpec>,
}

impl InfiniGen {
    /// Makes the selector from its adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(LowRankSpec::new(adapter)) }
    }
}

impl Selector for InfiniGen {
    fn name(&self) -> &str {
        "infinigen"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &LowRank = summary_as(summaries)?;
        let (kv_heads, group) = (ask.shape.kv_heads, ask.shape.group_tokens);
        let softmax = ask.aggregation != crate::retrieval::selector::HeadAggregation::Sum;
        let batch = match softmax {
            true => QueryBatch::query_heads(ask.query, kv_heads, ask.shape.key_dim),
            false => QueryBatch::kv_heads(ask.query, kv_heads, ask.shape.key_dim),
        };
        let (columns, fill) = low_rank(keys, ask, &batch);
        // One score for each head and group.
        let mut best = vec![0.0; kv_heads * ask.groups.len()];
        each_tile(ask, group, (batch.count(), columns), fill, |groups, mut tile| {
            let (units, weights) = tile.units();
            let place = (groups.start - ask.groups.start, ask.groups.len());
            best_by_head(units, weights, (columns, batch.count() / kv_heads), group, place, &mut best);
        });
        // A group that is later in the list of every head is never chosen, because enough groups precede it.
        let forced: usize = ask.forced.iter().map(ExactSizeIterator::len).sum();
        let listed = (ask.count + forced).min(ask.groups.len());
        scores.fill(f32::NEG_INFINITY);
        for best in best.chunks_exact(ask.groups.len().max(1)) {
            let mut list = highest(best, listed, |_| true);
            list.sort_unstable_by(|a, b| score_order(*a, *b));
            for (rank, (_, index)) in list.into_iter().enumerate() {
                let score = &mut scores[index as usize];
                *score = score.max(-(rank as f32));
            }
        }
        Ok(())
    }
}
