//! Sign bits of randomly rotated keys: one bit per dimension, no calibration.

pub(crate) mod selector;
pub(crate) mod summary;
