//! Pass 3 of attention: weighted sums of values.
//!
//! 1. The dims of a KV head are taken in tiles of a few registers.
//! 2. The rows of a tile are read as stored, or widened once into the scratch buffer if many query heads need them.
//! 3. For up to four query heads at a time, [`sums`] keeps the accumulators of a tile in registers over all tokens.
//!
//! Addition order: each accumulator is rescaled, then takes the tokens in their order.
// Register blocks are indexed by constants, because iterators would hide which registers are meant.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

use super::convert::{Bf16, F16, F32, StoredElement, widen_padded};
use super::plane::Plane;
use super::prefetch::{PrefetchRange, Prefetcher, prefetch_range};
use super::vector::Vector;
use stratakv_format::DType;

/// Adds weighted values to accumulators, as [`Kernel::values`](super::Kernel::values) defines it.
///
/// # Safety
/// The arguments satisfy the assertions of `Kernel::values`. The processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn values<S: Vector>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    factor: *const f32,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
    prefetcher: Option<&mut Prefetcher<'_>>,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        match plane.dtype {
            DType::F32 => {
                values_of_type::<S, F32>(plane, weights, columns, group, factor, acc, acc_stride, scratch, prefetcher)
            }
            DType::F16 => {
                values_of_type::<S, F16>(plane, weights, columns, group, factor, acc, acc_stride, scratch, prefetcher)
            }
            DType::Bf16 => {
                values_of_type::<S, Bf16>(plane, weights, columns, group, factor, acc, acc_stride, scratch, prefetcher)
            }
        }
    }
}

/// [`values`] for one element type.
///
/// # Safety
/// As for [`values`].
#[inline(always)]
unsafe fn values_of_type<S: Vector, E: StoredElement>(
    plane: &Plane<'_>,
    weights: *const f32,
    columns: usize,
    group: usize,
    factor: *const f32,
    acc: *mut f32,
    acc_stride: usize,
    scratch: *mut f32,
    mut prefetcher: Option<&mut Prefetcher<'_>>,
) {
    let tile = if S::WIDE { 4 } else { 2 };
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut d = 0;
        while d < plane.take {
            let left = plane.take - d;
            let vectors = if left >= tile * S::LANES { tile } else { 1 };
            let used = left.min(vectors * S::LANES);
            let next = match &mut prefetcher {
                Some(prefetcher) => prefetcher.next_ranges(used * E::BYTES * plane.rows.len()),
                None => &[],
            };
            // SAFETY: head, tokens and dims `d..d + used` are within plane, weights and accumulators, as the caller
            // asserted.
            unsafe {
                let (w, f) = (weights.add(j * group), factor.add(j * group));
                let out = acc.add(head * group * acc_stride + d);
                let offset = head * plane.head_stride + d * E::BYTES;
                if (group > 4 && E::BYTES < 4) || used < S::LANES {
                    // Many query heads, or a part of a register.
                    let width = vectors * S::LANES;
                    for (t, row) in plane.rows.iter().enumerate() {
                        widen_padded::<S, E>(row.as_ptr().add(offset), used, scratch.add(t * width));
                    }
                    let rows = TileRows::Widened { base: scratch, width };
                    sum_group::<S, F32>(&rows, plane.rows.len(), next, w, f, columns, group, vectors, out, acc_stride);
                } else {
                    let rows = TileRows::Stored { rows: plane.rows, offset };
                    sum_group::<S, E>(&rows, plane.rows.len(), next, w, f, columns, group, vectors, out, acc_stride);
                }
            }
            d += used;
        }
    }
}

/// The rows of a tile.
enum TileRows<'a> {
    /// The bytes from `offset` on of each stored row.
    Stored { rows: &'a [&'a [u8]], offset: usize },
    /// f32 rows of `width` elements, one after the other.
    Widened { base: *const f32, width: usize },
}

/// Adds `n` weighted rows of `vectors` registers (1 or a tile) for all query heads of a KV head.
///
/// # Safety
/// As for [`sums`], with `group` query heads.
#[inline(always)]
unsafe fn sum_group<S: Vector, E: StoredElement>(
    rows: &TileRows<'_>,
    n: usize,
    next: &[PrefetchRange],
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
        // SAFETY: query heads `i..i + heads` belong to this KV head. The caller vouches for rows, weights and
        // accumulators.
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

/// Adds `n` weighted rows to a register block of `Q` accumulators of `D` registers. Each row is loaded and widened
/// once.
///
/// # Safety
/// `n` rows of `D` registers and `n` rows of `Q` weights can be read. `Q` accumulators of `D` registers can be read and
/// written. The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn sums<S: Vector, E: StoredElement, const Q: usize, const D: usize>(
    rows: &TileRows<'_>,
    n: usize,
    next: &[PrefetchRange],
    weights: *const f32,
    factor: *const f32,
    columns: usize,
    acc: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        let zero = S::splat(0.0);
        let mut sum = [[zero; D]; Q];
        for i in 0..Q {
            for d in 0..D {
                sum[i][d] = S::load(acc.add(i * stride + d * S::LANES));
            }
            // Most blocks need no rescaling, because the maximum grows rarely.
            let factor = *factor.add(i);
            if factor != 1.0 {
                for d in 0..D {
                    sum[i][d] = S::mul(sum[i][d], S::splat(factor));
                }
            }
        }
        // Prefetches are spread over the tokens, because a burst would fill the queues of the L1 cache and stall it.
        let per_token = next.len().div_ceil(n);
        let mut next = next.iter();
        for t in 0..n {
            for range in next.by_ref().take(per_token) {
                prefetch_range::<S>(range);
            }
            let row = match rows {
                TileRows::Stored { rows, offset } => rows.get_unchecked(t).as_ptr().add(*offset),
                TileRows::Widened { base, width } => base.add(t * width).cast(),
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
