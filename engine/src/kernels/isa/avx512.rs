//! AVX-512F: 32 registers of 16 lanes. AVX-512F itself widens f16 and bf16.
// Each function is one line of intrinsics under the contract of `Vector`.
#![allow(unsafe_op_in_unsafe_fn)]

use crate::kernels::vector::Vector;
use std::arch::x86_64::*;

/// A register of sixteen f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Avx512;

// SAFETY: every operation accesses exactly 16 elements, by unaligned loads and stores.
unsafe impl Vector for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        _mm512_storeu_ps(to, v);
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        _mm512_reduce_add_ps(v)
    }
    #[inline(always)]
    unsafe fn sum4(four: [__m512; 4]) -> [f32; 4] {
        let lanes = sum_lanes(four);
        let half = _mm256_add_ps(
            _mm512_castps512_ps256(lanes),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes))),
        );
        let sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
    #[inline(always)]
    unsafe fn sum16([a, b, c, d]: [[__m512; 4]; 4]) -> [[f32; 4]; 4] {
        let fold = |x, y| {
            let moved = _mm512_shuffle_f32x4::<0b01_00_11_10>(x, y);
            _mm512_mask_add_ps(_mm512_add_ps(moved, x), 0xff00, moved, y)
        };
        let (ab, cd) = (fold(sum_lanes(a), sum_lanes(b)), fold(sum_lanes(c), sum_lanes(d)));
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
        let sums = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd));
        let mut out = [[0.0; 4]; 4];
        _mm512_storeu_ps(out.as_mut_ptr().cast(), sums);
        out
    }
    #[inline(always)]
    unsafe fn any_nan(v: __m512) -> bool {
        _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v) != 0
    }
    #[inline(always)]
    unsafe fn add_exponent(v: __m512, n: __m512) -> __m512 {
        let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shifted))
    }
    #[inline(always)]
    unsafe fn zero_below(v: __m512, x: __m512, limit: __m512) -> __m512 {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, limit), v)
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// Returns a register whose 128-bit lanes each hold the sums over that lane of the four operands.
///
/// A masked addition replaces one of two shuffles where the order of the summands is free, because shuffles share a
/// port with FMA.
#[inline(always)]
unsafe fn sum_lanes([a, b, c, d]: [__m512; 4]) -> __m512 {
    let fold = |x, y| {
        let moved = _mm512_shuffle_ps::<0b01_00_11_10>(x, y);
        _mm512_mask_add_ps(_mm512_add_ps(moved, x), 0xcccc, moved, y)
    };
    let (ab, cd) = (fold(a, b), fold(c, d));
    let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
    _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd))
}
