//! Seeded random numbers: splitmix64 (Steele, Lea and Flood, 2014).

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Returns the stream of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a number below `limit`, or 0 for a limit of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 { 0 } else { ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64 }
    }

    /// Returns true once in `times` on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
