//! Upper and lower bounds of `q . k` per query head, from records of minima and maxima (LeoAM section 4; Quest).

use crate::kernels::RowQuery;
use crate::retrieval::bounds::summary::Bounds;
use crate::retrieval::selector::ScoreRequest;
use std::ops::Range;

/// A query, split by sign.
///
/// The upper bound `sum_j max(q_j max_j, q_j min_j)` is the product of its negative part with the minima plus that of
/// its positive part with the maxima. The lower bound exchanges minima and maxima.
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

    proptest! {
        /// Lower and upper bounds hold for every token of every run, at every level, for every element type.
        #[test]
        fn bounds_hold_for_every_token(
            dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]),
            kv_heads in 1_usize..3, ratio in 1_usize..3, key_dim in 1_usize..20, group_tokens in 1_usize..6,
            groups in 1_usize..10, cut in 0_usize..10, seed in any::<u64>(), magnitude in -4_i32..3,
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = || (2.0 * rng.f32() - 1.0) * 10_f32.powi(magnitude);
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype };
            let mut summary = BoundsSpec { levels: 4 }.layer(0, shape).unwrap();
            let mut keys = Vec::new();
            let fill = |summary: &mut dyn LayerSummary, keys: &mut Vec<Vec<f32>>, random: &mut dyn FnMut() -> f32| {
                while summary.groups() < groups {
                    let mut plane = Vec::new();
                    for _ in 0..shape.width() * group_tokens {
                        match dtype {
                            DType::F32 => plane.extend(random().to_le_bytes()),
                            DType::F16 => plane.extend(f16::from_f32(random()).to_le_bytes()),
                            DType::Bf16 => plane.extend(bf16::from_f32(random()).to_le_bytes()),
                        }
                    }
                    let group = KeyGroup::new(shape, &plane, summary.groups() as u64).unwrap();
                    keys.truncate(summary.groups());
                    keys.push(group.tokens());
                    let promised = summary.bytes_for(1);
                    summary.push(&group);
                    assert!(summary.bytes() <= promised, "{} bytes, {promised} promised", summary.bytes());
                }
            };
            fill(summary.as_mut(), &mut keys, &mut random);
            summary.truncate(cut.min(groups));
            fill(summary.as_mut(), &mut keys, &mut random);
            let query: Vec<f32> = (0..kv_heads * ratio * key_dim).map(|_| random()).collect();
            let bounds: &Bounds = (summary.as_ref() as &dyn std::any::Any).downcast_ref().unwrap();
            let (aggregation, forced) = (HeadAggregation::Sum, [0..0, groups..groups]);
            let (scale, count) = (1.0, groups);
            let ask = ScoreRequest { query: &query, shape, scale, aggregation, groups: 0..groups, forced, count };
            let (mut bounded, mut joint, heads) = (BoundQuery::heads(&ask), BoundQuery::summed(&ask), kv_heads * ratio);
            for level in 0..4 {
                prop_assert_eq!(bounds.runs(level), groups >> level);
                let runs = 0..groups >> level;
                let (mut upper, mut lower) = (vec![0.0; runs.len() * heads], vec![0.0; runs.len() * heads]);
                let (mut summed, mut least) = (vec![0.0; runs.len()], vec![0.0; runs.len()]);
                bounded.put_upper(bounds, level, runs.clone(), &mut upper, heads);
                joint.put_upper(bounds, level, runs.clone(), &mut summed, 1);
                for run in runs {
                    bounded.put_lower(bounds, level, run, &mut lower[run * heads..][..heads]);
                    joint.put_lower(bounds, level, run, &mut least[run..=run]);
                    for (bounds, sum) in [(&upper, summed[run]), (&lower, least[run])] {
                        let bounds = &bounds[run * heads..][..heads];
                        let scale: f32 = bounds.iter().map(|bound| bound.abs()).sum();
                        let error = (sum - bounds.iter().sum::<f32>()).abs();
                        prop_assert!(error <= 1e-4 * scale.max(1e-3), "{sum} {bounds:?}");
                    }
                    // To the bit: no part of a run is above its upper bound or below its lower bound.
                    if level > 0 {
                        let half = run << 1..(run << 1) + 2;
                        let mut inner = vec![0.0; 2];
                        joint.put_upper(bounds, level - 1, half.clone(), &mut inner, 1);
                        prop_assert!(inner.iter().all(|inner| (least[run]..=summed[run]).contains(inner)), "{inner:?}");
                        let mut inner = vec![0.0; 2 * heads];
                        bounded.put_upper(bounds, level - 1, half, &mut inner, heads);
                        for (at, inner) in inner.iter().enumerate() {
                            let at = run * heads + at % heads;
                            prop_assert!((lower[at]..=upper[at]).contains(inner), "{inner}");
                        }
                    }
                }
                for run in 0..groups >> level {
                    for group in &keys[run << level..(run + 1) << level] {
                        for key in group.chunks_exact(shape.width()) {
                            for (head, q) in query.chunks_exact(key_dim).enumerate() {
                                let key = &key[head / ratio * key_dim..][..key_dim];
                                let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                                let scale: f64 = q.iter().zip(key).map(|(q, k)| f64::from(q * k).abs()).sum();
                                prop_assert!(f64::from(upper[run * heads + head]) >= dot - 1e-5 * scale);
                                prop_assert!(f64::from(lower[run * heads + head]) <= dot + 1e-5 * scale);
                            }
                        }
                    }
                }
            }
        }
    }
}
