//! Codecs of planes: how the K and V planes of blocks are stored, and how many bytes they take.

use crate::dtype::DType;

/// Codec: the elements themselves.
pub const CODEC_RAW: u8 = 0;
/// Codec: levels of 8 bits over each range.
pub const CODEC_INT8: u8 = 1;
/// Codec: levels of 4 bits over each range.
pub const CODEC_INT4: u8 = 2;

/// The channels of a token's value that share a range.
pub const VALUE_RANGE_CHANNELS: usize = 32;

/// The largest magnitude of an element that a writer appends to a layer with a codec: 2^126.
///
/// The range between two such elements is finite in binary32, even if its step is rounded up.
pub const ENCODED_ELEMENT_MAX: f32 = f32::from_bits(0x7e80_0000);

/// The codec of a plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PlaneCodec {
    /// The elements themselves.
    #[default]
    Raw = CODEC_RAW,
    /// 256 levels in even steps over each range: one byte per element.
    Int8 = CODEC_INT8,
    /// 16 levels in even steps over each range: half a byte per element.
    Int4 = CODEC_INT4,
}

/// The shape `[heads, tokens, dims]` of a plane of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneShape {
    /// The plane: 0 = K, 1 = V.
    pub plane: usize,
    /// The number of KV heads.
    pub heads: usize,
    /// The tokens of the group.
    pub tokens: usize,
    /// The elements of a head's key or value.
    pub dims: usize,
    /// The element type.
    pub dtype: DType,
}

impl PlaneShape {
    /// Returns the bytes of the plane under [`PlaneCodec::Raw`].
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.heads * self.tokens * self.dims * self.dtype.bytes()
    }

    /// Returns the ranges of a head.
    ///
    /// Keys have one per channel. Values have one per token and [`VALUE_RANGE_CHANNELS`] channels.
    #[must_use]
    pub const fn ranges(&self) -> usize {
        if self.plane == 0 { self.dims } else { self.tokens * self.dims.div_ceil(VALUE_RANGE_CHANNELS) }
    }
}

impl PlaneCodec {
    /// Returns the codec with this code on disk, or `None` for an unknown code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            CODEC_RAW => Some(Self::Raw),
            CODEC_INT8 => Some(Self::Int8),
            CODEC_INT4 => Some(Self::Int4),
            _ => None,
        }
    }

    /// Returns the code on disk.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the bytes of the row of a token.
    const fn row_bytes(self, shape: &PlaneShape) -> usize {
        match self {
            Self::Raw => shape.dims * shape.dtype.bytes(),
            Self::Int8 => shape.dims,
            Self::Int4 => shape.dims.div_ceil(2),
        }
    }

    /// Returns the bytes of a head's parameters: the minima of its ranges, then their steps. The rows follow them.
    #[must_use]
    pub const fn parameter_bytes(self, shape: &PlaneShape) -> usize {
        match self {
            Self::Raw => 0,
            Self::Int8 | Self::Int4 => 2 * shape.ranges() * shape.dtype.bytes(),
        }
    }

    /// Returns the bytes of a head.
    #[must_use]
    pub const fn head_bytes(self, shape: &PlaneShape) -> usize {
        self.parameter_bytes(shape) + shape.tokens * self.row_bytes(shape)
    }

    /// Returns the bytes of the stored plane.
    #[must_use]
    pub const fn bytes(self, shape: &PlaneShape) -> usize {
        shape.heads * self.head_bytes(shape)
    }

    /// Returns whether a plane of this shape may have this codec. Every codec except raw must save 5 %.
    #[must_use]
    pub const fn suits(self, shape: &PlaneShape) -> bool {
        matches!(self, Self::Raw) || (shape.dims > 0 && self.bytes(shape) * 20 <= shape.bytes() * 19)
    }

    /// Returns where a stored plane becomes invalid, or `None` if it can be decoded.
    ///
    /// It is the offset of the first minimum or step that is not finite. If `stored` has a wrong length, it is the
    /// shorter of the found and the expected length.
    #[must_use]
    pub fn first_bad(self, shape: &PlaneShape, stored: &[u8]) -> Option<usize> {
        if stored.len() != self.bytes(shape) {
            return Some(stored.len().min(self.bytes(shape)));
        }
        let parameters = self.parameter_bytes(shape);
        if parameters == 0 {
            return None;
        }
        let head_bytes = self.head_bytes(shape);
        stored.chunks_exact(head_bytes).enumerate().find_map(|(head, stored)| {
            let at = shape.dtype.first_not_finite(&stored[..parameters])?;
            Some(head * head_bytes + at)
        })
    }
}
