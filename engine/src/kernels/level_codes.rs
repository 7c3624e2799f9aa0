//! Codes of transformed keys: the nearest level of each dimension, and level numbers packed into bytes.
//!
//! Eight tokens are encoded side by side. The level number of an element is the number of middles between neighbouring
//! levels that lie below it.
//!
//! Addition order: the error of a token adds its dimensions in the order of the code bytes.

use super::dispatch::multiversion;

/// Tokens that are encoded side by side.
const LANES: usize = 8;

multiversion! {
    /// Writes the code of each token, and its squared distance to the levels that were chosen.
    ///
    /// - `keys` is `[tokens, levels.len()]`.
    /// - `packing` has the dimensions of each code byte, the first one in its lowest bits.
    /// - `levels` has the rising levels of each dimension, a power of two of them.
    /// - `codes` is `[tokens, packing.len()]`, and `errors` is `[tokens]`.
    pub(crate) fn pack_levels(
        keys: &[f32], packing: &[Vec<u32>], levels: &[Vec<f32>], codes: &mut [u8], errors: &mut [f32],
    ) = pack_levels_of_all;
}

#[inline(always)]
fn pack_levels_of_all(keys: &[f32], packing: &[Vec<u32>], levels: &[Vec<f32>], codes: &mut [u8], errors: &mut [f32]) {
    let (dims, bytes) = (levels.len(), packing.len());
    for ((keys, codes), errors) in
        keys.chunks(LANES * dims).zip(codes.chunks_mut(LANES * bytes)).zip(errors.chunks_mut(LANES))
    {
        let mut sums = [0.0_f32; LANES];
        for (at, byte) in packing.iter().enumerate() {
            let (mut bits, mut values) = (0, [0_u32; LANES]);
            for &dim in byte {
                let levels = &levels[dim as usize];
                let mut x = [0.0_f32; LANES];
                for (x, key) in x.iter_mut().zip(keys.chunks_exact(dims)) {
                    *x = key[dim as usize];
                }
                let (numbers, errors) = nearest_levels(&x, levels);
                for i in 0..LANES {
                    values[i] |= numbers[i] << bits;
                    sums[i] += errors[i];
                }
                bits += levels.len().ilog2();
            }
            for (code, value) in codes.chunks_exact_mut(bytes).zip(values) {
                code[at] = value as u8;
            }
        }
        errors.iter_mut().zip(sums).for_each(|(error, sum)| *error = sum);
    }
}

/// Returns the number of the nearest level of each element, and the squared distance to it.
#[inline(always)]
fn nearest_levels(x: &[f32; LANES], levels: &[f32]) -> ([u32; LANES], [f32; LANES]) {
    let (mut numbers, mut nearest) = ([0_u32; LANES], [levels[0]; LANES]);
    for pair in levels.windows(2) {
        let (middle, upper) = ((pair[0] + pair[1]) / 2.0, pair[1]);
        for i in 0..LANES {
            let is_above = x[i] > middle;
            numbers[i] += u32::from(is_above);
            nearest[i] = if is_above { upper } else { nearest[i] };
        }
    }
    let mut errors = [0.0_f32; LANES];
    for i in 0..LANES {
        errors[i] = (x[i] - nearest[i]) * (x[i] - nearest[i]);
    }
    (numbers, errors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each dimension gets its nearest level, the lower one at the middle of two.
        #[test]
        fn codes_have_the_nearest_levels(
            tokens in 1_usize..20, bits in prop::collection::vec(1_u32..=8, 1..12), seed in any::<u64>(),
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut small = || f32::from(rng.i8(-20..20)) / 2.0;
            let levels: Vec<Vec<f32>> = bits.iter().map(|bits| {
                let mut levels: Vec<f32> = (0..1 << bits).map(|_| small()).collect();
                levels.sort_by(f32::total_cmp);
                levels
            }).collect();
            let mut packing: Vec<Vec<u32>> = vec![vec![]];
            let mut used = 0;
            for (dim, bits) in bits.iter().enumerate() {
                if used + bits > 8 { packing.push(vec![]); used = 0; }
                used += bits;
                packing.last_mut().unwrap().push(dim as u32);
            }
            let keys: Vec<f32> = (0..tokens * bits.len()).map(|_| small()).collect();
            let (mut codes, mut errors) = (vec![0; tokens * packing.len()], vec![7.0; tokens]);
            pack_levels(&keys, &packing, &levels, &mut codes, &mut errors);
            for ((key, code), error) in keys.chunks(bits.len()).zip(codes.chunks(packing.len())).zip(errors) {
                let mut expected = 0.0;
                for (dims, value) in packing.iter().zip(code) {
                    let mut value = usize::from(*value);
                    for dim in dims {
                        let (x, levels) = (key[*dim as usize], &levels[*dim as usize]);
                        let number = value % levels.len();
                        value /= levels.len();
                        let least = levels.iter().map(|level| (x - level).powi(2)).fold(f32::INFINITY, f32::min);
                        prop_assert_eq!((x - levels[number]).powi(2), least);
                        let is_tie = |number: usize| (x - levels[number]).powi(2) == least;
                        prop_assert!(number == 0 || levels[number - 1] == levels[number] || !is_tie(number - 1));
                        expected += least;
                    }
                    prop_assert_eq!(value, 0);
                }
                prop_assert_eq!(error, expected);
            }
        }
    }
}
