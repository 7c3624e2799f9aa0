//! Helpers of the black-box tests in `tests/`: deterministic content, a plain model of a sequence, stores on disk.
#![forbid(unsafe_code)]

pub mod content;
pub mod disk;
pub mod image;
pub mod real;
pub mod rng;
pub mod sim;

/// A number from the environment, to make a test run longer than in the ordinary suite.
#[must_use]
pub fn count_from_env(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
