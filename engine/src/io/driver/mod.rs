//! Drivers move bytes between files and memory.
//!
//! [`uring`] is the default. [`posix`] replaces it where io_uring is absent or forbidden. `runtimes` holds the drivers of
//! the features `glommio` and `tokio-uring`.

pub(crate) mod blocking;
pub(crate) mod interface;
pub(crate) mod posix;
pub(crate) mod progress;
mod registered;
#[cfg(any(feature = "glommio", feature = "tokio-uring"))]
pub(crate) mod runtimes;
pub(crate) mod uring;
