//! Selectors: methods that score the groups of a layer from summaries, and how scores of query heads are aggregated.
//!
//! An embedder adds a method by implementing [`Selector`], with a summary of this crate or of its own. Methods of this
//! crate score tile by tile ([`score_tiles`](super::score_tiles)).

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{best_scores, best_units, exponentiate, join_lanes, lane_weights, packed_sums};
use crate::options::ComputeThreads;
use crate::retrieval::entry_selector::EntrySelector;
pub use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::summary::{KeyShape, LayerSummary, SummarySpec};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The id of a selector that is attached to a sequence. It is valid while that handle of the sequence is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SelectorId {
    /// Unique in this process, so that an id of another sequence is refused.
    number: u64,
}

impl SelectorId {
    /// Returns an id that no selector of this process has.
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Returns the number, which no other selector of this process has.
    pub(crate) fn number(self) -> u64 {
        self.number
    }
}

/// The request to score groups for one query.
#[derive(Clone, Debug)]
pub struct ScoreRequest<'a> {
    /// The query `[q_heads, key_dim]`, finite. `q_heads` is a multiple of the KV heads.
    pub query: &'a [f32],
    /// The shape of the keys.
    pub shape: KeyShape,
    /// The factor of `q . k` in the softmax.
    pub scale: f32,
    /// The aggregation of query heads.
    pub aggregation: HeadAggregation,
    /// The groups to score.
    pub groups: Range<usize>,
    /// Groups among these that are chosen regardless of their scores: sinks, then the newest. The two ranges may
    /// overlap.
    pub forced: [Range<usize>; 2],
    /// The number of groups that the budget allows in addition to the forced ones. A method that stops after finding
    /// this many must not count [forced](Self::is_forced) groups.
    pub count: usize,
    /// Threads that may compute parts of the scores. Scores must not depend on them.
    pub threads: Option<&'a dyn ComputeThreads>,
}

impl ScoreRequest<'_> {
    /// Returns whether a group is chosen regardless of its score.
    #[must_use]
    pub fn is_forced(&self, group: usize) -> bool {
        self.forced.iter().any(|forced| forced.contains(&group))
    }
}

/// A retrieval method: it scores groups from summaries.
pub trait Selector: Send + Sync {
    /// Returns its name.
    fn name(&self) -> &str;

    /// Returns the summaries that it scores.
    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>>;

    /// Writes a score for each group of `ask.groups`. A higher score is better, and infinity is chosen while the budget
    /// lasts.
    ///
    /// `summaries` are in the order of [`Self::summaries`] and know all these groups.
    ///
    /// # Errors
    /// The errors of the method.
    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()>;

    /// Returns the method as one that chooses entries. The engine then never calls [`Self::score`].
    fn entries(&self) -> Option<&dyn EntrySelector> {
        None
    }
}

/// Returns the first summary as its type.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: there is none, or it is of another type.
pub fn summary_as<'a, S: LayerSummary>(summaries: &[&'a dyn LayerSummary]) -> Result<&'a S> {
    let found = summaries.first().and_then(|summary| (*summary as &dyn Any).downcast_ref::<S>());
    let wrong =
        || Error::new(ErrorKind::InvalidArgument, "score: the summary is of another kind than the selector needs");
    found.ok_or_else(wrong)
}

/// Returns the refusal of [`Selector::score`] by a method that chooses entries.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`], always.
pub(crate) fn no_group_scores(name: &str) -> Result<()> {
    Err(Error::new(ErrorKind::InvalidArgument, format!("{name} chooses entries, and has no scores of groups")))
}

/// Aggregates scores of units over heads. `scores[g]` becomes the highest aggregated score of the units of group `g`.
///
/// A unit is a token, or a group if `per_group` is 1. `units` is `[groups * per_group, lanes]`, of which the first
/// `heads` lanes count, and is overwritten. A multiple of 8 lanes is fastest. Without lanes or units, scores are
/// unchanged.
pub fn aggregate(
    units: &mut [f32],
    (heads, lanes): (usize, usize),
    per_group: usize,
    aggregation: HeadAggregation,
    scale: f32,
    scores: &mut [f32],
) {
    if lanes == 0 || per_group == 0 {
        return;
    }
    let mut softmax = Softmax::new(lanes, scale);
    match aggregation {
        HeadAggregation::Sum => {
            let weights: Vec<f32> = (0..lanes).map(|lane| f32::from(u8::from(lane < heads))).collect();
            best_scores(units, &weights, lanes, per_group, scores);
        }
        HeadAggregation::Softmax if per_group == 1 && lanes < PACKED && PACKED.is_multiple_of(lanes) => {
            packed_softmax(units, (heads, lanes), scale, scores);
        }
        HeadAggregation::Softmax => {
            softmax.add(units);
            best_scores(units, &softmax.weights(&softmax.maxima, heads), lanes, per_group, scores);
        }
        HeadAggregation::GroupSoftmax => {
            let mut groups = vec![0.0; units.len().div_ceil(lanes.saturating_mul(per_group)) * lanes];
            best_units(units, lanes, per_group, &mut groups);
            softmax.add(&mut groups);
            best_scores(&groups, &softmax.weights(&softmax.maxima, heads), lanes, 1, scores);
        }
    }
}

/// Lanes of a register that several units share.
const PACKED: usize = 16;

/// Writes the sum over `heads` of the softmax of each lane, for `units` `[scores.len(), lanes]`. `lanes` divides
/// [`PACKED`].
///
/// Units are packed side by side, so that each lane is several lanes with a maximum and a sum of their own. The last
/// units, which fill no row, have their own as well.
fn packed_softmax(units: &mut [f32], (heads, lanes): (usize, usize), scale: f32, scores: &mut [f32]) {
    let (packed, rest) = units.split_at_mut(units.len() / PACKED * PACKED);
    let (mut all, mut last) = (Softmax::new(PACKED, scale), Softmax::new(lanes, scale));
    all.add(packed);
    last.add(rest);
    let (maxima, last_maxima) = (all.maxima.clone(), last.maxima.clone());
    for lane in 0..lanes {
        last.join(lane, &all);
        all.spread(lane, &last);
    }
    let mut weights = all.weights(&maxima, PACKED);
    weights.iter_mut().enumerate().filter(|(lane, _)| lane % lanes >= heads).for_each(|(_, weight)| *weight = 0.0);
    let (packed_scores, last_scores) = scores.split_at_mut(packed.len() / lanes);
    packed_sums(packed, &weights, lanes, packed_scores);
    best_scores(rest, &last.weights(&last_maxima, heads), lanes, 1, last_scores);
}

/// A softmax over units, one tile at a time.
pub(super) struct Softmax {
    /// The maxima so far, per lane.
    pub(super) maxima: Vec<f32>,
    /// The sums of the exponentials relative to these maxima, per lane.
    pub(super) sums: Vec<f32>,
    pub(super) factor: f32,
}

impl Softmax {
    pub(super) fn new(lanes: usize, scale: f32) -> Self {
        // Infinity times a difference of zero would be NaN.
        let factor = (scale * std::f32::consts::LOG2_E).min(f32::MAX);
        Self { maxima: vec![f32::MIN; lanes], sums: vec![0.0; lanes], factor }
    }

    /// Replaces `units` `[units, lanes]` by `exp(scale * (x - max))` per lane, with the maxima so far.
    pub(super) fn add(&mut self, units: &mut [f32]) {
        exponentiate(units, &mut self.maxima, &mut self.sums, self.factor);
    }

    /// Adds the lanes of `packed` that stand for a lane to it.
    fn join(&mut self, lane: usize, packed: &Self) {
        let own = (self.maxima[lane], self.sums[lane]);
        let others = (lane..PACKED).step_by(self.maxima.len()).map(|at| (packed.maxima[at], packed.sums[at]));
        // A lane without a unit has the sum 0 and no maximum.
        let each = || std::iter::once(own).chain(others.clone()).filter(|(_, sum)| *sum > 0.0);
        let largest = each().map(|(max, _)| max).fold(f32::MIN, f32::max);
        self.sums[lane] = each().map(|(max, sum)| sum * ((max - largest) * self.factor).exp2()).sum();
        self.maxima[lane] = largest;
    }

    /// Takes maximum and sum of a lane of `joined`, for all lanes that stand for it.
    fn spread(&mut self, lane: usize, joined: &Self) {
        for at in (lane..PACKED).step_by(joined.maxima.len()) {
            (self.maxima[at], self.sums[at]) = (joined.maxima[lane], joined.sums[lane]);
        }
    }

    /// Adds the units that another softmax has seen.
    pub(super) fn add_units_of(&mut self, other: &Self) {
        join_lanes(&mut self.maxima, &mut self.sums, (&other.maxima, &other.sums), self.factor);
    }

    /// Returns the factors of exponentials with these maxima, 0 for lanes that do not count.
    pub(super) fn weights(&self, maxima: &[f32], heads: usize) -> Vec<f32> {
        let mut weights = vec![0.0; maxima.len()];
        lane_weights(maxima, (&self.maxima, &self.sums), self.factor, &mut weights[..heads.min(maxima.len())]);
        weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn softmax_per_head_then_sum_then_maximum(
            values in prop::collection::vec(-8.0_f32..8.0, 12..200), heads in 1_usize..9, per_group in 1_usize..5,
            wide in any::<bool>(),
        ) {
            let tokens = values.len() / heads;
            prop_assume!(tokens > 0);
            let lanes = if wide { 16 } else { heads.next_power_of_two() };
            let mut units = vec![0.0; tokens * lanes];
            for t in 0..tokens { for h in 0..heads { units[t * lanes + h] = values[t * heads + h]; } }
            let groups = tokens.div_ceil(per_group);
            let mut scores = vec![0.0; groups];
            aggregate(&mut units.clone(), (heads, lanes), per_group, HeadAggregation::Softmax, 0.5, &mut scores);
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
            aggregate(&mut units.clone(), (heads, lanes), per_group, HeadAggregation::GroupSoftmax, 0.5, &mut scores);
            let mut weights = vec![0.0_f64; groups];
            for h in 0..heads {
                let group = |g: usize| g * per_group..tokens.min((g + 1) * per_group);
                let best = |g: usize| group(g).map(|t| values[t * heads + h]).fold(f32::MIN, f32::max);
                let e: Vec<f64> = (0..groups).map(|g| (0.5 * f64::from(best(g))).exp()).collect();
                let sum: f64 = e.iter().sum();
                (0..groups).for_each(|g| weights[g] += e[g] / sum);
            }
            for (score, weight) in scores.iter().zip(&weights) {
                prop_assert!((f64::from(*score) - weight).abs() < 1e-4, "{score} {weight}");
            }
            aggregate(&mut units, (heads, lanes), per_group, HeadAggregation::Sum, 0.5, &mut scores);
            let sum = |t: usize| values[t * heads..(t + 1) * heads].iter().sum::<f32>();
            let best = (0..per_group.min(tokens)).map(sum).fold(f32::NEG_INFINITY, f32::max);
            prop_assert!((scores[0] - best).abs() < 1e-4);
        }
    }
}
