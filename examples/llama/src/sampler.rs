//! Draws tokens: the most likely one, or at random by temperature and nucleus (top-p, Holtzman et al. 2020).
//!
//! The state of a sampler is [`SamplerState::BYTES`] bytes long. A session that stores it continues the same random
//! stream.

use anyhow::{Result, bail, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::model::argmax;

/// A sampler: its settings and its position in the random stream.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerState {
    temperature: f32,
    top_p: f32,
    seed: u64,
    /// Tokens drawn so far.
    drawn: u64,
}

const VERSION: u8 = 1;
/// 32-bit words of the random stream per drawn token.
const WORDS: u128 = 2;

impl SamplerState {
    /// The length of [`SamplerState::to_bytes`].
    pub const BYTES: usize = 25;

    /// Makes a sampler. Temperature 0 takes the most likely token.
    ///
    /// # Errors
    /// Fails if the temperature is negative or not finite, or if `top_p` is outside (0, 1].
    pub fn new(temperature: f32, top_p: f32, seed: u64) -> Result<Self> {
        ensure!(temperature.is_finite() && temperature >= 0.0, "temperature {temperature} must be 0 or more");
        ensure!(top_p > 0.0 && top_p <= 1.0, "top-p {top_p} must be above 0 and at most 1");
        Ok(Self { temperature, top_p, seed, drawn: 0 })
    }

    /// Makes the sampler that takes the most likely token.
    #[must_use]
    pub const fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0, drawn: 0 }
    }

    /// Returns whether two samplers have the same settings. Their positions may differ.
    #[must_use]
    pub fn same_settings(&self, other: &Self) -> bool {
        (self.temperature, self.top_p, self.seed) == (other.temperature, other.top_p, other.seed)
    }

    /// Draws the next token. The same state and logits give the same token on every machine with IEEE arithmetic.
    ///
    /// # Errors
    /// Fails if there are no logits, or if one of them is NaN.
    pub fn draw(&mut self, logits: &[f32]) -> Result<u32> {
        ensure!(!logits.iter().any(|x| x.is_nan()), "a logit is not a number");
        let Some(best) = argmax(logits) else { bail!("no logits to draw from") };
        let position = u128::from(self.drawn) * WORDS;
        self.drawn += 1;
        if self.temperature == 0.0 {
            return Ok(best);
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_word_pos(position);
        // 53 random bits make a number in [0, 1).
        let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;

        let max = f64::from(logits[best as usize]);
        let weight = |&x: &f32| ((f64::from(x) - max) / f64::from(self.temperature)).exp();
        let mut candidates: Vec<(f64, u32)> = logits.iter().map(weight).zip(0..).collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let total: f64 = candidates.iter().map(|c| c.0).sum();
        let mut kept = 0;
        let mut mass = 0.0;
        for (weight, _) in &candidates {
            kept += 1;
            mass += weight;
            if mass >= f64::from(self.top_p) * total {
                break;
            }
        }
        let mut left = uniform * mass;
        for &(weight, id) in &candidates[..kept] {
            left -= weight;
            if left < 0.0 {
                return Ok(id);
            }
        }
        Ok(candidates[kept - 1].1)
    }

    /// Returns the settings and the position as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = VERSION;
        bytes[1..5].copy_from_slice(&self.temperature.to_le_bytes());
        bytes[5..9].copy_from_slice(&self.top_p.to_le_bytes());
        bytes[9..17].copy_from_slice(&self.seed.to_le_bytes());
        bytes[17..].copy_from_slice(&self.drawn.to_le_bytes());
        bytes
    }

    /// Restores a sampler from [`SamplerState::to_bytes`].
    ///
    /// # Errors
    /// Fails if the bytes have another length or version, or settings that no sampler has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let Ok(bytes) = <&[u8; Self::BYTES]>::try_from(bytes) else {
            bail!("a sampler state has {} bytes, not {}", Self::BYTES, bytes.len())
        };
        ensure!(bytes[0] == VERSION, "the sampler state has version {}, but only {VERSION} is supported", bytes[0]);
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let long =
            |at: usize| u64::from(u32::from_le_bytes(word(at))) | u64::from(u32::from_le_bytes(word(at + 4))) << 32;
        let mut state = Self::new(f32::from_le_bytes(word(1)), f32::from_le_bytes(word(5)), long(9))?;
        state.drawn = long(17);
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(step: u32) -> Vec<f32> {
        (0..50u32).map(|i| ((i * 7919 + step * 104_729) % 101) as f32 / 20.0).collect()
    }

    fn draws(sampler: &mut SamplerState, steps: std::ops::Range<u32>) -> Vec<u32> {
        steps.map(|s| sampler.draw(&logits(s)).unwrap()).collect()
    }

    #[test]
    fn a_restored_state_continues_the_stream_from_any_point() {
        let start = SamplerState::new(0.8, 0.9, 42).unwrap();
        let whole = draws(&mut start.clone(), 0..40);
        for cut in 0..40u32 {
            let mut first = start.clone();
            let mut got = draws(&mut first, 0..cut);
            let mut second = SamplerState::from_bytes(&first.to_bytes()).unwrap();
            assert_eq!(first, second);
            got.extend(draws(&mut second, cut..40));
            assert_eq!(got, whole, "cut at {cut}");
        }
        let other = draws(&mut SamplerState::new(0.8, 0.9, 43).unwrap(), 0..40);
        assert_ne!(other, whole, "another seed");
    }

    #[test]
    fn drawn_frequencies_follow_the_softmax() {
        let mut sampler = SamplerState::new(0.5, 1.0, 7).unwrap();
        let logits = [0.0f32, 0.5, 1.0];
        let mut counts = [0f64; 3];
        for _ in 0..20_000 {
            counts[sampler.draw(&logits).unwrap() as usize] += 1.0 / 20_000.0;
        }
        let total: f64 = logits.iter().map(|&x| f64::from(x / 0.5).exp()).sum();
        for (x, share) in logits.iter().zip(counts) {
            assert!((share - f64::from(x / 0.5).exp() / total).abs() < 0.015, "{x}: {share}");
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_sufficient_set_and_greedy_takes_the_first_maximum() {
        let mut sampler = SamplerState::new(1.0, 0.6, 1).unwrap();
        // Probabilities 0.5, 0.3, 0.2: the first two reach 0.6.
        let logits = [0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()];
        let drawn: std::collections::BTreeSet<u32> = (0..500).map(|_| sampler.draw(&logits).unwrap()).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [1, 2]);
        assert_eq!(SamplerState::greedy().draw(&[1.0, 3.0, 3.0]).unwrap(), 1);
        let mut narrow = SamplerState::new(1.0, 1e-6, 1).unwrap();
        assert_eq!(narrow.draw(&logits).unwrap(), 1);
    }

    #[test]
    fn bad_settings_bytes_and_logits_are_errors() {
        assert!(SamplerState::new(-1.0, 1.0, 0).is_err());
        assert!(SamplerState::new(f32::NAN, 1.0, 0).is_err());
        assert!(SamplerState::new(1.0, 0.0, 0).is_err());
        assert!(SamplerState::new(1.0, 1.5, 0).is_err());
        assert!(SamplerState::greedy().draw(&[]).is_err());
        assert!(SamplerState::greedy().draw(&[0.0, f32::NAN]).is_err());
        let bytes = SamplerState::greedy().to_bytes();
        assert!(SamplerState::from_bytes(&bytes[1..]).is_err());
        let mut other = bytes;
        other[0] = 9;
        assert!(SamplerState::from_bytes(&other).is_err());
        let mut nonsense = bytes;
        nonsense[1..5].copy_from_slice(&f32::NAN.to_le_bytes());
        assert!(SamplerState::from_bytes(&nonsense).is_err());
    }
}
