//! The softmax of one query head over a row of scores, added to the weights of other heads.
//!
//! Addition order: the sum of a row adds in 16 sums, each in ascending order.

use super::dispatch::multiversion;

multiversion! {
    /// Adds the softmax of `scale * scores` to `weights`. `exponentials` is scratch. All three have the same length,
    /// and the products are finite.
    pub(crate) fn add_softmax(scores: &[f32], scale: f32, exponentials: &mut [f32], weights: &mut [f32])
        = add_softmax_of_row;
}

#[inline(always)]
fn add_softmax_of_row(scores: &[f32], scale: f32, exponentials: &mut [f32], weights: &mut [f32]) {
    let largest = scores.iter().fold(f32::NEG_INFINITY, |max, x| if scale * x > max { scale * x } else { max });
    for (out, x) in exponentials.iter_mut().zip(scores) {
        *out = super::lane_softmax::exp2((scale * x - largest) * std::f32::consts::LOG2_E);
    }
    let (runs, rest) = exponentials.as_chunks::<16>();
    let mut sums = [0.0_f32; 16];
    for run in runs {
        for i in 0..16 {
            sums[i] += run[i];
        }
    }
    // The largest score adds 1, so that the sum is never 0.
    let share = 1.0 / (sums.iter().sum::<f32>() + rest.iter().sum::<f32>());
    for (weight, x) in weights.iter_mut().zip(exponentials) {
        *weight += *x * share;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn weights_are_the_softmax_in_f64(
            scores in prop::collection::vec(-50.0_f32..50.0, 1..80), scale in 0.1_f32..2.0,
        ) {
            let mut weights = vec![0.25; scores.len()];
            add_softmax(&scores, scale, &mut vec![0.0; scores.len()], &mut weights);
            let powers: Vec<f64> = scores.iter().map(|x| f64::from(scale * x).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for (weight, power) in weights.iter().zip(powers) {
                prop_assert!((f64::from(*weight) - 0.25 - power / sum).abs() < 1e-5);
            }
        }
    }
}
