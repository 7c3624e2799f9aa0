//! Scoring of many tokens for many query heads at once: one lane of a vector register per query head.

use crate::kernels::multiversion;

/// Query vectors, each with the KV heads whose keys it meets. Lanes are padded to 8 or a multiple of 16.
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
        self.count.next_multiple_of(if self.count > 8 { 16 } else { 8 })
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
            weighted_rows(row, &matrix[head * self.key_dim * rank..], &mut sums);
            for (j, sum) in sums.iter().enumerate() {
                out[j * padded + lane] += sum;
            }
        }
        out
    }
}

multiversion! {
    /// `sums[j] += sum_i weights[i] * matrix[i][j]`.
    fn weighted_rows(weights: &[f32], matrix: &[f32], sums: &mut [f32]) = add_weighted_rows;
}

#[inline(always)]
fn add_weighted_rows(weights: &[f32], matrix: &[f32], sums: &mut [f32]) {
    for (weight, row) in weights.iter().zip(matrix.chunks_exact(sums.len().max(1))) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += weight * x;
        }
    }
}

multiversion! {
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

multiversion! {
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

/// Look-up tables of 16-bit numbers, in steps of each lane's own: half of the bytes to read that [`look_up`] reads.
pub(crate) struct Whole {
    /// `[code_bytes, 256, lanes]`.
    tables: Vec<i16>,
    steps: Vec<f32>,
    code_bytes: usize,
}

impl Whole {
    /// From tables as [`look_up`] has them. What all tokens have alike is left out. A sum is wrong by half a step for each code
    /// byte at most, and all sums lie within 32511 steps of zero.
    pub(crate) fn new(tables: &[f32], code_bytes: usize, lanes: usize) -> Self {
        let mut whole = Self { tables: vec![0; tables.len()], steps: vec![0.0; lanes], code_bytes };
        let mut middles = vec![0.0; code_bytes * lanes];
        middles_of(tables, &mut middles, &mut whole.steps);
        in_steps(tables, &middles, &whole.steps, &mut whole.tables);
        whole
    }

    /// `out[token][lane] = sum_b tables[b][codes[token][b]][lane]`, less what is the same for all tokens.
    pub(crate) fn look_up(&self, codes: &[u8], out: &mut [f32]) {
        look_up_whole(codes, &self.tables, &self.steps, self.code_bytes, out);
    }
}

/// The most of a sum, in steps: with half a step for each of 256 code bytes it is a 16-bit number.
const STEPS: f32 = (i16::MAX - 256) as f32;

multiversion! {
    /// `[code_bytes, lanes]` middles of the tables' ranges, and the steps that the sums of ranges are [`STEPS`] of.
    fn middles_of(tables: &[f32], middles: &mut [f32], steps: &mut [f32]) = middles_of_lanes;
}

#[inline(always)]
fn middles_of_lanes(tables: &[f32], middles: &mut [f32], steps: &mut [f32]) {
    let lanes = steps.len();
    for (table, middles) in tables.chunks_exact(256 * lanes).zip(middles.chunks_exact_mut(lanes)) {
        for first in (0..lanes).step_by(8) {
            let (mut low, mut high) = ([f32::MAX; 8], [f32::MIN; 8]);
            for row in table.chunks_exact(lanes) {
                let Some(row) = row[first..].first_chunk::<8>() else { continue };
                for i in 0..8 {
                    low[i] = if row[i] < low[i] { row[i] } else { low[i] };
                    high[i] = if row[i] > high[i] { row[i] } else { high[i] };
                }
            }
            for i in 0..8 {
                // Halves first: their difference is finite.
                let middle = low[i] * 0.5 + high[i] * 0.5;
                middles[first + i] = middle;
                // A middle that was rounded is nearer to one end.
                let (up, down) = (high[i] - middle, middle - low[i]);
                steps[first + i] += (if up > down { up } else { down }) / STEPS;
            }
        }
    }
}

multiversion! {
    fn in_steps(tables: &[f32], middles: &[f32], steps: &[f32], whole: &mut [i16]) = in_steps_of_lanes;
}

#[inline(always)]
fn in_steps_of_lanes(tables: &[f32], middles: &[f32], steps: &[f32], whole: &mut [i16]) {
    let lanes = steps.len();
    let each = tables.chunks_exact(256 * lanes).zip(whole.chunks_exact_mut(256 * lanes));
    for ((table, whole), middles) in each.zip(middles.chunks_exact(lanes)) {
        for (row, whole) in table.chunks_exact(lanes).zip(whole.chunks_exact_mut(lanes)) {
            for first in (0..lanes).step_by(8) {
                let (Some(row), Some(whole)) = (row[first..].first_chunk::<8>(), whole[first..].first_chunk_mut::<8>())
                else {
                    continue;
                };
                for i in 0..8 {
                    let step = if steps[first + i] > f32::MIN_POSITIVE { steps[first + i] } else { f32::MIN_POSITIVE };
                    let steps = (row[i] - middles[first + i]) / step;
                    whole[i] = (steps + if steps < 0.0 { -0.5 } else { 0.5 }) as i32 as i16;
                }
            }
        }
    }
}

multiversion! {
    fn look_up_whole(codes: &[u8], tables: &[i16], steps: &[f32], code_bytes: usize, out: &mut [f32])
        = look_up_whole_any;
}

#[inline(always)]
fn look_up_whole_any(codes: &[u8], tables: &[i16], steps: &[f32], code_bytes: usize, out: &mut [f32]) {
    match steps.len() {
        8 => look_up_whole_by::<8>(codes, tables, steps, code_bytes, out),
        16 => look_up_whole_by::<16>(codes, tables, steps, code_bytes, out),
        lanes if lanes.is_multiple_of(32) => look_up_whole_by::<32>(codes, tables, steps, code_bytes, out),
        _ => look_up_whole_by::<16>(codes, tables, steps, code_bytes, out),
    }
}

/// `N` lanes at a time, which divides their number.
#[inline(always)]
fn look_up_whole_by<const N: usize>(codes: &[u8], tables: &[i16], steps: &[f32], code_bytes: usize, out: &mut [f32]) {
    let runs = (steps.len() / N).max(1);
    let tables = tables.as_chunks::<N>().0;
    for (at, steps) in steps.as_chunks::<N>().0.iter().enumerate() {
        let out = out.as_chunks_mut::<N>().0.chunks_exact_mut(runs);
        for (codes, out) in codes.chunks_exact(code_bytes).zip(out) {
            let mut sums = [0_i16; N];
            for (table, &code) in tables.chunks_exact(256 * runs).zip(codes) {
                let row = &table[usize::from(code) * runs + at];
                for i in 0..N {
                    sums[i] = sums[i].wrapping_add(row[i]);
                }
            }
            for i in 0..N {
                out[at][i] = f32::from(sums[i]) * steps[i];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ranges of a last bit, whose middle is one of their ends.
    #[test]
    fn neighbouring_numbers_stay_in_order() {
        for low in [1.0_f32, 1.000_000_2, -3.0, 1e-30] {
            let high = low.next_up();
            let tables: Vec<f32> = (0..256 * 8).map(|i| if i / 8 < 128 { low } else { high }).collect();
            let (whole, mut out) = (Whole::new(&tables, 1, 8), vec![0.0; 16]);
            whole.look_up(&[0, 255], &mut out);
            assert!((0..8).all(|lane| out[lane] < out[8 + lane]), "{low}: {out:?}");
        }
    }

    proptest! {
        #[test]
        fn whole_numbers_are_as_exact_as_they_say(
            (bytes, lanes) in (1_usize..6, prop::sample::select(vec![8_usize, 16, 32, 48, 64])),
            size in -12_i32..12, tokens in 0_usize..20, seed in any::<u64>(),
        ) {
            let mut state = seed | 1;
            let mut random = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            let size = 2.0_f32.powi(size);
            let sizes: Vec<f32> = (0..bytes * lanes).map(|_| size * random()).collect();
            let table = |i: usize| &sizes[i / (256 * lanes) * lanes..][i % lanes];
            let tables: Vec<f32> = (0..bytes * 256 * lanes).map(|i| table(i) * random()).collect();
            let codes: Vec<u8> = (0..tokens * bytes).map(|_| (random() * 127.0 + 128.0) as u8).collect();
            let (mut expected, mut found) = (vec![0.0; tokens * lanes], vec![7.0; tokens * lanes]);
            look_up(&codes, &tables, bytes, lanes, &mut expected);
            let whole = Whole::new(&tables, bytes, lanes);
            whole.look_up(&codes, &mut found);
            for lane in 0..lanes {
                let entries = |b: usize| tables[b * 256 * lanes..][..256 * lanes].iter().skip(lane).step_by(lanes);
                let ends = |b| entries(b).fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
                let middle: f32 = (0..bytes).map(|b| (ends(b).0 + ends(b).1) / 2.0).sum();
                let range: f32 = (0..bytes).map(|b| (ends(b).1 - ends(b).0) / 2.0).sum();
                for token in 0..tokens {
                    let (found, expected) = (found[token * lanes + lane], expected[token * lanes + lane] - middle);
                    let error = bytes as f32 / 2.0 * range / STEPS;
                    prop_assert!((found - expected).abs() <= 1.01 * error + 1e-5 * size, "{found} {expected}");
                }
            }
        }
    }
}
