//! The free map of an arena: which pages of which slab are leased.
//!
//! Invariants:
//! - A slab keeps its slot in the table while it is mapped, so a lease finds it in constant time.
//! - A page is marked as taken exactly while one [`SlabSlot`] names it.

use std::sync::{Arc, Mutex};

use super::sizes::{PAGE_BYTES, SLAB_BYTES};
use super::slab::Slab;
use crate::metrics::{MemoryBudget, lock};

const PAGES: usize = SLAB_BYTES / PAGE_BYTES;
const WORDS: usize = PAGES / 64;

/// A slab with the map of its taken pages.
pub(super) struct SlabRange {
    pub(super) slab: Arc<Slab>,
    taken: [u64; WORDS],
    /// Number of taken pages.
    pub(super) used: usize,
    /// No free run is longer than this. A slab with small gaps only is therefore skipped without a search.
    longest: usize,
}

impl SlabRange {
    pub(super) fn new(slab: Arc<Slab>) -> Self {
        Self { slab, taken: [0; WORDS], used: 0, longest: PAGES }
    }

    /// Takes the first free run of `pages` pages. Returns its first page.
    ///
    /// First fit reuses the pages that were used last, which are still in the processor's caches. Batches that cycle
    /// through all memory cost a third more.
    fn take(&mut self, pages: usize) -> Option<usize> {
        if self.longest < pages {
            return None;
        }
        let Some(first) = self.find(pages) else {
            self.longest = pages - 1;
            return None;
        };
        self.mark(first, pages, true);
        Some(first)
    }

    fn find(&self, pages: usize) -> Option<usize> {
        let mut first = self.next_page(0, false);
        while first + pages <= PAGES {
            let end = self.next_page(first, true);
            if end - first >= pages {
                return Some(first);
            }
            first = self.next_page(end, false);
        }
        None
    }

    /// Returns the first page from `from` on that is taken, or that is free. Returns [`PAGES`] if there is none.
    fn next_page(&self, from: usize, taken: bool) -> usize {
        let mut at = from;
        while at < PAGES {
            let word = if taken { self.taken[at / 64] } else { !self.taken[at / 64] };
            let rest = word >> (at % 64);
            if rest != 0 {
                return at + rest.trailing_zeros() as usize;
            }
            at = (at / 64 + 1) * 64;
        }
        PAGES
    }

    fn mark(&mut self, first: usize, pages: usize, taken: bool) {
        for page in first..first + pages {
            debug_assert_ne!(self.taken[page / 64] >> (page % 64) & 1 == 1, taken);
            self.taken[page / 64] ^= 1 << (page % 64);
        }
        self.used = if taken { self.used + pages } else { self.used - pages };
    }

    fn give(&mut self, first: usize, pages: usize) {
        self.mark(first, pages, false);
        // The free run that these pages join begins after the last taken page before them.
        let (mut before, end) = (first, self.next_page(first, true));
        while before > 0 && self.taken[(before - 1) / 64] >> ((before - 1) % 64) & 1 == 0 {
            before -= 1;
        }
        self.longest = self.longest.max(end - before);
    }
}

/// The slabs of an arena.
#[derive(Default)]
pub(super) struct SlabTable {
    pub(super) slots: Vec<Option<SlabRange>>,
}

/// Pages of a slab that are taken for `len` bytes.
pub(super) struct SlabSlot {
    pub(super) slab: Arc<Slab>,
    pub(super) slot: usize,
    pub(super) first: usize,
    pub(super) pages: usize,
    pub(super) len: usize,
}

impl SlabTable {
    /// Takes pages for `len` bytes in one slab.
    pub(super) fn take(&mut self, len: usize) -> Option<SlabSlot> {
        let pages = len.div_ceil(PAGE_BYTES).max(1);
        self.slots.iter_mut().enumerate().find_map(|(slot, range)| {
            let range = range.as_mut()?;
            let first = range.take(pages)?;
            Some(SlabSlot { slab: Arc::clone(&range.slab), slot, first, pages, len })
        })
    }

    pub(super) fn give(&mut self, slot: usize, first: usize, pages: usize) {
        if let Some(Some(range)) = self.slots.get_mut(slot) {
            range.give(first, pages);
        }
    }

    /// Adds a slab in the first free slot.
    pub(super) fn add(&mut self, slab: Arc<Slab>) {
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        self.slots[slot] = Some(SlabRange::new(slab));
    }
}

/// The state that the clones of an arena and its leases share.
pub(super) struct ArenaState {
    pub(super) budget: Arc<MemoryBudget>,
    pub(super) limit: usize,
    pub(super) table: Mutex<SlabTable>,
    /// Held while a slab is mapped, so that one need maps one slab. Taken before `table`. Threads that find free pages
    /// do not take it.
    pub(super) growing: Mutex<()>,
}

impl Drop for ArenaState {
    fn drop(&mut self) {
        for range in lock(&self.table).slots.iter().flatten() {
            range.slab.retire();
        }
    }
}
