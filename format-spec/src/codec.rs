//! Codecs of planes: how the K and V planes of blocks are stored, and how long that is.

use crate::dtype::DType;

/// Codec: the elements as they are.
pub const CODEC_RAW: u8 = 0;
/// Codec: 256 levels per group of elements.
pub const CODEC_INT8: u8 = 1;
/// Codec: 16 levels per group of elements.
pub const CODEC_INT4: u8 = 2;

/// Elements of a token's value that share a range.
pub const VALUE_RUN: usize = 32;

/// How a plane is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PlaneCodec {
    /// As it is.
    #[default]
    Raw = CODEC_RAW,
    /// 256 levels in even steps over the range of a group: a byte per element.
    Int8 = CODEC_INT8,
    /// 16 levels: half a byte per element.
    Int4 = CODEC_INT4,
}

/// A plane `[heads, tokens, dims]` of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneShape {
    /// 0 = K, 1 = V.
    pub plane: usize,
    /// KV heads.
    pub heads: usize,
    /// Tokens of the group.
    pub tokens: usize,
    /// Elements of a head's key or value.
    pub dims: usize,
    /// Element type.
    pub dtype: DType,
}

impl PlaneShape {
    /// Bytes of the plane as it is.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.heads * self.tokens * self.dims * self.dtype.bytes()
    }

    /// Ranges of a head: one per channel for keys, one per token and run of [`VALUE_RUN`] channels for values.
    #[must_use]
    pub const fn ranges(&self) -> usize {
        if self.plane == 0 { self.dims } else { self.tokens * self.dims.div_ceil(VALUE_RUN) }
    }
}

impl PlaneCodec {
    /// The codec with this code on disk, or `None` for an unknown one.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            CODEC_RAW => Some(Self::Raw),
            CODEC_INT8 => Some(Self::Int8),
            CODEC_INT4 => Some(Self::Int4),
            _ => None,
        }
    }

    /// The code on disk.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes of the levels of a row.
    const fn row_bytes(self, shape: &PlaneShape) -> usize {
        match self {
            Self::Raw => shape.dims * shape.dtype.bytes(),
            Self::Int8 => shape.dims,
            Self::Int4 => shape.dims.div_ceil(2),
        }
    }

    /// Bytes of the parameters in front of a head's rows: the least values of its ranges, then their steps.
    #[must_use]
    pub const fn parameter_bytes(self, shape: &PlaneShape) -> usize {
        match self {
            Self::Raw => 0,
            Self::Int8 | Self::Int4 => 2 * shape.ranges() * shape.dtype.bytes(),
        }
    }

    /// Bytes of a head.
    #[must_use]
    pub const fn head_bytes(self, shape: &PlaneShape) -> usize {
        self.parameter_bytes(shape) + shape.tokens * self.row_bytes(shape)
    }

    /// Bytes of the plane as it is stored.
    #[must_use]
    pub const fn bytes(self, shape: &PlaneShape) -> usize {
        shape.heads * self.head_bytes(shape)
    }

    /// Whether a plane of this shape is stored so: raw always, another codec where it saves 5 %.
    #[must_use]
    pub const fn suits(self, shape: &PlaneShape) -> bool {
        matches!(self, Self::Raw) || (shape.dims > 0 && self.bytes(shape) * 20 <= shape.bytes() * 19)
    }

    /// The offset in a stored plane of the first parameter that is not a finite number, or where the bytes that follow are missing;
    /// none where the plane can be decoded.
    #[must_use]
    pub fn first_bad(self, shape: &PlaneShape, stored: &[u8]) -> Option<usize> {
        if stored.len() != self.bytes(shape) {
            return Some(stored.len().min(self.bytes(shape)));
        }
        let parameters = self.parameter_bytes(shape);
        if parameters == 0 {
            return None;
        }
        // The exponent of what is not finite is all ones; it stands in the upper two bytes.
        let (bytes, exponent) = match shape.dtype {
            DType::F32 => (4, 0x7f80),
            DType::F16 => (2, 0x7c00),
            DType::Bf16 => (2, 0x7f80),
        };
        let head_bytes = self.head_bytes(shape);
        stored.chunks_exact(head_bytes).enumerate().find_map(|(head, stored)| {
            let infinite = |word: &[u8]| match word {
                [.., low, high] => u16::from_le_bytes([*low, *high]) & exponent == exponent,
                _ => true,
            };
            let at = stored[..parameters].chunks_exact(bytes).position(infinite)?;
            Some(head * head_bytes + at * bytes)
        })
    }
}
