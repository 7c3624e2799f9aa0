//! AVX2 with FMA and F16C: 16 registers of 8 lanes.
// Each function is one line of intrinsics under the contract of `Vector`.
#![allow(unsafe_op_in_unsafe_fn)]

use crate::kernels::vector::Vector;
use std::arch::x86_64::*;

/// A register of eight f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Avx2;

// SAFETY: every operation accesses exactly 8 elements, by unaligned loads and stores.
unsafe impl Vector for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        _mm256_storeu_ps(to, v);
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        let mut lanes = [0.0_f32; 8];
        _mm256_storeu_ps(lanes.as_mut_ptr(), v);
        lanes.iter().sum()
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
    #[inline(always)]
    unsafe fn any_nan(v: __m256) -> bool {
        _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)) != 0
    }
    #[inline(always)]
    unsafe fn add_exponent(v: __m256, n: __m256) -> __m256 {
        let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shifted))
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m256, x: __m256, limit: __m256) -> __m256 {
        _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x, limit), v)
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}
