//! Tests of directories that are written and read again, and of covers over them.

use super::cover::Covered;
use super::directory_pieces::{self, PagePlace};
use super::layer_clusters::LayerClusters;
use super::page_plan::tests as page_plan;
use super::page_sources::{PageDevice, PageSources};
use super::stored_list::{FrameTable, StoredList};
use super::stored_set::{DirectoryFront, StoredLayer, StoredSet};
use crate::attention::{HeadMask, TokenMask};
use crate::catalog::FrameMeta;
use crate::layout::KvLayout;
use crate::options::BalancePolicy;
use crate::retrieval::clusters::ClusterLists;
use std::collections::BTreeSet;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::pool::{DirectoryFields, DirectoryPiece, EntryHeads};
use stratakv_format::{DType, DeviceIndex, FrameId, Location, SegmentId, SequenceId};

/// Pages of 8 entries if they hold one head, and of 4 if they hold both.
const GEOMETRY: LayerGeometry =
    LayerGeometry { kv_heads: 2, key_dim: 64, value_dim: 64, window: None, rope: None, codecs: RAW_PLANES };
const DTYPE: DType = DType::F32;
/// Frames of the tests have this many pages.
const FRAME_PAGES: u32 = 9;

fn layout() -> Layout {
    Layout { dtype: DTYPE, group_tokens: 4, padded_planes: false, fingerprint: [0; 32], layers: vec![GEOMETRY] }
}

/// Returns the pieces of the directory of each list. Frame 10 holds the first 8 pages, frame 11 the next ones.
fn directories(clusters: &LayerClusters, (set, generation): (u64, u64)) -> Vec<Vec<Vec<u8>>> {
    let place = |nth: u32, valid| PagePlace {
        frame: FrameId(u64::from(10 + nth / (FRAME_PAGES - 1))),
        page: 1 + nth % (FRAME_PAGES - 1),
        valid,
        checksum: u64::from(nth),
    };
    let pages = page_plan::pages(clusters);
    let places: Vec<PagePlace> = (0..).zip(&pages).map(|(nth, page)| place(nth, page.valid)).collect();
    let of_list = |(nth, list): (u16, &super::layer_clusters::HeadClusters)| {
        let fields = DirectoryFields {
            set,
            generation,
            heads: list.heads,
            method: "test",
            method_version: 1,
            seed: 0,
            tokens: clusters.tokens,
            entries: list.clusters.stored() as u64,
            clusters: list.clusters.len() as u32,
            memberships: list.memberships,
            representative: (0, 0),
        };
        let own: Vec<PagePlace> =
            pages.iter().zip(&places).filter(|(page, _)| page.list == nth).map(|(_, place)| *place).collect();
        directory_pieces::encode(&fields, list, &own, &clusters.geometry).expect("a directory")
    };
    (0..).zip(&clusters.lists).map(of_list).collect()
}

/// Reads the directories. Frames of `known` exist, and entries from `end` on are passed over.
fn read(clusters: &LayerClusters, known: &[u64], end: u64) -> StoredLayer {
    let layout = layout();
    let exists = |frame: FrameId| known.contains(&frame.0).then_some((FRAME_PAGES, u64::MAX));
    let mut frames = FrameTable::new(Vec::new(), &exists);
    let lists = directories(clusters, (10, 1)).into_iter().map(|pieces| {
        let pieces: Vec<DirectoryPiece<'_>> =
            pieces.iter().map(|piece| DirectoryPiece::verify(piece, &layout, 0).expect("a piece")).collect();
        StoredList::read(&pieces, &GEOMETRY, (DTYPE, end), &mut frames).expect("a list")
    });
    let lists = lists.collect();
    StoredLayer { lists, frames: frames.frames }
}

fn stored(lists: &[&[&[u32]]], tokens: u64) -> LayerClusters {
    let lists: Vec<ClusterLists> = lists.iter().map(|list| ClusterLists::of_clusters(list.iter())).collect();
    LayerClusters::covering(&lists, tokens, &GEOMETRY, DTYPE).expect("clusters")
}

/// Returns a source of pages on one device. The frames of `usable` can be read.
fn sources(usable: &[bool]) -> PageSources {
    let frames = usable.iter().map(|usable| usable.then_some(0)).collect();
    PageSources::new(frames, vec![PageDevice::new(1e-5, 1e-9, false)], BalancePolicy::EarliestFinish)
}

/// Returns the tokens that each head attends to in pages, after a check that it attends to each once.
pub(super) fn attended(covered: &Covered) -> [BTreeSet<u32>; 2] {
    let mut heads = [BTreeSet::new(), BTreeSet::new()];
    for page in &covered.pages {
        let mut named = HeadMask::EMPTY;
        for (own, slots) in &page.items {
            assert!(own.intersection(named).is_empty() && !slots.is_empty());
            named = named.union(*own);
            for head in own.iter() {
                assert!(page.heads == EntryHeads::All || page.heads == EntryHeads::One(head as u16));
                for slot in slots.iter() {
                    let row = page.rows.iter().find(|(at, _)| usize::from(*at) == slot).expect("a row for each slot");
                    assert!(heads[head].insert(row.1), "head {head} attends to token {} twice", row.1);
                }
            }
        }
    }
    heads
}

/// The clusters of a front, its origin and LSN, and its set and generation.
type GivenFront<'a> = (&'a LayerClusters, (u64, u64), (u64, u64));

/// Returns the front of a frame of an origin that holds the directories of these clusters.
fn front(clusters: &LayerClusters, (origin, lsn): (u64, u64), version: (u64, u64)) -> DirectoryFront {
    let (mut bytes, mut pieces) = (Vec::new(), Vec::new());
    for piece in directories(clusters, version).concat() {
        pieces.push((0, bytes.len()..bytes.len() + piece.len()));
        bytes.extend(piece);
    }
    let meta = FrameMeta {
        origin: SequenceId(origin),
        lsn,
        nonce: 0,
        location: Location { device: DeviceIndex(0), segment: SegmentId(0), page: 1, pages: 1 },
        header_crc: 0,
        header_pages: 1,
        front_pages: 1,
        derived: true,
        refs: 1,
        other_copies: Vec::new(),
    };
    DirectoryFront { frame: FrameId(lsn), meta, token_end: u64::MAX, bytes, pieces }
}

/// SPEC.md, chapter 11: of one origin and set, the directory of the highest generation is in force, and of equal
/// generations the one with the highest LSN. Of several sets of a method, the engine uses the one written last.
#[test]
fn the_highest_generation_of_the_set_that_was_written_last_is_in_force() {
    let all: Vec<u32> = (0..16).collect();
    let clusters = stored(&[&all.chunks(4).collect::<Vec<_>>()], 16);
    let short = stored(&[&all[..8].chunks(4).collect::<Vec<_>>()], 8);
    let layout = KvLayout::new(layout()).expect("a layout");
    let exists = |_: FrameId| Some((FRAME_PAGES, u64::MAX));
    // The fronts, the expected tokens, and the expected set and generation.
    let cases: [(&[GivenFront<'_>], u64, (u64, u64)); 5] = [
        (&[(&clusters, (1, 5), (10, 1)), (&short, (1, 6), (10, 2))], 8, (10, 2)),
        (&[(&clusters, (1, 6), (10, 1)), (&short, (1, 5), (10, 2))], 8, (10, 2)),
        (&[(&clusters, (1, 5), (10, 1)), (&short, (1, 6), (10, 1))], 8, (10, 1)),
        (&[(&clusters, (1, 5), (10, 9)), (&short, (1, 6), (11, 1))], 8, (11, 1)),
        (&[(&clusters, (1, 5), (10, 9)), (&short, (2, 6), (10, 1))], 8, (10, 1)),
    ];
    for (given, tokens, version) in cases {
        let mut fronts: Vec<DirectoryFront> =
            given.iter().map(|(clusters, place, version)| front(clusters, *place, *version)).collect();
        for _ in 0..2 {
            let set = StoredSet::read(&fronts, "test", (&layout, 16), &exists);
            assert_eq!((set.tokens, set.version, set.dropped), (tokens, Some(version), 0), "{version:?}");
            fronts.reverse();
        }
    }
}

#[test]
fn every_token_is_found_where_its_directory_says() {
    let own: &[&[u32]] = &[&[7, 0, 12, 13, 14], &[1, 2, 3, 4, 5, 6, 8, 9, 10, 11], &[15]];
    for lists in [vec![own], vec![own, own]] {
        let clusters = stored(&lists, 16);
        let layer = read(&clusters, &[10, 11], 16);
        for (list, own) in layer.lists.iter().zip(&clusters.lists) {
            let pages = page_plan::pages(&clusters);
            let first = pages.iter().position(|page| clusters.lists[usize::from(page.list)].heads == own.heads);
            for token in 0..16 {
                let found: Vec<(u32, u8)> = list.places(token).collect();
                let [(page, slot)] = found[..] else { panic!("token {token} is at {found:?}") };
                let page = pages[first.expect("a page") + page as usize];
                let members = own.clusters.members(page.cluster as usize).expect("a cluster");
                assert_eq!(members[page.first as usize + usize::from(slot)], token);
            }
            assert_eq!(list.places(16).count(), 0);
        }
    }
}

#[test]
fn entries_beyond_the_end_and_in_frames_that_are_gone_are_left_to_groups() {
    let all: Vec<u32> = (0..48).collect();
    let clusters = stored(&[&all.chunks(4).collect::<Vec<_>>()], 48);
    assert_eq!(page_plan::pages(&clusters).len(), 12);
    // The first 8 pages are in frame 10.
    for (known, end, expected) in [(&[10, 11][..], 48, 48), (&[10], 48, 32), (&[10, 11], 20, 20), (&[], 48, 0)] {
        let layer = read(&clusters, known, end);
        let covered = layer.cover(std::slice::from_ref(&all), 2, sources(&[true; 2]));
        let [one, other] = attended(&covered);
        assert_eq!((one.len(), &one), (expected, &other), "{known:?}, end {end}");
        assert_eq!(covered.left, [all[expected..].to_vec()]);
    }
    let covered = read(&clusters, &[10, 11], 48).cover(std::slice::from_ref(&all), 2, sources(&[false, true]));
    assert_eq!(covered.left, [all[..32].to_vec()], "a frame whose device is gone");
}

#[test]
fn an_entry_of_several_clusters_comes_from_a_page_that_is_read_anyway() {
    // Token 5 is in three clusters, tokens 0 and 4 in two.
    let clusters = stored(&[&[&[5, 1, 0], &[5, 4], &[5, 2, 3], &[6, 7, 0, 4]]], 8);
    let layer = read(&clusters, &[10], 8);
    let pages = |chosen: &[u32]| {
        let covered = layer.cover(&[chosen.to_vec()], 2, sources(&[true; 2]));
        assert_eq!(attended(&covered)[0], chosen.iter().copied().collect());
        covered.pages.iter().map(|page| page.page.checksum).collect::<Vec<_>>()
    };
    assert_eq!(pages(&[5]), [0], "the first page");
    assert_eq!(pages(&[5, 3]), [2], "the page of token 3");
    assert_eq!(pages(&[5, 0, 4, 7]), [2, 3], "token 5 comes from the page beside that of token 7");
    assert_eq!(pages(&[0, 4]), [0, 1]);
    assert_eq!(pages(&[6, 0, 4]), [3]);
}

#[test]
fn heads_that_choose_other_tokens_share_pages_of_all_heads() {
    let all: Vec<u32> = (0..16).collect();
    let joint = read(&stored(&[&all.chunks(4).collect::<Vec<_>>()], 16), &[10], 16);
    let chosen = [vec![9, 0, 1], vec![1, 2, 14]];
    let covered = joint.cover(&chosen, 2, sources(&[true; 2]));
    assert_eq!(attended(&covered), [[0, 1, 9].into(), [1, 2, 14].into()]);
    assert_eq!(covered.pages.len(), 3);
    let slots = |bits: &[usize]| bits.iter().fold(TokenMask::EMPTY, |all, bit| all.union(TokenMask::one(*bit)));
    let items = [(HeadMask::one(0), slots(&[0, 1])), (HeadMask::one(1), slots(&[1, 2]))];
    assert_eq!(covered.pages[0].items, items);
    assert_eq!(covered.left, [vec![], vec![]]);
    // Lists of their own: each head has its pages, also for tokens that both choose.
    let own: Vec<&[u32]> = all.chunks(8).collect();
    let apart = read(&stored(&[&own, &own], 16), &[10], 16);
    let covered = apart.cover(&[vec![3, 9]], 2, sources(&[true; 2]));
    assert_eq!(attended(&covered), [[3, 9].into(), [3, 9].into()]);
    assert_eq!((covered.pages.len(), covered.left.len()), (4, 2));
}

#[test]
fn a_directory_that_is_incomplete_or_names_pages_beyond_its_frame_is_dropped() {
    let all: Vec<u32> = (0..16).collect();
    let clusters = stored(&[&all.chunks(4).collect::<Vec<_>>()], 16);
    let layout = layout();
    let pieces = directories(&clusters, (10, 1)).remove(0);
    let pieces: Vec<DirectoryPiece<'_>> =
        pieces.iter().map(|piece| DirectoryPiece::verify(piece, &layout, 0).expect("a piece")).collect();
    let dropped = |pieces: &[DirectoryPiece<'_>], pages| {
        let exists = |_| Some((pages, u64::MAX));
        let mut frames = FrameTable::new(Vec::new(), &exists);
        StoredList::read(pieces, &GEOMETRY, (DTYPE, 16), &mut frames).expect_err("a directory that breaks a rule")
    };
    assert!(dropped(&pieces[..1], FRAME_PAGES).contains("clusters"));
    assert!(dropped(&[pieces[1], pieces[0]], FRAME_PAGES).contains("follow"));
    assert!(dropped(&[pieces[0], pieces[0], pieces[1]], FRAME_PAGES).contains("starts with cluster 0"));
    assert!(dropped(&[], FRAME_PAGES).contains("without pieces"));
    assert!(dropped(&pieces, 4).contains("page 4 of frame 10"));
}
