//! After InfiniGen: every KV head ranks tokens by itself, by partial keys of its own. What it reads is whole groups, so a
//! group stands where the best of its tokens stands in the list of any head.

use crate::error::Result;
use crate::kernels::multiversion;
use crate::retrieval::adapter::Adapter;
use crate::retrieval::lanes::Lanes;
use crate::retrieval::low_rank::summary::{LowRank, LowRankSpec};
use crate::retrieval::selector::{ScoreRequest, Selector, each_tile, low_rank, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use crate::retrieval::top_k::{highest, score_order};
use std::sync::Arc;

/// Per-token, per-head selection by an adapter whose columns each belong to one head.
#[derive(Clone, Debug)]
pub struct InfiniGen {
    keys: Arc<LowRankSpec>,
}

impl InfiniGen {
    /// With this adapter.
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
        let lanes = match softmax {
            true => Lanes::heads(ask.query, kv_heads, ask.shape.key_dim),
            false => Lanes::sums(ask.query, kv_heads, ask.shape.key_dim),
        };
        let (columns, fill) = low_rank(keys, ask, &lanes);
        // Per head, one for each group.
        let mut best = vec![0.0; kv_heads * ask.groups.len()];
        each_tile(ask, group, (lanes.count(), columns), fill, |groups, mut tile| {
            let (units, weights) = tile.units();
            let place = (groups.start - ask.groups.start, ask.groups.len());
            best_by_head(units, weights, (columns, lanes.count() / kv_heads), group, place, &mut best);
        });
        // Of groups that come later in the list of every head, none is chosen: as many come before it.
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

multiversion! {
    /// The best token of each group for each head, by the sum over its `ratio` lanes: those of a head from the first group's place
    /// on in its row, `[kv_heads, all groups]`.
    fn best_by_head(
        units: &[f32],
        weights: &[f32],
        lanes: (usize, usize),
        group: usize,
        place: (usize, usize),
        best: &mut [f32],
    ) = best_of_heads;
}

#[inline(always)]
fn best_of_heads(
    units: &[f32],
    weights: &[f32],
    (columns, ratio): (usize, usize),
    group: usize,
    (first, row): (usize, usize),
    best: &mut [f32],
) {
    match (columns, ratio) {
        (8, 1) => best_of::<8, 1>(units, weights, group, (first, row), best),
        (16, 2) => best_of::<16, 2>(units, weights, group, (first, row), best),
        (32, 4) => best_of::<32, 4>(units, weights, group, (first, row), best),
        _ => {
            for (tokens, at) in units.chunks_exact(columns * group).zip(first..) {
                for (head, best) in best.chunks_exact_mut(row).enumerate() {
                    let lanes = head * ratio..(head + 1) * ratio;
                    let mut highest = f32::NEG_INFINITY;
                    for unit in tokens.chunks_exact(columns) {
                        let lanes = unit[lanes.clone()].iter().zip(&weights[lanes.clone()]);
                        highest = highest.max(lanes.map(|(x, w)| x * w).sum());
                    }
                    best[at] = highest;
                }
            }
        }
    }
}

/// With all columns of use.
#[inline(always)]
fn best_of<const N: usize, const R: usize>(
    units: &[f32],
    weights: &[f32],
    group: usize,
    (first, row): (usize, usize),
    best: &mut [f32],
) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    let mut rows = best.chunks_exact_mut(row);
    let mut best: [&mut [f32]; 8] = std::array::from_fn(|_| rows.next().unwrap_or_default());
    for (tokens, at) in units.chunks_exact(N * group).zip(first..) {
        let mut highest = [f32::NEG_INFINITY; 8];
        for unit in tokens.as_chunks::<N>().0 {
            for head in 0..8 {
                let mut sum = 0.0;
                for i in 0..R {
                    sum += unit[head * R + i] * weights[head * R + i];
                }
                highest[head] = if sum > highest[head] { sum } else { highest[head] };
            }
        }
        // Lanes beyond the heads have no row.
        for (best, highest) in best.iter_mut().zip(highest) {
            if let Some(best) = best.get_mut(at) {
                *best = highest;
            }
        }
    }
}
