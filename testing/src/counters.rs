//! Counters of a store that tests compare.

use stratakv::Store;
use stratakv::metrics::Category;

/// Returns the bytes that all devices have read.
#[must_use]
pub fn read_bytes(store: &Store) -> u64 {
    store.status().devices.iter().map(|device| device.counters.read_bytes).sum()
}

/// Returns the bytes of memory that summaries take.
#[must_use]
pub fn summary_bytes(store: &Store) -> usize {
    let memory = store.status().memory;
    memory.categories.iter().filter(|of| of.category == Category::Summaries).map(|of| of.used_bytes).sum()
}
