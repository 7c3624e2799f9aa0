//! LeoAM (section 4): bounds of long chunks first; a chunk is taken whole when its lower bound beats what is left, split when
//! it may hold something better, and never looked into when its upper bound is too low.

use super::bounds::BoundQuery;
use super::selector::{Ask, ScoreForm, Selector, summary_as};
use crate::error::Result;
use crate::summary::{Bounds, KeyBounds, KeySummary, SummaryKind};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

/// Levels of chunks: up to 64 groups.
const LEVELS: usize = 7;

/// LeoAM's adaptive selection.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeoAm {
    /// Share of the chunks that matter; the initial chunk length follows from it. `None`: the share that the budget selects.
    pub density: Option<f64>,
}

/// The level of chunks, of `2^level` groups, to begin with: that for which the evaluations expected are fewest, which for `m`
/// chunks of `n` groups are `m * sum_{i <= log2(n / m)} (2 rho)^i`. (The paper's sum ends one term earlier, which would count
/// none at all for `m = n`.)
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
    /// A chunk of these bounds, `[q_heads]` each.
    fn chunk(&self, lower: &[f32], upper: &[f32], level: usize, run: usize) -> Chunk {
        let sum = |bounds: &[f32]| match self.form {
            ScoreForm::Raw => bounds.iter().sum::<f32>(),
            ScoreForm::Softmax => {
                bounds.iter().zip(&self.top).map(|(bound, top)| ((bound - top) * self.scale).exp()).sum()
            }
        };
        Chunk { lower: sum(lower), upper: sum(upper), level, run }
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
        let longest = initial_level(groups.len(), density, bounds.levels());
        let (mut query, heads) = (BoundQuery::new(ask), ask.query.len() / ask.shape.key_dim);
        let mut initial = Vec::new();
        let mut at = groups.start;
        let mut top = vec![f32::NEG_INFINITY; heads];
        while at < groups.end {
            // As long a run as starts here, ends inside, and is whole.
            let fits = |l: &usize| {
                let run = at >> l;
                at.is_multiple_of(1 << l) && (run + 1) << l <= groups.end && run < bounds.runs(*l)
            };
            let level = (0..=longest).rev().find(fits).unwrap_or(0);
            // All that start like it, at once.
            let (run, end) = (at >> level, (groups.end >> level).min(bounds.runs(level)));
            let runs = run..if level == longest { end } else { run + 1 };
            let lower = query.lower(bounds, level, runs.clone(), heads);
            let upper = query.upper(bounds, level, runs.clone(), heads);
            for upper in upper.chunks_exact(heads) {
                top.iter_mut().zip(upper).for_each(|(top, upper)| *top = top.max(*upper));
            }
            at = runs.end << level;
            initial.push((level, runs, lower, upper));
        }
        let scale = Scale { form: ask.form, scale: ask.scale, top };
        let mut heap = BinaryHeap::new();
        let add = |heap: &mut BinaryHeap<Chunk>, level: usize, runs: Range<usize>, lower: &[f32], upper: &[f32]| {
            let bounds = lower.chunks_exact(heads).zip(upper.chunks_exact(heads));
            heap.extend(runs.zip(bounds).map(|(run, (lower, upper))| scale.chunk(lower, upper, level, run)));
        };
        for (level, runs, lower, upper) in initial {
            add(&mut heap, level, runs, &lower, &upper);
        }
        // The order in which groups are confirmed is their score; the rest stays merged and unread.
        scores.fill(f32::NEG_INFINITY);
        let mut rank = 0.0_f32;
        let mut left = ask.count;
        while left > 0
            && let Some(chunk) = heap.pop()
        {
            let first = chunk.run << chunk.level;
            let members = first..first + (1 << chunk.level);
            // Those that are chosen anyway take no place that is left.
            let takes = members.clone().filter(|group| !ask.is_forced(*group)).count();
            let beats_rest = heap.peek().is_none_or(|next| chunk.lower >= next.upper);
            if chunk.level == 0 || (beats_rest && takes <= left) {
                for group in members {
                    rank -= 1.0;
                    scores[group - groups.start] = rank;
                }
                left -= takes;
                continue;
            }
            let (level, halves) = (chunk.level - 1, 2 * chunk.run..2 * chunk.run + 2);
            let lower = query.lower(bounds, level, halves.clone(), heads);
            let upper = query.upper(bounds, level, halves.clone(), heads);
            add(&mut heap, level, halves, &lower, &upper);
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
