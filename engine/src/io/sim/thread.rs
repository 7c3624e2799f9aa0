//! The environment of the simulation that runs on this thread: see [`crate::io::seams`].

use super::random::Rng;
use crate::io::buffer::arena::Arena;
use crate::io::coverage;
use crate::io::seams::Sizes;
use crate::metrics::MemoryBudget;
use std::cell::RefCell;
use std::sync::Arc;
use stratakv_format::PAGE_BYTES;

struct Own {
    rng: Rng,
    clock: u64,
    sizes: Sizes,
}

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
    static MEMORY: RefCell<Option<(Arc<MemoryBudget>, Arena)>> = const { RefCell::new(None) };
}

/// From now on this thread's randomness and clock follow the seed, and manifests have `manifest_pages` pages with at most
/// `batch_bytes` of records per batch.
pub(super) fn enter(seed: u64, manifest_pages: u64, batch_bytes: usize) {
    let bytes = manifest_pages.max(4) * PAGE_BYTES as u64;
    let sizes = Sizes {
        manifest_bytes: bytes,
        zero_bytes: bytes as usize,
        batch_bytes: batch_bytes.max(256),
        gather_tokens: [4, 9, 20, 64][(seed >> 8) as usize % 4],
        gather_memory: 0,
    };
    OWN.with(|own| *own.borrow_mut() = Some(Own { rng: Rng::new(seed), clock: 1_700_000_000_000, sizes }));
    coverage::start();
}

/// Randomness, clock and sizes are the real ones again.
pub(super) fn leave() {
    OWN.with(|own| *own.borrow_mut() = None);
    coverage::stop();
}

pub(crate) fn sizes() -> Option<Sizes> {
    OWN.with(|own| own.borrow().as_ref().map(|own| own.sizes))
}

pub(crate) fn random() -> Option<u64> {
    OWN.with(|own| own.borrow_mut().as_mut().map(|own| own.rng.next_u64()))
}

/// One of `count` things.
pub(crate) fn choose(count: usize) -> usize {
    OWN.with(|own| own.borrow_mut().as_mut().map_or(0, |own| own.rng.below(count as u64) as usize))
}

pub(crate) fn clock() -> Option<u64> {
    OWN.with(|own| {
        own.borrow_mut().as_mut().map(|own| {
            own.clock += 1;
            own.clock
        })
    })
}

/// Lets time pass on this thread.
pub(super) fn advance(milliseconds: u64) {
    OWN.with(|own| own.borrow_mut().iter_mut().for_each(|own| own.clock += milliseconds));
}

/// The time it is, without any passing.
pub(super) fn now() -> u64 {
    OWN.with(|own| own.borrow().as_ref().map_or(0, |own| own.clock))
}

/// Buffers that stay mapped from one simulated store of this thread to the next; mapping them takes longer than a case.
pub(crate) fn memory(limit: usize) -> Option<(Arc<MemoryBudget>, Arena)> {
    OWN.with(|own| own.borrow().is_some()).then(|| {
        MEMORY.with(|memory| {
            let mut memory = memory.borrow_mut();
            if let Some((budget, arena)) = &*memory
                && budget.limit() == limit
            {
                return (Arc::clone(budget), arena.clone());
            }
            let budget = MemoryBudget::new(limit);
            let arena = Arena::new(Arc::clone(&budget), limit);
            memory.insert((budget, arena)).clone()
        })
    })
}
