//! Codecs of single planes. This room is pure: it does no I/O and has no state.
//!
//! | codec | error | size |
//! |---|---|---|
//! | [`Codec::Raw`] | none | that of the plane |
//! | [`Codec::SplitLz4`], [`Codec::SplitZstd`] | none | depends on the data |
//! | [`Codec::Int8`], [`Codec::Int4`] | at most [`error_bound`] | fixed by the shape |
//!
//! - The split codecs compress the bytes of each significance separately: sign and exponent apart from the mantissa.
//! - The quantised codecs use even steps over a range. A range covers one channel of a group for keys. For values it
//!   covers [`VALUE_RANGE_CHANNELS`] channels of one token. Sources: KIVI; LeoAM section 4.3.
//! - Keys have channels that are large in every token, so each channel has its own range. Values do not, and attention
//!   weighs whole tokens.
//!
//! Invariants:
//! - [`encode`] returns the codec that was used. That is raw if another would not save 5 % or cannot hold the numbers.
//! - [`decode`] accepts any bytes. Bytes that are no plane of the shape are an error, never a panic.
//! - Memory depends on the shape alone, never on a length in the stored bytes.

mod block;
mod compressed_share;
mod quantise;
mod split;
#[cfg(test)]
mod tests;

use crate::error::{Error, ErrorKind, Result};
pub(crate) use block::BlockCoder;
pub use compressed_share::{TransferModel, solve_layers, solve_share};
pub use quantise::error_bound;
pub use stratakv_format::codec::VALUE_RANGE_CHANNELS;

use stratakv_format::DType;

/// The encoding of a stored plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Codec {
    /// The plane's own bytes.
    Raw,
    /// 256 levels per range.
    Int8,
    /// 16 levels per range.
    Int4,
    /// Byte planes, each in LZ4 block format. It is fast and suits bf16.
    SplitLz4,
    /// Byte planes, each in zstd level 1, for slow devices. Needs the cargo feature `zstd`.
    SplitZstd,
}

impl Codec {
    /// Returns the codecs of this build.
    #[must_use]
    pub fn available() -> &'static [Self] {
        #[cfg(feature = "zstd")]
        return &[Self::Raw, Self::Int8, Self::Int4, Self::SplitLz4, Self::SplitZstd];
        #[cfg(not(feature = "zstd"))]
        &[Self::Raw, Self::Int8, Self::Int4, Self::SplitLz4]
    }

    /// Returns whether decoding gives back the exact bits.
    #[must_use]
    pub const fn is_lossless(self) -> bool {
        !matches!(self, Self::Int8 | Self::Int4)
    }
}

/// The content of a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// Keys: ranges per channel.
    Keys,
    /// Values: ranges per token.
    Values,
}

/// The shape `[heads, tokens, dims]` of a plane of little-endian elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlaneShape {
    /// Keys or values.
    pub kind: PlaneKind,
    /// KV heads.
    pub heads: usize,
    /// Tokens of the group.
    pub tokens: usize,
    /// Elements of a head's key or value.
    pub dims: usize,
    /// Element type.
    pub dtype: DType,
}

/// The maximum elements of a plane. It is far above the format's limit and keeps products of lengths in range.
const ELEMENTS_MAX: usize = 1 << 28;

impl PlaneShape {
    /// Returns the shape as the format's type.
    fn stored(&self) -> stratakv_format::codec::PlaneShape {
        let Self { kind, heads, tokens, dims, dtype } = *self;
        stratakv_format::codec::PlaneShape { plane: usize::from(kind == PlaneKind::Values), heads, tokens, dims, dtype }
    }

    /// Returns the bytes of the plane without a codec.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the shape has no elements, or more than a plane may have.
    pub fn bytes(&self) -> Result<usize> {
        let elements = self.heads.checked_mul(self.tokens).and_then(|n| n.checked_mul(self.dims));
        match elements {
            Some(elements) if elements > 0 && elements <= ELEMENTS_MAX => Ok(elements * self.dtype.bytes()),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("codec: {self:?} has no or too many elements"))),
        }
    }
}

/// Encodes `plane` and appends it to `out`. Returns the codec that was used.
///
/// That is [`Codec::Raw`] if `codec` would not save 5 %, or if a quantised codec meets NaN or infinity.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `plane` is not of this shape. [`ErrorKind::Unsupported`]: this build lacks the
/// codec.
pub fn encode(codec: Codec, shape: &PlaneShape, plane: &[u8], out: &mut Vec<u8>) -> Result<Codec> {
    let bytes = shape.bytes()?;
    if plane.len() != bytes {
        let text = format!("encode: the plane has {} bytes but {shape:?} needs {bytes}", plane.len());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let start = out.len();
    let encoded = match codec {
        Codec::Raw => false,
        Codec::Int8 => {
            out.resize(start + quantise::stored_bytes::<8>(shape), 0);
            quantise::encode_8(shape, plane, &mut out[start..])
        }
        Codec::Int4 => {
            out.resize(start + quantise::stored_bytes::<4>(shape), 0);
            quantise::encode_4(shape, plane, &mut out[start..])
        }
        Codec::SplitLz4 | Codec::SplitZstd => split::encode(codec, shape.dtype, plane, out)?,
    };
    if encoded && (out.len() - start) * 20 <= bytes * 19 {
        return Ok(codec);
    }
    out.truncate(start);
    out.extend_from_slice(plane);
    Ok(Codec::Raw)
}

/// Decodes `stored`, which [`encode`] made with this codec and shape, to `plane`.
///
/// # Errors
/// [`ErrorKind::Corruption`]: `stored` is not such a plane. The content of `plane` is then unspecified.
/// [`ErrorKind::InvalidArgument`]: the length of `plane` is not that of the shape.
/// [`ErrorKind::Unsupported`]: this build lacks the codec.
pub fn decode(codec: Codec, shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let bytes = shape.bytes()?;
    if plane.len() != bytes {
        let text = format!("decode: the output has {} bytes but the plane needs {bytes}", plane.len());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    match codec {
        Codec::Raw if stored.len() == bytes => {
            plane.copy_from_slice(stored);
            Ok(())
        }
        Codec::Raw => Err(damaged(format!("{} bytes of a raw plane of {bytes}", stored.len()))),
        Codec::Int8 => quantise::decode_8(shape, stored, plane),
        Codec::Int4 => quantise::decode_4(shape, stored, plane),
        Codec::SplitLz4 | Codec::SplitZstd => split::decode(codec, shape.dtype, stored, plane),
    }
}

fn damaged(what: String) -> Error {
    Error::new(ErrorKind::Corruption, format!("encoded plane: {what}"))
}
