//! Scores of clusters by one vector each: a centroid or the key of a medoid.
//!
//! Source: SWARM, section 6, and DynaKV, section 4.1. Neither paper says how query heads are combined. A softmax over
//! the clusters per query head, then the sum over query heads, finds more than the sum of raw scores.

use crate::kernels::multiply_by_lanes;
use crate::retrieval::entry_selector::EntryRequest;
use crate::retrieval::query_batch::QueryBatch;
use crate::retrieval::selector::aggregate;

/// The vectors of the clusters of one list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Representatives<'a> {
    /// `[clusters, key_dim]` of one KV head, or `[clusters, kv_heads * key_dim]`.
    pub(crate) vectors: &'a [f32],
    /// The KV head; none for clusters of all heads.
    pub(crate) head: Option<usize>,
}

/// The products of vectors with the query heads of a request.
pub(crate) struct HeadProducts {
    /// `[vectors, lanes]`, of which the first `heads` lanes count.
    units: Vec<f32>,
    heads: usize,
    lanes: usize,
}

impl HeadProducts {
    /// Returns the aggregated score of each vector. Vectors that `counts` excludes get negative infinity and take no
    /// part in a softmax.
    pub(crate) fn scores(mut self, ask: &EntryRequest<'_>, counts: impl Fn(usize) -> bool) -> Vec<f32> {
        for (at, unit) in self.units.chunks_exact_mut(self.lanes).enumerate() {
            if !counts(at) {
                unit.fill(f32::MIN);
            }
        }
        let mut scores = vec![0.0; self.units.len() / self.lanes];
        aggregate(&mut self.units, (self.heads, self.lanes), 1, ask.aggregation, ask.scale, &mut scores);
        for (at, score) in scores.iter_mut().enumerate() {
            if !counts(at) || score.is_nan() {
                *score = f32::NEG_INFINITY;
            }
        }
        scores
    }

    /// Returns these products, followed by those with more vectors of the same kind.
    pub(crate) fn followed_by(mut self, mut others: Self) -> Self {
        self.units.append(&mut others.units);
        self
    }

    /// Returns the products of each query head with these vectors, then with those of `others`: `[heads, vectors]`.
    pub(crate) fn rows_with(&self, others: &Self) -> Vec<f32> {
        let units = || self.units.chunks_exact(self.lanes).chain(others.units.chunks_exact(others.lanes));
        (0..self.heads).flat_map(|head| units().map(move |unit| unit[head])).collect()
    }
}

impl Representatives<'_> {
    /// Returns `q . k` of each vector and query head.
    pub(crate) fn products(&self, ask: &EntryRequest<'_>) -> HeadProducts {
        let (dim, kv_heads) = (ask.shape.key_dim, ask.shape.kv_heads);
        let width = if self.head.is_some() { dim } else { dim * kv_heads };
        let q_heads = ask.query.len() / dim;
        let per_head = q_heads / kv_heads;
        let query = match self.head {
            Some(head) => &ask.query[head * per_head * dim..][..per_head * dim],
            None => ask.query,
        };
        let batch = match self.head {
            Some(_) => QueryBatch::query_heads(query, 1, dim),
            None => QueryBatch::query_heads(query, kv_heads, dim),
        };
        let lanes = batch.padded();
        let mut weights = vec![0.0; width * lanes];
        for (lane, head, row) in batch.rows() {
            for (at, q) in row.iter().enumerate() {
                weights[(head * dim + at) * lanes + lane] = *q;
            }
        }
        let mut units = vec![0.0; self.vectors.len() / width.max(1) * lanes];
        multiply_by_lanes(self.vectors, &weights, width, lanes, &mut units);
        HeadProducts { units, heads: batch.count(), lanes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::{HeadAggregation, KeyShape};
    use stratakv_format::DType;

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
        let vectors = [1.0, 0.0, 0.0, 1.0, 9.0, 9.0];
        let scores = Representatives { vectors: &vectors, head: Some(0) }.products(&ask).scores(&ask, |at| at != 2);
        let weight = |x: f32, y: f32| x.exp() / (x.exp() + y.exp());
        assert!((scores[0] - (weight(1.0, 0.0) + weight(0.0, 2.0))).abs() < 1e-4, "{scores:?}");
        assert!((scores[1] - (weight(0.0, 1.0) + weight(2.0, 0.0))).abs() < 1e-4, "{scores:?}");
        assert_eq!(scores[2], f32::NEG_INFINITY);
        let joint = Representatives { vectors: &[1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0], head: None };
        let raw = EntryRequest { aggregation: HeadAggregation::Sum, ..ask };
        let raw = joint.products(&raw).scores(&raw, |_| true);
        assert_eq!(raw, [4.0, 3.0]);
    }
}
