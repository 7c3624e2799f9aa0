//! Selectors: a method that scores the groups of a layer from summaries. A method of an embedder's own is one more
//! implementation of [`Selector`], with a summary of this crate or of its own.

use crate::attention::RowQuery;
use crate::error::{Error, ErrorKind, Result};
use crate::simd::widest;
use crate::summary::{KeyShape, KeySummary, Lanes, LowRank, SummaryKind};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;

/// How scores of several query heads become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ScoreForm {
    /// The sum of `q . k` over query heads, as the papers have it.
    #[default]
    Raw,
    /// Softmax over the tokens per query head, then the sum over query heads: what attention itself weighs with.
    Softmax,
}

/// What a selector is asked for.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// `[q_heads, key_dim]`, finite; `q_heads` is a multiple of the KV heads.
    pub query: &'a [f32],
    /// Shape of the keys.
    pub shape: KeyShape,
    /// Factor of `q . k` in the softmax.
    pub scale: f32,
    /// How heads are added up.
    pub form: ScoreForm,
    /// Groups to score.
    pub groups: Range<usize>,
    /// Groups among these that are chosen whatever their scores are: sinks, then the newest; the two may overlap.
    pub forced: [Range<usize>; 2],
    /// Groups that the budget has room for beside those chosen anyway. A method that stops when it has found so many must not
    /// count [forced](Self::is_forced) ones: their places would go to groups that it did not score.
    pub count: usize,
}

impl Ask<'_> {
    /// Whether a group is chosen whatever its score is.
    #[must_use]
    pub fn is_forced(&self, group: usize) -> bool {
        self.forced.iter().any(|forced| forced.contains(&group))
    }
}

/// A method of choosing groups.
pub trait Selector: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// The summaries it scores.
    fn summaries(&self) -> Vec<Arc<dyn SummaryKind>>;

    /// Scores of the groups `ask.groups`, one each, higher is better, from its summaries in the order of
    /// [`Self::summaries`], which know all these groups. A group of score infinity is always chosen while the budget lasts.
    ///
    /// # Errors
    /// Whatever keeps it from scoring.
    fn score(&self, summaries: &[&dyn KeySummary], ask: &Ask<'_>, scores: &mut [f32]) -> Result<()>;
}

/// The first summary, as what it is.
///
/// # Errors
/// There is none, or it is of another kind.
pub fn summary_as<'a, S: KeySummary>(summaries: &[&'a dyn KeySummary]) -> Result<&'a S> {
    let found = summaries.first().and_then(|summary| (*summary as &dyn Any).downcast_ref::<S>());
    found.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "a summary of another kind than the selector's"))
}

/// Adds up scores of units (tokens, or groups with `per_group` 1) over heads: `scores[g]` is the highest of the units of
/// group `g`. `units` is `[groups * per_group, lanes]`, of which the first `heads` lanes count; it is used up. Fastest with lanes a
/// multiple of 8. Without lanes, or with groups of no units, scores stay as they are.
pub fn combine(
    units: &mut [f32],
    (heads, lanes): (usize, usize),
    per_group: usize,
    form: ScoreForm,
    scale: f32,
    scores: &mut [f32],
) {
    if lanes == 0 || per_group == 0 {
        return;
    }
    if form == ScoreForm::Softmax {
        let weights = softmax(units, heads, lanes, scale);
        best(units, &weights, lanes, per_group, scores);
    } else {
        let weights: Vec<f32> = (0..lanes).map(|lane| f32::from(u8::from(lane < heads))).collect();
        best(units, &weights, lanes, per_group, scores);
    }
}

widest! {
    /// The units become `exp(scale * (x - max))` per lane; gives one over the sum of each lane that counts.
    pub(super) fn softmax(units: &mut [f32], heads: usize, lanes: usize, scale: f32) -> Vec<f32> = exponentials;
}

#[inline(always)]
fn exponentials(units: &mut [f32], heads: usize, lanes: usize, scale: f32) -> Vec<f32> {
    let (mut maxima, mut sums) = (vec![f32::MIN; lanes], vec![0.0_f32; lanes]);
    for unit in units.chunks_exact(lanes) {
        for (max, x) in maxima.iter_mut().zip(unit) {
            *max = if *x > *max { *x } else { *max };
        }
    }
    // Infinity times a difference of zero is no number.
    let factor = (scale * std::f32::consts::LOG2_E).min(f32::MAX);
    for unit in units.chunks_exact_mut(lanes) {
        for ((x, max), sum) in unit.iter_mut().zip(&maxima).zip(&mut sums) {
            *x = exp2((*x - max) * factor);
            *sum += *x;
        }
    }
    sums.iter()
        .enumerate()
        .map(|(lane, sum)| if lane < heads { 1.0 / sum.max(f32::MIN_POSITIVE) } else { 0.0 })
        .collect()
}

widest! {
    fn best(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) = best_of_groups;
}

#[inline(always)]
fn best_of_groups(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) {
    for (group, score) in units.chunks(lanes.saturating_mul(per_group)).zip(scores) {
        let mut highest = f32::NEG_INFINITY;
        for unit in group.chunks_exact(lanes) {
            let mut sums = [0.0_f32; 8];
            let ((units, rest), (weights, rest_weights)) = (unit.as_chunks::<8>(), weights.as_chunks::<8>());
            for (x, weights) in units.iter().zip(weights) {
                for i in 0..8 {
                    sums[i] += x[i] * weights[i];
                }
            }
            for ((sum, x), weight) in sums.iter_mut().zip(rest).zip(rest_weights) {
                *sum += x * weight;
            }
            highest = highest.max(sums.iter().sum());
        }
        *score = highest;
    }
}

/// `2^x` for `x <= 0`, to about 2e-7; 0 far below.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let x = if x < -126.0 { -126.0 } else { x };
    let shifted = x + 12_582_912.0;
    let f = x - (shifted - 12_582_912.0);
    let p = 1.333_355_8e-3_f32;
    let p = p * f + 9.618_129e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + 6.931_472e-1;
    let p = p * f + 1.0;
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// For methods that score tokens linearly in the query: `fill` gives the scores of all tokens for the lanes.
pub(super) fn by_tokens(ask: &Ask<'_>, joint: bool, scores: &mut [f32], fill: impl FnOnce(&Lanes, &mut [f32])) {
    let (heads, dim) = (ask.shape.kv_heads, ask.shape.key_dim);
    let lanes = match (ask.form, joint) {
        (ScoreForm::Softmax, _) => Lanes::heads(ask.query, heads, dim),
        (ScoreForm::Raw, true) => Lanes::joint(ask.query, heads, dim),
        (ScoreForm::Raw, false) => Lanes::sums(ask.query, heads, dim),
    };
    let group = ask.shape.group_tokens;
    let mut units = vec![0.0; ask.groups.len() * group * lanes.padded()];
    fill(&lanes, &mut units);
    combine(&mut units, (lanes.count(), lanes.padded()), group, ask.form, ask.scale, scores);
}

/// Scores of all tokens of `groups` by low-rank keys: `[tokens, lanes]`.
pub(super) fn low_rank(keys: &LowRank, lanes: &Lanes, groups: Range<usize>, out: &mut [f32]) {
    let rank = keys.rank();
    RowQuery::new(&keys.queries(lanes), 1, rank).add(keys.rows(groups), (rank, 0), DType::F16, out, lanes.padded());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn powers_of_two(x in -100.0_f32..0.0) {
            prop_assert!((exp2(x) / x.exp2() - 1.0).abs() < 1e-5, "{} {}", exp2(x), x.exp2());
        }

        #[test]
        fn softmax_per_head_then_sum_then_maximum(
            values in prop::collection::vec(-8.0_f32..8.0, 12..200), heads in 1_usize..9, per_group in 1_usize..5,
        ) {
            let tokens = values.len() / heads;
            prop_assume!(tokens > 0);
            let mut units = vec![0.0; tokens * 16];
            for t in 0..tokens { for h in 0..heads { units[t * 16 + h] = values[t * heads + h]; } }
            let groups = tokens.div_ceil(per_group);
            let mut scores = vec![0.0; groups];
            combine(&mut units.clone(), (heads, 16), per_group, ScoreForm::Softmax, 0.5, &mut scores);
            let mut weights = vec![0.0_f64; tokens];
            for h in 0..heads {
                let e: Vec<f64> = (0..tokens).map(|t| (0.5 * f64::from(values[t * heads + h])).exp()).collect();
                let sum: f64 = e.iter().sum();
                (0..tokens).for_each(|t| weights[t] += e[t] / sum);
            }
            for (g, score) in scores.iter().enumerate() {
                let best = weights[g * per_group..tokens.min((g + 1) * per_group)].iter().copied().fold(0.0, f64::max);
                prop_assert!((f64::from(*score) - best).abs() < 1e-4, "{score} {best}");
            }
            combine(&mut units, (heads, 16), per_group, ScoreForm::Raw, 0.5, &mut scores);
            let sum = |t: usize| values[t * heads..(t + 1) * heads].iter().sum::<f32>();
            let best = (0..per_group.min(tokens)).map(sum).fold(f32::NEG_INFINITY, f32::max);
            prop_assert!((scores[0] - best).abs() < 1e-4);
        }
    }
}
