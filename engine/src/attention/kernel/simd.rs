//! The vector operations that the passes are written over ([`Simd`]), and how stored elements are loaded ([`Element`]).
//!
//! The passes are written once and are `inline(always)`: their code is compiled inside the `target_feature` functions of each
//! instruction set.
#![allow(unsafe_code)]

use crate::attention::ahead::{LINE, Stretch};

/// Vector operations of one instruction set.
///
/// # Safety
/// Implementors: `LANES` divides `PAD` and is the number of f32 in `V`; loads and stores touch exactly `LANES` elements from the
/// pointer on, at any alignment. Callers of every method: the CPU has the instruction set.
pub(super) unsafe trait Simd: Copy {
    type V: Copy;
    const LANES: usize;
    /// Whether 32 vector registers exist (else 16): blocks of 16 accumulators, not 8.
    const WIDE: bool;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn load_f16(from: *const u8) -> Self::V;
    unsafe fn load_bf16(from: *const u8) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The sums over the lanes of each.
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4];
    /// The sums over the lanes of each of sixteen.
    #[inline(always)]
    unsafe fn sum16([a, b, c, d]: [[Self::V; 4]; 4]) -> [[f32; 4]; 4] {
        // SAFETY: as the caller says.
        unsafe { [Self::sum4(a), Self::sum4(b), Self::sum4(c), Self::sum4(d)] }
    }
    unsafe fn any_nan(v: Self::V) -> bool;
    /// Adds the integer in the low bits of `n` to the exponent of `v`.
    unsafe fn add_exponent(v: Self::V, n: Self::V) -> Self::V;
    /// `v` where `x >= limit`, else 0.
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V;
    /// A hint to bring the cache line at `at` into the L2 cache; any address is allowed. Into L2 measured faster
    /// than into L1 on Zen 4.
    unsafe fn prefetch(at: *const u8);
}

/// Asks for all lines of a stretch.
#[inline(always)]
pub(super) unsafe fn prefetch<S: Simd>(stretch: &Stretch) {
    let mut offset = 0;
    while offset < stretch.bytes {
        // SAFETY: a hint, allowed for any address; the CPU has the instruction set, as the caller says.
        unsafe { S::prefetch(stretch.start.wrapping_add(offset)) };
        offset += LINE;
    }
}

/// How stored elements become f32.
///
/// # Safety
/// Callers: `LANES` (or `n < LANES`) elements can be read at the pointer, at any alignment.
pub(super) trait Element {
    const BYTES: usize;

    unsafe fn load<S: Simd>(from: *const u8) -> S::V;

    /// The first `n < LANES` elements, then zeros.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const u8, n: usize) -> S::V {
        let mut buffer = [0u8; 64];
        // SAFETY: the caller vouches for `n` elements, fewer than the 16 of up to 4 bytes that the buffer holds.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), n * Self::BYTES);
            Self::load::<S>(buffer.as_ptr())
        }
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says; `Simd::load` takes any alignment.
        unsafe { S::load(from.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::load_f16(from) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::V {
        // SAFETY: as the caller says.
        unsafe { S::load_bf16(from) }
    }
}

/// `dims` elements as f32, padded with zeros to whole vectors.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, E: Element>(from: *const u8, dims: usize, to: *mut f32) {
    let mut d = 0;
    // SAFETY: the caller vouches for `dims` elements at `from` and whole vectors at `to`.
    unsafe {
        while d + S::LANES <= dims {
            S::store(to.add(d), E::load::<S>(from.add(d * E::BYTES)));
            d += S::LANES;
        }
        if d < dims {
            S::store(to.add(d), E::load_part::<S>(from.add(d * E::BYTES), dims - d));
        }
    }
}
