//! After InfiniGen: every KV head ranks tokens by itself, by partial keys of its own. What it reads is whole groups, so a
//! group stands where the best of its tokens stands in the list of any head.

use super::selector::{Ask, Selector, each_tile, low_rank, summary_as};
use crate::error::Result;
use crate::simd::widest;
use crate::summary::{Adapter, KeySummary, Lanes, LowRank, LowRankKeys, SummaryKind};
use std::sync::Arc;

/// Per-token, per-head selection by an adapter whose columns each belong to one head.
#[derive(Clone, Debug)]
pub struct InfiniGen {
    keys: Arc<LowRankKeys>,
}

impl InfiniGen {
    /// With this adapter.
    #[must_use]
    pub fn new(adapter: Arc<Adapter>) -> Self {
        Self { keys: Arc::new(LowRankKeys::new(adapter)) }
    }
}

impl Selector for InfiniGen {
    fn name(&self) -> &str {
        "infinigen"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::clone(&self.keys) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let keys: &LowRank = summary_as(summaries)?;
        let (kv_heads, group) = (ask.shape.kv_heads, ask.shape.group_tokens);
        let softmax = ask.form != super::ScoreForm::Raw;
        let lanes = match softmax {
            true => Lanes::heads(ask.query, kv_heads, ask.shape.key_dim),
            false => Lanes::sums(ask.query, kv_heads, ask.shape.key_dim),
        };
        let (columns, fill) = low_rank(keys, ask, &lanes);
        let mut best: Vec<Vec<f32>> = (0..kv_heads).map(|_| Vec::with_capacity(ask.groups.len())).collect();
        each_tile(ask, group, (lanes.count(), columns), fill, |_, mut tile| {
            let (units, weights) = tile.units();
            best_by_head(units, weights, (columns, lanes.count() / kv_heads), group, &mut best);
        });
        // Of groups that come later in the list of every head, none is chosen: as many come before it.
        let forced: usize = ask.forced.iter().map(ExactSizeIterator::len).sum();
        let listed = (ask.count + forced).min(ask.groups.len());
        scores.fill(f32::NEG_INFINITY);
        for best in best {
            let mut list: Vec<(f32, usize)> = best.into_iter().zip(0..).collect();
            let order = |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
            if 0 < listed && listed < list.len() {
                list.select_nth_unstable_by(listed - 1, order);
            }
            list.truncate(listed);
            list.sort_unstable_by(order);
            for (rank, (_, index)) in list.into_iter().enumerate() {
                scores[index] = scores[index].max(-(rank as f32));
            }
        }
        Ok(())
    }
}

widest! {
    /// Adds to each head's list the best token of each group, by the sum over its `ratio` lanes.
    fn best_by_head(units: &[f32], weights: &[f32], lanes: (usize, usize), group: usize, best: &mut [Vec<f32>])
        = best_of_heads;
}

#[inline(always)]
fn best_of_heads(
    units: &[f32],
    weights: &[f32],
    (columns, ratio): (usize, usize),
    group: usize,
    best: &mut [Vec<f32>],
) {
    match (columns, ratio) {
        (8, 1) => best_of::<8, 1>(units, weights, group, best),
        (16, 2) => best_of::<16, 2>(units, weights, group, best),
        (32, 4) => best_of::<32, 4>(units, weights, group, best),
        _ => {
            for tokens in units.chunks_exact(columns * group) {
                for (head, best) in best.iter_mut().enumerate() {
                    let lanes = head * ratio..(head + 1) * ratio;
                    let mut highest = f32::NEG_INFINITY;
                    for unit in tokens.chunks_exact(columns) {
                        let lanes = unit[lanes.clone()].iter().zip(&weights[lanes.clone()]);
                        highest = highest.max(lanes.map(|(x, w)| x * w).sum());
                    }
                    best.push(highest);
                }
            }
        }
    }
}

/// With all columns of use.
#[inline(always)]
fn best_of<const N: usize, const R: usize>(units: &[f32], weights: &[f32], group: usize, best: &mut [Vec<f32>]) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    for tokens in units.chunks_exact(N * group) {
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
        best.iter_mut().zip(highest).for_each(|(best, highest)| best.push(highest));
    }
}
