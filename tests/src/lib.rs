//! Helpers of the black-box tests in `tests/`: deterministic content, a plain model of a sequence, stores on disk.
#![forbid(unsafe_code)]

pub mod damage;
pub mod disk;
pub mod image;
pub mod protocol;
pub mod real;
pub mod sim;
pub mod soak;

pub use stratakv_testing::{content, rng};

/// Makes two tests of each function: one thread per device (`None`) and one thread for all devices (`Some(1)`).
///
/// The functions take the largest number of threads that serve the devices.
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

/// Returns a number from the environment, so that a test can run longer than in the ordinary suite.
#[must_use]
pub fn count_from_env(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
