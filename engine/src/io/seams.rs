//! What the engine takes from outside besides its devices: randomness, the clock, and a few sizes. With feature `sim` a
//! simulation replaces them on its own thread; everywhere else, and without the feature, these are the real ones.

use crate::error::{Error, ErrorKind, Result};

/// Sizes that a simulation makes small, so that its cases reach their limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes of a fresh manifest file. A full one ends in a checkpoint.
    pub(crate) manifest_bytes: u64,
    /// Zeros written at once over a fresh manifest file, so that a later sync has no extents to convert.
    pub(crate) zero_bytes: usize,
    /// The most bytes of records of a batch.
    pub(crate) batch_bytes: usize,
    /// Tokens that commits write one by one before one of them writes their groups.
    pub(crate) gather_tokens: u64,
    /// The least memory of a store whose commits gather groups: with less, a read may need all there is.
    pub(crate) gather_memory: usize,
}

const SIZES: Sizes = Sizes {
    manifest_bytes: 4 << 20,
    zero_bytes: 1 << 20,
    batch_bytes: stratakv_format::manifest::RECORDS_BYTES_MAX,
    gather_tokens: 64,
    gather_memory: 16 << 20,
};

pub(crate) fn sizes() -> Sizes {
    #[cfg(feature = "sim")]
    if let Some(sizes) = crate::io::sim::thread::sizes() {
        return sizes;
    }
    SIZES
}

/// Whether this thread simulates.
pub(crate) fn is_simulated() -> bool {
    #[cfg(feature = "sim")]
    return crate::io::sim::thread::sizes().is_some();
    #[cfg(not(feature = "sim"))]
    false
}

/// Random bytes for ids and nonces.
///
/// # Errors
/// The system has none to give.
pub(crate) fn random_u64() -> Result<u64> {
    #[cfg(feature = "sim")]
    if let Some(random) = crate::io::sim::thread::random() {
        return Ok(random);
    }
    getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("random numbers: {e}")))
}

/// Now, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(now) = crate::io::sim::thread::clock() {
        return now;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
