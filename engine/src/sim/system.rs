//! The simulated system: clock, random numbers and buffers of a simulation.

use super::random::Rng;
use super::scheduler::SimScheduler;
use crate::io::buffer::arena::Arena;
use crate::io::replacement::Replacement;
use crate::io::scheduler::ThreadlessScheduler;
use crate::io::seams::{Clock, Environment, RandomSource, ReplacedSystem, Sizes};
use crate::metrics::{MemoryBudget, lock};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use stratakv_format::PAGE_BYTES;

thread_local! {
    /// Buffers that stay mapped from one store of this thread to the next, because mapping them takes longer than a
    /// case.
    static BUFFERS: RefCell<Option<(Arc<MemoryBudget>, Arena)>> = const { RefCell::new(None) };
}

/// The system of a simulation. Clones share it.
#[derive(Clone)]
pub(super) struct SimSystem {
    state: Arc<Mutex<SystemState>>,
    sizes: Sizes,
}

struct SystemState {
    rng: Rng,
    clock_ms: u64,
}

impl SimSystem {
    /// Returns a system whose randomness follows the seed. Manifests have `manifest_pages` pages, with at most
    /// `batch_bytes` of records per batch.
    pub(super) fn new(seed: u64, manifest_pages: u64, batch_bytes: usize) -> Self {
        let bytes = manifest_pages.max(4) * PAGE_BYTES as u64;
        let sizes = Sizes {
            manifest_bytes: bytes,
            zero_bytes: bytes as usize,
            batch_bytes: batch_bytes.max(256),
            gather_tokens: [4, 9, 20, 64][(seed >> 8) as usize % 4],
            gather_memory: 0,
        };
        let state = SystemState { rng: Rng::new(seed), clock_ms: 1_700_000_000_000 };
        Self { state: Arc::new(Mutex::new(state)), sizes }
    }

    /// Returns the environment of stores on this system.
    pub(super) fn environment(&self) -> Environment {
        let system: Arc<dyn ReplacedSystem> = Arc::new(self.clone());
        Environment::replaced(system.into())
    }

    /// Returns a number below `count`.
    pub(super) fn choose(&self, count: usize) -> usize {
        lock(&self.state).rng.below(count as u64) as usize
    }

    /// Lets time pass.
    pub(super) fn advance(&self, milliseconds: u64) {
        lock(&self.state).clock_ms += milliseconds;
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

impl ReplacedSystem for SimSystem {
    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn scheduler(&self) -> Replacement<dyn ThreadlessScheduler> {
        let scheduler: Arc<dyn ThreadlessScheduler> = Arc::new(SimScheduler::new(self.clone()));
        scheduler.into()
    }

    fn buffers(&self, limit: usize) -> (Arc<MemoryBudget>, Arena) {
        BUFFERS.with_borrow_mut(|buffers| {
            if let Some((budget, arena)) = &*buffers
                && budget.limit() == limit
            {
                return (Arc::clone(budget), arena.clone());
            }
            let budget = MemoryBudget::new(limit);
            let arena = Arena::new(Arc::clone(&budget), limit);
            buffers.insert((budget, arena)).clone()
        })
    }
}
