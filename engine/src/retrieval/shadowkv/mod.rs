//! ShadowKV: mean keys choose chunks, and keys of a low rank are reconstructed in memory instead of being read.

pub(crate) mod reconstructed;
pub(crate) mod selector;
pub(crate) mod summary;
