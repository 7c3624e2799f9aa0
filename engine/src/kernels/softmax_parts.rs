//! The softmax of selection: exponentials that are kept in bf16 between the pass that sums them and the pass that
//! weighs them.
//!
//! 1. [`Exponentials`] turns a tile of scores `[tokens, lanes]` into `2^((score - max) * factor)`, and updates the
//!    maxima and sums of the lanes. `max` is the maximum up to this tile.
//! 2. After the last tile the caller knows the final maxima and sums. For each tile it computes the weight of each
//!    lane, which also corrects the exponentials for a maximum that grew later.
//! 3. [`WeightedSums`] adds, for each token, the exponentials of its lanes times the weights.
//!
//! bf16 halves the memory traffic between the passes. On a processor without bf16 instructions the caller computes the
//! exponentials in f32 and narrows them.

/// Turns scores `[tokens, lanes]` into `2^((score - max) * factor)` in the bits of bf16.
///
/// The arguments are the scores, the maxima of the lanes so far, the sums of the exponentials relative to these maxima,
/// the factor and the output. Maxima and sums are updated.
pub(crate) type Exponentials = fn(&[f32], &mut [f32], &mut [f32], f32, &mut [u16]);

/// Writes, for each token of `[tokens, lanes]` in the bits of bf16, the sum over lanes times the weights of the lanes.
pub(crate) type WeightedSums = fn(&[u16], &[f32], &mut [f32]);

/// Returns the two passes, for a multiple of 16 lanes, or none if this processor has no bf16 instructions.
pub(crate) fn softmax_parts() -> Option<(Exponentials, WeightedSums)> {
    #[cfg(target_arch = "x86_64")]
    {
        use super::dispatch::{FeatureSet, has};
        if has(FeatureSet::Avx512Bf16) {
            return Some((
                // SAFETY: the processor has what the function is compiled for.
                |scores, maxima, sums, factor, out| unsafe { x86::exponentials(scores, maxima, sums, factor, out) },
                // SAFETY: as above.
                |parts, weights, out| unsafe { x86::weighted(parts, weights, out) },
            ));
        }
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::kernels::isa::avx512::Avx512;
    use crate::kernels::lane_softmax::LEAST_EXPONENT;
    use crate::kernels::vector::Vector;
    use std::arch::x86_64::*;

    /// Elements between the exponentials in work and those that are prefetched, because they may be in no cache.
    const AHEAD: usize = 8192;

    /// Prefetches the exponentials [`AHEAD`] of these.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn prefetch_ahead(parts: &[u16; 16]) {
        _mm_prefetch::<_MM_HINT_T0>(parts.as_ptr().wrapping_add(AHEAD).cast());
    }

    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    pub(super) fn exponentials(scores: &[f32], maxima: &mut [f32], sums: &mut [f32], factor: f32, out: &mut [u16]) {
        if maxima.len().is_multiple_of(32) {
            exponentials_by::<2>(scores, maxima, sums, factor, out);
        } else {
            exponentials_by::<1>(scores, maxima, sums, factor, out);
        }
    }

    /// [`exponentials`] for `16 * RUNS` lanes at a time.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn exponentials_by<const RUNS: usize>(
        scores: &[f32],
        maxima: &mut [f32],
        sums: &mut [f32],
        factor: f32,
        out: &mut [u16],
    ) {
        let stride = maxima.len() / (16 * RUNS);
        if stride == 0 {
            return;
        }
        let (factor, limit) = (_mm512_set1_ps(factor), _mm512_set1_ps(LEAST_EXPONENT));
        let (scores, out) = (scores.as_chunks::<16>().0.as_chunks::<RUNS>().0, out.as_chunks_mut::<16>().0);
        let out = out.as_chunks_mut::<RUNS>().0;
        let (maxima, sums) = (maxima.as_chunks_mut::<16>().0, sums.as_chunks_mut::<16>().0);
        let each = maxima.as_chunks_mut::<RUNS>().0.iter_mut().zip(sums.as_chunks_mut::<RUNS>().0);
        for (at, (maxima, sums)) in each.enumerate() {
            let mut max: [__m512; RUNS] = std::array::from_fn(|i| load(&maxima[i]));
            // Even and odd tokens have chains of their own, because each maximum waits for the one before it.
            let mut odd = max;
            for pair in scores.chunks(2 * stride) {
                for i in 0..RUNS {
                    max[i] = _mm512_max_ps(max[i], load(&pair[at][i]));
                    if let Some(score) = pair.get(at + stride) {
                        odd[i] = _mm512_max_ps(odd[i], load(&score[i]));
                    }
                }
            }
            let mut sum = max;
            for i in 0..RUNS {
                max[i] = _mm512_max_ps(max[i], odd[i]);
                sum[i] = _mm512_mul_ps(load(&sums[i]), power(load(&maxima[i]), max[i], factor, limit));
            }
            for (scores, out) in scores.chunks_exact(stride).zip(out.chunks_exact_mut(stride)) {
                prefetch_ahead(&out[at][0]);
                for i in 0..RUNS {
                    let part = power(load(&scores[at][i]), max[i], factor, limit);
                    sum[i] = _mm512_add_ps(sum[i], part);
                    let narrow = _mm512_cvtneps_pbh(part);
                    // SAFETY: both types have 32 bytes and allow any value.
                    let narrow = unsafe { std::mem::transmute::<__m256bh, __m256i>(narrow) };
                    // SAFETY: the array has 32 bytes.
                    unsafe { _mm256_storeu_si256(out[at][i].as_mut_ptr().cast(), narrow) };
                }
            }
            for i in 0..RUNS {
                store(&mut maxima[i], max[i]);
                store(&mut sums[i], sum[i]);
            }
        }
    }

    /// Returns `2^((x - max) * factor)`, with the exponent at least `limit`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn power(x: __m512, max: __m512, factor: __m512, limit: __m512) -> __m512 {
        exp2(_mm512_max_ps(_mm512_mul_ps(_mm512_sub_ps(x, max), factor), limit))
    }

    /// Returns `2^x` from the least exponent on, with a relative error of about 8e-5, far below the rounding of bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn exp2(x: __m512) -> __m512 {
        const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        let f = _mm512_reduce_ps::<DOWN>(x);
        let mut p = _mm512_set1_ps(7.802_452e-2);
        for c in [0.226_067_16, 0.695_833_54, 0.999_925_2] {
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
        }
        // The scale is two to the power of the largest integer that is not above x.
        _mm512_scalef_ps(p, x)
    }

    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    pub(super) fn weighted(parts: &[u16], weights: &[f32], out: &mut [f32]) {
        match weights.len() {
            16 => weighted_by::<1>(parts, weights, out),
            32 => weighted_by::<2>(parts, weights, out),
            lanes => {
                let runs = (lanes / 16).max(1);
                for (parts, out) in parts.as_chunks::<16>().0.chunks_exact(runs).zip(out) {
                    let mut sum = _mm512_setzero_ps();
                    for (part, weights) in parts.iter().zip(weights.as_chunks::<16>().0) {
                        sum = _mm512_fmadd_ps(widened(part), load(weights), sum);
                    }
                    *out = _mm512_reduce_add_ps(sum);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn weighted_by<const RUNS: usize>(parts: &[u16], weights: &[f32], out: &mut [f32]) {
        let weights: [__m512; RUNS] = std::array::from_fn(|i| load(&weights.as_chunks::<16>().0[i]));
        let sum = |parts: &[[u16; 16]; RUNS]| {
            prefetch_ahead(&parts[0]);
            let mut sum = _mm512_mul_ps(widened(&parts[0]), weights[0]);
            for i in 1..RUNS {
                sum = _mm512_fmadd_ps(widened(&parts[i]), weights[i], sum);
            }
            sum
        };
        let tokens = parts.as_chunks::<16>().0.as_chunks::<RUNS>().0;
        let ((fours, rest), (out_fours, out_rest)) = (tokens.as_chunks::<4>(), out.as_chunks_mut::<4>());
        for ([a, b, c, d], out) in fours.iter().zip(out_fours) {
            *out = sum4([sum(a), sum(b), sum(c), sum(d)]);
        }
        for (token, out) in rest.iter().zip(out_rest) {
            *out = _mm512_reduce_add_ps(sum(token));
        }
    }

    /// Returns, for each of four registers, the sum of its lanes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn sum4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let sums =
            _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
        let sums = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps::<1>(sums));
        let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let mut out = [0.0; 4];
        // SAFETY: the array has 16 bytes.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn widened(from: &[u16; 16]) -> __m512 {
        // SAFETY: the array has 32 bytes, and the processor has the instruction set.
        unsafe { Avx512::load_bf16(from.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn load(from: &[f32; 16]) -> __m512 {
        // SAFETY: the array has 16 f32.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
    fn store(to: &mut [f32; 16], x: __m512) {
        // SAFETY: the array has 16 f32.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::lane_softmax::LEAST_EXPONENT;
    use half::bf16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn softmax_parts_are_exponentials_and_their_weighted_sums(
            runs in 1_usize..4, tokens in 0_usize..40, factor in 0.0_f32..3.0, seed in any::<u64>(),
        ) {
            let Some((exponentials, weighted)) = softmax_parts() else { return Ok(()) };
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut random = move || 2.0 * rng.f32() - 1.0;
            let lanes = 16 * runs;
            let scores: Vec<f32> = (0..tokens * lanes).map(|_| 20.0 * random()).collect();
            let first: Vec<f32> = (0..lanes).map(|_| 20.0 * random()).collect();
            let (mut maxima, mut sums, mut parts) = (first.clone(), vec![1.0; lanes], vec![7; tokens * lanes]);
            exponentials(&scores, &mut maxima, &mut sums, factor, &mut parts);
            let weights: Vec<f32> = (0..lanes).map(|_| random().abs()).collect();
            let mut out = vec![7.0; tokens];
            weighted(&parts, &weights, &mut out);
            let value = |at: usize| f64::from(bf16::from_bits(parts[at]).to_f32());
            for lane in 0..lanes {
                let column = (0..tokens).map(|token| scores[token * lanes + lane]);
                let max = column.clone().fold(first[lane], f32::max);
                prop_assert_eq!(maxima[lane], max);
                let power = |x: f32| (f64::from(x - max) * f64::from(factor)).max(LEAST_EXPONENT.into()).exp2();
                let sum = power(first[lane]) + column.clone().map(power).sum::<f64>();
                prop_assert!((f64::from(sums[lane]) / sum - 1.0).abs() < 1e-4, "{} {sum}", sums[lane]);
                for (token, score) in column.enumerate() {
                    let (found, expected) = (value(token * lanes + lane), power(score));
                    // The tolerance is half a last bit of bf16 plus the error before rounding.
                    prop_assert!((found / expected - 1.0).abs() < 1.0 / 256.0 + 1e-4, "{found} {expected}");
                }
            }
            for (token, found) in out.iter().enumerate() {
                let sum: f64 = (0..lanes).map(|lane| value(token * lanes + lane) * f64::from(weights[lane])).sum();
                prop_assert!((f64::from(*found) - sum).abs() <= 1e-5 * sum, "{found} {sum}");
            }
        }
    }
}
