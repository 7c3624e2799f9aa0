//! Selectors: methods that score the groups of a layer from summaries, and how scores of query heads are aggregated.
//!
//! An embedder adds a method by implementing [`Selector`], with a summary of this crate or of its own. Scores are
//! computed tile by tile, so that a tile stays in the processor's caches until it is aggregated.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{
    RowQuery, WeightedSums, best_scores, best_units, exponentiate, lane_weights, narrow_bf16, packed_sums,
    softmax_parts, widen_bf16,
};
use crate::retrieval::entry_selector::EntrySelector;
pub use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::low_rank::summary::LowRank;
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::summary::{KeyShape, LayerSummary, SummarySpec};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use stratakv_format::DType;

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
struct Softmax {
    /// The maxima so far, per lane.
    maxima: Vec<f32>,
    /// The sums of the exponentials relative to these maxima, per lane.
    sums: Vec<f32>,
    factor: f32,
}

impl Softmax {
    fn new(lanes: usize, scale: f32) -> Self {
        // Infinity times a difference of zero would be NaN.
        let factor = (scale * std::f32::consts::LOG2_E).min(f32::MAX);
        Self { maxima: vec![f32::MIN; lanes], sums: vec![0.0; lanes], factor }
    }

    /// Replaces `units` `[units, lanes]` by `exp(scale * (x - max))` per lane, with the maxima so far.
    fn add(&mut self, units: &mut [f32]) {
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

    /// Returns the factors of exponentials with these maxima, 0 for lanes that do not count.
    fn weights(&self, maxima: &[f32], heads: usize) -> Vec<f32> {
        let mut weights = vec![0.0; maxima.len()];
        lane_weights(maxima, (&self.maxima, &self.sums), self.factor, &mut weights[..heads.min(maxima.len())]);
        weights
    }
}

/// The most scores of a tile. A tile of this size stays in the caches until it is aggregated.
const TILE: usize = 4096;
/// The most units of a tile.
const TILE_UNITS: usize = 256;
/// Token scores that are computed before the best of each group is taken.
const FEW: usize = 4096;

/// Scores groups for methods that score tokens linearly in the query.
///
/// `prepare` returns the number of columns, which is at least that of the lanes, and a function that fills the scores
/// of all tokens of some groups.
pub(crate) fn by_tokens<F: FnMut(Range<usize>, &mut [f32])>(
    ask: &ScoreRequest<'_>,
    scores: &mut [f32],
    prepare: impl FnOnce(&QueryBatch) -> (usize, F),
) {
    let (heads, dim, per_group) = (ask.shape.kv_heads, ask.shape.key_dim, ask.shape.group_tokens);
    let batch = match ask.aggregation {
        HeadAggregation::Softmax | HeadAggregation::GroupSoftmax => QueryBatch::query_heads(ask.query, heads, dim),
        HeadAggregation::Sum => QueryBatch::joint(ask.query, heads, dim),
    };
    let (columns, mut fill) = prepare(&batch);
    if ask.aggregation == HeadAggregation::GroupSoftmax {
        let few = (FEW / (per_group * columns).max(1)).max(1);
        let mut room = Vec::new();
        let fill = |groups: Range<usize>, out: &mut [f32]| {
            for (first, out) in groups.clone().step_by(few).zip(out.chunks_mut(few * columns)) {
                let of = first..groups.end.min(first + few);
                room.resize(of.len() * per_group * columns, 0.0);
                fill(of, &mut room);
                best_units(&room, columns, per_group, out);
            }
        };
        each_tile(ask, 1, (batch.count(), columns), fill, |groups, mut tile| {
            tile.best(1, &mut scores[groups.start - ask.groups.start..groups.end - ask.groups.start]);
        });
        return;
    }
    each_tile(ask, per_group, (batch.count(), columns), fill, |groups, mut tile| {
        tile.best(per_group, &mut scores[groups.start - ask.groups.start..groups.end - ask.groups.start]);
    });
}

/// A tile of units, raw or as parts of exponentials in bf16, with the weight of each column.
pub(crate) struct Tile<'a> {
    units: Units<'a>,
    weights: &'a [f32],
    weighted: Option<WeightedSums>,
    room: &'a mut [f32],
}

enum Units<'a> {
    Whole(&'a [f32]),
    Parts(&'a [u16]),
}

impl Tile<'_> {
    /// Returns the units `[units, columns]` and the weights of columns.
    pub(crate) fn units(&mut self) -> (&[f32], &[f32]) {
        match self.units {
            Units::Whole(units) => (units, self.weights),
            Units::Parts(parts) => {
                let room = &mut self.room[..parts.len()];
                widen_bf16(parts, room);
                (room, self.weights)
            }
        }
    }

    /// Writes the best unit of each group, as [`aggregate`] does at its end.
    pub(crate) fn best(&mut self, per_group: usize, scores: &mut [f32]) {
        let columns = self.weights.len();
        match (&self.units, self.weighted) {
            // The sum is the best unit of a group of one. One that is not a number loses, as in larger groups.
            (Units::Parts(parts), Some(weighted)) if per_group == 1 && scores.len() * columns == parts.len() => {
                weighted(parts, self.weights, scores);
                scores.iter_mut().for_each(|sum| *sum = sum.max(f32::NEG_INFINITY));
            }
            (Units::Parts(parts), Some(weighted)) => {
                let sums = &mut self.room[..parts.len() / columns];
                weighted(parts, self.weights, sums);
                best_scores(sums, &[1.0], 1, per_group, scores);
            }
            _ => {
                let (units, weights) = self.units();
                best_scores(units, weights, columns, per_group, scores);
            }
        }
    }
}

/// Scores `units` units of each group, tile by tile.
///
/// `fill` writes `[units, columns]`, of which `lanes` count. `take` gets each tile. With a softmax, the tile holds
/// parts of the exponentials.
pub(crate) fn each_tile(
    ask: &ScoreRequest<'_>,
    units: usize,
    (lanes, columns): (usize, usize),
    mut fill: impl FnMut(Range<usize>, &mut [f32]),
    mut take: impl FnMut(Range<usize>, Tile<'_>),
) {
    let per_group = columns * units;
    let tile = ((TILE / columns.max(1)).min(TILE_UNITS) / units).max(1);
    let tiles = || {
        let starts = ask.groups.clone().step_by(tile);
        starts.map(|first| first..(first + tile).min(ask.groups.end))
    };
    let mut room = vec![0.0; tile.min(ask.groups.len()) * per_group];
    if ask.aggregation == HeadAggregation::Sum {
        let weights: Vec<f32> = (0..columns).map(|lane| f32::from(u8::from(lane < lanes))).collect();
        for groups in tiles() {
            let scores = &mut room[..groups.len() * per_group];
            fill(groups.clone(), scores);
            take(groups, Tile { units: Units::Whole(scores), weights: &weights, weighted: None, room: &mut [] });
        }
        return;
    }
    let kernels = softmax_parts().filter(|_| columns.is_multiple_of(16));
    let mut all = Vec::with_capacity(ask.groups.len() * per_group);
    let mut softmax = Softmax::new(columns, ask.scale);
    let mut maxima = Vec::with_capacity(ask.groups.len().div_ceil(tile) * columns);
    for groups in tiles() {
        let scores = &mut room[..groups.len() * per_group];
        fill(groups, scores);
        let start = all.len();
        all.resize(start + scores.len(), 0);
        let parts = &mut all[start..];
        match kernels {
            Some((exponentials, _)) => {
                exponentials(scores, &mut softmax.maxima, &mut softmax.sums, softmax.factor, parts);
            }
            None => {
                softmax.add(scores);
                narrow_bf16(scores, parts);
            }
        }
        maxima.extend_from_slice(&softmax.maxima);
    }
    let weighted = kernels.map(|(_, weighted)| weighted);
    for ((groups, parts), maxima) in tiles().zip(all.chunks(tile * per_group)).zip(maxima.chunks(columns)) {
        let weights = softmax.weights(maxima, lanes);
        take(groups, Tile { units: Units::Parts(parts), weights: &weights, weighted, room: &mut room });
    }
}

/// Returns a function that fills the scores of groups from low-rank keys.
pub(crate) fn low_rank<'a>(
    keys: &'a LowRank,
    ask: &ScoreRequest<'_>,
    batch: &QueryBatch,
) -> (usize, impl FnMut(Range<usize>, &mut [f32]) + use<'a>) {
    let (rank, queries) = (keys.rank(), keys.queries(batch));
    let columns = if batch.count() == 1 { 1 } else { batch.padded() };
    let (heads, own) = (ask.shape.kv_heads, rank / ask.shape.kv_heads);
    // If each head has columns of its own, a query vector is multiplied with these columns only.
    let per_head = batch.count() / heads;
    let others = |(lane, row): (usize, &[f32])| {
        let first = lane / per_head.max(1) * own;
        row.iter().enumerate().any(|(j, q)| *q != 0.0 && !(first..first + own).contains(&j))
    };
    let apart = per_head > 0 && own > 0 && !queries.chunks_exact(rank).enumerate().any(others);
    let mut query = if apart {
        let row = |(lane, row): (usize, &'_ [f32])| row[lane / per_head * own..][..own].to_vec();
        let queries: Vec<f32> = queries.chunks_exact(rank).enumerate().flat_map(row).collect();
        RowQuery::new(&queries, heads, own)
    } else {
        RowQuery::new(&queries, 1, rank)
    };
    let fill = move |groups: Range<usize>, out: &mut [f32]| {
        query.put(keys.rows(groups), (rank, 0), DType::F16, out, columns);
    };
    (columns, fill)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tiles_are_as_one(
            (groups, per_group, heads) in (1_usize..400, 1_usize..6, 1_usize..20), first in 0_usize..50,
            rise in -0.3_f32..0.3, softmax in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let columns = if heads == 1 { 1 } else { heads.next_multiple_of(8) };
            // The maxima rise or fall from tile to tile.
            let units: Vec<f32> = (0..groups * per_group * columns)
                .map(|at| 8.0 * random() + rise * (at / columns) as f32)
                .collect();
            let aggregation = if softmax { HeadAggregation::Softmax } else { HeadAggregation::Sum };
            let mut expected = vec![0.0; groups];
            aggregate(&mut units.clone(), (heads, columns), per_group, aggregation, 0.5, &mut expected);
            let ask = ScoreRequest {
                query: &[],
                shape: KeyShape { kv_heads: 1, key_dim: 1, group_tokens: per_group, dtype: DType::F32 },
                scale: 0.5,
                aggregation,
                groups: first..first + groups,
                forced: [0..0, 0..0],
                count: 1,
            };
            let fill = |of: Range<usize>, out: &mut [f32]| {
                let at = |group: usize| (group - first) * per_group * columns;
                out.copy_from_slice(&units[at(of.start)..at(of.end)]);
            };
            let mut scores = vec![0.0; groups];
            each_tile(&ask, per_group, (heads, columns), fill, |of, mut tile| {
                tile.best(per_group, &mut scores[of.start - first..of.end - first]);
            });
            // Parts of exponentials are bf16, which is exact to 1/256.
            let error = if softmax { 1.0 / 256.0 } else { 1e-4 };
            for (group, (x, y)) in scores.iter().zip(&expected).enumerate() {
                prop_assert!((x - y).abs() <= error * y.abs() + 1e-6, "group {group}: {x}, as one {y}");
            }
        }

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
