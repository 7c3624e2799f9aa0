//! Pass 3: weighted sums of values.
#![allow(unsafe_code)]
// Register blocks are indexed by constants; iterators over them obscure which registers are meant.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

use super::simd::{Bf16, Element, F16, F32, Simd, prefetch, widen};
use super::{Ahead, Plane};
use crate::attention::ahead::Stretch;
use stratakv_format::DType;

/// # Safety
/// As asserted by `Kernel::values`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn values<S: Simd>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    factor: *const f32,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
    ahead: Option<&mut Ahead<'_>>,
) {
    // SAFETY: handed on.
    unsafe {
        match plane.dtype {
            DType::F32 => values_of::<S, F32>(plane, weights, columns, group, factor, acc, acc_stride, scratch, ahead),
            DType::F16 => values_of::<S, F16>(plane, weights, columns, group, factor, acc, acc_stride, scratch, ahead),
            DType::Bf16 => {
                values_of::<S, Bf16>(plane, weights, columns, group, factor, acc, acc_stride, scratch, ahead)
            }
        }
    }
}

#[inline(always)]
unsafe fn values_of<S: Simd, E: Element>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    factor: *const f32,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
    mut ahead: Option<&mut Ahead<'_>>,
) {
    let tile = if S::WIDE { 4 } else { 2 };
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut d = 0;
        while d < plane.take {
            let left = plane.take - d;
            let vectors = if left >= tile * S::LANES { tile } else { 1 };
            let used = left.min(vectors * S::LANES);
            let next = match &mut ahead {
                Some(ahead) => ahead.rows(used * E::BYTES * plane.rows.len()),
                None => &[],
            };
            // SAFETY: head, tokens, and dims `d..d + used` are within plane, weights and accumulators (asserted by the caller).
            unsafe {
                let (w, f) = (weights.add(j * group), factor.add(j * group));
                let out = acc.add(head * group * acc_stride + d);
                let offset = head * plane.head_stride + d * E::BYTES;
                if (group > 4 && E::BYTES < 4) || used < S::LANES {
                    // Many query heads, or a part of a vector: widen the tile once.
                    let width = vectors * S::LANES;
                    for (t, row) in plane.rows.iter().enumerate() {
                        widen::<S, E>(row.as_ptr().add(offset), used, scratch.add(t * width));
                    }
                    let rows = Rows::Wide { base: scratch, width };
                    sum_group::<S, F32>(&rows, plane.rows.len(), next, w, f, columns, group, vectors, out, acc_stride);
                } else {
                    let rows = Rows::Stored { rows: plane.rows, offset };
                    sum_group::<S, E>(&rows, plane.rows.len(), next, w, f, columns, group, vectors, out, acc_stride);
                }
            }
            d += used;
        }
    }
}

/// The rows of a tile.
enum Rows<'a> {
    /// `offset` bytes into each stored row.
    Stored { rows: &'a [&'a [u8]], offset: usize },
    /// Widened, one behind the other.
    Wide { base: *const f32, width: usize },
}

/// Weighted sums of `n` rows of `vectors` vectors (1 or a tile) for all query heads of a KV head.
#[inline(always)]
unsafe fn sum_group<S: Simd, E: Element>(
    rows: &Rows<'_>,
    n: usize,
    next: &[Stretch],
    weights: *const f32,
    factor: *const f32,
    columns: usize,
    group: usize,
    vectors: usize,
    acc: *mut f32,
    stride: usize,
) {
    let mut i = 0;
    while i < group {
        let heads = (group - i).min(4);
        let next = if i == 0 { next } else { &[] };
        // SAFETY: query heads `i..i + heads` of this KV head; rows, weights and accumulators as the caller says.
        unsafe {
            let (w, f, acc) = (weights.add(i), factor.add(i), acc.add(i * stride));
            match (heads, vectors) {
                (1, 4) => sums::<S, E, 1, 4>(rows, n, next, w, f, columns, acc, stride),
                (2, 4) => sums::<S, E, 2, 4>(rows, n, next, w, f, columns, acc, stride),
                (3, 4) => sums::<S, E, 3, 4>(rows, n, next, w, f, columns, acc, stride),
                (4, 4) => sums::<S, E, 4, 4>(rows, n, next, w, f, columns, acc, stride),
                (1, 2) => sums::<S, E, 1, 2>(rows, n, next, w, f, columns, acc, stride),
                (2, 2) => sums::<S, E, 2, 2>(rows, n, next, w, f, columns, acc, stride),
                (3, 2) => sums::<S, E, 3, 2>(rows, n, next, w, f, columns, acc, stride),
                (4, 2) => sums::<S, E, 4, 2>(rows, n, next, w, f, columns, acc, stride),
                (1, _) => sums::<S, E, 1, 1>(rows, n, next, w, f, columns, acc, stride),
                (2, _) => sums::<S, E, 2, 1>(rows, n, next, w, f, columns, acc, stride),
                (3, _) => sums::<S, E, 3, 1>(rows, n, next, w, f, columns, acc, stride),
                (_, _) => sums::<S, E, 4, 1>(rows, n, next, w, f, columns, acc, stride),
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
    next: &[Stretch],
    weights: *const f32,
    factor: *const f32,
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
            // The maximum grows rarely; most blocks need no rescaling.
            let factor = *factor.add(i);
            if factor != 1.0 {
                for d in 0..D {
                    sum[i][d] = S::mul(sum[i][d], S::splat(factor));
                }
            }
        }
        // Prefetches are spread over the tokens: a burst would fill the queues of the L1 cache and stall it.
        let per_token = next.len().div_ceil(n);
        let mut next = next.iter();
        for t in 0..n {
            for stretch in next.by_ref().take(per_token) {
                prefetch::<S>(stretch);
            }
            let row = match rows {
                Rows::Stored { rows, offset } => rows.get_unchecked(t).as_ptr().add(*offset),
                Rows::Wide { base, width } => base.add(t * width).cast(),
            };
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
