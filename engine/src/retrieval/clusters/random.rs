//! Seeded random numbers: splitmix64 (Steele, Lea and Flood, 2014).

/// A stream of random numbers. The same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub(in crate::retrieval) struct SeededRandom(u64);

impl SeededRandom {
    /// Returns the stream of a seed.
    pub(in crate::retrieval) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a stream of its own for part `index` of what this seed decides.
    pub(in crate::retrieval) fn of_part(seed: u64, index: u64) -> Self {
        let mut parts = Self(seed ^ index.wrapping_mul(0xd134_2543_de82_ef95));
        Self(parts.bits())
    }

    /// Returns 64 random bits.
    pub(in crate::retrieval) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a number below `limit`, or 0 for a limit of 0.
    pub(in crate::retrieval) fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.bits()) * limit as u128) >> 64) as usize
    }

    /// Returns a number from 0 to below 1.
    pub(in crate::retrieval) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number of the normal distribution with mean 0 and variance 1 (Box and Muller, 1958).
    pub(in crate::retrieval) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Shuffles a slice (Fisher and Yates).
    pub(in crate::retrieval) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_ranges_and_moments() {
        let mut random = SeededRandom::new(7);
        assert_eq!((random.below(0), random.below(1)), (0, 0));
        let normals: Vec<f64> = (0..20_000).map(|_| random.normal()).collect();
        let mean = normals.iter().sum::<f64>() / 20_000.0;
        let variance = normals.iter().map(|x| x * x).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let mut items: Vec<u32> = (0..100).collect();
        random.shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert!(items.into_iter().eq(0..100));
        assert!((0..1000).all(|_| random.below(10) < 10 && (0.0..1.0).contains(&random.unit())));
        assert_ne!(SeededRandom::of_part(1, 0).bits(), SeededRandom::of_part(1, 1).bits());
    }
}
