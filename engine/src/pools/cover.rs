//! Which pages give the chosen entries.
//!
//! An entry of several clusters is in several pages, and is attended once per head. Reading is a cover:
//!
//! 1. The pages of entries with one place are read.
//! 2. Another entry comes from such a page if one has it, otherwise from its first page. Entries with fewer places come
//!    first.
//!
//! The cover depends on the entries and on the stored set alone.

use super::stored_list::{StoredList, StoredPage};
use super::stored_set::StoredLayer;
use crate::attention::{HeadMask, TokenMask};
use std::collections::BTreeMap;
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
    /// one list for all heads. `usable` tells whether the pages of a frame can be read.
    pub(crate) fn cover(&self, chosen: &[Vec<u32>], kv_heads: usize, usable: &dyn Fn(u32) -> bool) -> Covered {
        if let [list] = &self.lists[..]
            && list.heads == EntryHeads::All
        {
            return list.cover_all(chosen, kv_heads, usable);
        }
        let mut covered = Covered::default();
        for head in 0..kv_heads {
            let Some(own) = chosen.get(if chosen.len() == 1 { 0 } else { head }) else { continue };
            let is_own = |list: &&StoredList| list.heads == EntryHeads::One(head as u16);
            let Some(list) = self.lists.iter().find(is_own) else {
                covered.left.push(own.clone());
                continue;
            };
            let (pages, left) = list.pick(own, usable);
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
    fn cover_all(&self, chosen: &[Vec<u32>], kv_heads: usize, usable: &dyn Fn(u32) -> bool) -> Covered {
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
        let (pages, left) = self.pick(&all, usable);
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
    fn pick(&self, tokens: &[u32], usable: &dyn Fn(u32) -> bool) -> (PageRows, Vec<u32>) {
        let places = |token: u32| self.places(token).filter(|(page, _)| usable(self.pages[*page as usize].frame));
        let mut pages = PageRows::new();
        let (mut left, mut several) = (Vec::new(), Vec::new());
        for &token in tokens {
            let mut own = places(token);
            match (own.next(), own.next()) {
                (None, _) => left.push(token),
                (Some((page, slot)), None) => pages.entry(page).or_default().push((slot, token)),
                (Some(_), Some(_)) => several.push((2 + own.count(), token)),
            }
        }
        several.sort_unstable();
        for (_, token) in several {
            let of_read = places(token).find(|(page, _)| pages.contains_key(page));
            if let Some((page, slot)) = of_read.or_else(|| places(token).next()) {
                pages.entry(page).or_default().push((slot, token));
            }
        }
        pages.values_mut().for_each(|rows| rows.sort_unstable());
        left.sort_unstable();
        (pages, left)
    }
}
