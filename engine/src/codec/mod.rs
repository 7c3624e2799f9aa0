//! Codecs of single planes: bytes to fewer bytes and back. Pure: no I/O, no state, nothing of the store.
//!
//! [`encode`] says which codec a plane really got: raw whenever another would not save 5 %, or cannot hold it. [`decode`]
//! takes any bytes: what is not a plane of this shape is an error, never a panic, and never more memory than the plane's own.
//!
//! | codec | what it keeps | size |
//! |---|---|---|
//! | [`Codec::Raw`] | everything | all of it |
//! | [`Codec::SplitLz4`], [`Codec::SplitZstd`] | everything: sign and exponent bytes apart from mantissa bytes, each compressed | depends on the data |
//! | [`Codec::Int8`], [`Codec::Int4`] | values to within [`error_bound`], in steps of their group's range: per channel for keys, per token and [`VALUE_RANGE_CHANNELS`] channels for values (KIVI; LeoAM section 4.3) | fixed by the shape |
//!
//! Keys have channels that are large in every token, so a key channel gets a range of its own; values do not, and a token is
//! what attention weighs.

mod block;
mod element;
mod quantise;
mod split;
#[cfg(test)]
mod tests;
mod theta;

use crate::error::{Error, ErrorKind, Result};
pub(crate) use block::BlockCoder;
pub use quantise::error_bound;
pub use stratakv_format::codec::VALUE_RANGE_CHANNELS;
pub use theta::{TransferModel, solve_layers, solve_theta};

use stratakv_format::DType;

/// How a plane is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Codec {
    /// As it is.
    Raw,
    /// 256 levels per group.
    Int8,
    /// 16 levels per group.
    Int4,
    /// Byte planes, LZ4 block format each: fast, for bf16.
    SplitLz4,
    /// Byte planes, zstd level 1 each: for slow devices. Takes the cargo feature `zstd`.
    SplitZstd,
}

impl Codec {
    /// Every codec that this build has.
    #[must_use]
    pub fn available() -> &'static [Self] {
        #[cfg(feature = "zstd")]
        return &[Self::Raw, Self::Int8, Self::Int4, Self::SplitLz4, Self::SplitZstd];
        #[cfg(not(feature = "zstd"))]
        &[Self::Raw, Self::Int8, Self::Int4, Self::SplitLz4]
    }

    /// Whether what comes back has the very bits.
    #[must_use]
    pub const fn is_lossless(self) -> bool {
        !matches!(self, Self::Int8 | Self::Int4)
    }
}

/// What the numbers of a plane are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// Keys: ranges per channel.
    Keys,
    /// Values: ranges per token.
    Values,
}

/// A plane `[heads, tokens, dims]` of little-endian elements.
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

/// The most elements of a plane, far above what the format allows: products of lengths stay in range.
const ELEMENTS_MAX: usize = 1 << 28;

impl PlaneShape {
    /// The same as the format says it.
    fn stored(&self) -> stratakv_format::codec::PlaneShape {
        let Self { kind, heads, tokens, dims, dtype } = *self;
        stratakv_format::codec::PlaneShape { plane: usize::from(kind == PlaneKind::Values), heads, tokens, dims, dtype }
    }

    /// Bytes of the plane as it is.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: nothing in it, or more than any plane has.
    pub fn bytes(&self) -> Result<usize> {
        let elements = self.heads.checked_mul(self.tokens).and_then(|n| n.checked_mul(self.dims));
        match elements {
            Some(elements) if elements > 0 && elements <= ELEMENTS_MAX => Ok(elements * self.dtype.bytes()),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("no plane has the shape {self:?}"))),
        }
    }
}

/// Encodes `plane` behind what `out` holds. The codec it was encoded with: [`Codec::Raw`] when `codec` would not save 5 %, and
/// for numbers that the quantised forms do not have (NaN, infinite).
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `plane` is not of this shape. [`ErrorKind::Unsupported`]: a codec that this build lacks.
pub fn encode(codec: Codec, shape: &PlaneShape, plane: &[u8], out: &mut Vec<u8>) -> Result<Codec> {
    let bytes = shape.bytes()?;
    if plane.len() != bytes {
        let text = format!("a plane of {} bytes where {shape:?} has {bytes}", plane.len());
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
/// [`ErrorKind::Corruption`]: `stored` is no such plane; `plane` is then unspecified. [`ErrorKind::InvalidArgument`]: `plane`
/// has another length than the shape. [`ErrorKind::Unsupported`]: a codec that this build lacks.
pub fn decode(codec: Codec, shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let bytes = shape.bytes()?;
    if plane.len() != bytes {
        let text = format!("room of {} bytes for a plane of {bytes}", plane.len());
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
