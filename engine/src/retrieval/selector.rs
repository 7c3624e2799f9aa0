//! Selectors: a method that scores the groups of a layer from summaries. A method of an embedder's own is one more
//! implementation of [`Selector`], with a summary of this crate or of its own.

use crate::error::{Error, ErrorKind, Result};
use crate::kernels::{RowQuery, WeightedSums, multiversion, softmax_parts};
use crate::retrieval::lanes::Lanes;
use crate::retrieval::low_rank::summary::LowRank;
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
}

/// How scores of several query heads become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HeadAggregation {
    /// The sum of `q . k` over query heads, as the papers have it.
    #[default]
    Sum,
    /// Softmax over the tokens per query head, then the sum over query heads: what attention itself weighs with.
    Softmax,
    /// Softmax over the groups per query head, each group with its best token for that head, then the sum over query heads: one
    /// exponential per head and group instead of one per head and token. Methods that score groups have no tokens to take the
    /// best of, and those that rank tokens per head none to put together: it is [`Self::Softmax`] there.
    GroupSoftmax,
}

/// What a selector is asked for.
#[derive(Clone, Debug)]
pub struct ScoreRequest<'a> {
    /// `[q_heads, key_dim]`, finite; `q_heads` is a multiple of the KV heads.
    pub query: &'a [f32],
    /// Shape of the keys.
    pub shape: KeyShape,
    /// Factor of `q . k` in the softmax.
    pub scale: f32,
    /// How heads are added up.
    pub aggregation: HeadAggregation,
    /// Groups to score.
    pub groups: Range<usize>,
    /// Groups among these that are chosen whatever their scores are: sinks, then the newest; the two may overlap.
    pub forced: [Range<usize>; 2],
    /// Groups that the budget has room for beside those chosen anyway. A method that stops when it has found so many must not
    /// count [forced](Self::is_forced) ones: their places would go to groups that it did not score.
    pub count: usize,
}

impl ScoreRequest<'_> {
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
    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>>;

    /// Scores of the groups `ask.groups`, one each, higher is better, from its summaries in the order of
    /// [`Self::summaries`], which know all these groups. A group of score infinity is always chosen while the budget lasts.
    ///
    /// # Errors
    /// Whatever keeps it from scoring.
    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()>;
}

/// The first summary, as what it is.
///
/// # Errors
/// There is none, or it is of another kind.
pub fn summary_as<'a, S: LayerSummary>(summaries: &[&'a dyn LayerSummary]) -> Result<&'a S> {
    let found = summaries.first().and_then(|summary| (*summary as &dyn Any).downcast_ref::<S>());
    found.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "a summary of another kind than the selector's"))
}

/// Adds up scores of units (tokens, or groups with `per_group` 1) over heads: `scores[g]` is the highest of the units of
/// group `g`. `units` is `[groups * per_group, lanes]`, of which the first `heads` lanes count; it is used up. Fastest with lanes a
/// multiple of 8. Without lanes, or with groups of no units, scores stay as they are.
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
            best(units, &weights, lanes, per_group, scores);
        }
        HeadAggregation::Softmax => {
            softmax.add(units);
            best(units, &softmax.weights(&softmax.maxima, heads), lanes, per_group, scores);
        }
        HeadAggregation::GroupSoftmax => {
            let mut groups = vec![0.0; units.len().div_ceil(lanes.saturating_mul(per_group)) * lanes];
            best_units(units, lanes, per_group, &mut groups);
            softmax.add(&mut groups);
            best(&groups, &softmax.weights(&softmax.maxima, heads), lanes, 1, scores);
        }
    }
}

multiversion! {
    /// The best unit of each group, lane by lane: `[units, lanes]` to `[groups, lanes]`.
    fn best_units(units: &[f32], lanes: usize, per_group: usize, out: &mut [f32]) = best_units_of_lanes;
}

#[inline(always)]
fn best_units_of_lanes(units: &[f32], lanes: usize, per_group: usize, out: &mut [f32]) {
    match lanes {
        8 => best_units_by::<8>(units, per_group, out),
        16 => best_units_by::<16>(units, per_group, out),
        32 => best_units_by::<32>(units, per_group, out),
        _ => {
            for (group, out) in units.chunks(lanes.saturating_mul(per_group)).zip(out.chunks_exact_mut(lanes)) {
                out.fill(f32::MIN);
                for unit in group.chunks_exact(lanes) {
                    for (best, x) in out.iter_mut().zip(unit) {
                        *best = if *x > *best { *x } else { *best };
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn best_units_by<const N: usize>(units: &[f32], per_group: usize, out: &mut [f32]) {
    for (group, out) in units.as_chunks::<N>().0.chunks(per_group).zip(out.as_chunks_mut::<N>().0) {
        let mut best = [f32::MIN; N];
        for unit in group {
            for i in 0..N {
                best[i] = if unit[i] > best[i] { unit[i] } else { best[i] };
            }
        }
        *out = best;
    }
}

/// Softmax over units that come in parts.
struct Softmax {
    /// So far, per lane.
    maxima: Vec<f32>,
    /// Of the exponentials, less these maxima.
    sums: Vec<f32>,
    factor: f32,
}

impl Softmax {
    fn new(lanes: usize, scale: f32) -> Self {
        // Infinity times a difference of zero is no number.
        let factor = (scale * std::f32::consts::LOG2_E).min(f32::MAX);
        Self { maxima: vec![f32::MIN; lanes], sums: vec![0.0; lanes], factor }
    }

    /// `units` `[units, lanes]` become `exp(scale * (x - max))` per lane, with the maxima so far.
    fn add(&mut self, units: &mut [f32]) {
        exponentials(units, &mut self.maxima, &mut self.sums, self.factor);
    }

    /// What the exponentials with these maxima are to be multiplied by; 0 for lanes that do not count.
    fn weights(&self, maxima: &[f32], heads: usize) -> Vec<f32> {
        let mut weights = vec![0.0; maxima.len()];
        weights_of(maxima, (&self.maxima, &self.sums), self.factor, &mut weights[..heads.min(maxima.len())]);
        weights
    }
}

multiversion! {
    fn weights_of(maxima: &[f32], last: (&[f32], &[f32]), factor: f32, weights: &mut [f32]) = weights_of_lanes;
}

#[inline(always)]
fn weights_of_lanes(maxima: &[f32], (last, sums): (&[f32], &[f32]), factor: f32, weights: &mut [f32]) {
    for (((weight, max), last), sum) in weights.iter_mut().zip(maxima).zip(last).zip(sums) {
        // Of parts far below the last maximum nothing is left.
        *weight = exp2((max - last) * factor) / if *sum > f32::MIN_POSITIVE { *sum } else { f32::MIN_POSITIVE };
    }
}

multiversion! {
    fn exponentials(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32) = exponentials_of_lanes;
}

#[inline(always)]
fn exponentials_of_lanes(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32) {
    match maxima.len() {
        lanes if lanes.is_multiple_of(32) => exponentials_by::<32>(units, maxima, sums, factor),
        lanes if lanes.is_multiple_of(16) => exponentials_by::<16>(units, maxima, sums, factor),
        lanes if lanes.is_multiple_of(8) => exponentials_by::<8>(units, maxima, sums, factor),
        _ => exponentials_by::<1>(units, maxima, sums, factor),
    }
}

/// `N` lanes at a time, which divides their number.
#[inline(always)]
fn exponentials_by<const N: usize>(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32) {
    let lanes = maxima.len();
    let each = maxima.as_chunks_mut::<N>().0.iter_mut().zip(sums.as_chunks_mut::<N>().0);
    for (at, (last_maxima, last_sums)) in each.enumerate() {
        let (mut maxima, mut sums) = (*last_maxima, *last_sums);
        for unit in units.chunks_exact(lanes) {
            let Some(unit) = unit[at * N..].first_chunk::<N>() else { continue };
            for i in 0..N {
                maxima[i] = if unit[i] > maxima[i] { unit[i] } else { maxima[i] };
            }
        }
        for i in 0..N {
            sums[i] *= exp2((last_maxima[i] - maxima[i]) * factor);
        }
        for unit in units.chunks_exact_mut(lanes) {
            let Some(unit) = unit[at * N..].first_chunk_mut::<N>() else { continue };
            for i in 0..N {
                unit[i] = exp2((unit[i] - maxima[i]) * factor);
                sums[i] += unit[i];
            }
        }
        (*last_maxima, *last_sums) = (maxima, sums);
    }
}

multiversion! {
    /// `units` `[units, lanes]`, lanes a multiple of 8 and none above its maximum, become `2^(factor * (x - maximum))`.
    pub(crate) fn powers(units: &mut [f32], maxima: &[f32], factor: f32) = powers_of_lanes;
}

#[inline(always)]
fn powers_of_lanes(units: &mut [f32], maxima: &[f32], factor: f32) {
    for unit in units.chunks_exact_mut(maxima.len()) {
        for (units, maxima) in unit.as_chunks_mut::<8>().0.iter_mut().zip(maxima.as_chunks::<8>().0) {
            for i in 0..8 {
                units[i] = exp2((units[i] - maxima[i]) * factor);
            }
        }
    }
}

multiversion! {
    /// As [`aggregate`] does at last.
    pub(crate) fn best(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) = best_of_groups;
}

#[inline(always)]
fn best_of_groups(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) {
    match (lanes, per_group) {
        (1, 8) if units.len().is_multiple_of(8) => {
            let weight = weights[0];
            for (units, score) in units.as_chunks::<8>().0.iter().zip(scores) {
                let x = units.map(|x| x * weight);
                let half: [f32; 4] = std::array::from_fn(|i| x[i].max(x[i + 4]));
                *score = half[0].max(half[2]).max(half[1].max(half[3]));
            }
        }
        (16, _) => best_of_lanes::<16>(units, weights, per_group, scores),
        (32, _) => best_of_lanes::<32>(units, weights, per_group, scores),
        _ => best_of_any(units, weights, lanes, per_group, scores),
    }
}

#[inline(always)]
fn best_of_lanes<const N: usize>(units: &[f32], weights: &[f32], per_group: usize, scores: &mut [f32]) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    for (group, score) in units.chunks(per_group.saturating_mul(N)).zip(scores) {
        let mut highest = f32::NEG_INFINITY;
        for unit in group.as_chunks::<N>().0 {
            let mut sums = [0.0_f32; 16];
            for first in (0..N).step_by(16) {
                for i in 0..16 {
                    sums[i] += unit[first + i] * weights[first + i];
                }
            }
            let sums: [f32; 8] = std::array::from_fn(|i| sums[i] + sums[i + 8]);
            highest = highest.max(sum8(sums));
        }
        *score = highest;
    }
}

#[inline(always)]
fn best_of_any(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) {
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
            highest = highest.max(sum8(sums));
        }
        *score = highest;
    }
}

/// In pairs: the additions of a plain sum would wait for each other.
#[inline(always)]
fn sum8(x: [f32; 8]) -> f32 {
    let x: [f32; 4] = std::array::from_fn(|i| x[i] + x[i + 4]);
    (x[0] + x[2]) + (x[1] + x[3])
}

/// `2^x` for `x <= 0`, to about 2e-7; no less than 2^-126.
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

/// Scores that are filled in at a time: they stay in the caches until they are added up.
const TILE: usize = 4096;
/// The most units at a time.
const TILE_UNITS: usize = 256;
/// Scores of tokens that are filled in before the best of their groups are taken.
const FEW: usize = 4096;

/// For methods that score tokens linearly in the query. `prepare` gives the columns of scores, at least the lanes, and what
/// fills in those of all tokens of some groups.
pub(crate) fn by_tokens<F: FnMut(Range<usize>, &mut [f32])>(
    ask: &ScoreRequest<'_>,
    scores: &mut [f32],
    prepare: impl FnOnce(&Lanes) -> (usize, F),
) {
    let (heads, dim, per_group) = (ask.shape.kv_heads, ask.shape.key_dim, ask.shape.group_tokens);
    let lanes = match ask.aggregation {
        HeadAggregation::Softmax | HeadAggregation::GroupSoftmax => Lanes::heads(ask.query, heads, dim),
        HeadAggregation::Sum => Lanes::joint(ask.query, heads, dim),
    };
    let (columns, mut fill) = prepare(&lanes);
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
        each_tile(ask, 1, (lanes.count(), columns), fill, |groups, mut tile| {
            tile.best(1, &mut scores[groups.start - ask.groups.start..groups.end - ask.groups.start]);
        });
        return;
    }
    each_tile(ask, per_group, (lanes.count(), columns), fill, |groups, mut tile| {
        tile.best(per_group, &mut scores[groups.start - ask.groups.start..groups.end - ask.groups.start]);
    });
}

/// Some units, as they are or as parts of exponentials in bf16, and the weight of each column.
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
    /// Units `[units, columns]`, and the weights of columns.
    pub(crate) fn units(&mut self) -> (&[f32], &[f32]) {
        match self.units {
            Units::Whole(units) => (units, self.weights),
            Units::Parts(parts) => {
                let room = &mut self.room[..parts.len()];
                widen(parts, room);
                (room, self.weights)
            }
        }
    }

    /// The best unit of each group, as [`aggregate`] has it at last.
    pub(crate) fn best(&mut self, per_group: usize, scores: &mut [f32]) {
        let columns = self.weights.len();
        match (&self.units, self.weighted) {
            (Units::Parts(parts), Some(weighted)) => {
                let sums = &mut self.room[..parts.len() / columns];
                weighted(parts, self.weights, sums);
                best(sums, &[1.0], 1, per_group, scores);
            }
            _ => {
                let (units, weights) = self.units();
                best(units, weights, columns, per_group, scores);
            }
        }
    }
}

multiversion! {
    /// To bf16, the nearest.
    fn narrow(from: &[f32], to: &mut [u16]) = narrow_each;
}

#[inline(always)]
fn narrow_each(from: &[f32], to: &mut [u16]) {
    for (from, to) in from.iter().zip(to) {
        let bits = from.to_bits();
        // No number stays none.
        *to = if from.is_nan() { 0x7fc0 } else { (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16 };
    }
}

multiversion! {
    fn widen(from: &[u16], to: &mut [f32]) = widen_each;
}

#[inline(always)]
fn widen_each(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.iter().zip(to) {
        *to = f32::from_bits(u32::from(*from) << 16);
    }
}

/// Scores of `units` units of each group, some groups at a time: `fill` writes `[units, columns]`, of which `lanes` count, and
/// `take` gets them, in the softmax form as parts of the exponentials.
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
                narrow(scores, parts);
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

/// Low-rank keys as something to fill in the scores of groups by.
pub(crate) fn low_rank<'a>(
    keys: &'a LowRank,
    ask: &ScoreRequest<'_>,
    lanes: &Lanes,
) -> (usize, impl FnMut(Range<usize>, &mut [f32]) + use<'a>) {
    let (rank, queries) = (keys.rank(), keys.queries(lanes));
    let columns = if lanes.count() == 1 { 1 } else { lanes.padded() };
    let (heads, own) = (ask.shape.kv_heads, rank / ask.shape.kv_heads);
    // Where each head has columns of its own, a query vector meets those alone.
    let per_head = lanes.count() / heads;
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
        fn powers_of_two(x in -100.0_f32..0.0) {
            prop_assert!((exp2(x) / x.exp2() - 1.0).abs() < 1e-5, "{} {}", exp2(x), x.exp2());
        }

        #[test]
        fn tiles_are_as_one(
            (groups, per_group, heads) in (1_usize..400, 1_usize..6, 1_usize..20), first in 0_usize..50,
            rise in -0.3_f32..0.3, softmax in any::<bool>(), seed in any::<u64>(),
        ) {
            let mut state = seed | 1;
            let mut random = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            let columns = if heads == 1 { 1 } else { heads.next_multiple_of(8) };
            // Maxima that rise, or fall, from tile to tile.
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
            // Parts of exponentials are bf16, exact to half of a 128th.
            let error = if softmax { 1.0 / 256.0 } else { 1e-4 };
            for (group, (x, y)) in scores.iter().zip(&expected).enumerate() {
                prop_assert!((x - y).abs() <= error * y.abs() + 1e-6, "group {group}: {x}, as one {y}");
            }
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
            aggregate(&mut units.clone(), (heads, 16), per_group, HeadAggregation::Softmax, 0.5, &mut scores);
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
            aggregate(&mut units.clone(), (heads, 16), per_group, HeadAggregation::GroupSoftmax, 0.5, &mut scores);
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
            aggregate(&mut units, (heads, 16), per_group, HeadAggregation::Sum, 0.5, &mut scores);
            let sum = |t: usize| values[t * heads..(t + 1) * heads].iter().sum::<f32>();
            let best = (0..per_group.min(tokens)).map(sum).fold(f32::NEG_INFINITY, f32::max);
            prop_assert!((scores[0] - best).abs() < 1e-4);
        }
    }
}
