//! Element-wise minima and maxima of keys, as 16-bit elements.
//!
//! f16 and bf16 keys are compared as integers of the same order, so their extremes are exact. Extremes of f32 keys are
//! bf16, the minimum rounded down and the maximum up, so that they are still bounds. They are clamped to the finite
//! bf16, so a key beyond those is outside its bounds.

use super::convert::f32_to_bf16_below;
use super::dispatch::multiversion;
use stratakv_format::DType;

multiversion! {
    /// Writes the minima and maxima `[kv_heads, key_dim]` of a K plane `[kv_heads, tokens, key_dim]`.
    pub(crate) fn extremes(
        key_plane: &[u8],
        heads: usize,
        tokens: usize,
        dtype: DType,
        minima: &mut [u16],
        maxima: &mut [u16],
    ) = extremes_of_heads;
}

#[inline(always)]
fn extremes_of_heads(
    key_plane: &[u8],
    heads: usize,
    tokens: usize,
    dtype: DType,
    minima: &mut [u16],
    maxima: &mut [u16],
) {
    let dim = minima.len() / heads;
    let head_bytes = tokens * dim * dtype.bytes();
    for head in 0..heads {
        let plane = &key_plane[head * head_bytes..(head + 1) * head_bytes];
        let (minima, maxima) = (&mut minima[head * dim..][..dim], &mut maxima[head * dim..][..dim]);
        match dtype {
            DType::F32 => extremes_f32(plane, minima, maxima),
            DType::F16 | DType::Bf16 => extremes_16(plane, minima, maxima),
        }
    }
}

/// Maps the bits of a 16-bit float to an integer of the same order.
#[inline(always)]
fn ordered(bits: u16) -> i16 {
    (bits ^ (((bits as i16) >> 15) as u16 & 0x7fff)) as i16
}

/// Inverts [`ordered`]. The mapping is its own inverse.
#[inline(always)]
fn unordered(ordered: i16) -> u16 {
    ordered as u16 ^ ((ordered >> 15) as u16 & 0x7fff)
}

/// The columns of a block, whose minima and maxima stay in registers over all tokens.
const COLUMNS: usize = 32;

#[inline(always)]
fn extremes_16(plane: &[u8], minima: &mut [u16], maxima: &mut [u16]) {
    let row_bytes = minima.len() * 2;
    for (start, (minima, maxima)) in minima.chunks_mut(COLUMNS).zip(maxima.chunks_mut(COLUMNS)).enumerate() {
        let first = start * COLUMNS * 2;
        let mut low = [i16::MAX; COLUMNS];
        let mut high = [i16::MIN; COLUMNS];
        for row in plane.chunks_exact(row_bytes) {
            let bytes = &row[first..first + minima.len() * 2];
            match bytes.as_chunks::<2>().0.try_into() {
                Ok(columns) => extend_16::<COLUMNS>(columns, &mut low, &mut high),
                Err(_) => {
                    for (at, bits) in bytes.as_chunks::<2>().0.iter().enumerate() {
                        let value = ordered(u16::from_le_bytes(*bits));
                        (low[at], high[at]) = (low[at].min(value), high[at].max(value));
                    }
                }
            }
        }
        // One loop each, because the compiler does not vectorise a loop over both.
        minima.iter_mut().zip(&low).for_each(|(out, value)| *out = unordered(*value));
        maxima.iter_mut().zip(&high).for_each(|(out, value)| *out = unordered(*value));
    }
}

/// Takes a block of columns into account. The fixed length lets the compiler use vector instructions.
#[inline(always)]
fn extend_16<const N: usize>(columns: &[[u8; 2]; N], low: &mut [i16; N], high: &mut [i16; N]) {
    for at in 0..N {
        let value = ordered(u16::from_le_bytes(columns[at]));
        low[at] = low[at].min(value);
        high[at] = high[at].max(value);
    }
}

#[inline(always)]
fn extremes_f32(plane: &[u8], minima: &mut [u16], maxima: &mut [u16]) {
    let dim = minima.len();
    let mut low = vec![f32::INFINITY; dim];
    let mut high = vec![f32::NEG_INFINITY; dim];
    for row in plane.chunks_exact(dim * 4) {
        for (j, bits) in row.chunks_exact(4).enumerate() {
            // The addition clears the sign of a zero, because it depends on the processor which of two zeros is less.
            let value = f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]) + 0.0;
            low[j] = low[j].min(value);
            high[j] = high[j].max(value);
        }
    }
    for j in 0..dim {
        minima[j] = f32_to_bf16_below(low[j]);
        maxima[j] = f32_to_bf16_below(-high[j]) ^ 0x8000;
    }
}

/// Writes the record of a run, minima and then maxima, from the records of its halves.
pub(crate) fn merge_extremes(left: &[u16], right: &[u16], out: &mut [u16]) {
    let width = out.len() / 2;
    let (minima, maxima) = out.split_at_mut(width);
    for (out, (a, b)) in minima.iter_mut().zip(left[..width].iter().zip(&right[..width])) {
        *out = if ordered(*a) <= ordered(*b) { *a } else { *b };
    }
    for (out, (a, b)) in maxima.iter_mut().zip(left[width..].iter().zip(&right[width..])) {
        *out = if ordered(*a) <= ordered(*b) { *b } else { *a };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    #[test]
    fn extremes_of_zeros_have_no_sign() {
        for column in [[0.0_f32, -0.0], [-0.0, 0.0], [-0.0, -0.0]] {
            let plane: Vec<u8> = column.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (mut low, mut high) = ([1], [1]);
            extremes_f32(&plane, &mut low, &mut high);
            assert_eq!((low, high), ([0], [0]), "{column:?}");
        }
    }

    #[test]
    fn f32_extremes_are_clamped_to_the_finite_bf16() {
        let plane = [f32::MIN.to_le_bytes(), f32::MAX.to_le_bytes()].concat();
        let (mut low, mut high) = ([0], [0]);
        extremes_f32(&plane, &mut low, &mut high);
        assert_eq!((low, high), ([bf16::MIN.to_bits()], [bf16::MAX.to_bits()]));
    }

    proptest! {
        #[test]
        fn f32_extremes_are_rounded_outward(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(x.is_finite());
            let (mut low, mut high) = ([0], [0]);
            extremes_f32(&x.to_le_bytes(), &mut low, &mut high);
            let (low, high) = (bf16::from_bits(low[0]), bf16::from_bits(high[0]));
            prop_assert!(low.is_finite() && high.is_finite());
            // Keys beyond the finite bf16 have these as bounds.
            let within = x.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32());
            prop_assert!(low.to_f32() <= within && within <= high.to_f32());
            // Nothing is between the bounds, so they are the nearest.
            let above = if low.to_bits() == 0x8000 { 1 } else if low.to_bits() >> 15 == 0 { low.to_bits() + 1 } else {
                low.to_bits() - 1
            };
            let is_exact = low.to_f32() == within && within == high.to_f32();
            prop_assert!(is_exact || bf16::from_bits(above).to_f32() == high.to_f32());
        }

        #[test]
        fn ordered_bits_keep_the_order(a in any::<u16>(), b in any::<u16>()) {
            let (x, y) = (f16::from_bits(a), f16::from_bits(b));
            prop_assume!(x.is_finite() && y.is_finite() && x != y);
            prop_assert_eq!(x < y, ordered(a) < ordered(b));
            prop_assert_eq!(unordered(ordered(a)), a);
        }
    }
}
