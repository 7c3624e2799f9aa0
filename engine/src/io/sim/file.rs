//! One file: what is durable, what reads see, and what lies between the two.
//!
//! A write arrives, is under way, and completes. A sync makes durable what had completed when it arrived. At a crash any
//! part of the rest may land, whether it had completed or not.

use super::pages::{PAGE, PageId, Pages, SECTOR_BYTES, ZERO};
use super::random::Rng;

/// Sectors of a page.
const SECTORS: usize = PAGE / SECTOR_BYTES;

/// One page of a write.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// The write it belongs to.
    write: u64,
    page: u32,
    content: PageId,
}

#[derive(Clone, Debug, Default)]
pub(super) struct File {
    /// What reads see.
    live: Vec<PageId>,
    durable: Vec<PageId>,
    /// A length that is not durable yet.
    pending_pages: Option<usize>,
    /// Arrived, not completed.
    under_way: Vec<Change>,
    /// Completed and not durable, in the order of completion, each with its moment.
    pending: Vec<(u64, Change)>,
    /// Written before a sync that failed: the system believes them clean, and no later sync brings them home.
    doomed: Vec<Change>,
}

/// How much of what is pending lands at a crash.
#[derive(Clone, Copy)]
pub(super) enum Landing {
    Nothing,
    Everything,
    /// Each change or not.
    Whole,
    /// Sectors of each write or not.
    Torn,
    /// The first changes.
    Front(usize),
}

impl Landing {
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

fn set(pages: &mut Vec<PageId>, change: Change) {
    let page = change.page as usize;
    if pages.len() <= page {
        pages.resize(page + 1, ZERO);
    }
    pages[page] = change.content;
}

impl File {
    pub(super) fn with_pages(pages: usize) -> Self {
        Self { live: vec![ZERO; pages], pending_pages: Some(pages), ..Self::default() }
    }

    pub(super) fn grow(&mut self, pages: usize) {
        if pages > self.live.len() {
            self.live.resize(pages, ZERO);
            self.pending_pages = Some(pages);
        }
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.live.len() * PAGE
    }

    /// What reads see.
    pub(super) fn pages(&self) -> &[PageId] {
        &self.live
    }

    pub(super) fn page(&self, page: usize) -> Option<PageId> {
        self.live.get(page).copied()
    }

    /// A page of a write arrives.
    pub(super) fn arrive(&mut self, write: u64, page: usize, content: PageId) {
        self.under_way.push(Change { write, page: page as u32, content });
    }

    /// The first `sectors` of a write complete, at page offset `shift` from where they belong; the rest never was.
    /// `moment` only grows.
    pub(super) fn complete(&mut self, pages: &mut Pages, write: u64, sectors: usize, moment: u64, shift: i64) {
        let mut left = sectors;
        let mut changes = std::mem::take(&mut self.under_way);
        changes.retain(|change| {
            if change.write != write {
                return true;
            }
            let page = (i64::from(change.page) + shift).max(0) as u32;
            if left > 0 {
                let old = self.live.get(page as usize).copied().unwrap_or(ZERO);
                let own = left.min(SECTORS);
                let content = if own == SECTORS { change.content } else { pages.mix(old, change.content, |s| s < own) };
                let change = Change { page, content, ..*change };
                set(&mut self.live, change);
                self.pending.push((moment, change));
                left -= own;
            }
            false
        });
        self.under_way = changes;
    }

    /// A write fails: any of its sectors may be there.
    pub(super) fn fail(&mut self, pages: &mut Pages, write: u64, moment: u64, rng: &mut Rng) {
        let changes: Vec<Change> = self.under_way.extract_if(.., |change| change.write == write).collect();
        for change in changes {
            let old = self.live.get(change.page as usize).copied().unwrap_or(ZERO);
            let change = Change { content: pages.mix(old, change.content, |_| rng.one_in(2)), ..change };
            set(&mut self.live, change);
            self.pending.push((moment, change));
        }
    }

    /// A write is reported complete, and never was.
    pub(super) fn forget(&mut self, write: u64) {
        self.under_way.retain(|change| change.write != write);
    }

    /// Makes durable what had completed by `moment`.
    pub(super) fn sync(&mut self, moment: u64) {
        self.land_length();
        let durable = &mut self.durable;
        let covered = self.pending.iter().take_while(|(completed, _)| *completed <= moment).count();
        for (_, change) in self.pending.drain(..covered) {
            set(durable, change);
        }
    }

    /// A sync that failed.
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

    /// Other bytes on the medium, durably.
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

    /// The power went: decides what landed.
    pub(super) fn crash(&mut self, pages: &mut Pages, rng: &mut Rng) {
        let mut changes = std::mem::take(&mut self.doomed);
        changes.extend(self.pending.drain(..).map(|(_, change)| change));
        changes.append(&mut self.under_way);
        if !changes.is_empty() || self.pending_pages.is_some() {
            let writes =
                changes.chunk_by(|a, b| a.write == b.write).count() + usize::from(self.pending_pages.is_some());
            let landing = Landing::any(rng, writes);
            let length_lands = match landing {
                Landing::Nothing => false,
                Landing::Everything => true,
                Landing::Front(count) => count > 0,
                Landing::Whole | Landing::Torn => rng.one_in(2),
            };
            if length_lands {
                self.land_length();
            }
            for (index, write) in changes.chunk_by(|a, b| a.write == b.write).enumerate() {
                let lands = match landing {
                    Landing::Nothing => false,
                    Landing::Everything => true,
                    Landing::Front(count) => index + 1 < count,
                    Landing::Whole => rng.one_in(2),
                    Landing::Torn => {
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

    /// A front, a back, or any sectors of a write.
    fn land_torn(&mut self, pages: &mut Pages, rng: &mut Rng, write: &[Change]) {
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
            set(&mut self.durable, Change { content, ..*change });
        }
    }
}
