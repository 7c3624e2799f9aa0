//! Rows of f16 with a power of two of their own, so that keys of any magnitude keep the precision of f16.
//!
//! An element is `half * 2^exponent`. The largest element of a row is from 2^14 to 2^15 before the power of two is
//! multiplied. A row of f16 below 2^15 keeps all its bits. A row of bf16 keeps the bits of elements
//! above 2^-31 of the largest one.

use super::convert::{narrow_f16, widen_f16};

/// The exponent of the largest element of a row of halves.
const TOP: i32 = 14;
/// The largest exponent of a row, up or down. Elements of rows that are smaller still lose bits.
pub(crate) const SCALED_EXPONENT_MAX: i32 = 100;
/// Elements that are scaled at a time.
const RUN: usize = 64;

/// Narrows a finite row to halves of the same length. Returns the exponent of its power of two.
pub(crate) fn narrow_scaled(row: &[f32], halves: &mut [u16]) -> i8 {
    let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    // The exponent of an f32, less its bias. That of 0 and of the least numbers is -127.
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    let exponent = if largest > 0.0 { (exponent - TOP).clamp(-SCALED_EXPONENT_MAX, SCALED_EXPONENT_MAX) } else { 0 };
    let factor = power(-exponent);
    let mut scaled = [0.0; RUN];
    for (row, halves) in row.chunks(RUN).zip(halves.chunks_mut(RUN)) {
        let scaled = &mut scaled[..row.len()];
        scaled.iter_mut().zip(row).for_each(|(scaled, x)| *scaled = x * factor);
        narrow_f16(scaled, halves);
    }
    exponent as i8
}

/// Widens a row of halves.
pub(crate) fn widen_scaled(halves: &[u16], exponent: i8, row: &mut [f32]) {
    widen_f16(halves, row);
    if exponent != 0 {
        let factor = power_of_two(exponent);
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Returns the power of two of an exponent that [`narrow_scaled`] returned.
pub(crate) fn power_of_two(exponent: i8) -> f32 {
    power(i32::from(exponent))
}

/// Returns a power of two that is a normal f32.
fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_keep_eleven_bits_of_their_largest_element(
            row in prop::collection::vec(-1.0_f32..1.0, 1..200), scale in -70_i32..50,
        ) {
            let row: Vec<f32> = row.into_iter().map(|x| x * power(scale)).collect();
            let (mut halves, mut back) = (vec![0; row.len()], vec![9.0; row.len()]);
            let exponent = narrow_scaled(&row, &mut halves);
            widen_scaled(&halves, exponent, &mut back);
            let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            for (x, found) in row.iter().zip(&back) {
                prop_assert!((x - found).abs() <= x.abs() / 2048.0 + largest * power(-38), "{x} {found}");
            }
            // A row that was stored once is stored again without a loss.
            let mut again = vec![0.0; row.len()];
            let exponent = narrow_scaled(&back, &mut halves);
            widen_scaled(&halves, exponent, &mut again);
            prop_assert_eq!(again, back);
        }

        #[test]
        fn rows_of_halves_are_exact(bits in prop::collection::vec(0_u16..0x7800, 1..70)) {
            let row: Vec<f32> = bits.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
            let (mut halves, mut back) = (vec![0; row.len()], vec![9.0; row.len()]);
            let exponent = narrow_scaled(&row, &mut halves);
            widen_scaled(&halves, exponent, &mut back);
            prop_assert_eq!(back, row);
        }
    }

    #[test]
    fn rows_of_zeros_and_of_large_elements_are_stored() {
        for row in [[0.0, 0.0], [1e15, -1e15], [1e-44, 0.0]] {
            let (mut halves, mut back) = ([0; 2], [9.0; 2]);
            let exponent = narrow_scaled(&row, &mut halves);
            widen_scaled(&halves, exponent, &mut back);
            assert!(row.iter().zip(back).all(|(x, found)| (x - found).abs() <= x.abs() / 2048.0 + 1e-38), "{back:?}");
        }
    }
}
