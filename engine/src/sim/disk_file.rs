//! One file of a simulated disk: its durable pages, the pages that reads see, and the writes that are not durable yet.
//!
//! A write arrives, is in flight, and completes. A sync makes durable the writes that had completed when the sync
//! arrived. At a crash any part of the other writes may land, whether they had completed or not.

use super::pages::{PAGE, PageId, Pages, SECTOR_BYTES, ZERO};
use super::random::Rng;

/// Sectors of a page.
const SECTORS: usize = PAGE / SECTOR_BYTES;

/// One page of a write.
#[derive(Clone, Copy, Debug)]
struct PageChange {
    /// The number of the write.
    write: u64,
    page: u32,
    content: PageId,
}

/// A file of a simulated disk.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskFile {
    /// The pages that reads see.
    live: Vec<PageId>,
    durable: Vec<PageId>,
    /// The length in pages, if it is not durable yet.
    pending_pages: Option<usize>,
    /// Writes that have arrived and not completed.
    in_flight: Vec<PageChange>,
    /// Writes that have completed and are not durable, in the order of completion, each with its moment.
    pending: Vec<(u64, PageChange)>,
    /// Writes that a failed sync covered. The system believes their pages clean, so no later sync makes them durable.
    doomed: Vec<PageChange>,
}

/// The changes that land at a crash, out of those that are not durable.
#[derive(Clone, Copy)]
pub(super) enum CrashOutcome {
    Nothing,
    Everything,
    /// Each change lands whole or not at all.
    Whole,
    /// Any sectors of each write land.
    Torn,
    /// The first changes land, this many of them.
    Front(usize),
}

impl CrashOutcome {
    pub(super) fn any(rng: &mut Rng, changes: usize) -> Self {
        match rng.below(8) {
            0 => Self::Nothing,
            1 => Self::Everything,
            2 | 3 => Self::Whole,
            4 => Self::Front(rng.below(changes as u64 + 1) as usize),
            _ => Self::Torn,
        }
    }
}

fn set(pages: &mut Vec<PageId>, change: PageChange) {
    let page = change.page as usize;
    if pages.len() <= page {
        pages.resize(page + 1, ZERO);
    }
    pages[page] = change.content;
}

impl DiskFile {
    pub(super) fn with_pages(pages: usize) -> Self {
        Self { live: vec![ZERO; pages], pending_pages: Some(pages), ..Self::default() }
    }

    pub(super) fn grow(&mut self, pages: usize) {
        if pages > self.live.len() {
            self.live.resize(pages, ZERO);
            self.pending_pages = Some(pages);
        }
    }

    /// Returns the length in bytes.
    pub(super) fn len(&self) -> usize {
        self.live.len() * PAGE
    }

    /// Returns the pages that reads see.
    pub(super) fn pages(&self) -> &[PageId] {
        &self.live
    }

    pub(super) fn page(&self, page: usize) -> Option<PageId> {
        self.live.get(page).copied()
    }

    /// Lets a page of a write arrive.
    pub(super) fn arrive(&mut self, write: u64, page: usize, content: PageId) {
        self.in_flight.push(PageChange { write, page: page as u32, content });
    }

    /// Lets the first `sectors` of a write complete, `shift` pages from their place. The rest of the write never
    /// happens.
    ///
    /// `moment` is at least that of the previous call.
    pub(super) fn complete(&mut self, pages: &mut Pages, write: u64, sectors: usize, moment: u64, shift: i64) {
        let mut left = sectors;
        let mut changes = std::mem::take(&mut self.in_flight);
        changes.retain(|change| {
            if change.write != write {
                return true;
            }
            let page = (i64::from(change.page) + shift).max(0) as u32;
            if left > 0 {
                let old = self.live.get(page as usize).copied().unwrap_or(ZERO);
                let own = left.min(SECTORS);
                let content = if own == SECTORS { change.content } else { pages.mix(old, change.content, |s| s < own) };
                let change = PageChange { page, content, ..*change };
                set(&mut self.live, change);
                self.pending.push((moment, change));
                left -= own;
            }
            false
        });
        self.in_flight = changes;
    }

    /// Lets a write fail. Any of its sectors may be on the medium.
    pub(super) fn fail(&mut self, pages: &mut Pages, write: u64, moment: u64, rng: &mut Rng) {
        let changes: Vec<PageChange> = self.in_flight.extract_if(.., |change| change.write == write).collect();
        for change in changes {
            let old = self.live.get(change.page as usize).copied().unwrap_or(ZERO);
            let change = PageChange { content: pages.mix(old, change.content, |_| rng.one_in(2)), ..change };
            set(&mut self.live, change);
            self.pending.push((moment, change));
        }
    }

    /// Forgets a write that is reported as complete but never happened.
    pub(super) fn forget(&mut self, write: u64) {
        self.in_flight.retain(|change| change.write != write);
    }

    /// Makes durable the writes that had completed by `moment`.
    pub(super) fn sync(&mut self, moment: u64) {
        self.land_length();
        let durable = &mut self.durable;
        let covered = self.pending.iter().take_while(|(completed, _)| *completed <= moment).count();
        for (_, change) in self.pending.drain(..covered) {
            set(durable, change);
        }
    }

    /// Lets a sync fail. No later sync makes the writes that it covered durable.
    pub(super) fn doom(&mut self) {
        self.doomed.extend(self.pending.drain(..).map(|(_, change)| change));
    }

    /// Flips a bit on the medium.
    pub(super) fn rot(&mut self, pages: &mut Pages, offset: usize, bit: u32) {
        let mut flip = |content: &mut PageId| {
            let mut bytes = *pages.get(*content);
            bytes[offset % PAGE] ^= 1 << bit;
            *content = pages.put(&bytes);
        };
        let page = offset / PAGE;
        self.live.get_mut(page).into_iter().for_each(&mut flip);
        self.durable.get_mut(page).into_iter().for_each(&mut flip);
    }

    /// Replaces the bytes on the medium, durably.
    pub(super) fn replace(&mut self, pages: &mut Pages, bytes: &[u8]) {
        self.durable = bytes.as_chunks().0.iter().map(|page| pages.put(page)).collect();
        self.live.clone_from(&self.durable);
        (self.pending_pages, self.pending, self.doomed) = (None, Vec::new(), Vec::new());
    }

    fn land_length(&mut self) {
        if let Some(pages) = self.pending_pages.take()
            && self.durable.len() < pages
        {
            self.durable.resize(pages, ZERO);
        }
    }

    /// Decides after a power failure which writes landed.
    pub(super) fn crash(&mut self, pages: &mut Pages, rng: &mut Rng) {
        let mut changes = std::mem::take(&mut self.doomed);
        changes.extend(self.pending.drain(..).map(|(_, change)| change));
        changes.append(&mut self.in_flight);
        if !changes.is_empty() || self.pending_pages.is_some() {
            let writes =
                changes.chunk_by(|a, b| a.write == b.write).count() + usize::from(self.pending_pages.is_some());
            let outcome = CrashOutcome::any(rng, writes);
            let length_lands = match outcome {
                CrashOutcome::Nothing => false,
                CrashOutcome::Everything => true,
                CrashOutcome::Front(count) => count > 0,
                CrashOutcome::Whole | CrashOutcome::Torn => rng.one_in(2),
            };
            if length_lands {
                self.land_length();
            }
            for (index, write) in changes.chunk_by(|a, b| a.write == b.write).enumerate() {
                let lands = match outcome {
                    CrashOutcome::Nothing => false,
                    CrashOutcome::Everything => true,
                    CrashOutcome::Front(count) => index + 1 < count,
                    CrashOutcome::Whole => rng.one_in(2),
                    CrashOutcome::Torn => {
                        self.land_torn(pages, rng, write);
                        false
                    }
                };
                if lands {
                    write.iter().for_each(|change| set(&mut self.durable, *change));
                }
            }
        }
        self.pending_pages = None;
        self.live.clone_from(&self.durable);
    }

    /// Lands the first sectors of a write, its last sectors, or any of its sectors.
    fn land_torn(&mut self, pages: &mut Pages, rng: &mut Rng, write: &[PageChange]) {
        let cut = rng.below((write.len() * SECTORS) as u64 + 1) as usize;
        let shape = rng.below(3);
        for (index, change) in write.iter().enumerate() {
            let first = index * SECTORS;
            let whole = match shape {
                0 if first + SECTORS <= cut => Some(true),
                0 if first >= cut => Some(false),
                1 if first >= cut => Some(true),
                1 if first + SECTORS <= cut => Some(false),
                _ => None,
            };
            let old = self.durable.get(change.page as usize).copied().unwrap_or(ZERO);
            let content = match whole {
                Some(true) => change.content,
                Some(false) => continue,
                None => pages.mix(old, change.content, |sector| match shape {
                    0 => first + sector < cut,
                    1 => first + sector >= cut,
                    _ => rng.one_in(2),
                }),
            };
            set(&mut self.durable, PageChange { content, ..*change });
        }
    }
}
