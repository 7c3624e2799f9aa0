//! The inner loops, one instance per instruction set, chosen once at run time.
//!
//! A run of pieces is worked on in three passes over all its heads, so that the independent work of many heads hides the
//! latencies: scores (K planes), softmax, values (V planes). Scores lie as `[tokens, columns]` with one column per taking-part query head,
//! so that maxima, exponentials and sums run down columns without any reduction across a vector.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod scores;
mod simd;
mod softmax;
mod values;

use super::ahead::Ahead;
use std::sync::OnceLock;
use stratakv_format::DType;

/// Rows of f32 (query, accumulator, scores) are padded to a multiple of this: the widest vector.
pub(super) const PAD: usize = 16;

/// Elements of the scratch buffer in which narrow elements are widened once for many query heads.
pub(super) const SCRATCH: usize = 8192;

/// One plane of a run and what of it takes part. `heads` ascend.
#[derive(Clone, Copy)]
pub(super) struct Plane<'a> {
    /// The bytes from each token of head 0 on.
    pub(super) rows: &'a [&'a [u8]],
    /// Bytes from one head to the next.
    pub(super) head_stride: usize,
    pub(super) heads: &'a [u8],
    pub(super) dtype: DType,
    /// Elements used of each row.
    pub(super) take: usize,
}

impl Plane<'_> {
    /// Bytes used of each row.
    pub(super) fn row_bytes(&self) -> usize {
        self.take * self.dtype.bytes()
    }

    /// Whether every element that a kernel will touch lies within the rows. The heads ascend, so the last one decides.
    fn in_bounds(&self) -> bool {
        debug_assert!(self.heads.is_sorted());
        let Some(&head) = self.heads.last() else { return true };
        let Some(end) = usize::from(head).checked_mul(self.head_stride).and_then(|at| at.checked_add(self.row_bytes()))
        else {
            return false;
        };
        self.rows.iter().all(|row| end <= row.len())
    }
}

/// Records of 16-bit elements that lie one after the other, and what of them meets the query.
pub(super) struct RecordRun<'a> {
    pub(super) records: &'a [u16],
    /// Elements of a record, and the first that takes part.
    pub(super) record: usize,
    pub(super) offset: usize,
    pub(super) heads: usize,
    /// Query vectors of a head.
    pub(super) per_head: usize,
    /// Elements of a head.
    pub(super) dim: usize,
    pub(super) dtype: DType,
    /// Of a row of scores.
    pub(super) columns: usize,
    /// The query is `[dim, columns]`, for one head; else `[heads * per_head, stride]`.
    pub(super) transposed: bool,
}

impl RecordRun<'_> {
    pub(super) fn count(&self) -> usize {
        self.records.len() / self.record
    }

    /// Elements from one query vector to the next, and from one widened record to the next.
    pub(super) fn stride(&self) -> usize {
        self.dim.next_multiple_of(PAD)
    }
}

/// What [`Kernel::softmax`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scores {
    /// All scores were finite and are now weights.
    Finite,
    /// Some score is NaN or infinite. Nothing changed.
    NotFinite,
}

type ScoresFn = unsafe fn(&Plane<'_>, *const f32, usize, usize, *mut f32, usize, *mut f32, &mut Ahead<'_>);
type RecordsFn = unsafe fn(&RecordRun<'_>, *const f32, *mut f32, *mut f32);
type SoftmaxFn = unsafe fn(*mut f32, usize, usize, *mut f32, *mut f32, *mut f32) -> Scores;
type ValuesFn =
    unsafe fn(&Plane<'_>, *const f32, usize, usize, *const f32, *mut f32, usize, *mut f32, Option<&mut Ahead<'_>>);

/// The inner loops for one instruction set.
pub struct Kernel {
    name: &'static str,
    scores: ScoresFn,
    records: RecordsFn,
    softmax: SoftmaxFn,
    values: ValuesFn,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Kernel {
    /// `avx512`, `avx2`, `neon` or `portable`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The fastest kernel that this CPU can run.
    #[must_use]
    pub fn best() -> &'static Self {
        static BEST: OnceLock<&'static Kernel> = OnceLock::new();
        BEST.get_or_init(|| Self::available()[0])
    }

    /// All kernels that this CPU can run, fastest first; the last one is `portable`.
    #[doc(hidden)]
    #[must_use]
    pub fn available() -> Vec<&'static Self> {
        let mut kernels: Vec<&'static Self> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            kernels.extend(avx512::kernel());
            kernels.extend(avx2::kernel());
        }
        #[cfg(target_arch = "aarch64")]
        kernels.extend(neon::kernel());
        kernels.push(&portable::KERNEL);
        kernels
    }

    /// Dot products of the taking-part rows with the query heads of their KV head:
    /// `scores[t * columns + j * group + i] = query[(heads[j] * group + i)] . row(heads[j], t)`.
    #[allow(unsafe_code, clippy::too_many_arguments)]
    pub(super) fn scores(
        &self,
        plane: &Plane<'_>,
        query: &[f32],
        query_stride: usize,
        group: usize,
        scores: &mut [f32],
        columns: usize,
        scratch: &mut [f32; SCRATCH],
        ahead: &mut Ahead<'_>,
    ) {
        assert!(plane.in_bounds());
        assert!(plane.take <= query_stride && query_stride.is_multiple_of(PAD) && query_stride <= SCRATCH / 8);
        assert!(plane.heads.len() * group <= columns && plane.rows.len() * columns <= scores.len());
        assert!(plane.heads.last().is_none_or(|&head| (usize::from(head) + 1) * group * query_stride <= query.len()));
        // SAFETY: a kernel is only handed out where the CPU has its instructions; all reads of rows, queries and all writes of
        // scores lie within the slices by the assertions above; a block of at most 8 widened rows fits the scratch buffer.
        unsafe {
            (self.scores)(
                plane,
                query.as_ptr(),
                query_stride,
                group,
                scores.as_mut_ptr(),
                columns,
                scratch.as_mut_ptr(),
                ahead,
            );
        }
    }

    /// Dot products of records with query vectors: `out[r * columns + i] = query[i] . record(r)`, where vector `i` meets the
    /// elements of head `i / per_head`.
    #[allow(unsafe_code)]
    pub(super) fn records(&self, run: &RecordRun<'_>, query: &[f32], out: &mut [f32], scratch: &mut [f32; SCRATCH]) {
        assert!(run.record > 0 && run.dtype.bytes() == 2 && run.offset + run.heads * run.dim <= run.record);
        assert!(run.count() * run.columns <= out.len());
        if run.transposed {
            assert!(run.heads == 1 && run.columns.is_multiple_of(PAD) && run.stride() <= SCRATCH / 8);
            assert!(run.dim * run.columns <= query.len());
        } else {
            assert!(run.heads * run.per_head <= run.columns);
            assert!(run.heads * run.per_head * run.stride() <= query.len());
        }
        // SAFETY: a kernel is only handed out where the CPU has its instructions; all reads of records and queries and all
        // writes of scores lie within the slices by the assertions above; a block of at most 8 widened records fits the scratch
        // buffer.
        unsafe { (self.records)(run, query.as_ptr(), out.as_mut_ptr(), scratch.as_mut_ptr()) }
    }

    /// Turns `scores` (`[tokens, columns]`) into weights `exp(score - max)`, updates the running maxima and sums (`[columns]`) and
    /// sets `factor` (`[columns]`) to what the accumulators must be multiplied by (exactly 1 where the maximum did not grow).
    #[allow(unsafe_code)]
    pub(super) fn softmax(
        &self,
        scores: &mut [f32],
        tokens: usize,
        max: &mut [f32],
        sum: &mut [f32],
        factor: &mut [f32],
    ) -> Scores {
        let columns = max.len();
        assert!(columns.is_multiple_of(PAD) && sum.len() == columns && factor.len() == columns);
        assert!(tokens * columns <= scores.len());
        // SAFETY: a kernel is only handed out where the CPU has its instructions; columns are whole vectors and all rows lie
        // within the slices by the assertions above.
        unsafe {
            (self.softmax)(
                scores.as_mut_ptr(),
                tokens,
                columns,
                max.as_mut_ptr(),
                sum.as_mut_ptr(),
                factor.as_mut_ptr(),
            )
        }
    }

    /// Rescales the accumulators of the query heads of the taking-part KV heads and adds the weighted rows:
    /// `acc[(heads[j] * group + i)] = factor[j * group + i] * acc[(heads[j] * group + i)] + sum_t weights[t * columns + j * group + i] * row(heads[j], t)`.
    #[allow(unsafe_code, clippy::too_many_arguments)]
    pub(super) fn values(
        &self,
        plane: &Plane<'_>,
        weights: &[f32],
        columns: usize,
        group: usize,
        factor: &[f32],
        acc: &mut [f32],
        acc_stride: usize,
        scratch: &mut [f32; SCRATCH],
        ahead: Option<&mut Ahead<'_>>,
    ) {
        assert!(plane.in_bounds());
        assert!(plane.take <= acc_stride && acc_stride.is_multiple_of(PAD) && plane.rows.len() <= SCRATCH / (4 * PAD));
        assert!(
            plane.heads.len() * group <= columns
                && plane.rows.len() * columns <= weights.len()
                && columns <= factor.len()
        );
        assert!(plane.heads.last().is_none_or(|&head| (usize::from(head) + 1) * group * acc_stride <= acc.len()));
        // SAFETY: a kernel is only handed out where the CPU has its instructions; all reads of rows and weights and all writes of
        // accumulators (padded to whole vectors) lie within the slices by the assertions above; a tile of at most 128 tokens by 4
        // vectors fits the scratch buffer.
        unsafe {
            (self.values)(
                plane,
                weights.as_ptr(),
                columns,
                group,
                factor.as_ptr(),
                acc.as_mut_ptr(),
                acc_stride,
                scratch.as_mut_ptr(),
                ahead,
            );
        }
    }
}

/// The three passes, and the scores of records, over one [`Simd`](simd::Simd) type, compiled with the named instruction sets.
macro_rules! entry_points {
    ($simd:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        unsafe fn scores(
            plane: &super::Plane<'_>,
            query: *const f32,
            query_stride: usize,
            group: usize,
            scores: *mut f32,
            columns: usize,
            scratch: *mut f32,
            ahead: &mut super::Ahead<'_>,
        ) {
            super::scores::scores::<$simd>(plane, query, query_stride, group, scores, columns, scratch, ahead);
        }

        #[target_feature(enable = $features)]
        unsafe fn records(run: &super::RecordRun<'_>, query: *const f32, out: *mut f32, scratch: *mut f32) {
            super::scores::records::<$simd>(run, query, out, scratch);
        }

        #[target_feature(enable = $features)]
        unsafe fn softmax(
            scores: *mut f32,
            tokens: usize,
            columns: usize,
            max: *mut f32,
            sum: *mut f32,
            factor: *mut f32,
        ) -> super::Scores {
            super::softmax::softmax::<$simd>(scores, tokens, columns, max, sum, factor)
        }

        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        unsafe fn values(
            plane: &super::Plane<'_>,
            weights: *const f32,
            columns: usize,
            group: usize,
            factor: *const f32,
            acc: *mut f32,
            acc_stride: usize,
            scratch: *mut f32,
            ahead: Option<&mut super::Ahead<'_>>,
        ) {
            super::values::values::<$simd>(plane, weights, columns, group, factor, acc, acc_stride, scratch, ahead);
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use entry_points;

/// Name of the kernel in use: `avx512`, `avx2`, `neon` or `portable`.
#[must_use]
pub fn kernel_name() -> &'static str {
    Kernel::best().name()
}
