//! [`EarlierLayer`]: the pages of the set that a sequence has stored, as far as a new directory may name them.

use super::directory_pieces::PagePlace;
use super::stored_list::StoredList;
use super::stored_set::StoredLayer;
use crate::io::planted;
use stratakv_format::FrameId;
use stratakv_format::pool::EntryHeads;

/// A frame whose pages a new directory may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EarlierFrame {
    pub(crate) id: FrameId,
    /// The pages of 4096 bytes of its pool.
    pub(crate) pool_pages: u32,
}

/// A page of an earlier set, with the tokens of its entries in the order of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EarlierPage {
    pub(super) place: PagePlace,
    pub(super) tokens: Vec<u32>,
}

/// The pages of one head, or of all heads.
#[derive(Clone, Debug)]
pub(super) struct EarlierList {
    pub(super) heads: EntryHeads,
    /// In the order of frames, and of pages in them.
    pub(super) pages: Vec<EarlierPage>,
}

/// The pages of a layer that may stay.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlierLayer {
    pub(super) lists: Vec<EarlierList>,
    pub(super) frames: Vec<EarlierFrame>,
}

impl EarlierLayer {
    /// Returns the most bytes of memory for the pages of a layer and for [the plan](super::growth_plan) over them.
    pub(crate) fn bytes_for(layer: &StoredLayer) -> usize {
        // A place, a token, and a count of a cluster's entries in a page. A count sorts beside its copy.
        let of_list = |list: &StoredList| list.pages.len() * 2 * size_of::<EarlierPage>() + list.entries() * 64;
        layer.lists.iter().map(of_list).sum()
    }

    /// Returns the pages of a stored layer. `known` returns a frame that exists, and that the sequence wrote.
    ///
    /// A page whose entries are not all known is left out, because its directory states the number of its entries.
    pub(crate) fn new(layer: &StoredLayer, known: &dyn Fn(FrameId) -> Option<EarlierFrame>) -> Self {
        let known: Vec<Option<EarlierFrame>> = layer.frames.iter().map(|id| known(*id)).collect();
        let lists = layer.lists.iter().map(|list| EarlierList::new(list, &known)).collect();
        Self { lists, frames: known.into_iter().flatten().collect() }
    }
}

impl EarlierList {
    fn new(list: &StoredList, known: &[Option<EarlierFrame>]) -> Self {
        let mut slots: Vec<Vec<(u8, u32)>> = vec![Vec::new(); list.pages.len()];
        for token in 0..list.tokens() {
            list.places(token).for_each(|(page, slot)| slots[page as usize].push((slot, token)));
        }
        let mut pages: Vec<EarlierPage> = list
            .pages
            .iter()
            .zip(slots)
            .filter_map(|(page, mut slots)| {
                let frame = known.get(page.frame as usize).copied().flatten()?;
                slots.sort_unstable();
                let is_whole = slots.len() == page.valid as usize
                    && slots.iter().enumerate().all(|(nth, (slot, _))| usize::from(*slot) == nth);
                let place = PagePlace { frame: frame.id, page: page.page, valid: page.valid, checksum: page.checksum };
                if planted!(KeptEntriesExchanged) {
                    slots.reverse();
                }
                is_whole.then(|| EarlierPage { place, tokens: slots.into_iter().map(|(_, token)| token).collect() })
            })
            .collect();
        pages.sort_unstable_by_key(|page| (page.place.frame, page.place.page));
        Self { heads: list.heads, pages }
    }
}
