//! Rows of signed bytes with a factor of their own, so that vectors that are compared take a byte per element.
//!
//! An element is `byte * factor`. The largest element of a row is ±127 times the factor. Two ways of rounding exist:
//! 1. [`narrow_to_bytes`] rounds to the nearest, for a row that was computed from all that it describes.
//! 2. [`narrow_to_bytes_evenly`] rounds up or down, each as often as the element is close to it. A row that moves by
//!    less than half a byte at a time then still gets where it moves to. To the nearest, it would stay where it is.
//!
//! Invariants:
//! - Both depend on the row alone. Rounding up or down is decided by the bits and the place of the element.
//! - A row that was stored is stored again without a loss.

use super::dispatch::multiversion;

/// The largest byte of a row.
const TOP: f32 = 127.0;
/// Rows whose elements are all below it are zeros, because their factor has no inverse.
const LEAST: f32 = 1e-35;
/// A sum with it has room for integers alone.
const INTEGERS: f32 = 12_582_912.0;

multiversion! {
    /// Narrows a finite row to bytes of the same length, to the nearest. Returns the factor of the row.
    pub(crate) fn narrow_to_bytes(row: &[f32], bytes: &mut [i8]) -> f32 = narrow_to_nearest;
}

multiversion! {
    /// Narrows a finite row to bytes of the same length, up or down. The expected byte of an element is the element.
    /// Returns the factor of the row.
    pub(crate) fn narrow_to_bytes_evenly(row: &[f32], bytes: &mut [i8]) -> f32 = narrow_up_or_down;
}

multiversion! {
    /// Widens a row of bytes.
    pub(crate) fn widen_bytes(bytes: &[i8], factor: f32, row: &mut [f32]) = widen_row;
}

multiversion! {
    /// Returns the squared norm of a row of at most 2^17 bytes, without its factor.
    pub(crate) fn squared_norm_of_bytes(bytes: &[i8]) -> u32 = sum_of_squares;
}

#[inline(always)]
fn largest_of(row: &[f32]) -> f32 {
    // A fold of 16 maxima, which the compiler keeps in registers.
    let (runs, rest) = row.as_chunks::<16>();
    let mut largest = [0.0_f32; 16];
    for run in runs {
        for i in 0..16 {
            largest[i] = if run[i].abs() > largest[i] { run[i].abs() } else { largest[i] };
        }
    }
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let rest = rest.iter().fold(0.0, |found, x| larger(found, x.abs()));
    largest.into_iter().fold(rest, larger)
}

#[inline(always)]
fn narrow_to_nearest(row: &[f32], bytes: &mut [i8]) -> f32 {
    narrow_by(row, bytes, |_, _| 0.0)
}

#[inline(always)]
fn narrow_up_or_down(row: &[f32], bytes: &mut [i8]) -> f32 {
    narrow_by(row, bytes, |x, at| {
        // The finish of MurmurHash3.
        let bits = x.to_bits() ^ at.wrapping_mul(0x9e37_79b9);
        let bits = (bits ^ bits >> 16).wrapping_mul(0x85eb_ca6b);
        let bits = (bits ^ bits >> 13).wrapping_mul(0xc2b2_ae35);
        // Between -1/2 and 1/2 and never one of them, so that an integer stays.
        ((bits >> 17) as f32 + 0.5) / 32768.0 - 0.5
    })
}

/// Rounds each element after adding what `offset` returns for the element and its place.
#[inline(always)]
fn narrow_by(row: &[f32], bytes: &mut [i8], offset: impl Fn(f32, u32) -> f32) -> f32 {
    let largest = largest_of(row);
    if largest < LEAST {
        bytes.fill(0);
        return 0.0;
    }
    let inverse = TOP / largest;
    for ((byte, x), at) in bytes.iter_mut().zip(row).zip(0_u32..) {
        let x = x * inverse;
        let whole = ((x + offset(x, at)) + INTEGERS) - INTEGERS;
        let whole = if whole > TOP { TOP } else { whole };
        let whole = if whole < -TOP { -TOP } else { whole };
        // The lowest byte of the bits of this sum is the integer as a signed byte.
        *byte = (whole + INTEGERS).to_bits() as i8;
    }
    largest / TOP
}

#[inline(always)]
fn widen_row(bytes: &[i8], factor: f32, row: &mut [f32]) {
    row.iter_mut().zip(bytes).for_each(|(x, byte)| *x = f32::from(*byte) * factor);
}

#[inline(always)]
fn sum_of_squares(bytes: &[i8]) -> u32 {
    bytes.iter().map(|byte| (i32::from(*byte) * i32::from(*byte)) as u32).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_keep_seven_bits_of_their_largest_element(
            row in prop::collection::vec(-1.0_f32..1.0, 1..200), scale in -100_i32..50, evenly in any::<bool>(),
        ) {
            let row: Vec<f32> = row.into_iter().map(|x| x * (scale as f32).exp2()).collect();
            let narrow = if evenly { narrow_to_bytes_evenly } else { narrow_to_bytes };
            let (mut bytes, mut back) = (vec![9; row.len()], vec![9.0; row.len()]);
            let factor = narrow(&row, &mut bytes);
            widen_bytes(&bytes, factor, &mut back);
            let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let step = if evenly { largest / 127.0 } else { largest / 254.0 };
            for (x, found) in row.iter().zip(&back) {
                prop_assert!((x - found).abs() <= step * 1.0001, "{x} {found}");
            }
            let norm: f64 = bytes.iter().map(|byte| f64::from(*byte).powi(2)).sum();
            prop_assert_eq!(f64::from(squared_norm_of_bytes(&bytes)), norm);
            // A row that was stored once is stored again without a loss.
            let mut again = vec![9; row.len()];
            let second = narrow(&back, &mut again);
            prop_assert!(again == bytes && (second - factor).abs() <= 1e-6 * factor, "{factor} {second}");
        }
    }

    #[test]
    fn rows_of_zeros_and_of_large_elements_are_stored() {
        for (row, expected) in [([0.0, 0.0], [0, 0]), ([1e15, -1e15], [127, -127]), ([1e-44, 0.0], [0, 0])] {
            for narrow in [narrow_to_bytes, narrow_to_bytes_evenly] {
                let (mut bytes, mut back) = ([5; 2], [9.0; 2]);
                let factor = narrow(&row, &mut bytes);
                widen_bytes(&bytes, factor, &mut back);
                assert_eq!(bytes, expected);
                assert!(row.iter().zip(back).all(|(x, found)| (x - found).abs() <= x.abs() / 1e6 + 1e-35), "{back:?}");
            }
        }
    }

    #[test]
    fn rounding_up_or_down_has_no_bias() {
        // Each element is a third of the way from one byte to the next.
        let mut row: Vec<f32> = (0..9000).map(|at| (at % 60) as f32 - 30.0 + 1.0 / 3.0).collect();
        row.push(127.0);
        let mut bytes = vec![0; row.len()];
        assert_eq!(narrow_to_bytes_evenly(&row, &mut bytes), 1.0);
        let up = row.iter().zip(&bytes).filter(|(x, byte)| f32::from(**byte) > **x).count();
        assert!((2700..3300).contains(&up), "{up} of 9000");
    }
}
