//! Bounds of `q . k` per query head over records of minima and maxima (LeoAM section 4; Quest).

use super::selector::Ask;
use crate::attention::RowQuery;
use crate::summary::Bounds;
use std::ops::Range;

/// A query, split by sign: `sum_j max(q_j max_j, q_j min_j)` is the product of its positive part with the maxima and of its
/// negative part with the minima, and the lower bound the other way round.
pub(super) struct BoundQuery {
    positive: RowQuery,
    negative: RowQuery,
    /// Elements of the minima of a record.
    width: usize,
}

impl BoundQuery {
    pub(super) fn new(ask: &Ask<'_>) -> Self {
        let part = |sign: fn(f32) -> f32| {
            let part: Vec<f32> = ask.query.iter().map(|q| sign(*q)).collect();
            RowQuery::new(&part, ask.shape.kv_heads, ask.shape.key_dim)
        };
        Self { positive: part(|q| q.max(0.0)), negative: part(|q| q.min(0.0)), width: ask.shape.width() }
    }

    /// Upper bounds of runs of a level, `[runs, columns]`, a column per query head; `columns` is at least their number.
    pub(super) fn upper(&mut self, bounds: &Bounds, level: usize, runs: Range<usize>, columns: usize) -> Vec<f32> {
        let mut out = vec![0.0; runs.len() * columns];
        self.put_upper(bounds, level, runs, &mut out, columns);
        out
    }

    /// The same, written to `out`.
    pub(super) fn put_upper(
        &mut self,
        bounds: &Bounds,
        level: usize,
        runs: Range<usize>,
        out: &mut [f32],
        columns: usize,
    ) {
        let parts = [(&mut self.negative, 0), (&mut self.positive, self.width)];
        products(parts, bounds, level, runs, out, columns);
    }

    /// Lower bounds likewise.
    pub(super) fn lower(&mut self, bounds: &Bounds, level: usize, runs: Range<usize>, columns: usize) -> Vec<f32> {
        let mut out = vec![0.0; runs.len() * columns];
        let parts = [(&mut self.positive, 0), (&mut self.negative, self.width)];
        products(parts, bounds, level, runs, &mut out, columns);
        out
    }
}

/// Sums of the products of parts of a query, each with the elements of the records from so many on.
fn products(
    parts: [(&mut RowQuery, usize); 2],
    bounds: &Bounds,
    level: usize,
    runs: Range<usize>,
    out: &mut [f32],
    columns: usize,
) {
    out.fill(0.0);
    // Of a record the minima come first, then as many maxima.
    let width = parts[1].1;
    for (part, first) in parts {
        part.add_pieces(bounds.records(level, runs.clone()), (2 * width, first), bounds.element(), out, columns);
    }
}

/// Upper bounds of the groups, summed over query heads: as for one vector, whose cost does not grow with their number.
pub(super) fn summed_upper(bounds: &Bounds, ask: &Ask<'_>, out: &mut [f32]) {
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
    out.fill(0.0);
    let records = bounds.records(0, ask.groups.clone());
    RowQuery::new(&weights, 1, 2 * width).add_pieces(records, (2 * width, 0), bounds.element(), out, 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::ScoreForm;
    use crate::summary::{KeyBounds, KeyGroup, KeyShape, KeySummary, SummaryKind};
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
            let mut state = seed | 1;
            let mut random = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 10_f32.powi(magnitude)
            };
            let shape = KeyShape { kv_heads, key_dim, group_tokens, dtype };
            let mut summary = KeyBounds { levels: 4 }.layer(0, shape).unwrap();
            let mut keys = Vec::new();
            let fill = |summary: &mut dyn KeySummary, keys: &mut Vec<Vec<f32>>, random: &mut dyn FnMut() -> f32| {
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
            let (form, forced) = (ScoreForm::Raw, [0..0, groups..groups]);
            let ask = Ask { query: &query, shape, scale: 1.0, form, groups: 0..groups, forced, count: groups };
            let (mut bounded, heads) = (BoundQuery::new(&ask), kv_heads * ratio);
            let mut summed = vec![0.0; groups];
            summed_upper(bounds, &ask, &mut summed);
            for (sum, upper) in summed.iter().zip(bounded.upper(bounds, 0, 0..groups, heads).chunks_exact(heads)) {
                let scale: f32 = upper.iter().map(|upper| upper.abs()).sum();
                prop_assert!((sum - upper.iter().sum::<f32>()).abs() <= 1e-4 * scale.max(1e-3), "{sum} {upper:?}");
            }
            for level in 0..4 {
                prop_assert_eq!(bounds.runs(level), groups >> level);
                let upper = bounded.upper(bounds, level, 0..groups >> level, heads);
                let lower = bounded.lower(bounds, level, 0..groups >> level, heads);
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
