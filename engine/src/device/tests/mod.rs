//! Buffers and directories.

mod arena;
pub(crate) mod bare;
mod dir;
mod progress;
pub(crate) mod sandbox;
