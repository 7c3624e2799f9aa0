//! Dense causal attention of prefill: tiles of query rows against tiles of keys with a running softmax.
//!
//! The query rows of one KV head (all its query heads, token after token) lie in the lanes of a panel, so that maximum, exponential and sum of
//! the softmax need no sums across lanes and one tile of keys and values serves every query head of the group.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::simd::{PANEL_VECTORS, accumulate_block, dot_block, exp2};

/// Keys per tile: keys, values and scores of a tile stay in the first two cache levels.
const KEY_TILE: usize = 64;
/// Query rows (tokens times query heads of a KV head) that share a tile of keys.
const ROW_TILE: usize = 192;
/// Start value of the running maximum: low enough for every score, finite, so that a tile without a valid key leaves weights of 0 and not NaN.
const LOWEST: f32 = -1.0e30;

/// Shape of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// Tokens a query may look back to, itself included; `None`: all.
    pub(crate) window: Option<usize>,
}

impl Shape {
    fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }
}

/// Attention of the query tokens `first..first + n` over the keys of all tokens up to each of them.
///
/// `queries` and `out` are `[n, query_heads, head_dim]`, `keys` and `values` `[tokens, kv_heads, head_dim]` with `tokens >= first + n`.
pub(crate) fn causal(shape: Shape, first: usize, queries: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) {
    let row = shape.query_heads * shape.head_dim;
    let tile = (ROW_TILE / shape.group()).max(1);
    let arch = pulp::Arch::new();
    out.par_chunks_mut(tile * row).zip(queries.par_chunks(tile * row)).enumerate().for_each(|(i, (out, queries))| {
        for head in 0..shape.kv_heads {
            arch.dispatch(Tile { shape, head, first: first + i * tile, queries, keys, values, out: &mut *out });
        }
    });
}

/// One tile of query tokens and one KV head.
struct Tile<'a> {
    shape: Shape,
    head: usize,
    /// Position of the tile's first query token.
    first: usize,
    queries: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 { self.run::<S, 8>(simd) } else { self.run::<S, 4>(simd) }
    }
}

impl Tile<'_> {
    /// `B`: keys (or value columns) per register block.
    #[inline(always)]
    fn run<S: Simd, const B: usize>(self, simd: S) {
        let Shape { head_dim, scale, window, .. } = self.shape;
        let group = self.shape.group();
        let tokens = self.queries.len() / (self.shape.query_heads * head_dim);
        let rows = tokens * group;
        let panel_rows = PANEL_VECTORS * S::F32_LANES;
        let panels = rows.div_ceil(panel_rows);
        let zero = simd.splat_f32s(0.0);

        let packed = self.pack_queries(panels, panel_rows, scale * std::f32::consts::LOG2_E);
        let (packed, _) = S::as_simd_f32s(&packed);
        let mut sums = vec![zero; panels * PANEL_VECTORS];
        let mut maxima = vec![simd.splat_f32s(LOWEST); panels * PANEL_VECTORS];
        let mut acc = vec![zero; panels * head_dim * PANEL_VECTORS];
        let mut scores = [zero; KEY_TILE * PANEL_VECTORS];
        let mut tile_keys = vec![0.0f32; KEY_TILE * head_dim];
        let mut tile_values = vec![0.0f32; KEY_TILE * head_dim];

        let end = self.first + tokens;
        let oldest = window.map_or(0, |w| (self.first + 1).saturating_sub(w));
        let mut start = oldest;
        while start < end {
            let count = KEY_TILE.min(end - start);
            self.gather(self.keys, start, &mut tile_keys[..count * head_dim]);
            self.gather(self.values, start, &mut tile_values[..count * head_dim]);
            for p in 0..panels {
                let panel_first = p * panel_rows;
                // Every row of this panel is older than every key of the tile.
                if self.first + (panel_first + panel_rows - 1) / group < start {
                    continue;
                }
                let scores = &mut scores[..count * PANEL_VECTORS];
                let panel = &packed[p * head_dim * PANEL_VECTORS..(p + 1) * head_dim * PANEL_VECTORS];
                let mut k = 0;
                while k + B <= count {
                    dot_block::<S, B>(
                        simd,
                        &tile_keys[k * head_dim..],
                        head_dim,
                        panel,
                        &mut scores[k * PANEL_VECTORS..],
                    );
                    k += B;
                }
                while k < count {
                    dot_block::<S, 1>(
                        simd,
                        &tile_keys[k * head_dim..],
                        head_dim,
                        panel,
                        &mut scores[k * PANEL_VECTORS..],
                    );
                    k += 1;
                }
                self.mask::<S>(simd, start, panel_first, panel_rows, scores);
                let v = p * PANEL_VECTORS..(p + 1) * PANEL_VECTORS;
                let acc = &mut acc[p * head_dim * PANEL_VECTORS..(p + 1) * head_dim * PANEL_VECTORS];
                soften(simd, scores, &mut maxima[v.clone()], &mut sums[v], acc);
                let mut c = 0;
                while c + B <= head_dim {
                    accumulate_block::<S, B>(simd, &tile_values, head_dim, c, scores, &mut acc[c * PANEL_VECTORS..]);
                    c += B;
                }
                while c < head_dim {
                    accumulate_block::<S, 1>(simd, &tile_values, head_dim, c, scores, &mut acc[c * PANEL_VECTORS..]);
                    c += 1;
                }
            }
            start += count;
        }
        self.unpack::<S>(panels, panel_rows, &acc, &sums);
    }

    /// Queries of this KV head as `[panel][head_dim][row]`, multiplied by `factor`; rows beyond the last token are zero.
    #[inline(always)]
    fn pack_queries(&self, panels: usize, panel_rows: usize, factor: f32) -> Vec<f32> {
        let Shape { head_dim, query_heads, .. } = self.shape;
        let group = self.shape.group();
        let mut packed = vec![0.0f32; panels * head_dim * panel_rows];
        for (t, token) in self.queries.chunks_exact(query_heads * head_dim).enumerate() {
            for g in 0..group {
                let row = t * group + g;
                let base = (row / panel_rows) * head_dim * panel_rows + row % panel_rows;
                let query = &token[(self.head * group + g) * head_dim..][..head_dim];
                for (d, &x) in query.iter().enumerate() {
                    packed[base + d * panel_rows] = x * factor;
                }
            }
        }
        packed
    }

    /// Rows of this KV head from `start` on, side by side.
    #[inline(always)]
    fn gather(&self, source: &[f32], start: usize, tile: &mut [f32]) {
        let Shape { head_dim, kv_heads, .. } = self.shape;
        let rows = source[start * kv_heads * head_dim..].chunks_exact(kv_heads * head_dim);
        for (to, from) in tile.chunks_exact_mut(head_dim).zip(rows) {
            to.copy_from_slice(&from[self.head * head_dim..][..head_dim]);
        }
    }

    /// Minus infinity where a row must not see a key: the key is newer, or fell out of the row's window.
    #[inline(always)]
    fn mask<S: Simd>(&self, simd: S, start: usize, panel_first: usize, panel_rows: usize, scores: &mut [S::f32s]) {
        let group = self.shape.group();
        let count = scores.len() / PANEL_VECTORS;
        let oldest_row = self.first + panel_first / group;
        let newest_row = self.first + (panel_first + panel_rows - 1) / group;
        let needs_causal = start + count > oldest_row + 1;
        let needs_window = self.shape.window.is_some_and(|w| start + w <= newest_row);
        if !needs_causal && !needs_window {
            return;
        }
        let hidden = simd.splat_f32s(f32::NEG_INFINITY);
        for (k, vectors) in scores.chunks_exact_mut(PANEL_VECTORS).enumerate() {
            let key = start + k;
            // Rows are ordered by token: those below `visible.start` are older than the key, those from `visible.end` on are past the window.
            let low = key.saturating_sub(self.first) * group;
            let high = match self.shape.window {
                Some(w) => (key + w).saturating_sub(self.first) * group,
                None => usize::MAX,
            };
            for (i, vector) in vectors.iter_mut().enumerate() {
                let row = panel_first + i * S::F32_LANES;
                if row + S::F32_LANES <= low || row >= high {
                    *vector = hidden;
                } else if row < low || row + S::F32_LANES > high {
                    for (j, lane) in pulp::bytemuck::cast_slice_mut::<S::f32s, f32>(std::slice::from_mut(vector))
                        .iter_mut()
                        .enumerate()
                    {
                        if row + j < low || row + j >= high {
                            *lane = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }

    /// Divides by the softmax sums and writes the rows to their places in `[tokens, query_heads, head_dim]`.
    #[inline(always)]
    fn unpack<S: Simd>(self, panels: usize, panel_rows: usize, acc: &[S::f32s], sums: &[S::f32s]) {
        let Shape { head_dim, query_heads, .. } = self.shape;
        let group = self.shape.group();
        let acc: &[f32] = pulp::bytemuck::cast_slice(acc);
        let sums: &[f32] = pulp::bytemuck::cast_slice(sums);
        debug_assert_eq!(sums.len(), panels * panel_rows);
        for (t, token) in self.out.chunks_exact_mut(query_heads * head_dim).enumerate() {
            for g in 0..group {
                let row = t * group + g;
                let base = (row / panel_rows) * head_dim * panel_rows + row % panel_rows;
                let inverse = 1.0 / sums[row];
                let out = &mut token[(self.head * group + g) * head_dim..][..head_dim];
                for (d, o) in out.iter_mut().enumerate() {
                    *o = acc[base + d * panel_rows] * inverse;
                }
            }
        }
    }
}

/// One step of the running softmax over a tile: scores become weights, sums and accumulators are rescaled to the new maximum.
#[inline(always)]
fn soften<S: Simd>(simd: S, scores: &mut [S::f32s], maxima: &mut [S::f32s], sums: &mut [S::f32s], acc: &mut [S::f32s]) {
    let mut new = [maxima[0], maxima[1], maxima[2]];
    for s in scores.chunks_exact(PANEL_VECTORS) {
        for i in 0..PANEL_VECTORS {
            new[i] = simd.max_f32s(new[i], s[i]);
        }
    }
    let mut factor = [simd.splat_f32s(0.0); PANEL_VECTORS];
    let mut sum = [simd.splat_f32s(0.0); PANEL_VECTORS];
    for i in 0..PANEL_VECTORS {
        factor[i] = exp2(simd, simd.sub_f32s(maxima[i], new[i]));
        sum[i] = simd.mul_f32s(sums[i], factor[i]);
        maxima[i] = new[i];
    }
    for s in scores.chunks_exact_mut(PANEL_VECTORS) {
        for i in 0..PANEL_VECTORS {
            s[i] = exp2(simd, simd.sub_f32s(s[i], new[i]));
            sum[i] = simd.add_f32s(sum[i], s[i]);
        }
    }
    sums.copy_from_slice(&sum);
    for a in acc.chunks_exact_mut(PANEL_VECTORS) {
        for i in 0..PANEL_VECTORS {
            a[i] = simd.mul_f32s(a[i], factor[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, in f64: one row, one head at a time.
    fn naive(shape: Shape, first: usize, queries: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
        let (d, heads) = (shape.head_dim, shape.query_heads);
        let n = queries.len() / (heads * d);
        let mut out = vec![0.0f32; queries.len()];
        for t in 0..n {
            let position = first + t;
            let oldest = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
            for h in 0..heads {
                let kv = h / shape.group();
                let q = &queries[(t * heads + h) * d..][..d];
                let row = |x: usize| (x * shape.kv_heads + kv) * d;
                let score = |x: usize| {
                    (0..d).map(|i| f64::from(q[i]) * f64::from(keys[row(x) + i])).sum::<f64>() * f64::from(shape.scale)
                };
                let scores: Vec<f64> = (oldest..=position).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let v: f64 =
                        weights.iter().enumerate().map(|(j, w)| w * f64::from(values[row(oldest + j) + i])).sum();
                    out[(t * heads + h) * d + i] = (v / sum) as f32;
                }
            }
        }
        out
    }

    /// A fixed sequence in -1..1.
    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed.wrapping_mul(2_654_435_761) | 1;
        (0..n)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 17;
                x ^= x << 5;
                (f64::from(x) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
            })
            .collect()
    }

    #[test]
    fn tiles_equal_the_definition() {
        for (query_heads, kv_heads, head_dim, tokens, first, window, spread) in [
            (8, 2, 64, 300, 0, None, 1.0),
            (8, 2, 64, 130, 70, None, 8.0),
            (4, 4, 16, 100, 0, Some(7), 1.0),
            (14, 2, 20, 90, 33, Some(50), 4.0),
            (3, 1, 5, 1, 0, None, 1.0),
            (2, 1, 128, 257, 64, Some(1), 1.0),
            (32, 1, 8, 77, 0, Some(64), 30.0),
        ] {
            let scale = spread / (head_dim as f32).sqrt();
            let shape = Shape { query_heads, kv_heads, head_dim, scale, window };
            let total = first + tokens;
            let q = noise(tokens * query_heads * head_dim, 1);
            let k = noise(total * kv_heads * head_dim, 2);
            let v = noise(total * kv_heads * head_dim, 3);
            let mut out = vec![f32::NAN; q.len()];
            causal(shape, first, &q, &k, &v, &mut out);
            for (i, (a, b)) in out.iter().zip(naive(shape, first, &q, &k, &v)).enumerate() {
                assert!((a - b).abs() < 1e-5, "{shape:?} first {first} element {i}: {a} against {b}");
            }
        }
    }
}
