//! The exact oracle: scores of all keys, kept in memory. For evaluation.

pub(crate) mod selector;
pub(crate) mod summary;
