//! Helpers of the black-box tests in `tests/`: deterministic content, a plain model of a sequence, stores on disk.
#![forbid(unsafe_code)]

pub mod content;
pub mod damage;
pub mod disk;
pub mod image;
pub mod real;
pub mod rng;
pub mod sim;
pub mod soak;

/// Makes tests of functions that take how many threads serve the devices at most: with one for each device, and with
/// one for all.
#[macro_export]
macro_rules! on_threads {
    ($($name:ident),+ $(,)?) => {
        mod a_thread_each {
            $(#[test] fn $name() { super::$name(None); })+
        }
        mod one_thread {
            $(#[test] fn $name() { super::$name(Some(1)); })+
        }
    };
}

/// A number from the environment, to make a test run longer than in the ordinary suite.
#[must_use]
pub fn count_from_env(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
