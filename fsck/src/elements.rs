//! The comparison of min/max summaries with their keys (SPEC.md chapter 11).

use stratakv_format::DType;
use stratakv_format::layout::{LayerGeometry, Layout};

/// Returns a number that orders like the float with these bits. Zeros of both signs have the same number.
fn ordered(bits: u16) -> i32 {
    let magnitude = i32::from(bits & 0x7fff);
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// The direction in which a bound of f32 keys is rounded to bf16.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    Down,
    Up,
}

/// Returns the bits of the nearest finite bf16 of `x` in this direction. Beyond the last finite one it is that one.
fn rounded(x: f32, rounding: Rounding) -> u16 {
    /// The magnitude of the last finite bf16.
    const LAST: u16 = 0x7f7f;
    let (upper, lower) = ((x.to_bits() >> 16) as u16, x.to_bits() & 0xffff);
    // The upper half by itself is the next number towards zero.
    let is_away = (rounding == Rounding::Down) == x.is_sign_negative();
    if lower == 0 || !is_away {
        return upper;
    }
    upper & 0x8000 | ((upper & 0x7fff) + 1).min(LAST)
}

/// Returns whether a record is the min/max summary of keys `[kv_heads, G, key_dim]`.
///
/// Summaries of 16-bit keys are their extremes. Summaries of f32 keys are the extremes, rounded outward to bf16.
pub(crate) fn is_min_max(record: &[u8], keys: &[u8], layer: &LayerGeometry, layout: &Layout) -> bool {
    let (dim, tokens) = (usize::from(layer.key_dim), usize::from(layout.group_tokens));
    let stored: Vec<i32> = record.chunks_exact(2).map(|b| ordered(u16::from_le_bytes([b[0], b[1]]))).collect();
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
            let expected = [rounded(low, Rounding::Down), rounded(high, Rounding::Up)];
            return expected.map(ordered) == [minima[at], maxima[at]];
        }
        let value = |token| ordered(u16::from_le_bytes([keys[offset(token)], keys[offset(token) + 1]]));
        let values = (0..tokens).map(value);
        values.clone().min() == Some(minima[at]) && values.max() == Some(maxima[at])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use stratakv_format::PlaneCodec;

    #[test]
    fn f32_is_rounded_outward_to_the_nearest_finite_bf16() {
        let tiny = f32::from_bits(1);
        for (x, down, up) in [
            (0.0, 0, 0),
            (1.0, 0x3f80, 0x3f80),
            (1.0_f32.next_up(), 0x3f80, 0x3f81),
            (-1.0_f32.next_up(), 0xbf81, 0xbf80),
            (tiny, 0, 1),
            (-tiny, 0x8001, 0x8000),
            (f32::MAX, 0x7f7f, 0x7f7f),
            (f32::MIN, 0xff7f, 0xff7f),
        ] {
            assert_eq!((rounded(x, Rounding::Down), rounded(x, Rounding::Up)), (down, up), "{x}");
            assert!(bf16::from_bits(down).to_f32() <= x || x == f32::MIN, "{x}");
            assert!(x <= bf16::from_bits(up).to_f32() || x == f32::MAX, "{x}");
        }
    }

    #[test]
    fn a_summary_has_the_exact_rounding_and_any_sign_of_zero() {
        let codecs = [PlaneCodec::Raw; 2];
        let layer = LayerGeometry { kv_heads: 1, key_dim: 2, value_dim: 0, window: None, rope: None, codecs };
        let layout =
            |dtype| Layout { dtype, group_tokens: 2, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] };
        let is_of = |record: [u16; 4], keys: &[u8], dtype| {
            is_min_max(&record.map(u16::to_le_bytes).concat(), keys, &layer, &layout(dtype))
        };
        let keys = [1.001_f32, f32::MAX, -1.001, 0.0].map(f32::to_le_bytes).concat();
        let exact = [0xbf81, 0, 0x3f81, 0x7f7f];
        assert!(is_of(exact, &keys, DType::F32) && is_of([0xbf81, 0x8000, 0x3f81, 0x7f7f], &keys, DType::F32));
        // Each of them contains the keys or nearly so, with another rounding.
        for (at, bits) in [(0, 0xbf80), (0, 0xbf82), (2, 0x3f80), (2, 0x3f82), (3, 0x7f80), (3, 0x7f7e)] {
            let mut other = exact;
            other[at] = bits;
            assert!(!is_of(other, &keys, DType::F32), "{at}: {bits:#x}");
        }
        let keys = [0x3c00_u16, 0x8000, 0xbc00, 0].map(u16::to_le_bytes).concat();
        for record in [[0xbc00, 0x8000, 0x3c00, 0], [0xbc00, 0, 0x3c00, 0x8000]] {
            assert!(is_of(record, &keys, DType::F16));
        }
        assert!(!is_of([0xbc00, 0, 0x3c01, 0], &keys, DType::F16));
    }
}
