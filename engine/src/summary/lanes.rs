//! Scoring of many tokens for many query heads at once: one lane of a vector register per query head.

use crate::simd::widest;

/// Query vectors, each with the KV heads whose keys it meets. Lanes are padded to a multiple of 8.
pub(crate) struct Lanes {
    /// Lane, KV head, `[key_dim]`.
    rows: Vec<(usize, usize, Vec<f32>)>,
    count: usize,
    key_dim: usize,
}

impl Lanes {
    /// A lane per query head. `query` is `[q_heads, key_dim]`, `q_heads` a multiple of `kv_heads`.
    pub(crate) fn heads(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
        let count = query.len() / key_dim;
        let ratio = count / kv_heads;
        let rows = query.chunks_exact(key_dim).enumerate().map(|(h, row)| (h, h / ratio, row.to_vec()));
        Self { rows: rows.collect(), count, key_dim }
    }

    /// A lane per KV head: the sum over its query heads. What is linear in the query needs no more for a raw sum.
    pub(crate) fn sums(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
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

    /// One lane for the sum over all query heads, for summaries that take all KV heads together.
    pub(crate) fn joint(query: &[f32], kv_heads: usize, key_dim: usize) -> Self {
        let mut lanes = Self::sums(query, kv_heads, key_dim);
        lanes.rows.iter_mut().for_each(|row| row.0 = 0);
        Self { count: 1, ..lanes }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn padded(&self) -> usize {
        self.count.next_multiple_of(8)
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, usize, &[f32])> {
        self.rows.iter().map(|(lane, head, row)| (*lane, *head, row.as_slice()))
    }

    /// The queries times `matrix` `[kv_heads * key_dim, rank]`: `[rank, padded]`.
    pub(crate) fn project(&self, matrix: &[f32], rank: usize) -> Vec<f32> {
        let mut out = vec![0.0; rank * self.padded()];
        let padded = self.padded();
        let mut sums = vec![0.0; rank];
        for (lane, head, row) in self.rows() {
            sums.fill(0.0);
            for (i, q) in row.iter().enumerate() {
                let weights = &matrix[(head * self.key_dim + i) * rank..][..rank];
                sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum += q * w);
            }
            for (j, sum) in sums.iter().enumerate() {
                out[j * padded + lane] += sum;
            }
        }
        out
    }
}

widest! {
    /// `out[token][lane] = sum_j keys[token][j] * weights[j][lane]`: keys `[tokens, rank]`, weights `[rank, lanes]`, out
    /// `[tokens, lanes]`, lanes a multiple of 8.
    pub(crate) fn multiply(keys: &[f32], weights: &[f32], rank: usize, lanes: usize, out: &mut [f32]) = multiply_inner;
}

#[inline(always)]
fn multiply_inner(keys: &[f32], weights: &[f32], rank: usize, lanes: usize, out: &mut [f32]) {
    for (keys, out) in keys.chunks(rank * 4).zip(out.chunks_mut(lanes * 4)) {
        let tokens = keys.len() / rank;
        for first in (0..lanes).step_by(8) {
            let mut sums = [[0.0_f32; 8]; 4];
            for j in 0..rank {
                let Some(weights) = weights[j * lanes + first..].first_chunk::<8>() else { continue };
                for (token, sums) in sums.iter_mut().enumerate().take(tokens) {
                    let key = keys[token * rank + j];
                    for i in 0..8 {
                        sums[i] += key * weights[i];
                    }
                }
            }
            for (token, sums) in sums.iter().enumerate().take(tokens) {
                out[token * lanes + first..][..8].copy_from_slice(sums);
            }
        }
    }
}

widest! {
    /// Table look-ups: `out[token][lane] = sum_b tables[b][codes[token][b]][lane]`; codes `[tokens, code_bytes]`, tables
    /// `[code_bytes, 256, lanes]`.
    pub(crate) fn look_up(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) = look_up_any;
}

#[inline(always)]
fn look_up_any(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) {
    match lanes {
        1 => look_up_inner::<1>(codes, tables, code_bytes, out),
        4 => look_up_inner::<4>(codes, tables, code_bytes, out),
        8 => look_up_inner::<8>(codes, tables, code_bytes, out),
        16 => look_up_inner::<16>(codes, tables, code_bytes, out),
        32 => look_up_inner::<32>(codes, tables, code_bytes, out),
        _ => look_up_wide(codes, tables, code_bytes, lanes, out),
    }
}

#[inline(always)]
fn look_up_inner<const LANES: usize>(codes: &[u8], tables: &[f32], code_bytes: usize, out: &mut [f32]) {
    let tables = tables.as_chunks::<LANES>().0.as_chunks::<256>().0;
    for (codes, out) in codes.chunks_exact(code_bytes).zip(out.as_chunks_mut::<LANES>().0) {
        let mut sums = [0.0_f32; LANES];
        for (table, &code) in tables.iter().zip(codes) {
            let row = &table[usize::from(code)];
            for i in 0..LANES {
                sums[i] += row[i];
            }
        }
        *out = sums;
    }
}

#[inline(always)]
fn look_up_wide(codes: &[u8], tables: &[f32], code_bytes: usize, lanes: usize, out: &mut [f32]) {
    for (codes, out) in codes.chunks_exact(code_bytes).zip(out.chunks_exact_mut(lanes)) {
        out.fill(0.0);
        for (b, &code) in codes.iter().enumerate() {
            let row = &tables[(b * 256 + usize::from(code)) * lanes..][..lanes];
            out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
}
