//! Which pages give the chosen entries.
//!
//! An entry of several clusters is in several pages, and is attended once per head. Reading is a cover:
//!
//! 1. The pages of entries with one place are read.
//! 2. Another entry comes from a page that is read anyway, if one has it. Otherwise it comes from the device that ends
//!    first with one more page. Between devices that end together, a page beside one that is read comes first, because
//!    it needs no request. Entries with fewer places come first.
//!
//! With one entry per page and equal devices this is the scheduling of SWARM, section 6.1. [`BalancePolicy`] has what
//! it is compared with: `FewestReads` counts pages, and `FirstCopy` always takes the first place.
//!
//! The cover depends on the entries, the stored set and the speeds of devices. It does not depend on their queues, so
//! that a prefetch and the read behind it take the same pages.

use super::page_sources::PageSources;
use super::stored_list::{StoredList, StoredPage};
use super::stored_set::StoredLayer;
use crate::attention::{HeadMask, TokenMask};
use crate::io::planted;
use crate::options::BalancePolicy;
use std::collections::{BTreeMap, HashSet};
use stratakv_format::pool::{EntryHeads, PageGeometry};

/// A page that gives chosen entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChosenPage {
    pub(crate) page: StoredPage,
    pub(crate) heads: EntryHeads,
    pub(crate) geometry: PageGeometry,
    /// KV heads, and the slots that they attend to. No head is in two items.
    pub(crate) items: Vec<(HeadMask, TokenMask)>,
    /// The attended slots with their tokens.
    pub(crate) rows: Vec<(u8, u32)>,
}

/// The slots and tokens that each page gives, by page.
type PageRows = BTreeMap<u32, Vec<(u8, u32)>>;

/// Chosen entries, divided into those in pages and the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Covered {
    /// In the order of storage, list after list.
    pub(crate) pages: Vec<ChosenPage>,
    /// The entries that groups give, for each KV head, or one list for all heads.
    pub(crate) left: Vec<Vec<u32>>,
}

impl StoredLayer {
    /// Returns the pages that give chosen entries. `chosen` has a list of tokens for each of `kv_heads` heads, or
    /// one list for all heads. `sources` has the devices of its frames.
    pub(crate) fn cover(&self, chosen: &[Vec<u32>], kv_heads: usize, mut sources: PageSources) -> Covered {
        let mut covered = match &self.lists[..] {
            [list] if list.heads == EntryHeads::All => list.cover_all(chosen, kv_heads, &mut sources),
            _ => self.cover_heads(chosen, kv_heads, &mut sources),
        };
        // On a device, the pages of neighbouring clusters are neighbours, so that one request reads them.
        covered.pages.sort_by_key(|own| (own.page.frame, own.page.page));
        covered
    }

    /// Covers the entries of each head, whose pages hold one head.
    fn cover_heads(&self, chosen: &[Vec<u32>], kv_heads: usize, sources: &mut PageSources) -> Covered {
        let mut covered = Covered::default();
        for head in 0..kv_heads {
            let Some(own) = chosen.get(if chosen.len() == 1 { 0 } else { head }) else { continue };
            let is_own = |list: &&StoredList| list.heads == EntryHeads::One(head as u16);
            let Some(list) = self.lists.iter().find(is_own) else {
                covered.left.push(own.clone());
                continue;
            };
            let (pages, left) = list.pick(own, sources);
            let chosen = pages.into_iter().map(|(page, rows)| {
                let slots =
                    rows.iter().fold(TokenMask::EMPTY, |all, (slot, _)| all.union(TokenMask::one(usize::from(*slot))));
                list.chosen(page, rows, vec![(HeadMask::one(head), slots)])
            });
            covered.pages.extend(chosen);
            covered.left.push(left);
        }
        covered
    }
}

impl StoredList {
    /// Covers the entries of all heads, whose pages hold all heads.
    fn cover_all(&self, chosen: &[Vec<u32>], kv_heads: usize, sources: &mut PageSources) -> Covered {
        let sorted: Vec<Vec<u32>> = chosen
            .iter()
            .map(|own| {
                let mut own = own.clone();
                own.sort_unstable();
                own
            })
            .collect();
        let mut all: Vec<u32> = sorted.concat();
        all.sort_unstable();
        all.dedup();
        let (pages, left) = self.pick(&all, sources);
        let masks = |rows: &[(u8, u32)]| {
            let mut items: Vec<(HeadMask, TokenMask)> = Vec::new();
            for (head, own) in sorted.iter().enumerate() {
                let mut slots = TokenMask::EMPTY;
                let attended = rows.iter().filter(|(_, token)| own.binary_search(token).is_ok());
                attended.for_each(|(slot, _)| _ = slots.insert(usize::from(*slot)));
                let own = if sorted.len() == 1 { HeadMask::all(kv_heads) } else { HeadMask::one(head) };
                match items.iter_mut().find(|(_, same)| *same == slots) {
                    Some((heads, _)) => *heads = heads.union(own),
                    None if slots.is_empty() => {}
                    None => items.push((own, slots)),
                }
            }
            items
        };
        let pages = pages.into_iter().map(|(page, rows)| {
            let items = masks(&rows);
            self.chosen(page, rows, items)
        });
        let is_left = |token: &&u32| left.binary_search(*token).is_ok();
        let left = sorted.iter().map(|own| own.iter().filter(is_left).copied().collect()).collect();
        Covered { pages: pages.collect(), left }
    }

    fn chosen(&self, page: u32, rows: Vec<(u8, u32)>, items: Vec<(HeadMask, TokenMask)>) -> ChosenPage {
        ChosenPage { page: self.pages[page as usize], heads: self.heads, geometry: self.geometry, items, rows }
    }

    /// Returns the pages to read, each with the slots and tokens that it gives, and the tokens that are in no page.
    /// Both are in rising order.
    fn pick(&self, tokens: &[u32], sources: &mut PageSources) -> (PageRows, Vec<u32>) {
        let frame = |page: u32| self.pages[page as usize].frame;
        let mut pages = PageRows::new();
        let (mut left, mut several) = (Vec::new(), Vec::new());
        for &token in tokens {
            let mut own = self.places(token).filter(|(page, _)| sources.is_usable(frame(*page)));
            match (own.next(), own.next()) {
                (None, _) => left.push(token),
                (Some((page, slot)), None) => pages.entry(page).or_default().push((slot, token)),
                (Some(one), Some(other)) if planted!(ReplicaCountedTwice) => {
                    [one, other]
                        .into_iter()
                        .for_each(|(page, slot)| pages.entry(page).or_default().push((slot, token)));
                }
                (Some(_), Some(_)) => several.push((2 + own.count(), token)),
            }
        }
        let mut reads = PageReads { list: self, known: HashSet::new(), sources };
        if self.has_replicas {
            pages.keys().for_each(|page| reads.add(*page));
        }
        several.sort_unstable();
        for (_, token) in several {
            if let Some((page, slot)) = reads.place(token, &pages) {
                let rows = pages.entry(page).or_insert_with(|| {
                    reads.add(page);
                    Vec::new()
                });
                rows.push((slot, token));
            }
        }
        pages.values_mut().for_each(|rows| rows.sort_unstable());
        left.sort_unstable();
        (pages, left)
    }
}

/// The pages of a list that are read so far.
struct PageReads<'a> {
    list: &'a StoredList,
    /// Frame and page of each.
    known: HashSet<(u32, u32)>,
    sources: &'a mut PageSources,
}

impl PageReads<'_> {
    fn is_beside(&self, page: &StoredPage) -> bool {
        let step = self.list.geometry.disk_pages();
        let before = page.page.checked_sub(step).is_some_and(|before| self.known.contains(&(page.frame, before)));
        before || self.known.contains(&(page.frame, page.page + step))
    }

    fn add(&mut self, page: u32) {
        let page = self.list.pages[page as usize];
        self.sources.read(page.frame, self.list.geometry.page_bytes);
        self.known.insert((page.frame, page.page));
    }

    /// Returns the page and slot that give an entry with several places.
    fn place(&self, token: u32, pages: &PageRows) -> Option<(u32, u8)> {
        let usable = |(page, _): &(u32, u8)| self.sources.is_usable(self.list.pages[*page as usize].frame);
        let mut places = self.list.places(token).filter(usable);
        if self.sources.policy == BalancePolicy::FirstCopy {
            return places.next();
        }
        let of_read = self.list.places(token).filter(usable).find(|(page, _)| pages.contains_key(page));
        let end = |(page, _): &(u32, u8)| {
            let page = self.list.pages[*page as usize];
            let (is_avoided, end) = self.sources.end_with(page.frame, self.list.geometry.page_bytes);
            (is_avoided, end, !self.is_beside(&page))
        };
        of_read.or_else(|| places.min_by(|a, b| end(a).partial_cmp(&end(b)).unwrap_or(std::cmp::Ordering::Equal)))
    }
}
