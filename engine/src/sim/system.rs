//! The simulated system: the clock and the random numbers of a simulation, and its sizes.

use super::random::Rng;
use crate::io::coverage;
use crate::io::seams::{Clock, RandomSource, Sizes};
use crate::metrics::lock;
use std::sync::{Arc, Mutex};
use stratakv_format::PAGE_BYTES;

/// The system of a simulation. Clones share it.
#[derive(Clone)]
pub(super) struct SimSystem {
    state: Arc<Mutex<SystemState>>,
    pub(super) sizes: Sizes,
}

struct SystemState {
    rng: Rng,
    clock_ms: u64,
    /// The latest time before the clock was last changed.
    latest_ms: u64,
}

impl SimSystem {
    /// Returns a system whose randomness follows the seed. Manifests have `manifest_pages` pages, with at most
    /// `batch_bytes` of records per batch. At most `open_files` files of segments stay open.
    pub(super) fn new(seed: u64, manifest_pages: u64, batch_bytes: usize, open_files: Option<usize>) -> Self {
        let bytes = manifest_pages.max(4) * PAGE_BYTES as u64;
        let sizes = Sizes {
            manifest_bytes: bytes,
            zero_bytes: bytes as usize,
            batch_bytes: batch_bytes.max(256),
            gather_tokens: [4, 9, 20, 64][(seed >> 8) as usize % 4],
            gather_memory: 0,
            open_files,
        };
        let state = SystemState { rng: Rng::new(seed), clock_ms: 1_700_000_000_000, latest_ms: 0 };
        Self { state: Arc::new(Mutex::new(state)), sizes }
    }

    /// Returns a number below `count`.
    pub(super) fn choose(&self, count: usize) -> usize {
        lock(&self.state).rng.below(count as u64) as usize
    }

    /// Lets time pass, or sets the clock back.
    pub(super) fn advance(&self, milliseconds: i64) {
        let mut state = lock(&self.state);
        coverage!(ClockWentBack, milliseconds < 0);
        state.latest_ms = state.latest_ms.max(state.clock_ms);
        state.clock_ms = state.clock_ms.saturating_add_signed(milliseconds);
    }

    /// Returns the latest time that the clock has shown.
    pub(super) fn latest(&self) -> u64 {
        let state = lock(&self.state);
        state.latest_ms.max(state.clock_ms)
    }

    /// Returns the time without letting any pass.
    pub(super) fn now(&self) -> u64 {
        lock(&self.state).clock_ms
    }
}

impl Clock for SimSystem {
    /// Each call lets a millisecond pass.
    fn unix_ms(&self) -> u64 {
        let mut state = lock(&self.state);
        state.clock_ms += 1;
        state.clock_ms
    }
}

impl RandomSource for SimSystem {
    fn random_u64(&self) -> u64 {
        lock(&self.state).rng.next_u64()
    }
}
