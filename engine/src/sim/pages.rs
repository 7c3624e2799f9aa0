//! The contents of simulated disks, page by page. A page is stored once and then shared by its number.

use std::cell::RefCell;

pub(super) const PAGE: usize = stratakv_format::PAGE_BYTES;

/// Bytes of a sector, which lands as a whole or not at all.
pub(super) const SECTOR_BYTES: usize = 512;

/// The number of a page's content. [`ZERO`] is a page of zeros.
pub(super) type PageId = u32;
pub(super) const ZERO: PageId = 0;

static ZEROS: [u8; PAGE] = [0; PAGE];

thread_local! {
    /// Pages of the last simulation of this thread, kept because mapping memory takes longer than a case.
    static SPARE: RefCell<Vec<Box<[u8; PAGE]>>> = const { RefCell::new(Vec::new()) };
}

/// The contents of all pages of a simulation.
pub(super) struct Pages {
    pages: Vec<Box<[u8; PAGE]>>,
    used: usize,
}

impl Pages {
    pub(super) fn new() -> Self {
        Self { pages: SPARE.take(), used: 0 }
    }

    pub(super) fn get(&self, id: PageId) -> &[u8; PAGE] {
        match id {
            ZERO => &ZEROS,
            id => &self.pages[id as usize - 1],
        }
    }

    /// Stores a page of these bytes.
    pub(super) fn put(&mut self, bytes: &[u8; PAGE]) -> PageId {
        if is_zero(bytes) {
            return ZERO;
        }
        match self.pages.get_mut(self.used) {
            Some(page) => page.copy_from_slice(bytes),
            None => self.pages.push(Box::new(*bytes)),
        }
        self.used += 1;
        self.used as PageId
    }

    /// Stores a page with the sectors of `new` for which `lands` returns true, and the others of `old`.
    pub(super) fn mix(&mut self, old: PageId, new: PageId, mut lands: impl FnMut(usize) -> bool) -> PageId {
        let mut mixed = *self.get(old);
        let new = *self.get(new);
        for (sector, (to, from)) in mixed.chunks_mut(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES)).enumerate() {
            if lands(sector) {
                to.copy_from_slice(from);
            }
        }
        self.put(&mixed)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        SPARE.set(std::mem::take(&mut self.pages));
    }
}

fn is_zero(bytes: &[u8; PAGE]) -> bool {
    bytes.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0)
}
