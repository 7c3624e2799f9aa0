//! The codecs of eight and four bits per element: shapes, error bound and errors. [`kernels`](crate::kernels) has the
//! loops and describes the quantised form.

use super::{PlaneKind, PlaneShape, damaged};
use crate::error::Result;
use crate::kernels::{DequantiseError, QuantisedShape, dequantise_4, dequantise_8, precision, quantise_4, quantise_8};
use stratakv_format::{DType, PlaneCodec};

/// Returns the maximum difference between an element and its decoded value.
///
/// `range` is the greatest minus the least element of its range, and `magnitude` bounds their absolute values. The
/// bound adds half a step, the rounding of the parameters, and the rounding of the result to the dtype.
#[must_use]
pub fn error_bound(bits: u32, dtype: DType, range: f32, magnitude: f32) -> f32 {
    let (unit, tiny) = precision(dtype);
    let levels = ((1_u32 << bits) - 1) as f32;
    // Rounding moves the least value by at most 2 units of the magnitude. The step grows by that and by its own
    // rounding.
    let step = (range + 2.0 * unit * magnitude) / levels * (1.0 + 2.0 * unit) + 2.0 * tiny;
    0.5 * step * 1.001 + 2.0 * unit * (magnitude + step) + 2.0 * tiny
}

/// Returns the bytes of a plane with `BITS` bits per element.
pub(super) fn stored_bytes<const BITS: u32>(shape: &PlaneShape) -> usize {
    shape.heads * quantised::<BITS>(shape).head_bytes
}

fn quantised<const BITS: u32>(shape: &PlaneShape) -> QuantisedShape {
    let codec = if BITS == 4 { PlaneCodec::Int4 } else { PlaneCodec::Int8 };
    let stored = shape.stored();
    let &PlaneShape { kind, heads, tokens, dims, dtype } = shape;
    let (ranges, head_bytes) = (stored.ranges(), codec.head_bytes(&stored));
    QuantisedShape { per_channel: kind == PlaneKind::Keys, heads, tokens, dims, dtype, ranges, head_bytes }
}

/// Encodes a plane with eight bits per element to `out`, which has [`stored_bytes`].
///
/// Returns false, and leaves `out` unspecified, if an element is not finite or a range is too large for f32.
pub(super) fn encode_8(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool {
    quantise_8(&quantised::<8>(shape), plane, out)
}

/// Encodes a plane with four bits per element, as [`encode_8`] does with eight.
pub(super) fn encode_4(shape: &PlaneShape, plane: &[u8], out: &mut [u8]) -> bool {
    quantise_4(&quantised::<4>(shape), plane, out)
}

/// Decodes a plane with eight bits per element.
///
/// # Errors
/// `Corruption`: `stored` has another length than the shape, or a range that is not finite.
pub(super) fn decode_8(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let found = dequantise_8(&quantised::<8>(shape), stored, plane);
    found.map_err(|e| damaged(describe(e, 8, stored.len(), stored_bytes::<8>(shape))))
}

/// Decodes a plane with four bits per element.
///
/// # Errors
/// As [`decode_8`].
pub(super) fn decode_4(shape: &PlaneShape, stored: &[u8], plane: &mut [u8]) -> Result<()> {
    let found = dequantise_4(&quantised::<4>(shape), stored, plane);
    found.map_err(|e| damaged(describe(e, 4, stored.len(), stored_bytes::<4>(shape))))
}

fn describe(error: DequantiseError, bits: u32, found: usize, expected: usize) -> String {
    match error {
        DequantiseError::Length => format!("{found} bytes where {bits} bits per element take {expected}"),
        DequantiseError::NotFinite => "a range that is not finite".into(),
    }
}
