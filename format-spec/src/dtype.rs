//! Element types of keys and values.

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
}
