//! The lossless codecs: bytes of one significance form a byte plane, and a general compressor packs each plane.
//!
//! 1. Rotate each 16-bit element left by one bit. The exponent then fills the high byte, with at most three mantissa
//!    bits.
//! 2. Collect the bytes of each significance, the least significant first.
//! 3. Store per byte plane: one byte for the kind, the length as u32, and the bytes.
//!
//! Mantissa bytes are close to random and are mostly stored uncompressed.

use super::{Codec, damaged};
use crate::error::{Error, Result};
use stratakv_format::DType;

/// The kind of an uncompressed byte plane.
const STORED: u8 = 0;
const LZ4: u8 = 1;
const ZSTD: u8 = 2;
const HEADER: usize = 5;

fn turned(dtype: DType, word: [u8; 2]) -> [u8; 2] {
    if dtype == DType::F32 { word } else { u16::from_le_bytes(word).rotate_left(1).to_le_bytes() }
}

/// Collects byte `nth` of every element.
fn byte_plane(dtype: DType, plane: &[u8], nth: usize, out: &mut Vec<u8>) {
    out.clear();
    match dtype {
        DType::F32 => out.extend(plane.as_chunks::<4>().0.iter().map(|word| word[nth])),
        DType::F16 | DType::Bf16 => out.extend(plane.as_chunks::<2>().0.iter().map(|w| turned(dtype, *w)[nth])),
    }
}

/// Encodes a plane and appends it to `out`. Returns `true`, because a lossless codec holds any plane.
pub(super) fn encode(codec: Codec, dtype: DType, plane: &[u8], out: &mut Vec<u8>) -> Result<bool> {
    let mut bytes = Vec::with_capacity(plane.len() / dtype.bytes());
    for nth in 0..dtype.bytes() {
        byte_plane(dtype, plane, nth, &mut bytes);
        let (how, packed) = match codec {
            Codec::SplitZstd => (ZSTD, zstd_compress(&bytes)?),
            _ => (LZ4, lz4_flex::block::compress(&bytes)),
        };
        let (how, body) = if packed.len() < bytes.len() { (how, &packed) } else { (STORED, &bytes) };
        out.push(how);
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(body);
    }
    Ok(true)
}

pub(super) fn decode(codec: Codec, dtype: DType, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let count = plane.len() / dtype.bytes();
    // One buffer holds all byte planes, so that no length in `stored` decides how much is allocated.
    let mut bytes = vec![0; plane.len()];
    let mut rest = stored;
    for into in bytes.chunks_exact_mut(count) {
        let short = || damaged("it ends within a byte plane".into());
        let (header, behind) = rest.split_at_checked(HEADER).ok_or_else(short)?;
        let len = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let (body, behind) = behind.split_at_checked(len).ok_or_else(short)?;
        rest = behind;
        let filled = match (header[0], codec) {
            (STORED, _) if body.len() == count => {
                into.copy_from_slice(body);
                count
            }
            (LZ4, Codec::SplitLz4) => {
                lz4_flex::block::decompress_into(body, into).map_err(|e| damaged(format!("LZ4: {e}")))?
            }
            (ZSTD, Codec::SplitZstd) => zstd_decompress(body, into)?,
            (how, _) => return Err(damaged(format!("a byte plane of kind {how} and {len} bytes"))),
        };
        if filled != count {
            return Err(damaged(format!("a byte plane of {filled} bytes instead of {count}")));
        }
    }
    if !rest.is_empty() {
        return Err(damaged(format!("{} bytes after the last byte plane", rest.len())));
    }
    match dtype {
        DType::F32 => {
            for (at, word) in plane.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *word = [bytes[at], bytes[count + at], bytes[2 * count + at], bytes[3 * count + at]];
            }
        }
        DType::F16 | DType::Bf16 => {
            let (low, high) = bytes.split_at(count);
            for ((word, low), high) in plane.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
                *word = u16::from_le_bytes([*low, *high]).rotate_right(1).to_le_bytes();
            }
        }
    }
    Ok(())
}

#[cfg(feature = "zstd")]
fn zstd_compress(bytes: &[u8]) -> Result<Vec<u8>> {
    zstd::bulk::compress(bytes, 1).map_err(|e| Error::io("compress with zstd", e))
}

#[cfg(feature = "zstd")]
fn zstd_decompress(body: &[u8], into: &mut [u8]) -> Result<usize> {
    zstd::bulk::decompress_to_buffer(body, into).map_err(|e| damaged(format!("zstd: {e}")))
}

#[cfg(not(feature = "zstd"))]
fn zstd_missing() -> Error {
    Error::new(crate::error::ErrorKind::Unsupported, "codec split-zstd: this build lacks the feature zstd")
}

#[cfg(not(feature = "zstd"))]
fn zstd_compress(_bytes: &[u8]) -> Result<Vec<u8>> {
    Err(zstd_missing())
}

#[cfg(not(feature = "zstd"))]
fn zstd_decompress(_body: &[u8], _into: &mut [u8]) -> Result<usize> {
    Err(zstd_missing())
}
