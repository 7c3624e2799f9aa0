//! Scores of groups, tile by tile. A tile stays in the processor's caches until it is aggregated.
//!
//! 1. Tiles are gathered in runs. Threads of the host take one run at a time, if there are enough.
//! 2. For each tile, the method fills the scores of its units, and a softmax turns them into exponentials.
//! 3. The softmaxes of the runs are joined, in order.
//! 4. For each tile, the exponentials are weighed and the best unit of each group is taken.
//!
//! Without a softmax, the first pass does everything.

use crate::kernels::{WeightedSums, best_scores, best_units, narrow_bf16, softmax_parts, widen_bf16};
use crate::options::{ComputeThreads, for_each};
use crate::retrieval::head_aggregation::HeadAggregation;
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::selector::{ScoreRequest, Softmax};
use std::ops::Range;

/// The most scores of a tile. A tile of this size stays in the caches until it is aggregated.
const TILE: usize = 4096;
/// The most units of a tile.
const TILE_UNITS: usize = 256;
/// About how many token scores a run has, in whole tiles. A thread takes one run at a time.
const RUN: usize = 16384;
/// Fewer runs stay on the calling thread, because another one would first have to fetch the tables of the query.
const SHARED_RUNS: usize = 5;
/// Token scores that are computed before the best of each group is taken.
const FEW: usize = 4096;

/// Returns how many of `threads` share the scores of `groups`, at most, if a group has this many token scores.
pub(crate) fn sharing_threads(threads: usize, groups: usize, of_group: usize) -> usize {
    let runs = groups.div_ceil((RUN / of_group.max(1)).max(1));
    if runs < SHARED_RUNS { 1 } else { threads.clamp(1, runs) }
}

/// Scores groups for methods that score tokens linearly in the query.
///
/// `prepare` returns the number of columns, which is at least that of the lanes, and a function that fills the scores
/// of all tokens of some groups.
pub(crate) fn by_tokens<F: FillScores>(
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
        let fill = move |groups: Range<usize>, out: &mut [f32]| {
            for (first, out) in groups.clone().step_by(few).zip(out.chunks_mut(few * columns)) {
                let of = first..groups.end.min(first + few);
                room.resize(of.len() * per_group * columns, 0.0);
                fill(of, &mut room);
                best_units(&room, columns, per_group, out);
            }
        };
        score_tiles(ask, 1, (batch.count(), columns), fill, scores, |tile, scores| tile.best(1, scores));
        return;
    }
    score_tiles(ask, per_group, (batch.count(), columns), fill, scores, |tile, scores| tile.best(per_group, scores));
}

/// A function that fills the scores `[units, columns]` of some groups. Each thread has a clone of its own.
pub(crate) trait FillScores: FnMut(Range<usize>, &mut [f32]) + Clone + Send + Sync {}

impl<F: FnMut(Range<usize>, &mut [f32]) + Clone + Send + Sync> FillScores for F {}

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

/// The tiles of a request, in runs of whole tiles that one thread works on at a time.
///
/// Runs depend on the request alone. Each has a softmax of its own, so that scores have the same bits on any number of
/// threads.
struct Tiling<'a> {
    ask: &'a ScoreRequest<'a>,
    lanes: usize,
    columns: usize,
    /// Scores of a group, in all its units.
    per_group: usize,
    /// Groups of a tile.
    tile: usize,
    /// Groups of a run, a multiple of `tile`.
    run: usize,
}

/// The scores of a run's units after the first pass, as parts of exponentials.
struct RunParts {
    /// `[units, columns]` in bf16, relative to the maxima of the unit's tile.
    parts: Vec<u16>,
    /// The maxima of the run up to each tile, `[tiles, columns]`.
    maxima: Vec<f32>,
    softmax: Softmax,
}

/// All runs after the first pass.
struct TileParts {
    runs: Vec<RunParts>,
    softmax: Softmax,
    weighted: Option<WeightedSums>,
}

impl<'a> Tiling<'a> {
    fn new(ask: &'a ScoreRequest<'a>, units: usize, (lanes, columns): (usize, usize)) -> Self {
        let tile = ((TILE / columns.max(1)).min(TILE_UNITS) / units).max(1);
        let of_tokens = ask.shape.group_tokens.max(1) * columns.max(1);
        let run = (RUN / of_tokens).next_multiple_of(tile).max(tile);
        Self { ask, lanes, columns, per_group: columns * units, tile, run }
    }

    /// Returns room for the units of a tile.
    fn room(&self) -> Vec<f32> {
        vec![0.0; self.tile.min(self.ask.groups.len()) * self.per_group]
    }

    /// Returns the threads for the runs.
    fn threads(&self) -> Option<&'a dyn ComputeThreads> {
        self.ask.threads.filter(|_| self.runs().len() >= SHARED_RUNS)
    }

    /// Returns the groups of each run.
    fn runs(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        ranges(self.ask.groups.clone(), self.run)
    }

    /// Fills all units and takes their exponentials, run by run.
    fn parts(&self, fill: &impl FillScores) -> TileParts {
        let columns = self.columns;
        let kernels = softmax_parts().filter(|_| columns.is_multiple_of(16));
        let of_run =
            |_| RunParts { parts: Vec::new(), maxima: Vec::new(), softmax: Softmax::new(columns, self.ask.scale) };
        let mut runs: Vec<RunParts> = self.runs().map(of_run).collect();
        let state = || (fill.clone(), self.room());
        for_each(self.threads(), self.runs().zip(&mut runs), state, |(fill, room), (groups, run)| {
            let RunParts { parts, maxima, softmax } = run;
            parts.reserve_exact(groups.len() * self.per_group);
            maxima.reserve_exact(groups.len().div_ceil(self.tile) * columns);
            for groups in ranges(groups, self.tile) {
                let scores = &mut room[..groups.len() * self.per_group];
                fill(groups, scores);
                let start = parts.len();
                parts.resize(start + scores.len(), 0);
                let parts = &mut parts[start..];
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
        });
        let mut softmax = Softmax::new(columns, self.ask.scale);
        runs.iter().for_each(|run| softmax.add_units_of(&run.softmax));
        TileParts { runs, softmax, weighted: kernels.map(|(_, weighted)| weighted) }
    }

    /// Calls `take` with each tile of a run, after the first pass.
    fn each_of_run(
        &self,
        all: &TileParts,
        (groups, run): (Range<usize>, &RunParts),
        room: &mut [f32],
        mut take: impl FnMut(Range<usize>, Tile<'_>),
    ) {
        let tiles = run.parts.chunks(self.tile * self.per_group).zip(run.maxima.chunks(self.columns));
        for (groups, (parts, maxima)) in ranges(groups, self.tile).zip(tiles) {
            let weights = all.softmax.weights(maxima, self.lanes);
            take(groups, Tile { units: Units::Parts(parts), weights: &weights, weighted: all.weighted, room });
        }
    }

    /// Returns the weights of columns whose raw scores are summed.
    fn raw_weights(&self) -> Vec<f32> {
        (0..self.columns).map(|lane| f32::from(u8::from(lane < self.lanes))).collect()
    }

    /// Fills the units of a run, and calls `take` with each tile.
    fn each_raw(
        &self,
        (fill, room): &mut (impl FillScores, Vec<f32>),
        groups: Range<usize>,
        weights: &[f32],
        mut take: impl FnMut(Range<usize>, Tile<'_>),
    ) {
        for groups in ranges(groups, self.tile) {
            let scores = &mut room[..groups.len() * self.per_group];
            fill(groups.clone(), scores);
            take(groups, Tile { units: Units::Whole(scores), weights, weighted: None, room: &mut [] });
        }
    }
}

/// Returns consecutive ranges of `step`, of which the last one may be shorter.
fn ranges(of: Range<usize>, step: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    of.clone().step_by(step).map(move |first| first..(first + step).min(of.end))
}

/// Scores `units` units of each group, tile by tile, on the threads of the request.
///
/// `fill` writes `[units, columns]`, of which `lanes` count. `take` gets each tile, and writes the scores of its
/// groups. With a softmax, the tile holds parts of the exponentials.
pub(crate) fn score_tiles(
    ask: &ScoreRequest<'_>,
    units: usize,
    (lanes, columns): (usize, usize),
    fill: impl FillScores,
    scores: &mut [f32],
    take: impl Fn(&mut Tile<'_>, &mut [f32]) + Sync,
) {
    let tiling = Tiling::new(ask, units, (lanes, columns));
    if ask.aggregation == HeadAggregation::Sum {
        let (weights, state) = (tiling.raw_weights(), || (fill.clone(), tiling.room()));
        let runs = tiling.runs().zip(scores.chunks_mut(tiling.run));
        for_each(tiling.threads(), runs, state, |state, (groups, scores)| {
            let first = groups.start;
            tiling.each_raw(state, groups, &weights, |groups, mut tile| {
                take(&mut tile, &mut scores[groups.start - first..groups.end - first]);
            });
        });
        return;
    }
    let all = tiling.parts(&fill);
    let runs = tiling.runs().zip(scores.chunks_mut(tiling.run)).zip(&all.runs);
    let room = || tiling.room();
    for_each(tiling.threads(), runs, room, |room, ((groups, scores), run)| {
        let first = groups.start;
        tiling.each_of_run(&all, (groups, run), room, |groups, mut tile| {
            take(&mut tile, &mut scores[groups.start - first..groups.end - first]);
        });
    });
}

/// Scores units as [`score_tiles`] does, and calls `take` with each tile in order.
pub(crate) fn each_tile(
    ask: &ScoreRequest<'_>,
    units: usize,
    (lanes, columns): (usize, usize),
    fill: impl FillScores,
    mut take: impl FnMut(Range<usize>, Tile<'_>),
) {
    let tiling = Tiling::new(ask, units, (lanes, columns));
    if ask.aggregation == HeadAggregation::Sum {
        let mut state = (fill, tiling.room());
        return tiling.each_raw(&mut state, ask.groups.clone(), &tiling.raw_weights(), take);
    }
    let (all, mut room) = (tiling.parts(&fill), tiling.room());
    for run in tiling.runs().zip(&all.runs) {
        tiling.each_of_run(&all, run, &mut room, &mut take);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::NewThreads;
    use crate::retrieval::selector::aggregate;
    use crate::retrieval::summary::KeyShape;
    use proptest::prelude::*;
    use stratakv_format::DType;

    #[test]
    fn threads_share_no_more_runs_than_there_are() {
        for (threads, groups, of_group, sharing) in [
            (0, 0, 0, 1),
            (0, 100_000, 64, 1),
            (8, 4 * 512, 32, 1),
            (8, 4 * 512 + 1, 32, 5),
            (3, 4 * 512 + 1, 32, 3),
            (usize::MAX, 1_000, 1 << 20, 1_000),
        ] {
            assert_eq!(sharing_threads(threads, groups, of_group), sharing, "{threads} {groups} {of_group}");
        }
    }

    proptest! {
        #[test]
        fn tiles_are_as_one(
            (groups, per_group, heads) in (1_usize..1500, 1_usize..6, 1_usize..20), first in 0_usize..50,
            rise in -0.1_f32..0.1, softmax in any::<bool>(), seed in any::<u64>(),
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
                threads: None,
            };
            let fill = |of: Range<usize>, out: &mut [f32]| {
                let at = |group: usize| (group - first) * per_group * columns;
                out.copy_from_slice(&units[at(of.start)..at(of.end)]);
            };
            let mut scores = vec![0.0; groups];
            each_tile(&ask, per_group, (heads, columns), fill, |of, mut tile| {
                tile.best(per_group, &mut scores[of.start - first..of.end - first]);
            });
            let host = NewThreads { threads: 3, calls: 3 };
            let several = ScoreRequest { threads: Some(&host), ..ask.clone() };
            for ask in [&ask, &several] {
                let mut again = vec![0.0; groups];
                score_tiles(ask, per_group, (heads, columns), fill, &mut again, |tile, scores| {
                    tile.best(per_group, scores);
                });
                prop_assert_eq!(&again, &scores);
            }
            // Parts of exponentials are bf16, which is exact to 1/256.
            let error = if softmax { 1.0 / 256.0 } else { 1e-4 };
            for (group, (x, y)) in scores.iter().zip(&expected).enumerate() {
                prop_assert!((x - y).abs() <= error * y.abs() + 1e-6, "group {group}: {x}, as one {y}");
            }
        }
    }
}
