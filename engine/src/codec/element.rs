//! Elements of planes: arithmetic without branches, which compilers turn into vectors of any width.

/// A dtype.
pub(super) trait Element {
    /// The bytes of a number.
    type Word: Copy + Default;

    fn words(bytes: &[u8]) -> &[Self::Word];

    fn words_mut(bytes: &mut [u8]) -> &mut [Self::Word];

    fn widen(word: Self::Word) -> f32;

    /// To the nearest, ties to even. `x` is no NaN; the 16-bit types saturate.
    fn narrow(x: f32) -> Self::Word;

    /// The least number that is not below `x`, which is positive or zero and less than half the greatest; for f32 the least above.
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
        // An f32's exponent counts from 112 below an f16's; once more that for what is not finite. What has no leading one is
        // given one, and loses it by subtraction.
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
        // Beside a number 2^13 times as large as the power of two below, only the bits that f16 keeps have room.
        let exponent = x.to_bits() & 0xff << 23;
        let exponent = if exponent > LEAST_NORMAL { exponent } else { LEAST_NORMAL };
        let room = exponent + (13 << 23);
        let mantissa = (x + f32::from_bits(room)).to_bits() - room;
        // The leading one, where there is one, makes the exponent one more.
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
