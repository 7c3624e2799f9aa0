//! Element types of keys and values.

use crate::codec::ENCODED_ELEMENT_MAX;

/// The element type of the keys and values of a layout, little-endian on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 3,
}

impl DType {
    /// Returns the bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the dtype with this code on disk, or `None` for an unknown code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F16),
            3 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Returns the code on disk.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the customary lower-case name: `f32`, `f16` or `bf16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the offset of the first element that is not finite, or `None`.
    #[must_use]
    pub fn first_not_finite(self, elements: &[u8]) -> Option<usize> {
        // The exponent of such an element is all ones. It is in the upper two bytes.
        let exponent = match self {
            Self::F32 | Self::Bf16 => 0x7f80,
            Self::F16 => 0x7c00,
        };
        let bytes = self.bytes();
        let is_not_finite = |element: &[u8]| match element {
            [.., low, high] => u16::from_le_bytes([*low, *high]) & exponent == exponent,
            _ => true,
        };
        elements.chunks_exact(bytes).position(is_not_finite).map(|nth| nth * bytes)
    }

    /// Returns the offset of the first element that is not finite or above [`ENCODED_ELEMENT_MAX`] in magnitude, or
    /// `None`.
    #[must_use]
    pub fn first_not_encodable(self, elements: &[u8]) -> Option<usize> {
        // The bits of magnitudes have the order of the magnitudes.
        let limit = ENCODED_ELEMENT_MAX.to_bits();
        match self {
            // Every finite f16 is below the limit.
            Self::F16 => self.first_not_finite(elements),
            Self::F32 => {
                let words = elements.as_chunks::<4>().0;
                words.iter().position(|word| u32::from_le_bytes(*word) & 0x7fff_ffff > limit).map(|nth| nth * 4)
            }
            Self::Bf16 => {
                let words = elements.as_chunks::<2>().0;
                let is_above = |word: &[u8; 2]| u32::from(u16::from_le_bytes(*word) & 0x7fff) << 16 > limit;
                words.iter().position(is_above).map(|nth| nth * 2)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_encodable_up_to_the_limit() {
        let limit = ENCODED_ELEMENT_MAX;
        assert_eq!(limit, 2_f32.powi(126));
        for (x, is_encodable) in
            [(limit, true), (-limit, true), (limit.next_up(), false), (-f32::MAX, false), (f32::NAN, false)]
        {
            let elements = [0.5, x].map(f32::to_le_bytes).concat();
            assert_eq!(DType::F32.first_not_encodable(&elements), (!is_encodable).then_some(4), "{x}");
            assert_eq!(DType::F32.first_not_finite(&elements), x.is_nan().then_some(4), "{x}");
        }
        for (bits, at) in [(0x7e80_u16, None), (0xfe80, None), (0x7e81, Some(2)), (0xff7f, Some(2)), (0x7f80, Some(2))]
        {
            let elements = [0, bits].map(u16::to_le_bytes).concat();
            assert_eq!(DType::Bf16.first_not_encodable(&elements), at, "{bits:#x}");
        }
        for (bits, at) in [(0x7bff_u16, None), (0x7c00, Some(2)), (0xfe00, Some(2))] {
            let elements = [0, bits].map(u16::to_le_bytes).concat();
            assert_eq!(DType::F16.first_not_encodable(&elements), at, "{bits:#x}");
        }
    }
}
