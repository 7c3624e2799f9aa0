//! Tests of clusters that grow and split: which pages stay, and that no member is lost.

use super::directory_pieces::PagePlace;
use super::earlier::{EarlierFrame, EarlierLayer, EarlierList, EarlierPage};
use super::growth_plan::{joined, plan};
use super::layer_clusters::LayerClusters;
use super::page_plan::tests as page_plan;
use crate::retrieval::clusters::ClusterLists;
use std::collections::{BTreeMap, BTreeSet};
use stratakv_format::layout::{LayerGeometry, RAW_PLANES};
use stratakv_format::{DType, FrameId};

/// Entries of both heads: 4 fit a page.
const GEOMETRY: LayerGeometry =
    LayerGeometry { kv_heads: 2, key_dim: 64, value_dim: 64, window: None, rope: None, codecs: RAW_PLANES };

fn covering(clusters: &[Vec<u32>], tokens: u64) -> LayerClusters {
    let lists = [ClusterLists::of_clusters(clusters.iter())];
    LayerClusters::covering(&lists, tokens, &GEOMETRY, DType::F32).expect("clusters")
}

/// The stored pages of a list, as a writer leaves them.
#[derive(Default)]
struct StoredPages {
    pages: Vec<EarlierPage>,
    /// The pages of each frame.
    frames: BTreeMap<u64, u32>,
    written: usize,
}

impl StoredPages {
    /// Stores clusters, and returns how many pages stay. Checks that each member is in a page of the set.
    fn store(&mut self, layer: &LayerClusters) -> usize {
        let frames = self.frames.iter().map(|(id, pages)| EarlierFrame { id: FrameId(*id), pool_pages: *pages });
        let list = EarlierList { heads: layer.lists[0].heads, pages: std::mem::take(&mut self.pages) };
        let earlier = EarlierLayer { lists: vec![list], frames: frames.collect() };
        let plans = plan(layer, &earlier, 1);
        let fresh = layer.replaced(plans.iter().map(|own| own.fresh.clone()));
        let (stored, kept) = joined(layer.lists[0].heads, &plans[0], layer.tokens, &layer.geometry);
        let frame = self.frames.keys().max().map_or(10, |last| last + 1);
        let planned = page_plan::pages(&fresh);
        let new = (1..).zip(&planned).map(|(page, own)| PagePlace {
            frame: FrameId(frame),
            page,
            valid: own.valid,
            checksum: u64::from(page),
        });
        let places: Vec<PagePlace> = kept.iter().copied().chain(new).collect();
        self.written += planned.len();
        let mut left = &places[..];
        for members in stored.clusters.iter() {
            let (own, rest) = left.split_at(members.len().div_ceil(layer.geometry.entries));
            left = rest;
            let mut tokens = members;
            for place in own {
                let (valid, others) = tokens.split_at(place.valid as usize);
                tokens = others;
                self.pages.push(EarlierPage { place: *place, tokens: valid.to_vec() });
            }
            assert!(tokens.is_empty(), "every entry of a stored cluster is in a page");
            assert_eq!(members.iter().collect::<BTreeSet<_>>().len(), members.len(), "a token is in a cluster once");
        }
        assert!(left.is_empty());
        let memberships =
            (0..layer.tokens as u32).map(|token| stored.clusters.iter().flatten().filter(|own| **own == token).count());
        let memberships: Vec<usize> = memberships.collect();
        assert!(memberships.iter().all(|count| *count >= 1), "{memberships:?}");
        assert_eq!(memberships.iter().max().copied(), Some(usize::from(stored.memberships)));
        self.frames.insert(frame, planned.len() as u32);
        let named: BTreeSet<u64> = self.pages.iter().map(|page| page.place.frame.0).collect();
        self.frames.retain(|id, _| named.contains(id));
        self.pages.sort_by_key(|page| (page.place.frame, page.place.page));
        kept.len()
    }

    /// Returns the runs of pages that hold members of a cluster, as few pages as a greedy reader needs.
    fn runs(&self, members: &[u32]) -> usize {
        let mut left: BTreeSet<u32> = members.iter().copied().collect();
        let mut read: Vec<PagePlace> = Vec::new();
        while !left.is_empty() {
            let gain = |page: &&EarlierPage| page.tokens.iter().filter(|token| left.contains(token)).count();
            let best = self.pages.iter().max_by_key(gain).expect("a page");
            read.push(best.place);
            best.tokens.iter().for_each(|token| _ = left.remove(token));
        }
        read.sort_by_key(|place| (place.frame, place.page));
        read.chunk_by(|one, next| one.frame == next.frame && one.page + 1 == next.page).count()
    }
}

#[test]
fn growth_keeps_all_pages_of_clusters_that_did_not_change() {
    let clusters: Vec<Vec<u32>> = (0..16).map(|at| (0..6).map(|nth| at + nth * 16).collect()).collect();
    let mut disk = StoredPages::default();
    assert_eq!(disk.store(&covering(&clusters, 96)), 0);
    let pages = disk.pages.len();
    assert_eq!(disk.store(&covering(&clusters, 96)), pages);
    assert_eq!(disk.written, pages, "nothing was written once more");
}

#[test]
fn growth_writes_the_new_members_of_a_cluster_and_one_run_after_several_times() {
    let mut clusters: Vec<Vec<u32>> = (0..8).map(|at| (0..8).map(|nth| at * 8 + nth).collect()).collect();
    let mut disk = StoredPages::default();
    disk.store(&covering(&clusters, 64));
    let first = disk.pages.clone();
    for round in 0..8_u32 {
        let new = 64 + round * 4..68 + round * 4;
        clusters[3].extend(new.clone());
        let tokens = u64::from(new.end);
        disk.store(&covering(&clusters, tokens));
        assert!(disk.runs(&clusters[3]) <= 3, "round {round}");
        let untouched = first.iter().filter(|page| page.tokens.iter().all(|token| token / 8 != 3));
        untouched.for_each(|page| assert!(disk.pages.contains(page), "round {round}"));
    }
}

#[test]
fn growth_gives_up_frames_of_which_two_thirds_serve_no_cluster() {
    let clusters: Vec<Vec<u32>> = (0..16).map(|at| (0..4).map(|nth| at * 4 + nth).collect()).collect();
    let mut disk = StoredPages::default();
    disk.store(&covering(&clusters, 64));
    // Eleven clusters of sixteen exchange their members, so their pages serve none.
    let mut mixed = clusters.clone();
    (0..11).for_each(|at| mixed[at] = (0..4).map(|nth| (at as u32 + nth * 11) % 44).collect());
    disk.store(&covering(&mixed, 64));
    assert_eq!(disk.frames.keys().copied().collect::<Vec<_>>(), [11], "frame 10 was given up");
}

#[test]
fn growth_loses_no_member_in_random_histories() {
    for seed in 0..400 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let replicas = rng.bool();
        let mut clusters: Vec<Vec<u32>> = vec![Vec::new(); rng.usize(1..9)];
        let (mut disk, mut tokens) = (StoredPages::default(), 0);
        for _ in 0..rng.usize(2..9) {
            for token in tokens..tokens + rng.u32(1..40) * 4 {
                let count = clusters.len();
                let first = rng.usize(0..count);
                clusters[first].push(token);
                let second = rng.usize(0..count);
                if replicas && second != first && rng.bool() {
                    clusters[second].push(token);
                }
            }
            tokens = clusters.iter().flatten().max().map_or(0, |last| last + 1);
            // The largest clusters are split.
            for at in 0..clusters.len() {
                if clusters[at].len() > 24 {
                    let (stay, go) = clusters[at].iter().partition(|_| rng.bool());
                    clusters[at] = stay;
                    clusters.push(go);
                }
            }
            tokens = tokens.next_multiple_of(4);
            disk.store(&covering(&clusters, u64::from(tokens)));
            clusters.iter().for_each(|members| assert!(disk.runs(members) <= 8, "seed {seed}"));
        }
    }
}
