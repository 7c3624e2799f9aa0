//! Elements of planes: whether they are finite, and whether min/max summaries fit their keys.

use stratakv_format::DType;
use stratakv_format::layout::{LayerGeometry, Layout};

/// Returns the offset of the first element that is not finite. Such an element has an exponent of all ones.
pub(crate) fn first_not_finite(dtype: DType, elements: &[u8]) -> Option<usize> {
    let (bytes, exponent) = match dtype {
        DType::F32 => (4, 0x7f80),
        DType::F16 => (2, 0x7c00),
        DType::Bf16 => (2, 0x7f80),
    };
    let not_finite = |element: &[u8]| {
        let upper = u16::from_le_bytes([element[bytes - 2], element[bytes - 1]]);
        upper & exponent == exponent
    };
    elements.chunks_exact(bytes).position(not_finite).map(|nth| nth * bytes)
}

/// Returns a number that orders like the float with these bits.
fn ordered(bits: u16) -> i32 {
    let magnitude = i32::from(bits & 0x7fff);
    if bits & 0x8000 == 0 { magnitude } else { -1 - magnitude }
}

/// Returns whether a record is the min/max summary of keys `[kv_heads, G, key_dim]`.
///
/// Summaries of 16-bit keys are exact. Summaries of f32 keys are rounded outward to bf16: they contain the keys, and
/// exceed them by at most the rounding.
pub(crate) fn is_min_max(record: &[u8], keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> bool {
    let (dim, tokens) = (usize::from(layer.key_dim), usize::from(layout.group_tokens));
    let stored: Vec<u16> = record.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    let (minima, maxima) = stored.split_at(stored.len() / 2);
    (0..minima.len()).all(|at| {
        let (head, column) = (at / dim, at % dim);
        let offset = |token: usize| ((head * tokens + token) * dim + column) * layout.dtype.bytes();
        if layout.dtype == DType::F32 {
            let value = |token| {
                let at = offset(token);
                f32::from_le_bytes([keys[at], keys[at + 1], keys[at + 2], keys[at + 3]])
            };
            let low = (0..tokens).map(value).fold(f32::INFINITY, f32::min);
            let high = (0..tokens).map(value).fold(f32::NEG_INFINITY, f32::max);
            let (min, max) = (f32::from_bits(u32::from(minima[at]) << 16), f32::from_bits(u32::from(maxima[at]) << 16));
            let slack = |x: f32| x.abs() / 64.0 + f32::MIN_POSITIVE;
            return min <= low && high <= max && low - min <= slack(low) && max - high <= slack(high);
        }
        let value = |token| ordered(u16::from_le_bytes([keys[offset(token)], keys[offset(token) + 1]]));
        let values = (0..tokens).map(value);
        let (low, high) = (values.clone().min(), values.max());
        low == Some(ordered(minima[at])) && high == Some(ordered(maxima[at]))
    })
}
