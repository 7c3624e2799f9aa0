//! Weighted sums over one record of 16-bit elements, for selection: `sum_j weights_j * record_j`.
//!
//! Selection reads the summaries of a layer once per step, so this loop has to run at the speed of memory.
//!
//! Addition order: four registers take the products of consecutive lanes, then their sum is reduced. The elements after
//! the last whole block of four registers go through [`portable`], which has sixteen sums of its own.

use super::convert::{Bf16, F16, HalfElement};
use stratakv_format::DType;

/// Returns `sum_j weights_j * record_j` over elements in the bits of one 16-bit float type. Both slices have the same
/// length.
pub(crate) type DotFn = fn(weights: &[f32], record: &[u16]) -> f32;

/// Returns the fastest instance of this processor for records of `dtype`, which is f16 or else bf16.
pub(crate) fn dot_fn(dtype: DType) -> DotFn {
    #[cfg(target_arch = "x86_64")]
    if let Some(found) = x86::avx512_fn(dtype).or_else(|| x86::avx2_fn(dtype)) {
        return found;
    }
    match dtype {
        DType::F16 => portable::<F16>,
        _ => portable::<Bf16>,
    }
}

/// Adds in 16 independent sums, which the compiler keeps in vector registers if the conversion allows it.
fn portable<E: HalfElement>(weights: &[f32], record: &[u16]) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (weight_runs, weight_rest) = weights.as_chunks::<16>();
    let (runs, rest) = record.as_chunks::<16>();
    for (weights, run) in weight_runs.iter().zip(runs) {
        for i in 0..16 {
            sums[i] += weights[i] * E::widen_bits(run[i]);
        }
    }
    let rest: f32 = weight_rest.iter().zip(rest).map(|(weight, &bits)| weight * E::widen_bits(bits)).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Bf16, DotFn, F16, HalfElement, portable};
    use crate::kernels::dispatch::{FeatureSet, has};
    use crate::kernels::isa::avx2::Avx2;
    use crate::kernels::isa::avx512::Avx512;
    use crate::kernels::vector::Vector;
    use stratakv_format::DType;

    pub(super) fn avx512_fn(dtype: DType) -> Option<DotFn> {
        let found: DotFn = match dtype {
            // SAFETY: it is returned only if the processor has what the function is compiled for.
            DType::F16 => |weights, record| unsafe { avx512::<F16>(weights, record) },
            // SAFETY: as above.
            _ => |weights, record| unsafe { avx512::<Bf16>(weights, record) },
        };
        has(FeatureSet::Avx512).then_some(found)
    }

    pub(super) fn avx2_fn(dtype: DType) -> Option<DotFn> {
        let found: DotFn = match dtype {
            // SAFETY: it is returned only if the processor has what the function is compiled for.
            DType::F16 => |weights, record| unsafe { avx2::<F16>(weights, record) },
            // SAFETY: as above.
            _ => |weights, record| unsafe { avx2::<Bf16>(weights, record) },
        };
        has(FeatureSet::Avx2).then_some(found)
    }

    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    fn avx512<E: HalfElement>(weights: &[f32], record: &[u16]) -> f32 {
        // SAFETY: this function has the instruction set.
        unsafe { dot::<Avx512, E>(weights, record) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2<E: HalfElement>(weights: &[f32], record: &[u16]) -> f32 {
        // SAFETY: this function has the instruction set.
        unsafe { dot::<Avx2, E>(weights, record) }
    }

    /// Adds in four registers.
    ///
    /// # Safety
    /// The processor has the instruction set of `S`.
    #[inline(always)]
    unsafe fn dot<S: Vector, E: HalfElement>(weights: &[f32], record: &[u16]) -> f32 {
        let step = 4 * S::LANES;
        let whole = weights.len().min(record.len()) / step * step;
        // SAFETY: elements `at + i * LANES..` for `i < 4` lie below `whole`, which is within both slices. Loads need no
        // alignment, and the processor has the instruction set.
        let sum = unsafe {
            let mut sums = [S::splat(0.0); 4];
            for at in (0..whole).step_by(step) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let weight = S::load(weights.as_ptr().add(at + i * S::LANES));
                    let value = E::load::<S>(record.as_ptr().add(at + i * S::LANES).cast());
                    *sum = S::fma(weight, value, *sum);
                }
            }
            let [a, b, c, d] = sums;
            S::sum(S::add(S::add(a, b), S::add(c, d)))
        };
        sum + portable::<E>(&weights[whole..], &record[whole..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_instance_agrees_with_the_sum_in_f64(
            pairs in prop::collection::vec((-8.0_f32..8.0, -8.0_f32..8.0), 0..300),
            dtype in prop::sample::select(vec![DType::F16, DType::Bf16]),
        ) {
            let weights: Vec<f32> = pairs.iter().map(|pair| pair.0).collect();
            let f16 = dtype == DType::F16;
            let narrow = |x: f32| if f16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() };
            let widen = |bits| if f16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() };
            let record: Vec<u16> = pairs.iter().map(|pair| narrow(pair.1)).collect();
            let terms: Vec<f64> = weights.iter().zip(&record).map(|(w, &r)| f64::from(*w) * widen(r)).collect();
            let (sum, scale) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
            let mut instances = vec![dot_fn(dtype)];
            instances.push(if f16 { portable::<F16> } else { portable::<Bf16> });
            #[cfg(target_arch = "x86_64")]
            instances.extend(x86::avx512_fn(dtype).into_iter().chain(x86::avx2_fn(dtype)));
            for dot in instances {
                let found = f64::from(dot(&weights, &record));
                prop_assert!((found - sum).abs() <= 1e-5 * scale, "{found} for {sum}");
            }
        }
    }
}
