//! [`Kernel`]: the entry points of attention and of row scores, one table per instruction set, chosen once at run time.
//!
//! Attention works on a run of blocks in three passes over all heads of the run, because the independent work of many
//! heads hides latencies:
//! 1. [`Kernel::scores`] reads the K plane and writes scores `[tokens, columns]`, one column per query head.
//! 2. [`Kernel::softmax`] turns scores into weights. Maxima, exponentials and sums are taken down the columns, so
//!    nothing is reduced across a register.
//! 3. [`Kernel::values`] reads the V plane and adds the weighted rows to the accumulators.
//!
//! [`Kernel::row_scores`] is the fourth entry point, which selection uses.
//!
//! Invariants:
//! - The methods of [`Kernel`] assert every bound that the unsafe code relies on.
//! - [`Kernel::available`] returns only tables whose instruction set the processor has.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::dispatch::{FeatureSet, has};
use super::isa;
use super::plane::{PAD, Plane, SCRATCH};
use super::prefetch::Prefetcher;
use super::row_scores::{RecordRun, row_scores};
use super::scores::scores;
use super::softmax::{SoftmaxOutcome, softmax};
use super::values::values;
use std::sync::OnceLock;

type ScoresFn = unsafe fn(&Plane<'_>, *const f32, usize, usize, *mut f32, usize, *mut f32, &mut Prefetcher<'_>);
type RowScoresFn = unsafe fn(&RecordRun<'_>, *const f32, *mut f32, *mut f32);
type SoftmaxFn = unsafe fn(*mut f32, usize, usize, *mut f32, *mut f32, *mut f32) -> SoftmaxOutcome;
type ValuesFn =
    unsafe fn(&Plane<'_>, *const f32, usize, usize, *const f32, *mut f32, usize, *mut f32, Option<&mut Prefetcher<'_>>);

/// The inner loops of attention for one instruction set.
pub struct Kernel {
    name: &'static str,
    scores: ScoresFn,
    row_scores: RowScoresFn,
    softmax: SoftmaxFn,
    values: ValuesFn,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Defines a module with a [`Kernel`] over one [`Vector`](super::vector::Vector) type. Its functions are compiled with
/// the named extensions, and the generic loops are inlined into them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! kernel {
    ($module:ident, $vector:ty, $name:literal, $features:literal) => {
        mod $module {
            use super::*;

            pub(super) static KERNEL: Kernel = Kernel { name: $name, scores, row_scores, softmax, values };

            #[target_feature(enable = $features)]
            #[allow(clippy::too_many_arguments)]
            unsafe fn scores(
                plane: &Plane<'_>,
                query: *const f32,
                query_stride: usize,
                group: usize,
                scores: *mut f32,
                columns: usize,
                scratch: *mut f32,
                prefetcher: &mut Prefetcher<'_>,
            ) {
                // SAFETY: the caller keeps the contract, and this function has the instruction set.
                unsafe {
                    super::scores::<$vector>(plane, query, query_stride, group, scores, columns, scratch, prefetcher);
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn row_scores(run: &RecordRun<'_>, query: *const f32, out: *mut f32, scratch: *mut f32) {
                // SAFETY: as above.
                unsafe { super::row_scores::<$vector>(run, query, out, scratch) }
            }

            #[target_feature(enable = $features)]
            unsafe fn softmax(
                scores: *mut f32,
                tokens: usize,
                columns: usize,
                max: *mut f32,
                sum: *mut f32,
                factor: *mut f32,
            ) -> SoftmaxOutcome {
                // SAFETY: as above.
                unsafe { super::softmax::<$vector>(scores, tokens, columns, max, sum, factor) }
            }

            #[target_feature(enable = $features)]
            #[allow(clippy::too_many_arguments)]
            unsafe fn values(
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
                // SAFETY: as above.
                unsafe {
                    super::values::<$vector>(
                        plane, weights, columns, group, factor, acc, acc_stride, scratch, prefetcher,
                    );
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(avx512, isa::avx512::Avx512, "avx512", "avx512f,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernel!(avx2, isa::avx2::Avx2, "avx2", "avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
kernel!(neon, isa::neon::Neon, "neon", "neon");

static PORTABLE: Kernel = Kernel {
    name: "portable",
    scores: scores::<isa::portable::Portable>,
    row_scores: row_scores::<isa::portable::Portable>,
    softmax: softmax::<isa::portable::Portable>,
    values: values::<isa::portable::Portable>,
};

impl Kernel {
    /// Returns `avx512`, `avx2`, `neon` or `portable`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the fastest kernel that this processor can run.
    #[must_use]
    pub fn best() -> &'static Self {
        static BEST: OnceLock<&'static Kernel> = OnceLock::new();
        BEST.get_or_init(|| Self::available()[0])
    }

    /// Returns all kernels that this processor can run, the fastest first. The last one is `portable`.
    #[doc(hidden)]
    #[must_use]
    pub fn available() -> Vec<&'static Self> {
        let mut kernels: Vec<&'static Self> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            kernels.extend(has(FeatureSet::Avx512).then_some(&avx512::KERNEL));
            kernels.extend(has(FeatureSet::Avx2).then_some(&avx2::KERNEL));
        }
        #[cfg(target_arch = "aarch64")]
        kernels.extend(has(FeatureSet::Neon).then_some(&neon::KERNEL));
        kernels.push(&PORTABLE);
        kernels
    }

    /// Writes the dot products of rows with the query heads of their KV head:
    /// `scores[t * columns + j * group + i] = query[(heads[j] * group + i)] . row(heads[j], t)`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn scores(
        &self,
        plane: &Plane<'_>,
        query: &[f32],
        query_stride: usize,
        group: usize,
        scores: &mut [f32],
        columns: usize,
        scratch: &mut [f32; SCRATCH],
        prefetcher: &mut Prefetcher<'_>,
    ) {
        assert!(plane.in_bounds());
        assert!(plane.take <= query_stride && query_stride.is_multiple_of(PAD) && query_stride <= SCRATCH / 8);
        assert!(plane.heads.len() * group <= columns && plane.rows.len() * columns <= scores.len());
        assert!(plane.heads.last().is_none_or(|&head| (usize::from(head) + 1) * group * query_stride <= query.len()));
        // SAFETY: a kernel is returned only if the processor has its instructions. By the assertions above, rows,
        // queries and scores contain all elements accessed. A block of at most 8 widened rows fits the scratch
        // buffer.
        unsafe {
            (self.scores)(
                plane,
                query.as_ptr(),
                query_stride,
                group,
                scores.as_mut_ptr(),
                columns,
                scratch.as_mut_ptr(),
                prefetcher,
            );
        }
    }

    /// Writes the dot products of records with query vectors: `out[r * columns + i] = query[i] . record(r)`. Query
    /// vector `i` meets the elements of head `i / per_head`.
    pub(super) fn row_scores(&self, run: &RecordRun<'_>, query: &[f32], out: &mut [f32], scratch: &mut [f32; SCRATCH]) {
        assert!(run.record > 0 && run.offset + run.heads * run.dim <= run.record);
        assert!(run.count() * run.columns <= out.len());
        if run.transposed {
            assert!(run.heads == 1 && run.columns.is_multiple_of(PAD) && run.stride() <= SCRATCH / 8);
            assert!(run.dim * run.columns <= query.len());
        } else {
            assert!(run.heads * run.per_head <= run.columns);
            assert!(run.heads * run.per_head * run.stride() <= query.len());
        }
        // SAFETY: a kernel is returned only if the processor has its instructions. By the assertions above, records,
        // queries and scores contain all elements accessed. A block of at most 8 widened records fits the scratch
        // buffer.
        unsafe { (self.row_scores)(run, query.as_ptr(), out.as_mut_ptr(), scratch.as_mut_ptr()) }
    }

    /// Turns `scores` (`[tokens, columns]`) into weights `exp(score - max)` and updates the running maxima and sums
    /// (`[columns]`). Sets `factor` (`[columns]`) to the number that the accumulators must be multiplied by, which is
    /// exactly 1 where the maximum did not grow.
    pub(crate) fn softmax(
        &self,
        scores: &mut [f32],
        tokens: usize,
        max: &mut [f32],
        sum: &mut [f32],
        factor: &mut [f32],
    ) -> SoftmaxOutcome {
        let columns = max.len();
        assert!(columns.is_multiple_of(PAD) && sum.len() == columns && factor.len() == columns);
        assert!(tokens * columns <= scores.len());
        // SAFETY: a kernel is returned only if the processor has its instructions. By the assertions above, columns are
        // whole vectors and the slices contain all rows.
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

    /// Rescales the accumulators of the query heads whose KV heads take part, and adds the weighted rows: `acc[h] =
    /// factor[c] * acc[h] + sum_t weights[t * columns + c] * row(heads[j], t)`, where `h = heads[j] * group + i` and
    /// `c = j * group + i`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn values(
        &self,
        plane: &Plane<'_>,
        weights: &[f32],
        columns: usize,
        group: usize,
        factor: &[f32],
        acc: &mut [f32],
        acc_stride: usize,
        scratch: &mut [f32; SCRATCH],
        prefetcher: Option<&mut Prefetcher<'_>>,
    ) {
        assert!(plane.in_bounds());
        assert!(plane.take <= acc_stride && acc_stride.is_multiple_of(PAD) && plane.rows.len() <= SCRATCH / (4 * PAD));
        assert!(
            plane.heads.len() * group <= columns
                && plane.rows.len() * columns <= weights.len()
                && columns <= factor.len()
        );
        assert!(plane.heads.last().is_none_or(|&head| (usize::from(head) + 1) * group * acc_stride <= acc.len()));
        // SAFETY: a kernel is returned only if the processor has its instructions. By the assertions above, rows,
        // weights and accumulators (padded to whole vectors) contain all elements accessed. A tile of at most 128
        // tokens by 4 registers fits the scratch buffer.
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
                prefetcher,
            );
        }
    }
}

/// Returns the name of the kernel in use: `avx512`, `avx2`, `neon` or `portable`.
#[must_use]
pub fn kernel_name() -> &'static str {
    Kernel::best().name()
}
