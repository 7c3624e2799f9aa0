//! The pages of pools that directories in force name, and the runs that they form.
//!
//! Invariant: a page is added once, so runs and entries are those of distinct pages.

use crate::frames::PoolExtent;
use std::collections::HashMap;
use std::ops::Range;

/// The named pages of a store, by the frame that holds them.
#[derive(Debug, Default)]
pub(crate) struct NamedPages(HashMap<u64, FramePages>);

/// The named pages of one frame.
#[derive(Debug, Default)]
pub(crate) struct FramePages {
    /// A bit for each page of 4096 bytes of the frame: set if a named page starts there.
    starts: Vec<u64>,
    /// Runs with a page in the frame.
    pub(crate) runs: u64,
    /// Pages of the longest of these runs.
    pub(crate) longest_run: u64,
    /// Valid entries of the named pages.
    pub(crate) entries: u64,
    /// Entries that the named pages can hold.
    pub(crate) slots: u64,
    /// The number of the run of the last page, and the pages of that run so far.
    last_run: (u64, u64),
}

/// A page that a run names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedPage {
    /// The frame that holds the page.
    pub(crate) frame: u64,
    /// The page in that frame, in pages of 4096 bytes.
    pub(crate) page: u32,
    /// The number of the run, from 1. Runs of one store have different numbers.
    pub(crate) run: u64,
    /// The valid entries.
    pub(crate) entries: u64,
    /// The entries of a full page.
    pub(crate) slots: u64,
}

impl NamedPages {
    /// Adds a page. Returns false, and adds nothing, if it was added before.
    pub(crate) fn add(&mut self, page: &NamedPage) -> bool {
        let own = self.0.entry(page.frame).or_default();
        let (word, bit) = (page.page as usize / 64, 1 << (page.page % 64));
        if own.starts.len() <= word {
            own.starts.resize(word + 1, 0);
        }
        if own.starts[word] & bit != 0 {
            return false;
        }
        own.starts[word] |= bit;
        if own.last_run.0 != page.run {
            own.last_run = (page.run, 0);
            own.runs += 1;
        }
        own.last_run.1 += 1;
        own.longest_run = own.longest_run.max(own.last_run.1);
        own.entries += page.entries;
        own.slots += page.slots;
        true
    }

    /// Returns the named pages of a frame, if it has any.
    pub(crate) fn of(&self, frame: u64) -> Option<&FramePages> {
        self.0.get(&frame)
    }
}

impl FramePages {
    /// Returns how many of these pages of a pool are named. The range counts pages of the pool from 0.
    pub(crate) fn count(&self, pool: &PoolExtent, pages: Range<u32>) -> u64 {
        pages.filter(|nth| self.has(pool.first + nth * pool.disk_pages())).count() as u64
    }

    fn has(&self, page: u32) -> bool {
        self.starts.get(page as usize / 64).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_once_and_runs_by_their_pages() {
        let mut named = NamedPages::default();
        let mut add = |frame, page, run| named.add(&NamedPage { frame, page, run, entries: 3, slots: 4 });
        // Run 1 has three pages of frame 7, run 2 two pages, and run 3 one page of frame 8.
        let added = [(7, 2, 1), (7, 4, 1), (7, 6, 1), (7, 70, 2), (7, 4, 2), (7, 72, 2), (8, 2, 3)];
        let added = added.map(|(frame, page, run)| add(frame, page, run));
        assert_eq!(added, [true, true, true, true, false, true, true]);
        let own = named.of(7).expect("a frame");
        assert_eq!((own.runs, own.longest_run, own.entries, own.slots), (2, 3, 15, 20));
        let pool = PoolExtent { layer: 0, first: 2, pages: 40, written: 40, page_bytes: 8192 };
        assert_eq!((own.count(&pool, 0..40), own.count(&pool, 1..3), own.count(&pool, 3..34)), (5, 2, 0));
        let other = named.of(8).map(|own| (own.runs, own.longest_run));
        assert_eq!((other, named.of(9).is_none()), (Some((1, 1)), true));
    }
}
