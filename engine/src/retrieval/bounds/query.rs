//! Upper and lower bounds of `q . k` per query head, from records of minima and maxima (LeoAM section 4; Quest).
//!
//! 1. [`BoundQuery::heads`] or [`BoundQuery::summed`] splits a query by sign.
//! 2. [`BoundQuery::put_upper`] and [`BoundQuery::put_lower`] multiply its parts with records.
//!
//! Invariant: to the bit, no part of a run is above the upper bound of the run or below its lower bound.

use crate::kernels::RowQuery;
use crate::retrieval::bounds::summary::Bounds;
use crate::retrieval::selector::ScoreRequest;
use std::ops::Range;

/// A query, split by sign.
///
/// The upper bound `sum_j max(q_j max_j, q_j min_j)` is the product of its negative part with the minima plus that of
/// its positive part with the maxima. The lower bound exchanges minima and maxima.
#[derive(Clone)]
pub(crate) struct BoundQuery {
    /// The parts, each with the first element of a record that it applies to.
    parts: Vec<(RowQuery, usize)>,
    /// The elements of a record: minima, then as many maxima.
    record: usize,
    swapped: Vec<u16>,
}

impl BoundQuery {
    /// Returns a query with a column per query head.
    pub(crate) fn heads(ask: &ScoreRequest<'_>) -> Self {
        let part = |sign: fn(f32) -> f32| {
            let part: Vec<f32> = ask.query.iter().map(|q| sign(*q)).collect();
            RowQuery::new(&part, ask.shape.kv_heads, ask.shape.key_dim)
        };
        let width = ask.shape.width();
        Self::of(vec![(part(|q| q.min(0.0)), 0), (part(|q| q.max(0.0)), width)], width)
    }

    /// Returns a query with one column, summed over query heads. Its cost does not grow with their number.
    pub(crate) fn summed(ask: &ScoreRequest<'_>) -> Self {
        let (dim, width) = (ask.shape.key_dim, ask.shape.width());
        let ratio = ask.query.len() / width;
        let mut weights = vec![0.0; 2 * width];
        let (negative, positive) = weights.split_at_mut(width);
        for (head, row) in ask.query.chunks_exact(dim).enumerate() {
            for (j, &q) in row.iter().enumerate() {
                let at = head / ratio * dim + j;
                if q < 0.0 { negative[at] += q } else { positive[at] += q }
            }
        }
        Self::of(vec![(RowQuery::new(&weights, 1, 2 * width), 0)], width)
    }

    fn of(parts: Vec<(RowQuery, usize)>, width: usize) -> Self {
        Self { parts, record: 2 * width, swapped: Vec::new() }
    }

    /// Writes upper bounds of the runs of a level, `[runs, columns]`. `columns` is at least the number of its columns.
    pub(crate) fn put_upper(
        &mut self,
        bounds: &Bounds,
        level: usize,
        runs: Range<usize>,
        out: &mut [f32],
        columns: usize,
    ) {
        out.fill(0.0);
        for (part, first) in &mut self.parts {
            let place = (self.record, *first);
            part.add_slices(bounds.records(level, runs.clone()), place, bounds.element(), out, columns);
        }
    }

    /// Writes lower bounds of one run. They are rounded like upper bounds, so that no lower bound is above an upper
    /// bound within the run.
    pub(crate) fn put_lower(&mut self, bounds: &Bounds, level: usize, run: usize, out: &mut [f32]) {
        self.swapped.clear();
        for record in bounds.records(level, run..run + 1) {
            let (minima, maxima) = record.split_at(record.len() / 2);
            self.swapped.extend_from_slice(maxima);
            self.swapped.extend_from_slice(minima);
        }
        out.fill(0.0);
        let columns = out.len();
        for (part, first) in &mut self.parts {
            let place = (self.record, *first);
            part.add_slices(std::iter::once(self.swapped.as_slice()), place, bounds.element(), out, columns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::bounds::summary::BoundsSpec;
    use crate::retrieval::selector::HeadAggregation;
    use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, SummarySpec};
    use half::{bf16, f16};
    use proptest::prelude::*;
    use stratakv_format::DType;

    /// A history of pushed and cut groups, and a query.
    #[derive(Clone, Copy, Debug)]
    struct History {
        shape: KeyShape,
        /// Query heads of a KV head.
        ratio: usize,
        groups: usize,
        /// The groups that are left after the cut.
        cut: usize,
        seed: u64,
        /// The power of ten below which all elements are.
        magnitude: i32,
    }

    impl History {
        /// Returns the bounds, the keys of each group and the query.
        fn run(&self) -> (Box<dyn LayerSummary>, Vec<Vec<f32>>, Vec<f32>) {
            let shape = self.shape;
            let mut rng = fastrand::Rng::with_seed(self.seed);
            let mut random = || (2.0 * rng.f32() - 1.0) * 10_f32.powi(self.magnitude);
            let mut summary = BoundsSpec { levels: 4 }.layer(0, shape).unwrap();
            let mut keys = Vec::new();
            for cut in [0, self.cut.min(self.groups)] {
                summary.truncate(cut);
                keys.truncate(cut);
                while summary.groups() < self.groups {
                    let mut plane = Vec::new();
                    for _ in 0..shape.width() * shape.group_tokens {
                        match shape.dtype {
                            DType::F32 => plane.extend(random().to_le_bytes()),
                            DType::F16 => plane.extend(f16::from_f32(random()).to_le_bytes()),
                            DType::Bf16 => plane.extend(bf16::from_f32(random()).to_le_bytes()),
                        }
                    }
                    let group = KeyGroup::new(shape, &plane, summary.groups() as u64).unwrap();
                    keys.push(group.tokens());
                    let promised = summary.bytes_for(1);
                    summary.push(&group);
                    assert!(summary.bytes() <= promised, "{} bytes, {promised} promised", summary.bytes());
                }
            }
            let query = (0..shape.width() * self.ratio).map(|_| random()).collect();
            (summary, keys, query)
        }

        /// Checks the bounds of every run, at every level.
        fn check(&self) {
            let (summary, keys, query) = self.run();
            let (shape, groups) = (self.shape, self.groups);
            let bounds: &Bounds = (summary.as_ref() as &dyn std::any::Any).downcast_ref().unwrap();
            let (aggregation, forced) = (HeadAggregation::Sum, [0..0, groups..groups]);
            let (scale, count) = (1.0, groups);
            let ask = ScoreRequest {
                query: &query,
                shape,
                scale,
                aggregation,
                groups: 0..groups,
                forced,
                count,
                threads: None,
            };
            let heads = shape.kv_heads * self.ratio;
            for level in 0..4 {
                assert_eq!(bounds.runs(level), groups >> level);
                let found = RunBounds::new(bounds, level, &ask);
                for run in 0..groups >> level {
                    let own = run * heads..(run + 1) * heads;
                    found.check_sums(bounds, (level, run), &ask);
                    if level > 0 {
                        found.check_halves(&RunBounds::new(bounds, level - 1, &ask), run);
                    }
                    for key in keys[run << level..(run + 1) << level].iter().flat_map(|g| g.chunks_exact(shape.width()))
                    {
                        check_token(&query, key, shape, (&found.lower[own.clone()], &found.upper[own.clone()]));
                    }
                }
            }
        }
    }

    /// Checks the bounds of each query head for one token.
    fn check_token(query: &[f32], key: &[f32], shape: KeyShape, (lower, upper): (&[f32], &[f32])) {
        let ratio = upper.len() / shape.kv_heads;
        for (head, q) in query.chunks_exact(shape.key_dim).enumerate() {
            let key = &key[head / ratio * shape.key_dim..][..shape.key_dim];
            let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let scale: f64 = q.iter().zip(key).map(|(q, k)| f64::from(q * k).abs()).sum();
            let (lower, upper) = (f64::from(lower[head]), f64::from(upper[head]));
            assert!(lower <= dot + 1e-5 * scale && dot - 1e-5 * scale <= upper, "{lower} {dot} {upper}");
        }
    }

    /// The bounds of all runs of a level.
    struct RunBounds {
        /// Of query heads, `[runs, heads]`.
        upper: Vec<f32>,
        lower: Vec<f32>,
        /// Of the sum over query heads, `[runs]`.
        summed: Vec<f32>,
        least: Vec<f32>,
    }

    impl RunBounds {
        fn new(bounds: &Bounds, level: usize, ask: &ScoreRequest<'_>) -> Self {
            let (runs, heads) = (bounds.runs(level), ask.query.len() / ask.shape.key_dim);
            let (mut bounded, mut joint) = (BoundQuery::heads(ask), BoundQuery::summed(ask));
            let [mut upper, mut lower] = [(); 2].map(|()| vec![0.0; runs * heads]);
            let [mut summed, mut least] = [(); 2].map(|()| vec![0.0; runs]);
            bounded.put_upper(bounds, level, 0..runs, &mut upper, heads);
            joint.put_upper(bounds, level, 0..runs, &mut summed, 1);
            for run in 0..runs {
                bounded.put_lower(bounds, level, run, &mut lower[run * heads..][..heads]);
                joint.put_lower(bounds, level, run, &mut least[run..=run]);
            }
            Self { upper, lower, summed, least }
        }

        /// Checks the bounds of a run against their definition in f64.
        ///
        /// The scale of the rounding error is the sum of the magnitudes of all terms. The bound itself is no scale,
        /// because terms of both signs may cancel. They do so most with one token per group, whose bound is `q . k`.
        fn check_sums(&self, bounds: &Bounds, (level, run): (usize, usize), ask: &ScoreRequest<'_>) {
            let record = bounds.records(level, run..run + 1).next().unwrap();
            let widen = |bits: &u16| match bounds.element() {
                DType::F16 => f16::from_bits(*bits).to_f64(),
                _ => bf16::from_bits(*bits).to_f64(),
            };
            let record: Vec<f64> = record.iter().map(widen).collect();
            let (minima, maxima) = record.split_at(ask.shape.width());
            let heads = ask.query.len() / ask.shape.key_dim;
            let ratio = heads / ask.shape.kv_heads;
            let mut all = (0.0, 0.0, 0.0);
            for (head, query) in ask.query.chunks_exact(ask.shape.key_dim).enumerate() {
                let (mut lower, mut upper, mut scale) = (0.0, 0.0, 0.0);
                for (q, at) in query.iter().map(|q| f64::from(*q)).zip(head / ratio * ask.shape.key_dim..) {
                    let (a, b) = (q * minima[at], q * maxima[at]);
                    (lower, upper) = (lower + a.min(b), upper + a.max(b));
                    scale += a.abs().max(b.abs());
                }
                let found = (self.lower[run * heads + head], self.upper[run * heads + head]);
                assert_close(found, (lower, upper), scale);
                all = (all.0 + lower, all.1 + upper, all.2 + scale);
            }
            assert_close((self.least[run], self.summed[run]), (all.0, all.1), all.2);
        }

        /// Checks to the bit that no half of a run is above its upper bound or below its lower bound.
        fn check_halves(&self, halves: &Self, run: usize) {
            let heads = self.upper.len() / self.summed.len();
            for half in 2 * run..2 * run + 2 {
                assert!((self.least[run]..=self.summed[run]).contains(&halves.summed[half]), "{}", halves.summed[half]);
                for head in 0..heads {
                    let (at, inner) = (run * heads + head, halves.upper[half * heads + head]);
                    assert!((self.lower[at]..=self.upper[at]).contains(&inner), "{inner}");
                }
            }
        }
    }

    fn assert_close(found: (f32, f32), expected: (f64, f64), scale: f64) {
        for (found, expected) in [(found.0, expected.0), (found.1, expected.1)] {
            let error = (f64::from(found) - expected).abs();
            assert!(error <= 1e-5 * scale, "{found}, expected {expected}, terms of {scale}");
        }
    }

    proptest! {
        /// Lower and upper bounds hold for every token of every run, at every level, for every element type.
        #[test]
        fn bounds_hold_for_every_token(
            dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
            kv_heads in 1_usize..3, ratio in 1_usize..3, key_dim in 1_usize..20, group_tokens in 1_usize..6,
            groups in 1_usize..10, cut in 0_usize..10, seed in any::<u64>(), magnitude in -4_i32..3,
        ) {
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype };
            History { shape, ratio, groups, cut, seed, magnitude }.check();
        }
    }

    /// The terms of a lower bound have 42,000 as the sum of their magnitudes, and cancel to -1.8.
    #[test]
    fn bounds_whose_terms_cancel_are_exact_to_the_scale_of_the_terms() {
        let shape = KeyShape { kv_heads: 1, key_dim: 12, group_tokens: 1, dtype: DType::F32 };
        History { shape, ratio: 1, groups: 9, cut: 1, seed: 7616523523523165939, magnitude: 2 }.check();
    }
}
