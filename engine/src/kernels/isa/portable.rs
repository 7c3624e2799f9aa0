//! Plain Rust on arrays of eight lanes: the fallback, and the reference that the other instruction sets are tested
//! against.
// Each function is one line under the contract of `Vector`.
#![allow(unsafe_op_in_unsafe_fn)]

use crate::kernels::convert::{Bf16, F16, HalfElement};
use crate::kernels::vector::Vector;

const LANES: usize = 8;

/// An array of eight f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Portable;

/// Returns an array whose lane `i` is `f(i)`.
#[inline(always)]
fn lanes(mut f: impl FnMut(usize) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (i, lane) in out.iter_mut().enumerate() {
        *lane = f(i);
    }
    out
}

// SAFETY: every operation accesses exactly 8 elements, by unaligned reads and writes.
unsafe impl Vector for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        let bits: [[u8; 4]; LANES] = from.cast::<[[u8; 4]; LANES]>().read_unaligned();
        lanes(|i| f32::from_le_bytes(bits[i]))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::V {
        let bits: [[u8; 2]; LANES] = from.cast::<[[u8; 2]; LANES]>().read_unaligned();
        lanes(|i| F16::widen_bits(u16::from_le_bytes(bits[i])))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::V {
        let bits: [[u8; 2]; LANES] = from.cast::<[[u8; 2]; LANES]>().read_unaligned();
        lanes(|i| Bf16::widen_bits(u16::from_le_bytes(bits[i])))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::V {
        let bytes: [i8; LANES] = from.cast::<[i8; LANES]>().read_unaligned();
        lanes(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        to.cast::<Self::V>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        v.iter().sum()
    }
    #[inline(always)]
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        for (sum, v) in out.iter_mut().zip(v) {
            *sum = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
        }
        out
    }
    #[inline(always)]
    unsafe fn any_nan(v: Self::V) -> bool {
        v.iter().any(|x| x.is_nan())
    }
    #[inline(always)]
    unsafe fn add_exponent(v: Self::V, n: Self::V) -> Self::V {
        lanes(|i| f32::from_bits(v[i].to_bits().wrapping_add(n[i].to_bits() << 23)))
    }
    #[inline(always)]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        lanes(|i| if x[i] >= limit[i] { v[i] } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
}
