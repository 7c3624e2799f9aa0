//! Conversions between stored elements (f32, f16, bf16) and f32. No other file widens or narrows.
//!
//! The types [`F32`], [`F16`] and [`Bf16`] stand for the element type of a plane or record. In a register, the
//! operations `load_f16` and `load_bf16` of the [`Vector`] widen.

use super::dispatch::multiversion;
use super::vector::Vector;
use half::f16;

/// An element type as it is stored, little-endian.
///
/// # Safety
/// Callers of `load`: `LANES` elements can be read at the pointer, at any alignment. Callers of `load_part`: `n <
/// LANES` elements. The processor has the instruction set of `S`.
pub(super) trait StoredElement {
    /// Bytes of an element.
    const BYTES: usize;

    /// Loads one vector of elements as f32.
    unsafe fn load<S: Vector>(from: *const u8) -> S::V;

    /// Loads the first `n < LANES` elements as f32, then zeros.
    #[inline(always)]
    unsafe fn load_part<S: Vector>(from: *const u8, n: usize) -> S::V {
        let mut buffer = [0u8; 64];
        // SAFETY: `n` elements can be read. They fit the buffer, which holds 16 elements of up to 4 bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), n * Self::BYTES);
            Self::load::<S>(buffer.as_ptr())
        }
    }
}

/// A 16-bit element type.
pub(super) trait HalfElement: StoredElement {
    /// Returns the value of an element.
    fn widen_bits(bits: u16) -> f32;
}

/// IEEE 754 single precision.
pub(super) struct F32;
/// IEEE 754 half precision.
pub(super) struct F16;
/// The upper half of an f32.
pub(super) struct Bf16;

impl StoredElement for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait. `Vector::load` takes any alignment.
        unsafe { S::load(from.cast()) }
    }
}

impl StoredElement for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { S::load_f16(from) }
    }
}

impl StoredElement for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { S::load_bf16(from) }
    }
}

impl HalfElement for F16 {
    #[inline(always)]
    fn widen_bits(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
}

impl HalfElement for Bf16 {
    #[inline(always)]
    fn widen_bits(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}

/// Widens `dims` elements to f32 and pads them with zeros to whole vectors.
///
/// # Safety
/// `dims` elements can be read at `from`, and whole vectors written at `to`. The processor has the instruction set of
/// `S`.
#[inline(always)]
pub(super) unsafe fn widen<S: Vector, E: StoredElement>(from: *const u8, dims: usize, to: *mut f32) {
    let mut d = 0;
    // SAFETY: `d` stays below `dims`. The caller vouches for the rest.
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

multiversion! {
    /// Narrows to the nearest bf16, ties to even. A NaN stays NaN.
    pub(crate) fn narrow_bf16(from: &[f32], to: &mut [u16]) = narrow_each_bf16;
}

#[inline(always)]
fn narrow_each_bf16(from: &[f32], to: &mut [u16]) {
    for (from, to) in from.iter().zip(to) {
        let bits = from.to_bits();
        *to = if from.is_nan() { 0x7fc0 } else { (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16 };
    }
}

multiversion! {
    /// Widens the bits of bf16 elements.
    pub(crate) fn widen_bf16(from: &[u16], to: &mut [f32]) = widen_each_bf16;
}

#[inline(always)]
fn widen_each_bf16(from: &[u16], to: &mut [f32]) {
    for (from, to) in from.iter().zip(to) {
        *to = f32::from_bits(u32::from(*from) << 16);
    }
}
