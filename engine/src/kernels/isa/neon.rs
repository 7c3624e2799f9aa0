//! NEON (Advanced SIMD of AArch64): 32 registers of 4 lanes.
// Each function is one line of intrinsics under the contract of `Vector`.
#![allow(unsafe_op_in_unsafe_fn)]

use crate::kernels::vector::Vector;
use std::arch::aarch64::*;
use std::arch::asm;

/// A register of four f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Neon;

// SAFETY: every operation accesses exactly 4 elements. The byte forms of vld1 and vst1 take any alignment.
unsafe impl Vector for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        vreinterpretq_f32_u8(vld1q_u8(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> float32x4_t {
        let wide: float32x4_t;
        let narrow = vld1_u8(from);
        // FCVTL is part of the base of Advanced SIMD, but its intrinsic is newer than the oldest supported compiler.
        asm!(
            "fcvtl {wide:v}.4s, {narrow:v}.4h",
            wide = lateout(vreg) wide,
            narrow = in(vreg) narrow,
            options(pure, nomem, nostack, preserves_flags)
        );
        wide
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> float32x4_t {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(from))))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> float32x4_t {
        let four = vreinterpret_s8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: float32x4_t) {
        vst1q_u8(to.cast(), vreinterpretq_u8_f32(v));
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vsubq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmaxq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn sum(v: float32x4_t) -> f32 {
        vaddvq_f32(v)
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
        let mut out = [0.0; 4];
        vst1q_f32(out.as_mut_ptr(), sums);
        out
    }
    #[inline(always)]
    unsafe fn any_nan(v: float32x4_t) -> bool {
        vminvq_u32(vceqq_f32(v, v)) == 0
    }
    #[inline(always)]
    unsafe fn add_exponent(v: float32x4_t, n: float32x4_t) -> float32x4_t {
        let shifted = vshlq_n_u32::<23>(vreinterpretq_u32_f32(n));
        vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(v), shifted))
    }
    #[inline(always)]
    unsafe fn zero_below(v: float32x4_t, x: float32x4_t, limit: float32x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, limit), vreinterpretq_u32_f32(v)))
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly));
    }
}
