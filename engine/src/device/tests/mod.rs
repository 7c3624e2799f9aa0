//! Buffers and directories.

mod arena;
pub(crate) mod bare;
mod dir;
pub(crate) mod sandbox;
