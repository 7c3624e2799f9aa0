//! Memory, files and drivers: everything that touches the operating system. Knows nothing of the engine.
//!
//! [`arena`] lends page-aligned buffers; [`dir`] opens a device directory and its files; a [`driver::Driver`] moves bytes
//! between the two. [`uring`] is the default, [`posix`] stands in where io_uring is absent or forbidden;
//! `runtimes` holds the drivers of features `glommio` and `tokio-uring`.

pub(crate) mod aligned;
pub(crate) mod arena;
mod confine;
pub(crate) mod counted;
pub(crate) mod dir;
pub(crate) mod directory;
pub(crate) mod driver;
pub(crate) mod environment;
pub(crate) mod file;
pub(crate) mod here;
pub(crate) mod lazy;
pub(crate) mod pages;
pub(crate) mod posix;
mod probe;
pub(crate) mod profile;
mod progress;
pub(crate) mod region;
mod registered;
#[cfg(any(feature = "glommio", feature = "tokio-uring"))]
pub(crate) mod runtimes;
#[cfg(feature = "sim")]
pub(crate) mod sim;
pub(crate) mod slab;
pub(crate) mod uring;

#[cfg(test)]
pub(crate) mod tests;

pub use slab::PageBacking;
