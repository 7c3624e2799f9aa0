//! The three passes, written once over a small set of vector operations ([`Simd`]) and of element loads ([`Element`]).
//!
//! Everything here is `inline(always)`: the code is compiled inside the `target_feature` functions of each instruction set.
#![allow(unsafe_code)]
// Register blocks are indexed by constants; iterators over them obscure which registers are meant.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

use super::{Plane, Scores};
use stratakv_format::DType;

/// Vector operations of one instruction set.
///
/// # Safety
/// Implementors: `LANES` divides `PAD` and is the number of f32 in `V`; loads and stores touch exactly `LANES` elements from the
/// pointer on, at any alignment. Callers of every method: the CPU has the instruction set.
pub(super) unsafe trait Simd: Copy {
    type V: Copy;
    const LANES: usize;
    /// Whether 32 vector registers exist (else 16): blocks of 16 accumulators, not 8.
    const WIDE: bool;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn load_f16(from: *const u8) -> Self::V;
    unsafe fn load_bf16(from: *const u8) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The sums over the lanes of each.
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4];
    unsafe fn any_nan(v: Self::V) -> bool;
    /// Adds the integer in the low bits of `n` to the exponent of `v`.
    unsafe fn add_exponent(v: Self::V, n: Self::V) -> Self::V;
    /// `v` where `x >= limit`, else 0.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// A hint to bring the cache line at `at` near; any address is allowed.
    unsafe fn prefetch(at: *const u8);
}

/// How stored elements become f32.
///
/// # Safety
/// Callers: `LANES` (or `n < LANES`) elements can be read at the pointer, at any alignment.
trait Element {
    const BYTES: usize;

    unsafe fn load<S: Simd>(from: *const u8) -> S::V;

    /// The first `n < LANES` elements, then zeros.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const u8, n: usize) -> S::V {
        let mut buffer = [0u8; 64];
        // SAFETY: the caller vouches for `n` elements, fewer than the 16 of up to 4 bytes that the buffer holds.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), n * Self::BYTES);
            Self::load::<S>(buffer.as_ptr())
        }
    }
}

struct F32;
struct F16;
struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says; `Simd::load` takes any alignment.
        unsafe { S::load(from.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::load_f16(from) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::load_bf16(from) }
    }
}

/// Cache lines of `Plane::next`, to be asked for a few at a time.
struct Prefetch {
    at: *const u8,
    end: *const u8,
}

impl Prefetch {
    const LINE: usize = 64;

    #[inline(always)]
    fn new(plane: &Plane<'_>) -> Self {
        let range = plane.next.as_ptr_range();
        Self { at: range.start, end: range.end }
    }

    /// Asks for the next `bytes`.
    #[inline(always)]
    unsafe fn step<S: Simd>(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 && self.at < self.end {
            // SAFETY: a hint, allowed for any address.
            unsafe { S::prefetch(self.at) };
            self.at = self.at.wrapping_add(Self::LINE);
            left = left.saturating_sub(Self::LINE);
        }
    }
}

// Pass 1: scores.

/// # Safety
/// As asserted by `Kernel::scores`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    plane: &Plane<'_>,
    query: *const f32,
    query_stride: usize,
    group: usize,
    scores: *mut f32,
    columns: usize,
    scratch: *mut f32,
) {
    // SAFETY: handed on.
    unsafe {
        match plane.dtype {
            DType::F32 => scores_of::<S, F32>(plane, query, query_stride, group, scores, columns, scratch),
            DType::F16 => scores_of::<S, F16>(plane, query, query_stride, group, scores, columns, scratch),
            DType::Bf16 => scores_of::<S, Bf16>(plane, query, query_stride, group, scores, columns, scratch),
        }
    }
}

#[inline(always)]
unsafe fn scores_of<S: Simd, E: Element>(
    plane: &Plane<'_>,
    query: *const f32,
    query_stride: usize,
    group: usize,
    scores: *mut f32,
    columns: usize,
    scratch: *mut f32,
) {
    // Tokens per block: enough independent sums to hide the latency of fma, within the registers.
    let block = match (group, S::WIDE) {
        (1, _) | (2, true) => 8,
        (2 | 3, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let row_bytes = plane.row * E::BYTES;
    let mut prefetch = Prefetch::new(plane);
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut done = 0;
        while done < plane.tokens.len() {
            let n = if plane.tokens.len() - done >= block { block } else { 1 };
            // SAFETY: head and tokens are within the plane, the query and the scores (asserted by the caller).
            unsafe {
                let q = query.add(head * group * query_stride);
                let out = scores.add(done * columns + j * group);
                let base = plane.bytes.as_ptr().add(head * plane.group_tokens * row_bytes);
                let mut rows = [base; 8];
                for (row, &token) in rows.iter_mut().zip(&plane.tokens[done..done + n]) {
                    *row = base.add(usize::from(token) * row_bytes);
                }
                prefetch.step::<S>(n * row_bytes);
                if group > 4 && E::BYTES < 4 {
                    // Many query heads: widen the rows once.
                    for (t, row) in rows.iter_mut().enumerate().take(n) {
                        let wide = scratch.add(t * query_stride);
                        widen::<S, E>(*row, plane.take, wide);
                        *row = wide.cast::<u8>().cast_const();
                    }
                    let dims = plane.take.next_multiple_of(S::LANES);
                    dot_group::<S, F32>(q, query_stride, group, &rows, n, dims, out, columns);
                } else {
                    dot_group::<S, E>(q, query_stride, group, &rows, n, plane.take, out, columns);
                }
            }
            done += n;
        }
    }
}

/// Dot products of `n` rows (1 or a block) with all query heads of a KV head.
#[inline(always)]
unsafe fn dot_group<S: Simd, E: Element>(
    query: *const f32,
    stride: usize,
    group: usize,
    rows: &[*const u8; 8],
    n: usize,
    dims: usize,
    out: *mut f32,
    columns: usize,
) {
    let mut i = 0;
    while i < group {
        let heads = (group - i).min(4);
        // SAFETY: query heads `i..i + heads` of this KV head; rows and out as the caller says.
        unsafe {
            let (q, out) = (query.add(i * stride), out.add(i));
            match (heads, n) {
                (1, 8) => dots::<S, E, 1, 8>(q, stride, rows, dims, out, columns),
                (2, 8) => dots::<S, E, 2, 8>(q, stride, rows, dims, out, columns),
                (1, 4) => dots::<S, E, 1, 4>(q, stride, rows, dims, out, columns),
                (2, 4) => dots::<S, E, 2, 4>(q, stride, rows, dims, out, columns),
                (3, 4) => dots::<S, E, 3, 4>(q, stride, rows, dims, out, columns),
                (4, 4) => dots::<S, E, 4, 4>(q, stride, rows, dims, out, columns),
                (1, 2) => dots::<S, E, 1, 2>(q, stride, rows, dims, out, columns),
                (2, 2) => dots::<S, E, 2, 2>(q, stride, rows, dims, out, columns),
                (3, 2) => dots::<S, E, 3, 2>(q, stride, rows, dims, out, columns),
                (4, 2) => dots::<S, E, 4, 2>(q, stride, rows, dims, out, columns),
                (1, _) => dots::<S, E, 1, 1>(q, stride, rows, dims, out, columns),
                (2, _) => dots::<S, E, 2, 1>(q, stride, rows, dims, out, columns),
                (3, _) => dots::<S, E, 3, 1>(q, stride, rows, dims, out, columns),
                (_, _) => dots::<S, E, 4, 1>(q, stride, rows, dims, out, columns),
            }
        }
        i += heads;
    }
}

/// A register block: `Q` query heads by `T` rows, each row loaded and widened once.
#[inline(always)]
unsafe fn dots<S: Simd, E: Element, const Q: usize, const T: usize>(
    query: *const f32,
    stride: usize,
    rows: &[*const u8; 8],
    dims: usize,
    out: *mut f32,
    columns: usize,
) {
    // SAFETY: `dims` elements can be read at each row, `dims` rounded up to whole vectors at each query head (its padding is
    // zero), and `Q` columns of `T` rows of `out` can be written: the caller vouches.
    unsafe {
        let zero = S::splat(0.0);
        let mut acc = [[zero; T]; Q];
        let mut d = 0;
        while d + S::LANES <= dims {
            let mut k = [zero; T];
            for t in 0..T {
                k[t] = E::load::<S>(rows[t].add(d * E::BYTES));
            }
            for i in 0..Q {
                let q = S::load(query.add(i * stride + d));
                for t in 0..T {
                    acc[i][t] = S::fma(q, k[t], acc[i][t]);
                }
            }
            d += S::LANES;
        }
        if d < dims {
            for t in 0..T {
                let k = E::load_part::<S>(rows[t].add(d * E::BYTES), dims - d);
                for i in 0..Q {
                    acc[i][t] = S::fma(S::load(query.add(i * stride + d)), k, acc[i][t]);
                }
            }
        }
        // Sum the lanes, four vectors at a time, in the order [T, Q].
        let mut f = 0;
        while f < Q * T {
            let mut four = [zero; 4];
            for (s, v) in four.iter_mut().enumerate() {
                if f + s < Q * T {
                    *v = acc[(f + s) % Q][(f + s) / Q];
                }
            }
            let sums = S::sum4(four);
            for (s, &sum) in sums.iter().enumerate() {
                if f + s < Q * T {
                    *out.add((f + s) / Q * columns + (f + s) % Q) = sum;
                }
            }
            f += 4;
        }
    }
}

/// `dims` elements as f32, padded with zeros to whole vectors.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(from: *const u8, dims: usize, to: *mut f32) {
    let mut d = 0;
    // SAFETY: the caller vouches for `dims` elements at `from` and whole vectors at `to`.
    unsafe {
        while d + S::LANES <= dims {
            S::store(to.add(d), E::load::<S>(from.add(d * E::BYTES)));
            d += S::LANES;
        }
        if d < dims {
            S::store(to.add(d), E::load_part::<S>(from.add(d * E::BYTES), dims - d));
        }
    }
}

// Pass 2: softmax.

/// # Safety
/// As asserted by `Kernel::softmax`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(
    scores: *mut f32,
    tokens: usize,
    columns: usize,
    max: *mut f32,
    sum: *mut f32,
    factor: *mut f32,
) -> Scores {
    // SAFETY: `tokens` rows of `columns` (whole vectors), as the caller says.
    unsafe {
        // x * 0 is NaN for NaN and the infinities, and the sum keeps it.
        let zero = S::splat(0.0);
        let mut bad = zero;
        let mut c = 0;
        while c < columns {
            let mut m = S::load(max.add(c));
            for t in 0..tokens {
                let score = S::load(scores.add(t * columns + c));
                bad = S::fma(score, zero, bad);
                m = S::max(m, score);
            }
            // The new maximum waits here until all scores have proved finite.
            S::store(factor.add(c), m);
            c += S::LANES;
        }
        if S::any_nan(bad) {
            return Scores::NotFinite;
        }
        c = 0;
        while c < columns {
            let m = S::load(factor.add(c));
            let shrink = exp::<S>(S::sub(S::load(max.add(c)), m));
            let mut l = S::mul(S::load(sum.add(c)), shrink);
            for t in 0..tokens {
                let at = scores.add(t * columns + c);
                let weight = exp::<S>(S::sub(S::load(at), m));
                l = S::add(l, weight);
                S::store(at, weight);
            }
            S::store(max.add(c), m);
            S::store(sum.add(c), l);
            S::store(factor.add(c), shrink);
            c += S::LANES;
        }
        Scores::Finite
    }
}

/// `exp(x)` for `x <= 0` (`-inf` too), relative error below 2e-7; 0 below -87 (where f32 leaves its normal range).
///
/// Cody-Waite reduction and the polynomial of Cephes `expf` (Moshier).
#[inline(always)]
unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    const LIMIT: f32 = -87.0;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_1e-1];
    // SAFETY: arithmetic only; the CPU has the instruction set.
    unsafe {
        let limit = S::splat(LIMIT);
        let clamped = S::max(x, limit);
        let shifted = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(shifted, S::splat(ROUND));
        let r = S::fma(n, S::splat(-0.693_359_4), clamped);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::zero_below(S::add_exponent(p, shifted), x, limit)
    }
}

// Pass 3: values.

/// # Safety
/// As asserted by `Kernel::values`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
) {
    // SAFETY: handed on.
    unsafe {
        match plane.dtype {
            DType::F32 => values_of::<S, F32>(plane, weights, columns, group, acc, acc_stride, scratch),
            DType::F16 => values_of::<S, F16>(plane, weights, columns, group, acc, acc_stride, scratch),
            DType::Bf16 => values_of::<S, Bf16>(plane, weights, columns, group, acc, acc_stride, scratch),
        }
    }
}

#[inline(always)]
unsafe fn values_of<S: Simd, E: Element>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
) {
    let row_bytes = plane.row * E::BYTES;
    let tile = if S::WIDE { 4 } else { 2 };
    let mut prefetch = Prefetch::new(plane);
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut d = 0;
        while d < plane.take {
            let left = plane.take - d;
            let vectors = if left >= tile * S::LANES { tile } else { 1 };
            let used = left.min(vectors * S::LANES);
            // SAFETY: head, tokens, and dims `d..d + used` are within plane, weights and accumulators (asserted by the caller).
            unsafe {
                prefetch.step::<S>(used * E::BYTES * plane.tokens.len());
                let w = weights.add(j * group);
                let out = acc.add(head * group * acc_stride + d);
                let base = plane.bytes.as_ptr().add(head * plane.group_tokens * row_bytes + d * E::BYTES);
                if (group > 4 && E::BYTES < 4) || used < S::LANES {
                    // Many query heads, or a part of a vector: widen the tile once.
                    let width = vectors * S::LANES;
                    for (t, &token) in plane.tokens.iter().enumerate() {
                        widen::<S, E>(base.add(usize::from(token) * row_bytes), used, scratch.add(t * width));
                    }
                    let rows = Rows { base: scratch.cast::<u8>().cast_const(), stride: width * 4, tokens: None };
                    sum_group::<S, F32>(&rows, plane.tokens.len(), w, columns, group, vectors, out, acc_stride);
                } else {
                    let rows = Rows { base, stride: row_bytes, tokens: Some(plane.tokens) };
                    sum_group::<S, E>(&rows, plane.tokens.len(), w, columns, group, vectors, out, acc_stride);
                }
            }
            d += used;
        }
    }
}

/// Rows of a tile: row `t` starts `tokens[t]` (or `t`) strides behind `base`.
struct Rows<'a> {
    base: *const u8,
    stride: usize,
    tokens: Option<&'a [u8]>,
}

/// Weighted sums of `n` rows of `vectors` vectors (1 or a tile) for all query heads of a KV head.
#[inline(always)]
unsafe fn sum_group<S: Simd, E: Element>(
    rows: &Rows<'_>,
    n: usize,
    weights: *const f32,
    columns: usize,
    group: usize,
    vectors: usize,
    acc: *mut f32,
    stride: usize,
) {
    let mut i = 0;
    while i < group {
        let heads = (group - i).min(4);
        // SAFETY: query heads `i..i + heads` of this KV head; rows, weights and accumulators as the caller says.
        unsafe {
            let (w, acc) = (weights.add(i), acc.add(i * stride));
            match (heads, vectors) {
                (1, 4) => sums::<S, E, 1, 4>(rows, n, w, columns, acc, stride),
                (2, 4) => sums::<S, E, 2, 4>(rows, n, w, columns, acc, stride),
                (3, 4) => sums::<S, E, 3, 4>(rows, n, w, columns, acc, stride),
                (4, 4) => sums::<S, E, 4, 4>(rows, n, w, columns, acc, stride),
                (1, 2) => sums::<S, E, 1, 2>(rows, n, w, columns, acc, stride),
                (2, 2) => sums::<S, E, 2, 2>(rows, n, w, columns, acc, stride),
                (3, 2) => sums::<S, E, 3, 2>(rows, n, w, columns, acc, stride),
                (4, 2) => sums::<S, E, 4, 2>(rows, n, w, columns, acc, stride),
                (1, _) => sums::<S, E, 1, 1>(rows, n, w, columns, acc, stride),
                (2, _) => sums::<S, E, 2, 1>(rows, n, w, columns, acc, stride),
                (3, _) => sums::<S, E, 3, 1>(rows, n, w, columns, acc, stride),
                (_, _) => sums::<S, E, 4, 1>(rows, n, w, columns, acc, stride),
            }
        }
        i += heads;
    }
}

/// A register block: `Q` accumulators of `D` vectors, each row loaded and widened once.
#[inline(always)]
unsafe fn sums<S: Simd, E: Element, const Q: usize, const D: usize>(
    rows: &Rows<'_>,
    n: usize,
    weights: *const f32,
    columns: usize,
    acc: *mut f32,
    stride: usize,
) {
    // SAFETY: `n` rows of `D` vectors, `n` rows of `Q` weights and `Q` accumulators of `D` vectors: the caller vouches.
    unsafe {
        let zero = S::splat(0.0);
        let mut sum = [[zero; D]; Q];
        for i in 0..Q {
            for d in 0..D {
                sum[i][d] = S::load(acc.add(i * stride + d * S::LANES));
            }
        }
        for t in 0..n {
            let token = match rows.tokens {
                Some(tokens) => usize::from(*tokens.get_unchecked(t)),
                None => t,
            };
            let row = rows.base.add(token * rows.stride);
            let mut v = [zero; D];
            for d in 0..D {
                v[d] = E::load::<S>(row.add(d * S::LANES * E::BYTES));
            }
            for i in 0..Q {
                let w = S::splat(*weights.add(t * columns + i));
                for d in 0..D {
                    sum[i][d] = S::fma(w, v[d], sum[i][d]);
                }
            }
        }
        for i in 0..Q {
            for d in 0..D {
                S::store(acc.add(i * stride + d * S::LANES), sum[i][d]);
            }
        }
    }
}
