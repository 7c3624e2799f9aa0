//! Property tests of covers: pages on several devices, entries with several places, and frames that are gone.

use super::cover::Covered;
use super::page_sources::{PageDevice, PageSources};
use super::stored_list::{StoredList, StoredPage};
use super::stored_set::StoredLayer;
use super::tests::attended;
use crate::options::BalancePolicy;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use stratakv_format::layout::{LayerGeometry, RAW_PLANES};
use stratakv_format::pool::{EntryHeads, PageGeometry};
use stratakv_format::{DType, FrameId};

const POLICIES: [BalancePolicy; 3] =
    [BalancePolicy::EarliestFinish, BalancePolicy::FewestReads, BalancePolicy::FirstCopy];
const TOKENS: u32 = 48;

/// Pages in frames, one frame per device. A page holds up to `entries` tokens.
#[derive(Clone, Debug)]
struct DealtPages {
    /// Frame, page and tokens.
    pages: Vec<(u32, u32, Vec<u32>)>,
    /// For each frame, whether it can be read.
    usable: Vec<bool>,
    /// For each device, how slow it is, and whether reads avoid it.
    devices: Vec<(u32, bool)>,
}

impl DealtPages {
    fn list(&self, heads: EntryHeads, entries: usize) -> StoredList {
        let dim = (4096 / entries / 2 / 2 / 2) as u16;
        let layer =
            LayerGeometry { kv_heads: 2, key_dim: dim, value_dim: dim, window: None, rope: None, codecs: RAW_PLANES };
        let geometry = PageGeometry::new(&layer, DType::F16, heads);
        let pages: Vec<(StoredPage, Vec<u32>)> = (self.pages.iter())
            .map(|(frame, page, tokens)| {
                let valid = tokens.len() as u32;
                (StoredPage { frame: *frame, page: *page, valid, checksum: 0 }, tokens.clone())
            })
            .collect();
        StoredList::of_pages((heads, geometry), &pages, u64::from(TOKENS))
    }

    fn sources(&self, policy: BalancePolicy) -> PageSources {
        let frames = self.usable.iter().enumerate().map(|(frame, usable)| usable.then_some(frame)).collect();
        let device = |(slow, avoided): &(u32, bool)| PageDevice::new(1e-5, 1e-9 * f64::from(*slow), *avoided);
        PageSources::new(frames, self.devices.iter().map(device).collect(), policy)
    }

    /// Returns whether a page of a frame that can be read holds the token.
    fn has(&self, token: u32) -> bool {
        self.pages.iter().any(|(frame, _, tokens)| self.usable[*frame as usize] && tokens.contains(&token))
    }

    /// Checks that every row of a cover is where it says.
    fn check_rows(&self, covered: &Covered) {
        for own in &covered.pages {
            let at = |(frame, page, _): &&(u32, u32, Vec<u32>)| (*frame, *page) == (own.page.frame, own.page.page);
            let (_, _, tokens) = self.pages.iter().find(at).expect("a page that is stored");
            for (slot, token) in &own.rows {
                assert_eq!(tokens[usize::from(*slot)], *token);
            }
        }
        let places: Vec<(u32, u32)> = covered.pages.iter().map(|own| (own.page.frame, own.page.page)).collect();
        assert!(places.is_sorted_by(|a, b| a <= b), "in the order of storage");
    }
}

/// Returns pages of up to `entries` tokens on 1 to 4 devices. Tokens are in up to four pages.
fn dealt(entries: usize) -> impl Strategy<Value = DealtPages> {
    (1_usize..5).prop_flat_map(move |devices| {
        let page = (0..devices as u32, prop::collection::btree_set(0..TOKENS, 1..=entries));
        let device = (1_u32..4, prop::bool::weighted(0.1));
        let usable = prop::collection::vec(prop::bool::weighted(0.9), devices);
        (prop::collection::vec(page, 1..60), usable, prop::collection::vec(device, devices)).prop_map(
            |(pages, usable, devices)| {
                let mut memberships: BTreeMap<u32, u32> = BTreeMap::new();
                let mut next = vec![1_u32; devices.len()];
                let mut kept = Vec::new();
                for (frame, tokens) in pages {
                    let mut has_room = |token: &u32| {
                        let count = memberships.entry(*token).or_default();
                        *count += 1;
                        *count <= 4
                    };
                    let tokens: Vec<u32> = tokens.into_iter().filter(|token| has_room(token)).collect();
                    if !tokens.is_empty() {
                        kept.push((frame, next[frame as usize], tokens));
                        next[frame as usize] += 1;
                    }
                }
                DealtPages { pages: kept, usable, devices }
            },
        )
    })
}

fn chosen() -> impl Strategy<Value = [BTreeSet<u32>; 2]> {
    [prop::collection::btree_set(0..TOKENS, 0..40), prop::collection::btree_set(0..TOKENS, 0..40)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn each_head_attends_to_each_chosen_entry_once(
        (dealt, chosen, per_head) in (prop_oneof![dealt(1), dealt(4), dealt(8)], chosen(), any::<bool>()),
    ) {
        let lists: Vec<Vec<u32>> = chosen.iter().map(|own| own.iter().copied().collect()).collect();
        let list = |heads| dealt.list(heads, 8);
        let lists_of_layer = match per_head {
            true => vec![list(EntryHeads::One(0)), list(EntryHeads::One(1))],
            false => vec![list(EntryHeads::All)],
        };
        let frames = (0..dealt.usable.len() as u64).map(FrameId).collect();
        let layer = StoredLayer { lists: lists_of_layer, frames };
        for policy in POLICIES {
            let covered = layer.cover(&lists, 2, dealt.sources(policy));
            if !per_head {
                dealt.check_rows(&covered);
            }
            let in_pages = attended(&covered);
            prop_assert_eq!(covered.left.len(), 2);
            for head in 0..2 {
                let left: BTreeSet<u32> = covered.left[head].iter().copied().collect();
                prop_assert_eq!(left.len(), covered.left[head].len());
                prop_assert!(left.is_disjoint(&in_pages[head]));
                let both: BTreeSet<u32> = left.union(&in_pages[head]).copied().collect();
                prop_assert_eq!(&both, &chosen[head], "head {} with {:?}", head, policy);
                prop_assert!(left.iter().all(|token| !dealt.has(*token)), "{:?} is in pages", left);
            }
        }
    }

    #[test]
    fn one_entry_per_page_is_dealt_as_swarm_deals_it(dealt in dealt(1), chosen in chosen()) {
        let mut dealt = dealt;
        dealt.usable.fill(true);
        dealt.devices.fill((1, false));
        // No page is beside another one, so that ties are broken as in the paper: by the first place.
        dealt.pages.iter_mut().for_each(|(_, page, _)| *page *= 2);
        let tokens: Vec<u32> = chosen[0].iter().copied().collect();
        let frames = (0..dealt.usable.len() as u64).map(FrameId).collect();
        let layer = StoredLayer { lists: vec![dealt.list(EntryHeads::All, 1)], frames };
        // Section 6.1: buckets, by rising number of places, each entry to the smallest bucket.
        let mut buckets = vec![0_usize; dealt.devices.len()];
        let places = |token: u32| -> Vec<u32> {
            dealt.pages.iter().filter(|(_, _, own)| own[0] == token).map(|(frame, ..)| *frame).collect()
        };
        let mut order: Vec<(usize, u32)> = tokens.iter().map(|token| (places(*token).len(), *token)).collect();
        order.sort_unstable();
        for (_, token) in order {
            let smallest = places(token).into_iter().min_by_key(|frame| buckets[*frame as usize]);
            smallest.into_iter().for_each(|frame| buckets[frame as usize] += 1);
        }
        for policy in [BalancePolicy::EarliestFinish, BalancePolicy::FewestReads] {
            let covered = layer.cover(std::slice::from_ref(&tokens), 2, dealt.sources(policy));
            let mut found = vec![0_usize; dealt.devices.len()];
            covered.pages.iter().for_each(|own| found[own.page.frame as usize] += 1);
            prop_assert_eq!(&found, &buckets, "{:?}", policy);
        }
    }
}

#[test]
fn entries_with_replicas_go_to_the_device_that_ends_first() {
    // Tokens 0 to 7 are on device 0 alone. Tokens 8 to 23 are on both devices, first on device 0.
    let mut pages: Vec<(u32, u32, Vec<u32>)> = (0..24).map(|token| (0, 1 + 2 * token, vec![token])).collect();
    pages.extend((8..24).map(|token| (1, 1 + 2 * token, vec![token])));
    let mut dealt = DealtPages { pages, usable: vec![true; 2], devices: vec![(1, false); 2] };
    let tokens: Vec<u32> = (0..24).collect();
    let counts = |dealt: &DealtPages, policy| {
        let frames = vec![FrameId(0), FrameId(1)];
        let layer = StoredLayer { lists: vec![dealt.list(EntryHeads::All, 1)], frames };
        let covered = layer.cover(std::slice::from_ref(&tokens), 2, dealt.sources(policy));
        let on = |frame| covered.pages.iter().filter(|own| own.page.frame == frame).count();
        [on(0), on(1)]
    };
    assert_eq!(counts(&dealt, BalancePolicy::EarliestFinish), [12, 12]);
    assert_eq!(counts(&dealt, BalancePolicy::FewestReads), [12, 12]);
    assert_eq!(counts(&dealt, BalancePolicy::FirstCopy), [24, 0]);
    dealt.devices[1] = (2, false);
    assert_eq!(counts(&dealt, BalancePolicy::EarliestFinish), [12, 12], "devices of about the same speed");
    dealt.devices[1] = (50, false);
    let [fast, slow] = counts(&dealt, BalancePolicy::EarliestFinish);
    assert!(fast > 2 * slow && slow > 0, "{fast} pages of a fast device, {slow} of a slow one");
    assert_eq!(counts(&dealt, BalancePolicy::FewestReads), [12, 12]);
    dealt.devices[1] = (1, true);
    assert_eq!(counts(&dealt, BalancePolicy::EarliestFinish), [24, 0], "a device that failed is avoided");
    dealt.usable[0] = false;
    assert_eq!(counts(&dealt, BalancePolicy::EarliestFinish), [0, 16], "unless no other has the entries");
}
