//! [`HeadProducts`]: scores of clusters by one vector each, a centroid or the key of a medoid.
//!
//! Source: SWARM, section 6, and DynaKV, section 4.1. Neither paper says how query heads are combined. A softmax over
//! the clusters per query head, then the sum over query heads, finds more than the sum of raw scores.

use crate::kernels::RowQuery;
use crate::retrieval::byte_rows::ByteRows;
use crate::retrieval::entry_selector::EntryRequest;
use crate::retrieval::scaled_rows::ScaledRows;
use crate::retrieval::sealed_keys::HalfRows;
use crate::retrieval::selector::aggregate;
use stratakv_format::DType;

/// The vectors by which clusters are found, as they are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RepresentativeRows<'a> {
    /// In 16 bits per element.
    Halves(&'a ScaledRows),
    /// In 8 bits per element.
    Bytes(&'a ByteRows),
    /// Keys of waiting tokens.
    Waiting(&'a HalfRows<'a>),
}

impl RepresentativeRows<'_> {
    /// Returns the number of vectors.
    fn len(&self) -> usize {
        match self {
            Self::Halves(rows) => rows.len(),
            Self::Bytes(rows) => rows.len(),
            Self::Waiting(rows) => rows.len(),
        }
    }

    /// Writes the products of all vectors with a query, `[vectors, lanes]`.
    fn products(&self, query: &mut RowQuery, record: usize, units: &mut [f32], lanes: usize) {
        match self {
            Self::Halves(rows) => query.put(rows.halves(), (record, 0), DType::F16, units, lanes),
            Self::Bytes(rows) => query.put_bytes(rows.elements(), (record, 0), units, lanes),
            Self::Waiting(rows) => {
                let mut rest = units;
                for halves in rows.slices() {
                    let own;
                    (own, rest) = rest.split_at_mut(halves.len() / size_of::<u16>() / record * lanes);
                    query.put_half_bytes(halves, (record, 0), own, lanes);
                }
                return;
            }
        }
        multiply_rows(units, lanes, |at| match self {
            Self::Halves(rows) => rows.factor(at),
            Self::Bytes(rows) => rows.factor(at),
            Self::Waiting(_) => 1.0,
        });
    }
}

/// Multiplies each row of `units` `[rows, lanes]` by its factor.
fn multiply_rows(units: &mut [f32], lanes: usize, factor: impl Fn(usize) -> f32) {
    fn by<const N: usize>(units: &mut [f32], factor: impl Fn(usize) -> f32) {
        for (at, unit) in units.as_chunks_mut::<N>().0.iter_mut().enumerate() {
            let factor = factor(at);
            unit.iter_mut().for_each(|product| *product *= factor);
        }
    }
    match lanes {
        4 => by::<4>(units, factor),
        8 => by::<8>(units, factor),
        _ => units.chunks_exact_mut(lanes).enumerate().for_each(|(at, unit)| {
            let factor = factor(at);
            unit.iter_mut().for_each(|product| *product *= factor);
        }),
    }
}

/// The products of representatives with the query heads of a request.
pub(crate) struct HeadProducts {
    /// `[rows, lanes]`, of which the first `heads` lanes count.
    units: Vec<f32>,
    heads: usize,
    lanes: usize,
}

impl HeadProducts {
    /// Returns `q . k` of each row and query head. A row is a vector of KV head `head`, or of all heads.
    pub(crate) fn new(rows: RepresentativeRows<'_>, head: Option<usize>, ask: &EntryRequest<'_>) -> Self {
        Self::of_all(&[rows], head, ask)
    }

    /// Returns the products of several lists of rows, one behind the other.
    pub(crate) fn of_all(lists: &[RepresentativeRows<'_>], head: Option<usize>, ask: &EntryRequest<'_>) -> Self {
        let (dim, kv_heads) = (ask.shape.key_dim, ask.shape.kv_heads);
        let own = ask.query.len() / kv_heads;
        let (query, heads) = match head {
            Some(head) => (&ask.query[head * own..][..own], 1),
            None => (ask.query, kv_heads),
        };
        let count = query.len() / dim;
        let lanes = match count {
            1 | 2 | 4 => count,
            0..=8 => 8,
            _ => count.next_multiple_of(16),
        };
        let mut units = vec![0.0; lists.iter().map(RepresentativeRows::len).sum::<usize>() * lanes];
        let (mut query, mut rest) = (RowQuery::new(query, heads, dim), units.as_mut_slice());
        for rows in lists {
            let own;
            (own, rest) = rest.split_at_mut(rows.len() * lanes);
            rows.products(&mut query, heads * dim, own, lanes);
        }
        Self { units, heads: count, lanes }
    }

    /// Returns the aggregated score of each vector. Vectors that `counts` excludes get negative infinity and take no
    /// part in a softmax.
    pub(crate) fn scores(mut self, ask: &EntryRequest<'_>, counts: impl Fn(usize) -> bool) -> Vec<f32> {
        let excluded: Vec<u32> =
            (0..self.units.len() / self.lanes).filter(|at| !counts(*at)).map(|at| at as u32).collect();
        for at in &excluded {
            self.units[*at as usize * self.lanes..][..self.lanes].fill(f32::MIN);
        }
        let mut scores = vec![0.0; self.units.len() / self.lanes];
        aggregate(&mut self.units, (self.heads, self.lanes), 1, ask.aggregation, ask.scale, &mut scores);
        excluded.iter().for_each(|at| scores[*at as usize] = f32::NEG_INFINITY);
        scores.iter_mut().filter(|score| score.is_nan()).for_each(|score| *score = f32::NEG_INFINITY);
        scores
    }

    /// Returns these products, followed by those with more vectors of the same kind.
    pub(crate) fn followed_by(mut self, mut others: Self) -> Self {
        self.units.append(&mut others.units);
        self
    }

    /// Returns the products of each query head with these vectors, then with the vectors of `others`: `[heads,
    /// vectors]`.
    pub(crate) fn rows_with(&self, others: &Self) -> Vec<f32> {
        let units = || self.units.chunks_exact(self.lanes).chain(others.units.chunks_exact(others.lanes));
        (0..self.heads).flat_map(|head| units().map(move |unit| unit[head])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::{HeadAggregation, KeyShape};

    #[test]
    fn query_heads_are_scored_by_a_softmax_each_and_summed() {
        let shape = KeyShape { kv_heads: 2, key_dim: 2, group_tokens: 4, dtype: DType::F32 };
        // Two query heads per KV head.
        let query = [1.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 1.0];
        let ask = EntryRequest {
            query: &query,
            shape,
            scale: 1.0,
            aggregation: HeadAggregation::Softmax,
            tokens: 0..8,
            budget: 4,
        };
        let rows = |dim: usize, elements: &[f32]| {
            let mut rows = ScaledRows::new(dim);
            elements.chunks(dim).for_each(|row| rows.push(row));
            rows
        };
        let vectors = [rows(2, &[1.0, 0.0]), rows(2, &[0.0, 1.0, 9.0, 9.0])];
        let scores = HeadProducts::of_all(&vectors.each_ref().map(RepresentativeRows::Halves), Some(0), &ask)
            .scores(&ask, |at| at != 2);
        let weight = |x: f32, y: f32| x.exp() / (x.exp() + y.exp());
        assert!((scores[0] - (weight(1.0, 0.0) + weight(0.0, 2.0))).abs() < 1e-4, "{scores:?}");
        assert!((scores[1] - (weight(0.0, 1.0) + weight(2.0, 0.0))).abs() < 1e-4, "{scores:?}");
        assert_eq!(scores[2], f32::NEG_INFINITY);
        let joint = rows(4, &[1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]);
        let raw = EntryRequest { aggregation: HeadAggregation::Sum, ..ask };
        let raw = HeadProducts::new(RepresentativeRows::Halves(&joint), None, &raw).scores(&raw, |_| true);
        assert_eq!(raw, [4.0, 3.0]);
    }
}
