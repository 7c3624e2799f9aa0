//! Dense causal attention of prefill: tiles of query rows against tiles of keys, with a running softmax.
//!
//! A *row* is one token's query of one query head. The rows of a KV head are all its query heads, token after token.
//! They fill the lanes of *panels*, one row per lane. The softmax therefore never adds across lanes, and one tile of
//! keys and values serves every query head of the KV head. For each tile of rows and each KV head:
//!
//! 1. Rows are packed into panels and multiplied by the scale and by log2(e). The softmax then uses powers of two.
//! 2. For each tile of keys, panels are multiplied with the keys and masked by causality and by the sliding window.
//! 3. The running softmax turns scores into weights, and rescales sums and accumulators to the new maximum.
//! 4. Values are added up by weight.
//! 5. After the last tile, accumulators are divided by the sums and unpacked.

use anyhow::Result;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::prompt_rows::PromptPlane;
use crate::simd::{PANEL_VECTORS, accumulate_block, dot_block, exp2};

/// Keys per tile. The keys, values and scores of a tile fit into the first two cache levels.
const KEY_TILE: usize = 64;
/// Rows that share a tile of keys.
const ROW_TILE: usize = 192;
/// The start value of the running maximum. It is below every score. It is finite, so that a tile without a visible
/// key gives weights of 0 and not NaN.
const LOWEST: f32 = -1.0e30;

/// The shape of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    /// How many of the newest tokens a query sees, its own included. `None` means all tokens.
    pub(crate) window: Option<usize>,
}

impl Shape {
    fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }
}

/// Attends from each of the tokens `first..first + n` to all tokens up to it.
///
/// `queries` and `out` are `[n, query_heads, head_dim]`. `keys` and `values` hold at least `first + n` tokens.
///
/// # Errors
/// Fails if keys or values cannot be read.
pub(crate) fn causal(
    shape: Shape,
    first: usize,
    queries: &[f32],
    (keys, values): (&PromptPlane, &PromptPlane),
    out: &mut [f32],
) -> Result<()> {
    let row = shape.query_heads * shape.head_dim;
    let tile = (ROW_TILE / shape.group()).max(1);
    let arch = pulp::Arch::new();
    out.par_chunks_mut(tile * row).zip(queries.par_chunks(tile * row)).enumerate().try_for_each(
        |(i, (out, queries))| {
            (0..shape.kv_heads).try_for_each(|head| {
                arch.dispatch(Tile { shape, head, first: first + i * tile, queries, keys, values, out: &mut *out })
            })
        },
    )
}

/// One tile of query tokens and one KV head.
struct Tile<'a> {
    shape: Shape,
    head: usize,
    /// The position of the tile's first token.
    first: usize,
    queries: &'a [f32],
    keys: &'a PromptPlane,
    values: &'a PromptPlane,
    out: &'a mut [f32],
}

impl WithSimd for Tile<'_> {
    type Output = Result<()>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Result<()> {
        if S::REGISTER_COUNT >= 32 { self.run::<S, 8>(simd) } else { self.run::<S, 4>(simd) }
    }
}

impl Tile<'_> {
    /// Computes the tile. `B` is the number of keys, or of value columns, per register block.
    #[inline(always)]
    fn run<S: Simd, const B: usize>(self, simd: S) -> Result<()> {
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
            self.keys.read(self.head, start, &mut tile_keys[..count * head_dim])?;
            self.values.read(self.head, start, &mut tile_values[..count * head_dim])?;
            for p in 0..panels {
                let panel_first = p * panel_rows;
                // Every row of this panel is older than every key of this tile.
                if self.first + (panel_first + panel_rows - 1) / group < start {
                    continue;
                }
                let scores = &mut scores[..count * PANEL_VECTORS];
                let panel = &packed[p * head_dim * PANEL_VECTORS..(p + 1) * head_dim * PANEL_VECTORS];
                dot_rows::<S, B>(simd, &tile_keys, head_dim, panel, scores);
                self.mask::<S>(simd, start, panel_first, panel_rows, scores);
                let v = p * PANEL_VECTORS..(p + 1) * PANEL_VECTORS;
                let acc = &mut acc[p * head_dim * PANEL_VECTORS..(p + 1) * head_dim * PANEL_VECTORS];
                running_softmax(simd, scores, &mut maxima[v.clone()], &mut sums[v], acc);
                accumulate_columns::<S, B>(simd, &tile_values, head_dim, scores, acc);
            }
            start += count;
        }
        self.unpack::<S>(panels, panel_rows, &acc, &sums);
        Ok(())
    }

    /// Returns the rows as `[panel][head_dim][row]`, multiplied by `factor`. Rows beyond the last token are zero.
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

    /// Sets the score to minus infinity if the key is newer than the row, or outside of the row's window.
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
            // Rows are in the order of tokens. Rows below `low` are older than the key. Rows from `high` on are past
            // its window.
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

    /// Divides by the softmax sums and writes the rows to `[tokens, query_heads, head_dim]`.
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

/// Computes the scores of a panel with every key of a tile, in blocks of `B` keys.
#[inline(always)]
fn dot_rows<S: Simd, const B: usize>(
    simd: S,
    keys: &[f32],
    head_dim: usize,
    panel: &[S::f32s],
    scores: &mut [S::f32s],
) {
    let count = scores.len() / PANEL_VECTORS;
    let mut k = 0;
    while k + B <= count {
        dot_block::<S, B>(simd, &keys[k * head_dim..], head_dim, panel, &mut scores[k * PANEL_VECTORS..]);
        k += B;
    }
    while k < count {
        dot_block::<S, 1>(simd, &keys[k * head_dim..], head_dim, panel, &mut scores[k * PANEL_VECTORS..]);
        k += 1;
    }
}

/// Adds the values of a tile to a panel's accumulators by weight, in blocks of `B` columns.
#[inline(always)]
fn accumulate_columns<S: Simd, const B: usize>(
    simd: S,
    values: &[f32],
    head_dim: usize,
    weights: &[S::f32s],
    acc: &mut [S::f32s],
) {
    let mut c = 0;
    while c + B <= head_dim {
        accumulate_block::<S, B>(simd, values, head_dim, c, weights, &mut acc[c * PANEL_VECTORS..]);
        c += B;
    }
    while c < head_dim {
        accumulate_block::<S, 1>(simd, values, head_dim, c, weights, &mut acc[c * PANEL_VECTORS..]);
        c += 1;
    }
}

/// Makes one step of the running softmax: scores become weights, and sums and accumulators are rescaled to the new
/// maximum.
#[inline(always)]
fn running_softmax<S: Simd>(
    simd: S,
    scores: &mut [S::f32s],
    maxima: &mut [S::f32s],
    sums: &mut [S::f32s],
    acc: &mut [S::f32s],
) {
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
    use crate::kv::KvDType;

    /// Computes attention by its definition in f64, one row and one head at a time.
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

    /// Returns a fixed sequence of values between -1 and 1.
    fn noise(n: usize, seed: u64) -> Vec<f32> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..n).map(|_| 2.0 * random.f32() - 1.0).collect()
    }

    #[test]
    fn tiled_attention_equals_the_definition() {
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
            let plane = |rows: &[f32]| {
                let mut plane = PromptPlane::new(total, (kv_heads, head_dim), KvDType::F32, None).unwrap();
                plane.write(0, rows).unwrap();
                plane
            };
            causal(shape, first, &q, (&plane(&k), &plane(&v)), &mut out).unwrap();
            for (i, (a, b)) in out.iter().zip(naive(shape, first, &q, &k, &v)).enumerate() {
                assert!((a - b).abs() < 1e-5, "{shape:?} first {first} element {i}: {a} against {b}");
            }
        }
    }
}
