//! Checks of the keys that clustering is given, and products with them.

use crate::error::{Error, ErrorKind, Result};

/// The largest magnitude of an element of a key. Squared distances of such keys are finite up to 10 million dimensions.
pub const MAX_KEY_MAGNITUDE: f32 = 1e15;

/// Elements that are checked at once.
const RUN: usize = 256;

/// Checks that `keys` is `[entries, dim]`, finite and at most [`MAX_KEY_MAGNITUDE`]. Returns the number of entries.
pub(super) fn check_keys(operation: &str, keys: &[f32], dim: usize) -> Result<usize> {
    let refused = |what: String| Err(Error::new(ErrorKind::InvalidArgument, format!("{operation}: {what}")));
    if dim == 0 || !keys.len().is_multiple_of(dim) {
        return refused(format!("{} elements are no whole keys of dimension {dim}", keys.len()));
    }
    // A run without an early exit is checked in registers.
    let is_whole = |run: &[f32]| run.iter().fold(true, |whole, x| whole & (x.abs() <= MAX_KEY_MAGNITUDE));
    if keys.chunks(RUN).all(is_whole) {
        return Ok(keys.len() / dim);
    }
    if let Some(at) = keys.iter().position(|x| x.is_nan() || x.abs() > MAX_KEY_MAGNITUDE) {
        return refused(format!(
            "element {} of key {} is {}, not a finite number of at most {MAX_KEY_MAGNITUDE:e}",
            at % dim,
            at / dim,
            keys[at]
        ));
    }
    Ok(keys.len() / dim)
}
