//! LeoAM (section 4): a tree of bounds, descended only where a better group may be.
//!
//! 1. Bounds of long chunks are computed first.
//! 2. A chunk is taken whole if its lower bound beats the rest. It is split if its upper bound is high enough.
//!    Otherwise it is left.
//! 3. The search ends when the best remaining chunks are groups.
//!
//! With raw scores the chosen groups are those that upper bounds of all groups would choose, to the bit. With a softmax
//! they differ only by its normaliser, which is estimated from a sample of chunks.

use crate::error::Result;
use crate::kernels::{best_scores, powers};
use crate::retrieval::bounds::query::BoundQuery;
use crate::retrieval::bounds::summary::{Bounds, BoundsSpec};
use crate::retrieval::selector::{HeadAggregation, ScoreRequest, Selector, summary_as};
use crate::retrieval::summary::{LayerSummary, SummarySpec};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;
use std::sync::Arc;

/// Levels of chunks. The longest chunk has 64 groups.
const LEVELS: usize = 7;

/// Levels that a split descends at once. The eight parts are adjacent, and their bounds cost less than the bounds of
/// successive halves.
const SPLIT: usize = 3;

/// Splitting stops after `groups / SPLIT_LIMIT` bounds, because by then pruning saves less than it costs.
const ENOUGH: usize = 4;

/// The level of the longest chunks with a softmax, whose normaliser is estimated from them: eight groups.
const SOFTMAX_LEVEL: usize = 3;

/// Sampled chunks, at least. They tell how far groups are below the bounds of their chunks.
const SAMPLE: usize = 32;

/// Chunks per sampled chunk, at most.
const SAMPLE_STEP: usize = 8;

/// Chunks whose bounds are computed at a time, so that they stay in the cache until they are summed.
const TILE: usize = 256;

/// LeoAM's adaptive selection.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeoAm {
    /// The expected share of chunks that matter. The initial chunk length follows from it. `None`: the share that the
    /// budget selects.
    pub density: Option<f64>,
}

/// Returns the initial level, with chunks of `2^level` groups: the one with the fewest expected evaluations.
///
/// For `m` chunks of `n` groups these are `m * sum_{i <= log2(n / m)} (2 rho)^i`. The paper's sum ends one term
/// earlier, which would count none for `m = n`.
fn initial_level(groups: usize, density: f64, levels: usize) -> usize {
    let cost = |level: usize| {
        let chunks = groups as f64 / (1_u64 << level) as f64;
        chunks * (0..=level).map(|i| (2.0 * density).powi(i as i32)).sum::<f64>()
    };
    (0..levels).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(0)
}

/// Consecutive chunks of one level.
type TreePiece = (usize, Range<usize>);

/// Cuts groups into chunks of at most this level: the longest aligned ones that are inside the range and complete.
fn pieces(bounds: &Bounds, groups: &Range<usize>, longest: usize) -> Vec<TreePiece> {
    let mut pieces: Vec<TreePiece> = Vec::new();
    let mut at = groups.start;
    while at < groups.end {
        let fits = |l: &usize| {
            let run = at >> l;
            at.is_multiple_of(1 << l) && (run + 1) << l <= groups.end && run < bounds.runs(*l)
        };
        let level = (0..=longest).rev().find(fits).unwrap_or(0);
        let (run, end) = (at >> level, (groups.end >> level).min(bounds.runs(level)));
        let runs = run..if level == longest { end } else { run + 1 };
        // A summary that knows fewer groups than requested has no chunk here.
        at = runs.end.max(run + 1) << level;
        pieces.push((level, runs));
    }
    pieces
}

/// A chunk with an upper bound of the scores of its groups.
struct TreeChunk {
    upper: f32,
    level: usize,
    run: usize,
}

impl TreeChunk {
    fn groups(&self) -> Range<usize> {
        self.run << self.level..(self.run + 1) << self.level
    }
}

/// Orders higher bounds first, and among equal bounds the earlier chunk, as if every group were bounded.
impl Ord for TreeChunk {
    fn cmp(&self, other: &Self) -> Ordering {
        self.upper.total_cmp(&other.upper).then_with(|| other.groups().start.cmp(&self.groups().start))
    }
}

impl PartialOrd for TreeChunk {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for TreeChunk {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for TreeChunk {}

/// How bounds per head become one bound of the softmax.
///
/// `weight * 2^(factor * (x - maximum))` rises with the bound, so that sums over heads are bounds again.
struct Heads {
    maxima: Vec<f32>,
    /// 0 for lanes beyond the heads.
    weights: Vec<f32>,
    factor: f32,
}

impl Heads {
    /// Aggregates bounds `[chunks, lanes]`, which are overwritten.
    fn sum(&self, bounds: &mut [f32], out: &mut [f32]) {
        powers(bounds, &self.maxima, self.factor);
        best_scores(bounds, &self.weights, self.weights.len(), 1, out);
    }
}

/// Adds a multiple of a row to sums.
fn add(sums: &mut [f32], row: &[f32], times: f32) {
    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += times * x);
}

/// Computes the bounds of chunks.
struct Scorer<'a> {
    bounds: &'a Bounds,
    query: BoundQuery,
    /// The softmax, if the aggregation is one.
    heads: Option<Heads>,
    /// Bounds per head, and their sums.
    units: Vec<f32>,
    sums: Vec<f32>,
}

impl<'a> Scorer<'a> {
    /// Starts with the initial chunks: these pieces, or parts of them.
    fn new(ask: &ScoreRequest<'_>, bounds: &'a Bounds, pieces: Vec<TreePiece>) -> (Self, Vec<TreeChunk>) {
        if ask.aggregation != HeadAggregation::Sum {
            return Self::by_heads(ask, bounds, &pieces);
        }
        let query = BoundQuery::summed(ask);
        let mut scorer = Self { bounds, query, heads: None, units: Vec::new(), sums: Vec::new() };
        let mut chunks = Vec::new();
        pieces.into_iter().for_each(|piece| scorer.add(piece, &mut chunks));
        (scorer, chunks)
    }

    /// Estimates the normaliser of each head: the sum over all groups.
    ///
    /// Groups are bounded in the highest chunk of each head and in a sample of chunks. For other chunks the sum over
    /// groups is taken to be as far below the chunk's bound as in the sample.
    fn by_heads(ask: &ScoreRequest<'_>, bounds: &'a Bounds, pieces: &[TreePiece]) -> (Self, Vec<TreeChunk>) {
        let count = ask.query.len() / ask.shape.key_dim;
        let lanes = count.next_multiple_of(8);
        let mut query = BoundQuery::heads(ask);
        let mut put = |(level, runs): TreePiece, out: &mut Vec<f32>| {
            let first = out.len();
            out.resize(first + runs.len() * lanes, 0.0);
            query.put_upper(bounds, level, runs, &mut out[first..], lanes);
            first
        };
        let mut uppers = Vec::new();
        for piece in pieces {
            put(piece.clone(), &mut uppers);
        }
        let runs = || pieces.iter().flat_map(|(level, runs)| runs.clone().map(|run| (*level, run)));
        // The highest bound of each head, and its chunk.
        let mut highest = vec![(f32::MIN, 0); lanes];
        for (at, row) in uppers.chunks_exact(lanes).enumerate() {
            for (highest, x) in highest.iter_mut().zip(row).filter(|(highest, x)| **x > highest.0) {
                *highest = (*x, at);
            }
        }
        let maxima: Vec<f32> = highest.iter().map(|(max, _)| *max).collect();
        let step = (uppers.len() / lanes / SAMPLE).clamp(1, SAMPLE_STEP);
        // The chunks to split, and whether they are in the sample.
        let mut split: BTreeMap<usize, bool> = highest[..count].iter().map(|(_, at)| (*at, false)).collect();
        split.extend((step / 2..uppers.len() / lanes).step_by(step).map(|at| (at, true)));
        let factor = (ask.scale * std::f32::consts::LOG2_E).min(f32::MAX);
        powers(&mut uppers, &maxima, factor);
        let (mut units, mut chunks) = (Vec::with_capacity(uppers.len()), Vec::new());
        let [mut known, mut rest, mut sample, mut within] = [(); 4].map(|()| vec![0.0; lanes]);
        for (at, (row, (level, run))) in uppers.chunks_exact(lanes).zip(runs()).enumerate() {
            let chunk = TreeChunk { upper: 0.0, level, run };
            let groups = chunk.groups();
            match split.get(&at) {
                Some(of_sample) if level > 0 => {
                    let first = put((0, groups.clone()), &mut units);
                    powers(&mut units[first..], &maxima, factor);
                    units[first..].chunks_exact(lanes).for_each(|row| add(&mut known, row, 1.0));
                    if *of_sample {
                        add(&mut sample, row, groups.len() as f32);
                        units[first..].chunks_exact(lanes).for_each(|row| add(&mut within, row, 1.0));
                    }
                    chunks.extend(groups.map(|run| TreeChunk { upper: 0.0, level: 0, run }));
                }
                _ => {
                    add(if level > 0 { &mut rest } else { &mut known }, row, groups.len() as f32);
                    units.extend_from_slice(row);
                    chunks.push(chunk);
                }
            }
        }
        let weight = |lane: usize| {
            let ratio = if sample[lane] > 0.0 { within[lane] / sample[lane] } else { 1.0 };
            if lane < count { (known[lane] + ratio * rest[lane]).recip() } else { 0.0 }
        };
        let weights: Vec<f32> = (0..lanes).map(weight).collect();
        let mut sums = vec![0.0; chunks.len()];
        best_scores(&units, &weights, lanes, 1, &mut sums);
        chunks.iter_mut().zip(&sums).for_each(|(chunk, sum)| chunk.upper = *sum);
        (Self { bounds, query, heads: Some(Heads { maxima, weights, factor }), units, sums }, chunks)
    }

    /// Adds the bounds of the chunks of a piece.
    fn add(&mut self, (level, runs): TreePiece, chunks: &mut impl Extend<TreeChunk>) {
        self.sums.resize(runs.len(), 0.0);
        match &self.heads {
            None => self.query.put_upper(self.bounds, level, runs.clone(), &mut self.sums, 1),
            Some(heads) => {
                let lanes = heads.weights.len();
                for (first, sums) in runs.clone().step_by(TILE).zip(self.sums.chunks_mut(TILE)) {
                    self.units.resize(sums.len() * lanes, 0.0);
                    self.query.put_upper(self.bounds, level, first..first + sums.len(), &mut self.units, lanes);
                    heads.sum(&mut self.units, sums);
                }
            }
        }
        chunks.extend(runs.zip(&self.sums).map(|(run, sum)| TreeChunk { upper: *sum, level, run }));
    }

    /// Returns a lower bound of the scores of a chunk's groups.
    fn lower(&mut self, chunk: &TreeChunk) -> f32 {
        let mut out = [0.0];
        match &self.heads {
            None => self.query.put_lower(self.bounds, chunk.level, chunk.run, &mut out),
            Some(heads) => {
                self.units.resize(heads.weights.len(), 0.0);
                self.query.put_lower(self.bounds, chunk.level, chunk.run, &mut self.units);
                heads.sum(&mut self.units, &mut out);
            }
        }
        out[0]
    }
}

impl LeoAm {
    /// Returns the initial chunks.
    fn initial(&self, bounds: &Bounds, ask: &ScoreRequest<'_>) -> Vec<TreePiece> {
        let density = self.density.unwrap_or(ask.count as f64 / ask.groups.len().max(1) as f64).clamp(1e-4, 1.0);
        let longest = initial_level(ask.groups.len(), density, bounds.levels());
        let most = if ask.aggregation != HeadAggregation::Sum { SOFTMAX_LEVEL } else { LEVELS };
        pieces(bounds, &ask.groups, longest.min(most))
    }
}

impl Selector for LeoAm {
    fn name(&self) -> &str {
        "leoam"
    }

    fn summaries(&self) -> Vec<Arc<dyn SummarySpec>> {
        vec![Arc::new(BoundsSpec { levels: LEVELS }) as _]
    }

    fn score(&self, summaries: &[&dyn LayerSummary], ask: &ScoreRequest<'_>, scores: &mut [f32]) -> Result<()> {
        let bounds: &Bounds = summary_as(summaries)?;
        let (mut scorer, chunks) = Scorer::new(ask, bounds, self.initial(bounds, ask));
        let mut heap = BinaryHeap::from(chunks);
        // The bounds that splits have computed.
        let mut spent = 0;
        // Groups get scores in the order in which they are confirmed. The rest keeps no score.
        scores.fill(f32::NEG_INFINITY);
        let mut rank = 0.0_f32;
        let mut left = ask.count;
        while left > 0
            && let Some(chunk) = heap.pop()
        {
            // Forced groups take none of the remaining places.
            let takes = chunk.groups().filter(|group| !ask.is_forced(*group)).count();
            let beats_rest = |lower: f32| heap.peek().is_none_or(|next| lower > next.upper);
            if chunk.level == 0 || (takes <= left && beats_rest(scorer.lower(&chunk))) {
                for group in chunk.groups() {
                    rank -= 1.0;
                    scores[group - ask.groups.start] = rank;
                }
                left -= takes;
                continue;
            }
            if spent < ask.groups.len() / ENOUGH {
                let levels = chunk.level.min(SPLIT);
                spent += 1 << levels;
                scorer.add((chunk.level - levels, chunk.run << levels..(chunk.run + 1) << levels), &mut heap);
            } else {
                // Pruning saves little by now, so all groups of the remaining chunks are bounded at once.
                let (mut groups, mut rest): (Vec<TreeChunk>, Vec<TreeChunk>) =
                    heap.drain().partition(|chunk| chunk.level == 0);
                rest.push(chunk);
                rest.sort_unstable_by_key(|chunk| chunk.groups().start);
                for run in rest.chunk_by(|a, b| a.groups().end == b.groups().start) {
                    scorer.add((0, run[0].groups().start..run[run.len() - 1].groups().end), &mut groups);
                }
                heap = BinaryHeap::from(groups);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::bounds::min_max::Quest;
    use crate::retrieval::summary::{KeyGroup, KeyShape};
    use crate::retrieval::top_k::choose;
    use proptest::prelude::*;
    use stratakv_format::DType;

    /// Returns keys around a centre that moves after each `run` groups, in steps of `1 / steps`. Fewer steps give more
    /// ties.
    fn summaries(
        shape: KeyShape,
        groups: usize,
        (run, spread, steps): (usize, f32, f32),
        random: &mut impl FnMut() -> f32,
    ) -> [Box<dyn LayerSummary>; 2] {
        let mut kinds = [1, LEVELS].map(|levels| BoundsSpec { levels }.layer(0, shape).unwrap());
        let mut centre = vec![0.0; shape.width()];
        for group in 0..groups {
            if group % run == 0 {
                centre.iter_mut().for_each(|x| *x = random());
            }
            let per_head = shape.group_tokens * shape.key_dim;
            let key = |at: usize| centre[at / per_head * shape.key_dim + at % shape.key_dim] + spread * random();
            let plane: Vec<u8> = (0..shape.kv_heads * per_head)
                .map(key)
                .flat_map(|x| half::f16::from_f32((x * steps).round() / steps).to_le_bytes())
                .collect();
            let group = KeyGroup::new(shape, &plane, group as u64).unwrap();
            kinds.iter_mut().for_each(|summary| summary.push(&group));
        }
        kinds
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn chooses_what_bounds_of_all_groups_choose(
            (kv_heads, ratio, key_dim, group_tokens) in (1_usize..3, 1_usize..4, 1_usize..20, 1_usize..4),
            groups in prop_oneof![1_usize..80, 200_usize..900], (start, end) in (0_usize..20, 0_usize..20),
            (sinks, recent) in (0_usize..4, 0_usize..6), places in 0.0_f64..0.5,
            density in prop::option::of(0.0_f64..1.0), run in prop::sample::select(vec![1_usize, 8, 50, 300]),
            spread in prop::sample::select(vec![0.0_f32, 0.05, 1.0]),
            steps in prop::sample::select(vec![2.0_f32, 1000.0]), seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype: DType::F16 };
            let [flat, tree] = summaries(shape, groups, (run, spread, steps), &mut random);
            let query: Vec<f32> = (0..kv_heads * ratio * key_dim).map(|_| 4.0 * random()).collect();
            let range = start.min(groups - 1)..groups.saturating_sub(end).max(start.min(groups - 1) + 1);
            let forced = [
                range.start..(range.start + sinks).min(range.end),
                range.end.saturating_sub(recent).max(range.start)..range.end,
            ];
            let all_forced = range.clone().filter(|group| forced.iter().any(|forced| forced.contains(group))).count();
            let count = (places * range.len() as f64) as usize + all_forced;
            let mut ask = ScoreRequest {
                query: &query, shape, scale: 0.5, aggregation: HeadAggregation::Sum, groups: range.clone(),
                forced: forced.clone(),
                count: count - all_forced,
                threads: None,
            };
            let leoam = LeoAm { density };
            let chosen = |scores: &[f32]| {
                let wide = |range: &Range<usize>| range.start as u64..range.end as u64;
                choose(wide(&range), count, &forced.each_ref().map(wide), scores)
            };
            let (mut expected, mut scores) = (vec![0.0; range.len()], vec![0.0; range.len()]);
            Quest.score(&[flat.as_ref()], &ask, &mut expected).unwrap();
            leoam.score(&[tree.as_ref()], &ask, &mut scores).unwrap();
            prop_assert_eq!(chosen(&scores), chosen(&expected));

            // With a softmax and the estimated normalisers: no group that is left out is better.
            ask.aggregation = HeadAggregation::Softmax;
            leoam.score(&[tree.as_ref()], &ask, &mut scores).unwrap();
            let bounds: &Bounds = summary_as(&[tree.as_ref()]).unwrap();
            let (mut scorer, initial) = Scorer::new(&ask, bounds, leoam.initial(bounds, &ask));
            let mut all = Vec::new();
            scorer.add((0, range.clone()), &mut all);
            let chosen = chosen(&scores);
            let free = |chunk: &&TreeChunk| !ask.is_forced(chunk.run);
            let is_chosen = |chunk: &&TreeChunk| chosen.contains(&(chunk.run as u64));
            let (taken, left): (Vec<&TreeChunk>, Vec<&TreeChunk>) = all.iter().filter(free).partition(is_chosen);
            let lowest = taken.iter().map(|chunk| chunk.upper).fold(f32::INFINITY, f32::min);
            let highest = left.iter().map(|chunk| chunk.upper).fold(0.0, f32::max);
            prop_assert!(highest <= lowest * (1.0 + 1e-4), "{highest} is left, {lowest} taken");
            // If all chunks are in the sample, the normalisers are exact, and the scores sum to 1 per head.
            if initial.iter().all(|chunk| chunk.level == 0) {
                let sum: f64 = all.iter().map(|chunk| f64::from(chunk.upper)).sum();
                prop_assert!((sum - (kv_heads * ratio) as f64).abs() < 1e-3, "{sum}");
            }
        }
    }

    #[test]
    fn sparse_layers_start_with_long_chunks_and_dense_ones_with_groups() {
        assert_eq!(initial_level(1024, 0.95, 7), 0);
        assert!(initial_level(1024, 0.02, 7) >= 5);
        let levels: Vec<usize> = [0.5, 0.3, 0.1, 0.03].map(|rho| initial_level(1024, rho, 7)).to_vec();
        assert!(levels.windows(2).all(|w| w[0] <= w[1]), "{levels:?}");
    }
}
