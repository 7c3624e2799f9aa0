//! Weighted sums over records of 16-bit elements, for selection: `sum_j weights_j * record_j`, one instance per instruction
//! set. A layer's summaries are read once per step, so this should run at the speed of memory.

use half::{bf16, f16};
use stratakv_format::DType;

/// `sum_j weights_j * record_j` over elements in the bits of one 16-bit float type; both slices have the same length.
pub(crate) type DotFn = fn(weights: &[f32], record: &[u16]) -> f32;

/// The fastest instance of this CPU for records of `dtype`: f16, otherwise bf16.
pub(crate) fn dot_fn(dtype: DType) -> DotFn {
    #[cfg(target_arch = "x86_64")]
    if let Some(found) = x86::dot_fn(dtype) {
        return found;
    }
    match dtype {
        DType::F16 => |weights, record| portable(weights, record, |bits| f16::from_bits(bits).to_f32()),
        _ => |weights, record| portable(weights, record, |bits| bf16::from_bits(bits).to_f32()),
    }
}

/// In 16 independent sums, which the compiler keeps in vector registers where the conversion allows it.
fn portable(weights: &[f32], record: &[u16], widen: impl Fn(u16) -> f32) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (weight_runs, weight_rest) = weights.as_chunks::<16>();
    let (runs, rest) = record.as_chunks::<16>();
    for (weights, run) in weight_runs.iter().zip(runs) {
        for i in 0..16 {
            sums[i] += weights[i] * widen(run[i]);
        }
    }
    let rest: f32 = weight_rest.iter().zip(rest).map(|(weight, &bits)| weight * widen(bits)).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{DotFn, portable};
    use half::{bf16, f16};
    use std::arch::x86_64::*;
    use stratakv_format::DType;

    pub(super) fn dot_fn(dtype: DType) -> Option<DotFn> {
        let f16 = dtype == DType::F16;
        let narrow =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        match (narrow && is_x86_feature_detected!("avx512f"), narrow, f16) {
            // SAFETY: the CPU has what the function is compiled for.
            (true, _, true) => Some(|weights, record| unsafe { avx512::<true>(weights, record) }),
            // SAFETY: as above.
            (true, _, false) => Some(|weights, record| unsafe { avx512::<false>(weights, record) }),
            (_, true, _) => Some(avx2_fn(f16)),
            _ => None,
        }
    }

    /// Only for a CPU with AVX2, FMA and F16C.
    fn avx2_fn(f16: bool) -> DotFn {
        match f16 {
            // SAFETY: the callers have made sure of it.
            true => |weights, record| unsafe { avx2::<true>(weights, record) },
            // SAFETY: as above.
            false => |weights, record| unsafe { avx2::<false>(weights, record) },
        }
    }

    fn widen<const F16: bool>(bits: u16) -> f32 {
        if F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
    }

    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    fn avx512<const F16: bool>(weights: &[f32], record: &[u16]) -> f32 {
        let mut sums = [_mm512_setzero_ps(); 4];
        let (weight_runs, weight_rest) = weights.as_chunks::<64>();
        let (runs, rest) = record.as_chunks::<64>();
        for (weights, run) in weight_runs.iter().zip(runs) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 16 elements from 16 * i on, i < 4, lie inside the runs of 64; the loads need no alignment.
                let (weight, bits) = unsafe {
                    let bits = _mm256_loadu_si256(run.as_ptr().add(16 * i).cast());
                    (_mm512_loadu_ps(weights.as_ptr().add(16 * i)), bits)
                };
                let value = match F16 {
                    true => _mm512_cvtph_ps(bits),
                    false => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))),
                };
                *sum = _mm512_fmadd_ps(weight, value, *sum);
            }
        }
        let [a, b, c, d] = sums;
        let sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
        sum + portable(weight_rest, rest, widen::<F16>)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2<const F16: bool>(weights: &[f32], record: &[u16]) -> f32 {
        let mut sums = [_mm256_setzero_ps(); 4];
        let (weight_runs, weight_rest) = weights.as_chunks::<32>();
        let (runs, rest) = record.as_chunks::<32>();
        for (weights, run) in weight_runs.iter().zip(runs) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 8 elements from 8 * i on, i < 4, lie inside the runs of 32; the loads need no alignment.
                let (weight, bits) = unsafe {
                    let bits = _mm_loadu_si128(run.as_ptr().add(8 * i).cast());
                    (_mm256_loadu_ps(weights.as_ptr().add(8 * i)), bits)
                };
                let value = match F16 {
                    true => _mm256_cvtph_ps(bits),
                    false => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits))),
                };
                *sum = _mm256_fmadd_ps(weight, value, *sum);
            }
        }
        let [a, b, c, d] = sums;
        let mut lanes = [0.0_f32; 8];
        // SAFETY: the array holds the 8 elements stored.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d))) };
        lanes.iter().sum::<f32>() + portable(weight_rest, rest, widen::<F16>)
    }

    #[cfg(test)]
    pub(super) fn every_instance(dtype: DType) -> Vec<DotFn> {
        let mut found: Vec<DotFn> = dot_fn(dtype).into_iter().collect();
        if !found.is_empty() {
            // An instance was found, and each needs at least AVX2, FMA and F16C.
            found.push(avx2_fn(dtype == DType::F16));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_instance_agrees_with_the_sum_in_f64(
            pairs in prop::collection::vec((-8.0_f32..8.0, -8.0_f32..8.0), 0..300),
            dtype in prop::sample::select(vec![DType::F16, DType::Bf16]),
        ) {
            let weights: Vec<f32> = pairs.iter().map(|pair| pair.0).collect();
            let narrow = |x: f32| if dtype == DType::F16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() };
            let widen = |bits| if dtype == DType::F16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() };
            let record: Vec<u16> = pairs.iter().map(|pair| narrow(pair.1)).collect();
            let terms: Vec<f64> = weights.iter().zip(&record).map(|(w, &r)| f64::from(*w) * widen(r)).collect();
            let (sum, scale) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
            let mut instances = vec![dot_fn(dtype)];
            instances.push(match dtype {
                DType::F16 => |w, r| portable(w, r, |bits| f16::from_bits(bits).to_f32()),
                _ => |w, r| portable(w, r, |bits| bf16::from_bits(bits).to_f32()),
            });
            #[cfg(target_arch = "x86_64")]
            instances.extend(x86::every_instance(dtype));
            for dot in instances {
                let found = f64::from(dot(&weights, &record));
                prop_assert!((found - sum).abs() <= 1e-5 * scale, "{found} for {sum}");
            }
        }
    }
}
