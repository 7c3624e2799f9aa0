//! A small random number generator: one seed gives one history.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

/// Hashes `x` with one step of SplitMix64.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        let out = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        out
    }

    /// Returns a number below `n`. `n` must not be zero.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// Returns a number that is uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Returns `count` numbers in -1..1.
#[must_use]
pub fn noise(seed: usize, count: usize) -> Vec<f32> {
    let mut rng = Rng(seed as u64);
    (0..count).map(|_| rng.unit()).collect()
}
