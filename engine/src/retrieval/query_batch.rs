//! [`QueryBatch`]: the query vectors of a step, one lane of a vector register each.

use crate::kernels::add_weighted_rows;

/// Query vectors, each with the KV head whose keys it meets. Lanes are padded to 8 or a multiple of 16.
pub(crate) struct QueryBatch {
    /// The lane, the KV head and the vector `[key_dim]`. Several vectors may share a lane.
    rows: Vec<(usize, usize, Vec<f32>)>,
    /// Lanes without padding.
    count: usize,
    key_dim: usize,
}

impl QueryBatch {
    /// Returns a lane per query head. `query` is `[q_heads, key_dim]`, with `q_heads` a multiple of `kv_heads`.
    pub(crate) fn query_heads(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
        let count = query.len() / key_dim;
        let ratio = count / kv_heads;
        let rows = query.chunks_exact(key_dim).enumerate().map(|(h, row)| (h, h / ratio, row.to_vec()));
        Self { rows: rows.collect(), count, key_dim }
    }

    /// Returns a lane per KV head: the sum of its query heads. Scores that are linear in the query need no more for
    /// their sum over heads.
    pub(crate) fn kv_heads(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
        let per_head = query.len() / kv_heads;
        let mut rows = Vec::with_capacity(kv_heads);
        for (head, queries) in query.chunks_exact(per_head).enumerate() {
            let mut sum = vec![0.0; key_dim];
            for row in queries.chunks_exact(key_dim) {
                sum.iter_mut().zip(row).for_each(|(sum, q)| *sum += q);
            }
            rows.push((head, head, sum));
        }
        Self { rows, count: kv_heads, key_dim }
    }

    /// Returns one lane for the sum of all query heads.
    pub(crate) fn joint(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
        let mut batch = Self::kv_heads(query, kv_heads, key_dim);
        batch.rows.iter_mut().for_each(|row| row.0 = 0);
        Self { count: 1, ..batch }
    }

    /// Returns the number of lanes.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of lanes with padding.
    pub(crate) fn padded(&self) -> usize {
        self.count.next_multiple_of(if self.count > 8 { 16 } else { 8 })
    }

    /// Returns the vectors with their lanes and KV heads.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, usize, &[f32])> {
        self.rows.iter().map(|(lane, head, row)| (*lane, *head, row.as_slice()))
    }

    /// Returns the queries times `matrix` `[kv_heads * key_dim, rank]`, as `[rank, padded]`.
    pub(crate) fn project(&self, matrix: &[f32], rank: usize) -> Vec<f32> {
        let mut out = vec![0.0; rank * self.padded()];
        let padded = self.padded();
        let mut sums = vec![0.0; rank];
        for (lane, head, row) in self.rows() {
            sums.fill(0.0);
            add_weighted_rows(row, &matrix[head * self.key_dim * rank..], &mut sums);
            for (j, sum) in sums.iter().enumerate() {
                out[j * padded + lane] += sum;
            }
        }
        out
    }
}
