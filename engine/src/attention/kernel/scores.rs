//! Pass 1: dot products of keys and query heads.
#![allow(unsafe_code)]
// Register blocks are indexed by constants; iterators over them obscure which registers are meant.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

use super::simd::{Bf16, Element, F16, F32, Simd, prefetch, widen};
use super::{Ahead, Plane, RecordRun};
use crate::attention::ahead::{LINE, Stretch};
use stratakv_format::DType;

/// How far ahead of the work records are asked for, in bytes. Measured on Zen 4.
const RECORDS_AHEAD: usize = 8192;

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
    ahead: &mut Ahead<'_>,
) {
    // SAFETY: handed on.
    unsafe {
        match plane.dtype {
            DType::F32 => scores_of::<S, F32>(plane, query, query_stride, group, scores, columns, scratch, ahead),
            DType::F16 => scores_of::<S, F16>(plane, query, query_stride, group, scores, columns, scratch, ahead),
            DType::Bf16 => scores_of::<S, Bf16>(plane, query, query_stride, group, scores, columns, scratch, ahead),
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
    ahead: &mut Ahead<'_>,
) {
    // Tokens per block: enough independent sums to hide the latency of fma, within the registers.
    let block = match (group, S::WIDE) {
        (1, _) | (2, true) => 8,
        (2 | 3, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let row_bytes = plane.take * E::BYTES;
    for (j, &head) in plane.heads.iter().enumerate() {
        let head = usize::from(head);
        let mut next = ahead.rows(plane.rows.len() * row_bytes).iter();
        let per_token = next.len().div_ceil(plane.rows.len().max(1));
        let mut done = 0;
        while done < plane.rows.len() {
            let n = if plane.rows.len() - done >= block { block } else { 1 };
            for stretch in next.by_ref().take(n * per_token) {
                // SAFETY: the CPU has the instruction set.
                unsafe { prefetch::<S>(stretch) };
            }
            // SAFETY: head and tokens are within the plane, the query and the scores (asserted by the caller).
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

/// # Safety
/// As asserted by `Kernel::records`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn records<S: Simd>(run: &RecordRun<'_>, query: *const f32, out: *mut f32, scratch: *mut f32) {
    // SAFETY: handed on.
    unsafe {
        match (run.dtype, run.transposed) {
            (DType::F32, _) => {}
            (DType::F16, false) => records_of::<S, F16>(run, query, out),
            (DType::Bf16, false) => records_of::<S, Bf16>(run, query, out),
            (DType::F16, true) => wide_records::<S, F16>(run, query, out, scratch),
            (DType::Bf16, true) => wide_records::<S, Bf16>(run, query, out, scratch),
        }
    }
}

/// How far ahead of a row it is asked for while others are worked on: whole records, none of long rows, which the processor's
/// own prefetches follow.
#[inline(always)]
fn asked_ahead(run: &RecordRun<'_>) -> Option<usize> {
    (2 * run.dim <= RECORDS_AHEAD / 4).then(|| RECORDS_AHEAD.next_multiple_of(2 * run.record))
}

#[inline(always)]
unsafe fn records_of<S: Simd, E: Element>(run: &RecordRun<'_>, query: *const f32, out: *mut f32) {
    let (group, count, stride) = (run.per_head, run.count(), run.stride());
    let block = match (group, S::WIDE) {
        (1, _) | (2, true) => 8,
        (2 | 3, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let ahead = asked_ahead(run);
    // Heads of one cache line.
    let together = (LINE / (2 * run.dim)).max(1);
    // Of long rows one at a time is better: many streams are more than the processor follows.
    let alone = S::WIDE && group == 1 && run.columns == run.heads && run.record == run.heads * run.dim;
    let mut done = match (run.heads, run.dim / S::LANES, run.dim % S::LANES) {
        // SAFETY: as the caller says.
        (1, 1, 0) if alone => unsafe { sixteens::<S, E, 1, 1>(run, query, out) },
        // SAFETY: as the caller says.
        (1, 2, 0) if alone => unsafe { sixteens::<S, E, 1, 2>(run, query, out) },
        // SAFETY: as the caller says.
        (8, 1, 0) if alone => unsafe { sixteens::<S, E, 8, 1>(run, query, out) },
        // SAFETY: as the caller says.
        (8, 2, 0) if alone => unsafe { sixteens::<S, E, 8, 2>(run, query, out) },
        // SAFETY: as the caller says.
        (1, 4.., _) if group == 1 => return unsafe { one_by_one::<S, E>(run, query, out) },
        _ => 0,
    };
    while done < count {
        let n = if count - done >= block { block } else { 1 };
        let mut rows = [std::ptr::null(); 8];
        // SAFETY: the records, the query and the scores hold all that is touched (asserted by the caller).
        unsafe {
            for (t, row) in rows.iter_mut().enumerate().take(n) {
                *row = run.records.as_ptr().add((done + t) * run.record + run.offset).cast::<u8>();
            }
            for head in 0..run.heads {
                if let Some(ahead) = ahead
                    && head % together == 0
                {
                    for row in &rows[..n] {
                        prefetch::<S>(&Stretch { start: row.wrapping_add(ahead), bytes: 2 * run.dim * together });
                    }
                }
                let q = query.add(head * group * stride);
                let out = out.add(done * run.columns + head * group);
                dot_group::<S, E>(q, stride, group, &rows, n, run.dim, out, run.columns);
                for row in &mut rows[..n] {
                    *row = row.wrapping_add(2 * run.dim);
                }
            }
        }
        done += n;
    }
}

/// One query vector for each of `H` heads, which divides 16, of `V` vectors, and nothing else in a record: sixteen scores at a
/// time, which lie one after the other. How many records were done.
#[inline(always)]
unsafe fn sixteens<S: Simd, E: Element, const H: usize, const V: usize>(
    run: &RecordRun<'_>,
    query: *const f32,
    out: *mut f32,
) -> usize {
    let (count, ahead, dim) = (run.count(), asked_ahead(run).unwrap_or(0), V * S::LANES);
    let mut done = 0;
    while done + 16 / H <= count {
        // SAFETY: sixteen heads in whole records, a query vector for each head, and sixteen scores (asserted by the caller).
        unsafe {
            let keys = run.records.as_ptr().add(done * H * dim).cast::<u8>();
            let mut sums = [[S::splat(0.0); 4]; 4];
            for (t, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                let row = keys.add(t * dim * E::BYTES);
                if t % 4 == 0 {
                    // Not all at once: more than the processor asks for at a time would be waited for.
                    prefetch::<S>(&Stretch { start: row.wrapping_add(ahead), bytes: 4 * dim * E::BYTES });
                }
                for d in (0..dim).step_by(S::LANES) {
                    *sum = S::fma(S::load(query.add(t % H * dim + d)), E::load::<S>(row.add(d * E::BYTES)), *sum);
                }
            }
            out.add(done * H).cast::<[[f32; 4]; 4]>().write_unaligned(S::sum16(sums));
        }
        done += 16 / H;
    }
    done
}

/// One query vector and long rows: one record after the other, in four sums, asked for as the work goes on.
#[inline(always)]
unsafe fn one_by_one<S: Simd, E: Element>(run: &RecordRun<'_>, query: *const f32, out: *mut f32) {
    let (count, dim, step) = (run.count(), run.dim, 4 * S::LANES);
    let ahead = RECORDS_AHEAD.next_multiple_of(2 * run.record);
    for first in (0..count).step_by(4) {
        let n = (count - first).min(4);
        // SAFETY: the records, a query of whole vectors and the scores hold all that is touched (asserted by the caller).
        unsafe {
            let zero = S::splat(0.0);
            let mut four = [zero; 4];
            for (t, sum) in four.iter_mut().enumerate().take(n) {
                let row = run.records.as_ptr().add((first + t) * run.record + run.offset).cast::<u8>();
                let mut sums = [zero; 4];
                let mut d = 0;
                while d + step <= dim {
                    let start = row.wrapping_add(ahead + d * E::BYTES);
                    prefetch::<S>(&Stretch { start, bytes: step * E::BYTES });
                    for i in 0..4 {
                        let at = d + i * S::LANES;
                        sums[i] = S::fma(S::load(query.add(at)), E::load::<S>(row.add(at * E::BYTES)), sums[i]);
                    }
                    d += step;
                }
                while d + S::LANES <= dim {
                    sums[0] = S::fma(S::load(query.add(d)), E::load::<S>(row.add(d * E::BYTES)), sums[0]);
                    d += S::LANES;
                }
                if d < dim {
                    let rest = E::load_part::<S>(row.add(d * E::BYTES), dim - d);
                    sums[1] = S::fma(S::load(query.add(d)), rest, sums[1]);
                }
                *sum = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
            }
            for (t, sum) in S::sum4(four).iter().enumerate().take(n) {
                *out.add((first + t) * run.columns) = *sum;
            }
        }
    }
}

/// Many query vectors for one head: a column per lane, so that nothing is summed across a vector.
#[inline(always)]
unsafe fn wide_records<S: Simd, E: Element>(run: &RecordRun<'_>, query: *const f32, out: *mut f32, scratch: *mut f32) {
    // SAFETY: as below.
    unsafe {
        match S::WIDE {
            true => wide_blocks::<S, E, 8>(run, query, out, scratch),
            false => wide_blocks::<S, E, 4>(run, query, out, scratch),
        }
    }
}

#[inline(always)]
unsafe fn wide_blocks<S: Simd, E: Element, const T: usize>(
    run: &RecordRun<'_>,
    query: *const f32,
    out: *mut f32,
    scratch: *mut f32,
) {
    let (count, stride) = (run.count(), run.stride());
    let ahead = asked_ahead(run);
    let mut done = 0;
    while done < count {
        let n = T.min(count - done);
        // SAFETY: `n` records are within the run; `T` rows of `stride` fit the scratch buffer, and those beyond `n` hold numbers
        // of earlier records or zeros; the run's columns are whole vectors, and the query and the scores hold all of them
        // (asserted by the caller).
        unsafe {
            for t in 0..n {
                let row = run.records.as_ptr().add((done + t) * run.record + run.offset).cast::<u8>();
                if let Some(ahead) = ahead {
                    prefetch::<S>(&Stretch { start: row.wrapping_add(ahead), bytes: 2 * run.dim });
                }
                widen::<S, E>(row, run.dim, scratch.add(t * stride));
            }
            let mut column = 0;
            while column < run.columns {
                let zero = S::splat(0.0);
                let mut acc = [[zero; 2]; T];
                let pair = column + S::LANES < run.columns;
                if pair {
                    for d in 0..run.dim {
                        let q = query.add(d * run.columns + column);
                        let q = [S::load(q), S::load(q.add(S::LANES))];
                        for t in 0..T {
                            let x = S::splat(*scratch.add(t * stride + d));
                            acc[t][0] = S::fma(x, q[0], acc[t][0]);
                            acc[t][1] = S::fma(x, q[1], acc[t][1]);
                        }
                    }
                } else {
                    for d in 0..run.dim {
                        let q = S::load(query.add(d * run.columns + column));
                        for t in 0..T {
                            let x = S::splat(*scratch.add(t * stride + d));
                            acc[t][0] = S::fma(x, q, acc[t][0]);
                        }
                    }
                }
                for t in 0..n {
                    let out = out.add((done + t) * run.columns + column);
                    S::store(out, acc[t][0]);
                    if pair {
                        S::store(out.add(S::LANES), acc[t][1]);
                    }
                }
                column += if pair { 2 * S::LANES } else { S::LANES };
            }
        }
        done += n;
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
