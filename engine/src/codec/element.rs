//! The element types of planes. The arithmetic has no branches, so that the compiler vectorises it at any width.

/// An element type.
pub(super) trait Element {
    /// The bytes of one element.
    type Word: Copy + Default;

    fn words(bytes: &[u8]) -> &[Self::Word];

    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word];

    fn widen(word: Self::Word) -> f32;

    /// Rounds to the nearest element, ties to even. `x` must not be NaN. The 16-bit types saturate.
    fn narrow(x: f32) -> Self::Word;

    /// Returns the least element that is not below `x`; for f32 the least above `x`.
    ///
    /// `x` must be at least zero and less than half the greatest element.
    fn round_up(x: f32) -> f32;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl Element for F32 {
    type Word = [u8; 4];

    #[inline(always)]
    fn words(bytes: &[u8]) -> &[Self::Word] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word] {
        bytes.as_chunks_mut().0
    }

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
}

impl Element for F16 {
    type Word = [u8; 2];

    #[inline(always)]
    fn words(bytes: &[u8]) -> &[Self::Word] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word] {
        bytes.as_chunks_mut().0
    }

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        // The exponent bias of f32 exceeds that of f16 by 112. Infinity and NaN need this offset twice.
        // A subnormal gets an implicit leading one by the OR, and the subtraction removes its value.
        const MORE: u32 = 112 << 23;
        const LEADING: u32 = 113 << 23;
        let bits = u32::from(u16::from_le_bytes(word));
        let magnitude = (bits & 0x7fff) << 13;
        let normal = magnitude + MORE + if magnitude >= 0x7c00 << 13 { MORE } else { 0 };
        let small = (f32::from_bits(magnitude | LEADING) - f32::from_bits(LEADING)).to_bits();
        f32::from_bits((bits & 0x8000) << 16 | if magnitude < 1 << 23 { small } else { normal })
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        const MOST: f32 = 65504.0;
        const LEAST_NORMAL: u32 = 113 << 23;
        let sign = x.to_bits() >> 16 & 0x8000;
        let x = x.abs();
        let x = if x < MOST { x } else { MOST };
        // Adding a power of two 2^13 times larger than that of `x` rounds away all bits that f16 does not keep.
        let exponent = x.to_bits() & 0xff << 23;
        let exponent = if exponent > LEAST_NORMAL { exponent } else { LEAST_NORMAL };
        let room = exponent + (13 << 23);
        let mantissa = (x + f32::from_bits(room)).to_bits() - room;
        // The leading one of a normal number adds one to the exponent.
        ((sign | (((exponent - LEAST_NORMAL) >> 13) + mantissa)) as u16).to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        let near = Self::narrow(x);
        let above = (u16::from_le_bytes(near) + 1).to_le_bytes();
        let (near, above) = (Self::widen(near), Self::widen(above));
        if near < x { above } else { near }
    }
}

impl Element for Bf16 {
    type Word = [u8; 2];

    #[inline(always)]
    fn words(bytes: &[u8]) -> &[Self::Word] {
        bytes.as_chunks().0
    }

    #[inline(always)]
    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word] {
        bytes.as_chunks_mut().0
    }

    #[inline(always)]
    fn widen(word: Self::Word) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(word)) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self::Word {
        const MOST: f32 = f32::from_bits(0x7f7f << 16);
        let bits = x.clamp(-MOST, MOST).to_bits();
        (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
    }

    #[inline(always)]
    fn round_up(x: f32) -> f32 {
        let near = Self::widen(Self::narrow(x));
        let above = f32::from_bits(near.to_bits() + (1 << 16));
        if near < x { above } else { near }
    }
}
