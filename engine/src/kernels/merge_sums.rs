//! Merging of weighted sums: `sums * factor + others * other_factor`, element by element.

use super::dispatch::multiversion;

multiversion! {
    /// Scales `sums` and adds scaled `others`. Elements beyond the shorter slice stay.
    pub(crate) fn merge_sums(sums: &mut [f32], factor: f32, others: &[f32], other_factor: f32) = merge_body;
}

#[inline(always)]
fn merge_body(sums: &mut [f32], factor: f32, others: &[f32], other_factor: f32) {
    for (sum, other) in sums.iter_mut().zip(others) {
        *sum = *sum * factor + *other * other_factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_sums_have_the_bits_of_the_plain_loop() {
        let sums: Vec<f32> = (0..67).map(|i| (i as f32 - 30.0) / 7.0).collect();
        let others: Vec<f32> = (0..67).map(|i| 1.0 / (i as f32 + 0.3)).collect();
        let mut merged = sums.clone();
        merge_sums(&mut merged, 0.3, &others, -1.7);
        for ((merged, sum), other) in merged.iter().zip(&sums).zip(&others) {
            assert_eq!(merged.to_bits(), (sum * 0.3 + other * -1.7).to_bits());
        }
    }
}
