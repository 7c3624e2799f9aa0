//! Conversions between stored elements (f32, f16, bf16) and f32. No other file widens or narrows.
//!
//! Three forms exist, each for its callers:
//! 1. Slices: [`widen`], [`narrow`], [`widen_f16`] and the like convert whole rows.
//! 2. Registers: [`StoredElement::load`] widens one vector. The instructions are in [`isa`](super::isa).
//! 3. Single elements: [`f16_to_f32`], [`f32_to_f16`] and the like, and the branch-free [`StoredElement::widen`] and
//!    [`StoredElement::narrow`], which the compiler turns into vectors inside a loop.
//!
//! Invariants:
//! - Every form gives the same bits for every number. The branch-free forms may give other bits for a NaN.
//! - Narrowing rounds to the nearest, ties to even.

use super::dispatch::multiversion;
use super::vector::Vector;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use stratakv_format::DType;

/// The largest finite f16.
const F16_MAX: f32 = 65504.0;
/// The largest finite bf16.
const BF16_MAX: f32 = f32::from_bits(0x7f7f << 16);

/// An element type as it is stored, little-endian.
///
/// # Safety
/// Callers of `load`: `LANES` elements can be read at the pointer, at any alignment. Callers of `load_part`: `n <
/// LANES` elements. The processor has the instruction set of `S`.
pub(super) trait StoredElement {
    /// The bytes of an element.
    type Word: Copy + Default;
    /// The number of bytes of an element.
    const BYTES: usize;

    /// Returns the elements of a plane.
    fn words(bytes: &[u8]) -> &[Self::Word];

    /// Returns the elements of a plane, to be written.
    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word];

    /// Returns the value of an element, without branches.
    fn widen(word: Self::Word) -> f32;

    /// Returns the nearest element, without branches. `x` is not NaN. The 16-bit types saturate.
    fn narrow(x: f32) -> Self::Word;

    /// Returns the least element that is not below `x`, for f32 the least above it. `x` is not negative, and less than
    /// half the largest element.
    fn round_up(x: f32) -> f32;

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

/// The views of a plane as elements of this many bytes.
macro_rules! words_of_bytes {
    ($bytes:literal) => {
        type Word = [u8; $bytes];
        const BYTES: usize = $bytes;

        #[inline(always)]
        fn words(bytes: &[u8]) -> &[Self::Word] {
            bytes.as_chunks().0
        }

        #[inline(always)]
        fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word] {
            bytes.as_chunks_mut().0
        }
    };
}

/// IEEE 754 single precision.
pub(super) struct F32;
/// IEEE 754 half precision.
pub(super) struct F16;
/// The upper half of an f32.
pub(super) struct Bf16;
/// A signed byte.
pub(super) struct Int8;

impl StoredElement for F32 {
    words_of_bytes!(4);

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        f32::from_le_bytes(word)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        x.to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        f32::from_bits(x.to_bits() + 1)
    }

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait. `Vector::load` takes any alignment.
        unsafe { S::load(from.cast()) }
    }
}

impl StoredElement for F16 {
    words_of_bytes!(2);

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        // The exponent of an f32 is larger by 112 than that of an f16, and by 112 more for infinities and NaN.
        const MORE: u32 = 112 << 23;
        // A number without a leading one is given one, and the subtraction below removes it.
        const LEADING: u32 = 113 << 23;
        let bits = u32::from(u16::from_le_bytes(word));
        let magnitude = (bits & 0x7fff) << 13;
        let normal = magnitude + MORE + if magnitude >= 0x7c00 << 13 { MORE } else { 0 };
        let small = (f32::from_bits(magnitude | LEADING) - f32::from_bits(LEADING)).to_bits();
        f32::from_bits((bits & 0x8000) << 16 | if magnitude < 1 << 23 { small } else { normal })
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        const LEAST_NORMAL: u32 = 113 << 23;
        let sign = x.to_bits() >> 16 & 0x8000;
        let x = x.abs();
        let x = if x < F16_MAX { x } else { F16_MAX };
        // A number 2^13 times the power of two below x is added. The sum has room for the bits of f16 alone.
        let exponent = x.to_bits() & 0xff << 23;
        let exponent = if exponent > LEAST_NORMAL { exponent } else { LEAST_NORMAL };
        let room = exponent + (13 << 23);
        let mantissa = (x + f32::from_bits(room)).to_bits() - room;
        // The leading one of the mantissa, if there is one, adds one to the exponent.
        ((sign | (((exponent - LEAST_NORMAL) >> 13) + mantissa)) as u16).to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        let near = Self::narrow(x);
        let above = (u16::from_le_bytes(near) + 1).to_le_bytes();
        let (near, above) = (Self::widen(near), Self::widen(above));
        if near < x { above } else { near }
    }

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { S::load_f16(from) }
    }
}

impl StoredElement for Bf16 {
    words_of_bytes!(2);

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        Self::widen_bits(u16::from_le_bytes(word))
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        let bits = x.clamp(-BF16_MAX, BF16_MAX).to_bits();
        (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        let near = Self::widen(Self::narrow(x));
        let above = f32::from_bits(near.to_bits() + (1 << 16));
        if near < x { above } else { near }
    }

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { S::load_bf16(from) }
    }
}

impl StoredElement for Int8 {
    words_of_bytes!(1);

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        f32::from(i8::from_le_bytes(word))
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        // Half of the next number is added and taken away, so that the sum has room for integers alone.
        const INTEGERS: f32 = 12_582_912.0;
        let whole = (x.clamp(-128.0, 127.0) + INTEGERS) - INTEGERS;
        (whole as i8).to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        x.ceil()
    }

    #[inline(always)]
    unsafe fn load<S: Vector>(from: *const u8) -> S::V {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe { S::load_i8(from) }
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
pub(super) unsafe fn widen_padded<S: Vector, E: StoredElement>(from: *const u8, dims: usize, to: *mut f32) {
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

/// Returns the value of the bits of an f16.
#[inline]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    F16::widen_bits(bits)
}

/// Returns the bits of the nearest f16. Numbers beyond its range become infinite.
#[inline]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

/// Returns the bits of the nearest finite f16. `x` is not NaN.
#[inline]
pub(crate) fn f32_to_finite_f16(x: f32) -> u16 {
    f32_to_f16(x.clamp(-F16_MAX, F16_MAX))
}

/// Returns whether the little-endian bits of an f16 are a finite number.
#[inline]
pub(crate) fn is_finite_f16(bytes: [u8; 2]) -> bool {
    f16::from_le_bytes(bytes).is_finite()
}

/// Returns the bits of the largest bf16 that is not above `x`. For `x` below every finite bf16 it is the lowest
/// finite one, although that is above `x`.
#[inline(always)]
pub(super) fn f32_to_bf16_below(x: f32) -> u16 {
    let bits = x.to_bits();
    let cut = (bits >> 16) as u16;
    if x < 0.0 && bits & 0xffff != 0 { (cut + 1).min(bf16::MIN.to_bits()) } else { cut }
}

/// Returns the largest finite number of a type.
#[must_use]
pub(crate) fn largest_finite(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => F16_MAX,
        DType::Bf16 => BF16_MAX,
        DType::F32 => f32::MAX,
    }
}

/// Returns the relative spacing of the numbers of a type, and its smallest number or a bound of it.
pub(crate) fn precision(dtype: DType) -> (f32, f32) {
    match dtype {
        DType::F32 => (f32::EPSILON, f32::MIN_POSITIVE),
        DType::F16 => (f16::EPSILON.to_f32(), 6e-8),
        DType::Bf16 => (bf16::EPSILON.to_f32(), f32::MIN_POSITIVE),
    }
}

/// Returns whether `x` stays finite when it is narrowed to a type.
#[inline(always)]
pub(super) fn stays_finite(x: f32, dtype: DType) -> bool {
    // The least number that rounds to infinity is half a step above the largest finite one.
    let limit = match dtype {
        DType::F32 => return x.is_finite(),
        DType::F16 => 65520.0,
        DType::Bf16 => f32::from_bits(0x7f7f_8000),
    };
    x.abs() < limit
}

/// Widens the little-endian elements of a row.
pub(crate) fn widen(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(halves) if halves.len() <= out.len() => halves.convert_to_f32_slice(&mut out[..halves.len()]),
            _ => {
                for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *out = f16::from_le_bytes(*b).to_f32();
                }
            }
        },
        DType::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = bf16::from_le_bytes(*b).to_f32();
            }
        }
    }
}

/// Narrows a row to little-endian elements of a type.
pub(crate) fn narrow(row: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(row)),
        DType::F16 => match bytemuck::try_cast_slice_mut::<u8, f16>(out) {
            Ok(out) => out.convert_from_f32_slice(row),
            Err(_) => {
                for (out, &x) in out.chunks_exact_mut(2).zip(row) {
                    out.copy_from_slice(&f16::from_f32(x).to_le_bytes());
                }
            }
        },
        DType::Bf16 => match bytemuck::try_cast_slice_mut::<u8, bf16>(out) {
            Ok(out) => out.convert_from_f32_slice(row),
            Err(_) => {
                for (out, &x) in out.chunks_exact_mut(2).zip(row) {
                    out.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            }
        },
    }
}

/// Narrows to the bits of the nearest f16. Both slices have the same length.
pub(crate) fn narrow_f16(from: &[f32], to: &mut [u16]) {
    bytemuck::cast_slice_mut::<u16, f16>(to).convert_from_f32_slice(from);
}

/// Widens the bits of f16 elements. Both slices have the same length.
pub(crate) fn widen_f16(from: &[u16], to: &mut [f32]) {
    bytemuck::cast_slice::<u16, f16>(from).convert_to_f32_slice(to);
}

multiversion! {
    /// Narrows to the bits of the nearest bf16. A NaN stays NaN.
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
        *to = Bf16::widen_bits(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_free_conversions_equal_those_of_half() {
        for bits in 0..=u16::MAX {
            let (x, word) = (f16::from_bits(bits).to_f32(), bits.to_le_bytes());
            assert!(x.is_nan() || F16::widen(word).to_bits() == x.to_bits(), "{bits:#x}");
            assert_eq!(Bf16::widen(word).to_bits(), u32::from(bits) << 16);
        }
        for bits in (0..=u32::MAX).step_by(997) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            let most = f16::MAX.to_f32();
            assert_eq!(F16::narrow(x), f16::from_f32(x.clamp(-most, most)).to_le_bytes(), "{bits:#x}");
            let most = bf16::MAX.to_f32();
            assert_eq!(Bf16::narrow(x), bf16::from_f32(x.clamp(-most, most)).to_le_bytes(), "{bits:#x}");
        }
    }

    #[test]
    fn signed_bytes_round_to_the_nearest() {
        for byte in i8::MIN..=i8::MAX {
            let x = Int8::widen(byte.to_le_bytes());
            assert_eq!(
                (x, Int8::narrow(x), Int8::narrow(x + 0.4)),
                (f32::from(byte), byte.to_le_bytes(), byte.to_le_bytes())
            );
        }
        let narrow = [0.6, -2.5, 1e9, -1e9].map(|x| i8::from_le_bytes(Int8::narrow(x)));
        assert_eq!((narrow, Int8::round_up(3.2)), ([1, -2, 127, -128], 4.0));
    }

    #[test]
    fn largest_finite_numbers_are_those_of_half() {
        assert_eq!(largest_finite(DType::F16), f16::MAX.to_f32());
        assert_eq!(largest_finite(DType::Bf16), bf16::MAX.to_f32());
    }

    #[test]
    fn limits_are_where_rounding_reaches_infinity() {
        for (dtype, finite) in [(DType::F16, 65519.996_f32), (DType::Bf16, f32::from_bits(0x7f7f_7fff))] {
            assert!(stays_finite(finite, dtype) && !stays_finite(f32::from_bits(finite.to_bits() + 1), dtype));
        }
        assert!(f16::from_f32(65519.996).is_finite() && !f16::from_f32(65520.0).is_finite());
        assert!(bf16::from_f32(f32::from_bits(0x7f7f_7fff)).is_finite());
        assert!(!bf16::from_f32(f32::from_bits(0x7f7f_8000)).is_finite());
    }
}
