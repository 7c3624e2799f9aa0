//! Transform-coded keys: a code of a few bytes per token, scored by table look-ups.

pub(crate) mod codebook;
pub(crate) mod selector;
pub(crate) mod summary;
