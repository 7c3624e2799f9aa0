//! The softmax of selection in f32: exponentials, sums and weights per lane. A lane is a query head.
//!
//! Scores arrive in tiles `[units, lanes]`, where a unit is a token or a group:
//! 1. [`exponentiate`] turns a tile into exponentials relative to the maxima up to that tile.
//! 2. After the last tile, [`lane_weights`] gives the weights of each tile, which correct for maxima that grew later.
//!
//! [`softmax_parts`](super::softmax_parts) is the variant that keeps exponentials in bf16.

use super::dispatch::multiversion;

multiversion! {
    /// Writes, for each lane, the number that turns exponentials relative to `maxima` into weights that sum to 1.
    /// `last` has the final maxima and sums.
    pub(crate) fn lane_weights(maxima: &[f32], last: (&[f32], &[f32]), factor: f32, weights: &mut [f32])
        = weights_of_lanes;
}

#[inline(always)]
fn weights_of_lanes(maxima: &[f32], (last, sums): (&[f32], &[f32]), factor: f32, weights: &mut [f32]) {
    for (((weight, max), last), sum) in weights.iter_mut().zip(maxima).zip(last).zip(sums) {
        *weight = exp2((max - last) * factor) / if *sum > f32::MIN_POSITIVE { *sum } else { f32::MIN_POSITIVE };
    }
}

multiversion! {
    /// Turns `units` `[units, lanes]` into `2^(factor * (x - maximum))`, with the maxima of the lanes up to these
    /// units. Updates the maxima, and the sums of exponentials relative to them.
    pub(crate) fn exponentiate(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32)
        = exponentiate_lanes;
}

#[inline(always)]
fn exponentiate_lanes(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32) {
    match maxima.len() {
        lanes if lanes.is_multiple_of(32) => exponentiate_by::<32>(units, maxima, sums, factor),
        lanes if lanes.is_multiple_of(16) => exponentiate_by::<16>(units, maxima, sums, factor),
        lanes if lanes.is_multiple_of(8) => exponentiate_by::<8>(units, maxima, sums, factor),
        _ => exponentiate_by::<1>(units, maxima, sums, factor),
    }
}

/// [`exponentiate`] for `N` lanes at a time. `N` divides the number of lanes.
#[inline(always)]
fn exponentiate_by<const N: usize>(units: &mut [f32], maxima: &mut [f32], sums: &mut [f32], factor: f32) {
    let lanes = maxima.len();
    let each = maxima.as_chunks_mut::<N>().0.iter_mut().zip(sums.as_chunks_mut::<N>().0);
    for (at, (last_maxima, last_sums)) in each.enumerate() {
        let (mut maxima, mut sums) = (*last_maxima, *last_sums);
        for unit in units.chunks_exact(lanes) {
            let Some(unit) = unit[at * N..].first_chunk::<N>() else { continue };
            for i in 0..N {
                maxima[i] = if unit[i] > maxima[i] { unit[i] } else { maxima[i] };
            }
        }
        for i in 0..N {
            sums[i] *= exp2((last_maxima[i] - maxima[i]) * factor);
        }
        for unit in units.chunks_exact_mut(lanes) {
            let Some(unit) = unit[at * N..].first_chunk_mut::<N>() else { continue };
            for i in 0..N {
                unit[i] = exp2((unit[i] - maxima[i]) * factor);
                sums[i] += unit[i];
            }
        }
        (*last_maxima, *last_sums) = (maxima, sums);
    }
}

multiversion! {
    /// Joins maxima and sums of lanes over some units with those over other units. A lane without units has the sum 0.
    pub(crate) fn join_lanes(maxima: &mut [f32], sums: &mut [f32], other: (&[f32], &[f32]), factor: f32)
        = join_each_lane;
}

#[inline(always)]
fn join_each_lane(maxima: &mut [f32], sums: &mut [f32], other: (&[f32], &[f32]), factor: f32) {
    for (((max, sum), other_max), other_sum) in maxima.iter_mut().zip(sums).zip(other.0).zip(other.1) {
        let largest = if *other_max > *max { *other_max } else { *max };
        *sum = *sum * exp2((*max - largest) * factor) + other_sum * exp2((other_max - largest) * factor);
        *max = largest;
    }
}

multiversion! {
    /// Turns `units` `[units, lanes]` into `2^(factor * (x - maximum))`. There is a multiple of 8 lanes, and no unit
    /// is above the maximum of its lane.
    pub(crate) fn powers(units: &mut [f32], maxima: &[f32], factor: f32) = powers_of_lanes;
}

#[inline(always)]
fn powers_of_lanes(units: &mut [f32], maxima: &[f32], factor: f32) {
    for unit in units.chunks_exact_mut(maxima.len()) {
        for (units, maxima) in unit.as_chunks_mut::<8>().0.iter_mut().zip(maxima.as_chunks::<8>().0) {
            for i in 0..8 {
                units[i] = exp2((units[i] - maxima[i]) * factor);
            }
        }
    }
}

/// The least exponent of an exponential. It adds less than an f32 resolves to a sum of 2^24 exponentials.
///
/// The weight of a lane is at least such an exponential over that sum, so products of both are above 2^-126. Below it
/// some processors take a hundred times as long.
pub(super) const LEAST_EXPONENT: f32 = -50.0;

/// Returns `2^x` for `x <= 0` with a relative error of about 2e-7, but at least two to the [`LEAST_EXPONENT`].
#[inline(always)]
pub(super) fn exp2(x: f32) -> f32 {
    let x = if x < LEAST_EXPONENT { LEAST_EXPONENT } else { x };
    let shifted = x + 12_582_912.0;
    let f = x - (shifted - 12_582_912.0);
    let p = 1.333_355_8e-3_f32;
    let p = p * f + 9.618_129e-3;
    let p = p * f + 5.550_411e-2;
    let p = p * f + 2.402_265e-1;
    let p = p * f + 6.931_472e-1;
    let p = p * f + 1.0;
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn joined_lanes_are_those_of_all_units(
            values in prop::collection::vec(-60.0_f32..60.0, 8..200), cut in 0_usize..25, factor in 0.01_f32..2.0,
        ) {
            let units = &values[..values.len() / 8 * 8];
            let of = |units: &[f32]| {
                let (mut maxima, mut sums) = (vec![f32::MIN; 8], vec![0.0; 8]);
                exponentiate(&mut units.to_vec(), &mut maxima, &mut sums, factor);
                (maxima, sums)
            };
            let (first, last) = units.split_at((cut * 8).min(units.len()));
            let ((mut maxima, mut sums), other, all) = (of(first), of(last), of(units));
            join_lanes(&mut maxima, &mut sums, (&other.0, &other.1), factor);
            prop_assert_eq!(&maxima, &all.0);
            prop_assert!(sums.iter().zip(&all.1).all(|(joined, all)| (joined / all - 1.0).abs() < 1e-4));
        }

        #[test]
        fn exp2_is_close_to_the_power_of_two(x in -200.0_f32..0.0) {
            let expected = x.max(LEAST_EXPONENT).exp2();
            prop_assert!((exp2(x) / expected - 1.0).abs() < 1e-5, "{} {expected}", exp2(x));
        }
    }
}
