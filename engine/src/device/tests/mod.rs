//! Buffers and directories.

mod arena;
mod dir;
pub(crate) mod sandbox;
