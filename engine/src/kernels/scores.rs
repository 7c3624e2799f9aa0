//! Pass 1 of attention: dot products of keys and query heads.
//!
//! 1. For each KV head, the rows of its tokens are taken in blocks. A block has as many tokens as registers allow.
//! 2. For more than four query heads, the rows of a block are widened once into the scratch buffer.
//! 3. For up to four query heads at a time, [`dots`] keeps one accumulator per query head and token in a register.
//!
//! Addition order: each lane adds the products of its elements in ascending order. The lanes of an accumulator are
//! added last, in the order of the instruction set.
// Register blocks are indexed by constants, because iterators would hide which registers are meant.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

use super::convert::{Bf16, F16, F32, StoredElement, widen_padded};
use super::plane::Plane;
use super::prefetch::{Prefetcher, prefetch_range};
use super::vector::Vector;
use stratakv_format::DType;

/// Writes the scores of a plane, as [`Kernel::scores`](super::Kernel::scores) defines them.
///
/// # Safety
/// The arguments satisfy the assertions of `Kernel::scores`. The processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn scores<S: Vector>(
    plane: &Plane<'_>,
    query: *const f32,
    query_stride: usize,
    group: usize,
    scores: *mut f32,
    columns: usize,
    scratch: *mut f32,
    prefetcher: &mut Prefetcher<'_>,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        match plane.dtype {
            DType::F32 => {
                scores_of_type::<S, F32>(plane, query, query_stride, group, scores, columns, scratch, prefetcher)
            }
            DType::F16 => {
                scores_of_type::<S, F16>(plane, query, query_stride, group, scores, columns, scratch, prefetcher)
            }
            DType::Bf16 => {
                scores_of_type::<S, Bf16>(plane, query, query_stride, group, scores, columns, scratch, prefetcher)
            }
        }
    }
}

/// [`scores`] for one element type.
///
/// # Safety
/// As for [`scores`].
#[inline(always)]
unsafe fn scores_of_type<S: Vector, E: StoredElement>(
    plane: &Plane<'_>,
    query: *const f32,
    query_stride: usize,
    group: usize,
    scores: *mut f32,
    columns: usize,
    scratch: *mut f32,
    prefetcher: &mut Prefetcher<'_>,
) {
    // Tokens per block: enough independent sums to hide the latency of fma, few enough to stay in registers.
    let block = match (group, S::WIDE) {
        (1, _) | (2, true) => 8,
        (2 | 3, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let row_bytes = plane.take * E::BYTES;
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut next = prefetcher.next_ranges(plane.rows.len() * row_bytes).iter();
        let per_token = next.len().div_ceil(plane.rows.len().max(1));
        let mut done = 0;
        while done < plane.rows.len() {
            let n = if plane.rows.len() - done >= block { block } else { 1 };
            for range in next.by_ref().take(n * per_token) {
                // SAFETY: the processor has the instruction set.
                unsafe { prefetch_range::<S>(range) };
            }
            // SAFETY: head and tokens are within the plane, the query and the scores, as the caller asserted.
            unsafe {
                let q = query.add(head * group * query_stride);
                let out = scores.add(done * columns + j * group);
                let mut rows = [std::ptr::null(); 8];
                for (to, row) in rows.iter_mut().zip(&plane.rows[done..done + n]) {
                    *to = row.as_ptr().add(head * plane.head_stride);
                }
                if group > 4 && E::BYTES < 4 {
                    // Many query heads: widen the rows once.
                    for (t, row) in rows.iter_mut().enumerate().take(n) {
                        let wide = scratch.add(t * query_stride);
                        widen_padded::<S, E>(*row, plane.take, wide);
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

/// Writes the dot products of `n` rows (1 or a block) with all query heads of a KV head.
///
/// # Safety
/// As for [`dots`], with `n` rows and `group` query heads.
#[inline(always)]
pub(super) unsafe fn dot_group<S: Vector, E: StoredElement>(
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
        // SAFETY: query heads `i..i + heads` belong to this KV head. The caller vouches for rows and output.
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

/// Writes a register block of `Q` query heads by `T` rows. Each row is loaded and widened once.
///
/// # Safety
/// `dims` elements can be read at each row. At each query head, `dims` rounded up to whole vectors can be read, and the
/// padding is zero. `Q` columns of `T` rows of `out` can be written. The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn dots<S: Vector, E: StoredElement, const Q: usize, const T: usize>(
    query: *const f32,
    stride: usize,
    rows: &[*const u8; 8],
    dims: usize,
    out: *mut f32,
    columns: usize,
) {
    // SAFETY: the caller keeps the contract of this function.
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
        if Q == 4 && T == 4 {
            let mut all = [[zero; 4]; 4];
            for t in 0..T {
                for i in 0..Q {
                    all[t][i] = acc[i][t];
                }
            }
            for (t, sums) in S::sum16(all).iter().enumerate() {
                out.add(t * columns).cast::<[f32; 4]>().write_unaligned(*sums);
            }
            return;
        }
        // The lanes are summed for four accumulators at a time, in the order [T, Q].
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
