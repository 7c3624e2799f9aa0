//! LeoAM (section 4): bounds of long chunks first; a chunk is taken whole when its lower bound beats what is left, split when
//! it may hold something better, and never looked into when its upper bound is too low.

use super::selector::{Ask, ScoreForm, Selector, summary_as};
use crate::error::Result;
use crate::summary::{Bounds, Interval, KeyBounds, KeySummary, SummaryKind};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Levels of chunks: up to 64 groups.
const LEVELS: usize = 7;

/// LeoAM's adaptive selection.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeoAm {
    /// Share of the chunks that matter; the initial chunk length follows from it. `None`: the share that the budget selects.
    pub density: Option<f64>,
}

/// The number of initial chunks `m`, a power of two below `groups`, for which the evaluations expected are fewest:
/// `f(m) = m * sum_{i < log2(n / m)} (2 rho)^i`; then the level of chunks of `n / m` groups.
fn initial_level(groups: usize, density: f64, levels: usize) -> usize {
    let cost = |level: usize| {
        let chunks = groups as f64 / (1_u64 << level) as f64;
        chunks * (0..=level).map(|i| (2.0 * density).powi(i as i32)).sum::<f64>()
    };
    (0..levels).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(0)
}

struct Chunk {
    lower: f32,
    upper: f32,
    level: usize,
    run: usize,
}

impl Ord for Chunk {
    fn cmp(&self, other: &Self) -> Ordering {
        self.upper.total_cmp(&other.upper).then(other.run.cmp(&self.run)).then(self.level.cmp(&other.level))
    }
}

impl PartialOrd for Chunk {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Chunk {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Chunk {}

/// How head bounds become one: a monotone function of them, so that the sums are bounds again.
struct Scale {
    form: ScoreForm,
    scale: f32,
    /// Upper bound over everything, per query head.
    top: Vec<f32>,
}

impl Scale {
    fn chunk(&self, intervals: &[Interval], level: usize, run: usize) -> Chunk {
        let sum = |pick: fn(&Interval) -> f32| match self.form {
            ScoreForm::Raw => intervals.iter().map(pick).sum::<f32>(),
            ScoreForm::Softmax => {
                let terms = intervals.iter().zip(&self.top);
                terms.map(|(interval, top)| ((pick(interval) - top) * self.scale).exp()).sum()
            }
        };
        Chunk { lower: sum(|i| i.lower), upper: sum(|i| i.upper), level, run }
    }
}

impl Selector for LeoAm {
    fn name(&self) -> &str {
        "leoam"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>> {
        vec![Arc::new(KeyBounds { levels: LEVELS }) as _]
    }

    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()> {
        let bounds: &Bounds = summary_as(summaries)?;
        let groups = ask.groups.clone();
        let density = self.density.unwrap_or(ask.count as f64 / groups.len().max(1) as f64).clamp(1e-4, 1.0);
        let level = initial_level(groups.len(), density, bounds.levels());
        let mut intervals = Vec::new();
        let mut initial = Vec::new();
        let mut at = groups.start;
        let mut top = vec![f32::NEG_INFINITY; ask.query.len() / ask.shape.key_dim];
        while at < groups.end {
            // As long a run as starts here, ends inside, and is whole.
            let fits = |l: &usize| {
                let run = at >> l;
                at.is_multiple_of(1 << l) && (run + 1) << l <= groups.end && run < bounds.runs(*l)
            };
            let level = (0..=level).rev().find(fits).unwrap_or(0);
            bounds.intervals(ask.query, level, at >> level, &mut intervals);
            top.iter_mut().zip(&intervals).for_each(|(top, interval)| *top = top.max(interval.upper));
            initial.push((level, at >> level, intervals.clone()));
            at += 1 << level;
        }
        let scale = Scale { form: ask.form, scale: ask.scale, top };
        let mut heap: BinaryHeap<Chunk> =
            initial.iter().map(|(level, run, intervals)| scale.chunk(intervals, *level, *run)).collect();
        // The order in which groups are confirmed is their score; the rest stays merged and unread.
        scores.fill(f32::NEG_INFINITY);
        let mut rank = 0.0_f32;
        let mut left = ask.count;
        while left > 0
            && let Some(chunk) = heap.pop()
        {
            let span = 1 << chunk.level;
            let beats_rest = heap.peek().is_none_or(|next| chunk.lower >= next.upper);
            if chunk.level == 0 || (beats_rest && span <= left) {
                let first = chunk.run << chunk.level;
                for group in first..first + span {
                    rank -= 1.0;
                    scores[group - groups.start] = rank;
                }
                left -= span;
                continue;
            }
            for half in 0..2 {
                let (level, run) = (chunk.level - 1, 2 * chunk.run + half);
                bounds.intervals(ask.query, level, run, &mut intervals);
                heap.push(scale.chunk(&intervals, level, run));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_layers_start_with_long_chunks_and_dense_ones_with_groups() {
        assert_eq!(initial_level(1024, 0.95, 7), 0);
        assert!(initial_level(1024, 0.02, 7) >= 5);
        let levels: Vec<usize> = [0.5, 0.3, 0.1, 0.03].map(|rho| initial_level(1024, rho, 7)).to_vec();
        assert!(levels.windows(2).all(|w| w[0] <= w[1]), "{levels:?}");
    }
}
