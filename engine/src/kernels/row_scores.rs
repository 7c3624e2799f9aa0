//! Dot products of query vectors with records of 16-bit elements or signed bytes, for selection.
//!
//! One step of decoding reads all summaries of a layer once, so this loop has to run at the speed of memory. Four loops
//! share the work:
//! 1. [`blocks`] takes any shape: blocks of records against up to four query vectors at a time.
//! 2. [`sixteen_at_a_time`] takes one query vector per head of one or two registers, if records hold nothing else.
//! 3. [`one_by_one`] takes one query vector and long records.
//! 4. [`transposed_blocks`] takes many query vectors for one head. A lane is a query vector, so nothing is summed
//!    across lanes.
//!
//! Invariant: which loop runs depends on the shape alone, so the same records give the same bits.
// Register blocks are indexed by constants, because iterators would hide which registers are meant.
#![allow(clippy::needless_range_loop)]

use super::convert::{Bf16, F16, Int8, StoredElement, widen_padded};
use super::plane::PAD;
use super::prefetch::{LINE, PrefetchRange, prefetch_range};
use super::scores::dot_group;
use super::vector::Vector;

/// Bytes between the record in work and the record that is prefetched. Measured on Zen 4.
const RECORDS_AHEAD: usize = 8192;

/// The type of the elements of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordElement {
    F16,
    Bf16,
    Int8,
}

impl RecordElement {
    /// Returns the bytes of an element.
    #[inline(always)]
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F16 => F16::BYTES,
            Self::Bf16 => Bf16::BYTES,
            Self::Int8 => Int8::BYTES,
        }
    }
}

/// Consecutive records, and the elements of them that meet the query.
pub(super) struct RecordRun<'a> {
    /// The bytes of all records.
    pub(super) records: &'a [u8],
    /// Elements of a record.
    pub(super) record: usize,
    /// The first element of a record that takes part.
    pub(super) offset: usize,
    /// Heads of a record that take part.
    pub(super) heads: usize,
    /// Query vectors of a head.
    pub(super) per_head: usize,
    /// Elements of a head.
    pub(super) dim: usize,
    /// The element type.
    pub(super) element: RecordElement,
    /// Columns of a row of scores.
    pub(super) columns: usize,
    /// True if the query is `[dim, columns]`, for one head. Otherwise it is `[heads * per_head, stride]`.
    pub(super) transposed: bool,
}

impl RecordRun<'_> {
    /// Returns the number of records.
    pub(super) fn count(&self) -> usize {
        self.records.len() / self.record_bytes()
    }

    /// Returns the bytes of a record.
    #[inline(always)]
    fn record_bytes(&self) -> usize {
        self.record * self.element.bytes()
    }

    /// Returns the first element of a record that takes part.
    ///
    /// # Safety
    /// There is a record `at`.
    #[inline(always)]
    unsafe fn row<E: StoredElement>(&self, at: usize) -> *const u8 {
        // SAFETY: the elements from the offset on are inside the record.
        unsafe { self.records.as_ptr().add((at * self.record + self.offset) * E::BYTES) }
    }

    /// Returns the elements from one query vector to the next, and from one widened record to the next.
    pub(super) fn stride(&self) -> usize {
        self.dim.next_multiple_of(PAD)
    }

    /// Returns the bytes from a record to the one that is prefetched with it, in whole records.
    ///
    /// Long records have none, because the prefetcher of the processor follows them.
    #[inline(always)]
    fn prefetch_distance(&self) -> Option<usize> {
        let bytes = self.dim * self.element.bytes();
        (bytes <= RECORDS_AHEAD / 4).then(|| RECORDS_AHEAD.next_multiple_of(self.record_bytes()))
    }
}

/// Writes the scores of records, as [`Kernel::row_scores`](super::Kernel::row_scores) defines them.
///
/// # Safety
/// The arguments satisfy the assertions of `Kernel::row_scores`. The processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn row_scores<S: Vector>(run: &RecordRun<'_>, query: *const f32, out: *mut f32, scratch: *mut f32) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        match (run.element, run.transposed) {
            (RecordElement::F16, false) => blocks::<S, F16>(run, query, out),
            (RecordElement::Bf16, false) => blocks::<S, Bf16>(run, query, out),
            (RecordElement::Int8, false) => blocks::<S, Int8>(run, query, out),
            (RecordElement::F16, true) => transposed::<S, F16>(run, query, out, scratch),
            (RecordElement::Bf16, true) => transposed::<S, Bf16>(run, query, out, scratch),
            (RecordElement::Int8, true) => transposed::<S, Int8>(run, query, out, scratch),
        }
    }
}

/// Scores blocks of records against up to four query vectors at a time, after the loops for special shapes.
///
/// # Safety
/// As for [`row_scores`].
#[inline(always)]
unsafe fn blocks<S: Vector, E: StoredElement>(run: &RecordRun<'_>, query: *const f32, out: *mut f32) {
    let (group, count, stride) = (run.per_head, run.count(), run.stride());
    let block = match (group, S::WIDE) {
        (1, _) | (2, true) => 8,
        (2 | 3, false) | (_, true) => 4,
        (_, false) => 2,
    };
    let ahead = run.prefetch_distance();
    // Heads that share a cache line.
    let together = (LINE / (E::BYTES * run.dim)).max(1);
    // Records hold exactly one vector per head, and scores exactly one column per head.
    let alone = S::WIDE && group == 1 && run.columns == run.heads && run.record == run.heads * run.dim;
    let mut done = match (run.heads, run.dim / S::LANES, run.dim % S::LANES) {
        // SAFETY: the caller keeps the contract of this function.
        (1, 1, 0) if alone => unsafe { sixteen_at_a_time::<S, E, 1, 1>(run, query, out) },
        // SAFETY: as above.
        (1, 2, 0) if alone => unsafe { sixteen_at_a_time::<S, E, 1, 2>(run, query, out) },
        // SAFETY: as above.
        (8, 1, 0) if alone => unsafe { sixteen_at_a_time::<S, E, 8, 1>(run, query, out) },
        // SAFETY: as above.
        (8, 2, 0) if alone => unsafe { sixteen_at_a_time::<S, E, 8, 2>(run, query, out) },
        // Long records are read one at a time, because the processor follows few streams.
        // SAFETY: as above.
        (1, 4.., _) if group == 1 => return unsafe { one_by_one::<S, E>(run, query, out) },
        _ => 0,
    };
    while done < count {
        let n = if count - done >= block { block } else { 1 };
        let mut rows = [std::ptr::null(); 8];
        // SAFETY: the records, the query and the scores contain every element accessed, as the caller asserted.
        unsafe {
            for (t, row) in rows.iter_mut().enumerate().take(n) {
                *row = run.row::<E>(done + t);
            }
            for head in 0..run.heads {
                if let Some(ahead) = ahead
                    && head % together == 0
                {
                    for row in &rows[..n] {
                        prefetch_range::<S>(&PrefetchRange {
                            start: row.wrapping_add(ahead),
                            bytes: E::BYTES * run.dim * together,
                        });
                    }
                }
                let q = query.add(head * group * stride);
                let out = out.add(done * run.columns + head * group);
                dot_group::<S, E>(q, stride, group, &rows, n, run.dim, out, run.columns);
                for row in &mut rows[..n] {
                    *row = row.wrapping_add(E::BYTES * run.dim);
                }
            }
        }
        done += n;
    }
}

/// Writes sixteen consecutive scores at a time and returns the number of records done.
///
/// A record has `H` heads of `V` registers each and nothing else, and each head has one query vector. `H` divides 16.
///
/// # Safety
/// As for [`row_scores`], with a run of that shape.
#[inline(always)]
unsafe fn sixteen_at_a_time<S: Vector, E: StoredElement, const H: usize, const V: usize>(
    run: &RecordRun<'_>,
    query: *const f32,
    out: *mut f32,
) -> usize {
    let (count, ahead, dim) = (run.count(), run.prefetch_distance().unwrap_or(0), V * S::LANES);
    let mut done = 0;
    while done + 16 / H <= count {
        // SAFETY: sixteen heads in whole records, a query vector for each head and sixteen scores are in bounds, as the
        // caller asserted.
        unsafe {
            let keys = run.row::<E>(done);
            let mut sums = [[S::splat(0.0); 4]; 4];
            for (t, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                let row = keys.add(t * dim * E::BYTES);
                if t % 4 == 0 {
                    // Four rows at a time, because a burst fills the line fill buffers and stalls the loads.
                    prefetch_range::<S>(&PrefetchRange { start: row.wrapping_add(ahead), bytes: 4 * dim * E::BYTES });
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

/// Scores long records against one query vector, one record at a time in four accumulators.
///
/// # Safety
/// As for [`row_scores`], with one head and one query vector.
#[inline(always)]
unsafe fn one_by_one<S: Vector, E: StoredElement>(run: &RecordRun<'_>, query: *const f32, out: *mut f32) {
    let (count, dim, step) = (run.count(), run.dim, 4 * S::LANES);
    let ahead = RECORDS_AHEAD.next_multiple_of(run.record_bytes());
    for first in (0..count).step_by(4) {
        let n = (count - first).min(4);
        // SAFETY: the records, a query of whole vectors and the scores contain every element accessed, as the caller
        // asserted.
        unsafe {
            let zero = S::splat(0.0);
            let mut four = [zero; 4];
            for (t, sum) in four.iter_mut().enumerate().take(n) {
                let row = run.row::<E>(first + t);
                let mut sums = [zero; 4];
                let mut d = 0;
                while d + step <= dim {
                    let start = row.wrapping_add(ahead + d * E::BYTES);
                    prefetch_range::<S>(&PrefetchRange { start, bytes: step * E::BYTES });
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

/// Scores records against many query vectors of one head. A lane is a query vector.
///
/// # Safety
/// As for [`row_scores`], with a transposed query.
#[inline(always)]
unsafe fn transposed<S: Vector, E: StoredElement>(
    run: &RecordRun<'_>,
    query: *const f32,
    out: *mut f32,
    scratch: *mut f32,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        match S::WIDE {
            true => transposed_blocks::<S, E, 8>(run, query, out, scratch),
            false => transposed_blocks::<S, E, 4>(run, query, out, scratch),
        }
    }
}

/// [`transposed`] with blocks of `T` records.
///
/// # Safety
/// As for [`transposed`].
#[inline(always)]
unsafe fn transposed_blocks<S: Vector, E: StoredElement, const T: usize>(
    run: &RecordRun<'_>,
    query: *const f32,
    out: *mut f32,
    scratch: *mut f32,
) {
    let (count, stride) = (run.count(), run.stride());
    let ahead = run.prefetch_distance();
    let mut done = 0;
    while done < count {
        let n = T.min(count - done);
        // SAFETY: `n` records are within the run. `T` rows of `stride` fit the scratch buffer, and rows beyond `n` hold
        // earlier records or zeros. The columns of the run are whole vectors, and the query and the scores contain all
        // of them, as the caller asserted.
        unsafe {
            for t in 0..n {
                let row = run.row::<E>(done + t);
                if let Some(ahead) = ahead {
                    prefetch_range::<S>(&PrefetchRange { start: row.wrapping_add(ahead), bytes: E::BYTES * run.dim });
                }
                widen_padded::<S, E>(row, run.dim, scratch.add(t * stride));
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
