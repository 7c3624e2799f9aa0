//! Which pages of an earlier set stay when clusters have changed, and what is written.
//!
//! Entries never change, so an earlier page stays right whatever happens to its clusters. It is kept as long as it is
//! useful:
//!
//! 1. A page is a *main* page of a cluster if it holds half of the cluster, or if half of a page are its members.
//! 2. Members outside of main pages are *loose*. A page's worth of them is written as a run of the cluster's own. Fewer
//!    are looked for in two other kept pages at most, and otherwise share a new page with loose members of the
//!    neighbours.
//! 3. If a cluster is in more than [`RUNS_MAX`] runs per device, its smaller runs are written once more, in one run.
//!    Runs that stay have more members than the smaller ones together.
//! 4. A page goes if less than a third of its entries serve a cluster, and a frame goes if less than a third of its
//!    pages serve one. The clusters that these pages served are planned again.
//!
//! Invariants:
//! - Each member of a cluster is in a kept page or in a page that is written.
//! - Pages only go, so the rounds end.

use super::directory_pieces::PagePlace;
use super::earlier::{EarlierLayer, EarlierPage};
use super::layer_clusters::{CLUSTER_ENTRIES_MAX, HeadClusters, LayerClusters, packed};
use crate::io::{coverage, planted};
use crate::retrieval::clusters::ClusterLists;
use std::collections::HashMap;
use stratakv_format::FrameId;
use stratakv_format::pool::{EntryHeads, PageGeometry};

/// The most runs of pages that a cluster is read with on each device. If it has more, the smaller ones are joined.
const RUNS_MAX: usize = 3;
/// The most pages in which a cluster has few members.
const OVERFLOW_PAGES_MAX: usize = 2;
/// A page stays while one in this number of its entries serves a cluster, and a frame while one in this number of its
/// pages does.
const SERVING_PART: u32 = 3;
/// After this many rounds every cluster is written once more.
const ROUNDS_MAX: usize = 16;

/// A list of a layer: the kept pages, and the clusters whose pages are written.
pub(super) struct GrownList<'a> {
    pub(super) kept: Vec<&'a EarlierPage>,
    pub(super) fresh: ClusterLists,
}

/// Returns the plan of each list of a layer. `earlier` has the pages that may stay. A cluster has runs on `devices`
/// devices.
pub(super) fn plan<'a>(layer: &'a LayerClusters, earlier: &'a EarlierLayer, devices: usize) -> Vec<GrownList<'a>> {
    let pages_of = |heads: EntryHeads| {
        earlier.lists.iter().find(|list| list.heads == heads).map_or(&[][..], |list| &list.pages[..])
    };
    let mut lists: Vec<ListPlan<'_>> = layer
        .lists
        .iter()
        .map(|list| ListPlan {
            runs_max: RUNS_MAX * devices.max(1),
            ..ListPlan::new(&list.clusters, layer.tokens, pages_of(list.heads), &layer.geometry)
        })
        .collect();
    let pool_pages: HashMap<FrameId, u32> = earlier.frames.iter().map(|frame| (frame.id, frame.pool_pages)).collect();
    for round in 0.. {
        lists.iter_mut().for_each(ListPlan::decide);
        let is_last = round == ROUNDS_MAX;
        let mut named: HashMap<FrameId, u32> = HashMap::new();
        let used = lists.iter().flat_map(ListPlan::used);
        used.for_each(|page| *named.entry(page.place.frame).or_default() += layer.geometry.disk_pages());
        let is_sparse = |frame| {
            named.get(&frame).copied().unwrap_or(0) * SERVING_PART < pool_pages.get(&frame).copied().unwrap_or(0)
        };
        let dropped: usize = lists.iter_mut().map(|list| list.drop_pages(&|frame| is_last || is_sparse(frame))).sum();
        if dropped == 0 {
            break;
        }
        coverage!(ClustersCompacted);
    }
    lists.into_iter().map(|list| list.finish(layer.tokens)).collect()
}

/// How many members of a cluster are in a page.
#[derive(Clone, Copy)]
struct Share {
    cluster: u32,
    page: u32,
    members: u32,
}

/// The plan of one list.
struct ListPlan<'a> {
    clusters: &'a ClusterLists,
    pages: &'a [EarlierPage],
    page_entries: usize,
    disk_pages: u32,
    /// The most runs of a cluster on all devices.
    runs_max: usize,
    /// By cluster, then by page.
    shares: Vec<Share>,
    /// True for pages that may stay.
    allowed: Vec<bool>,
    /// The entries of each page that serve a cluster.
    serving: Vec<u32>,
    /// Clusters, and runs of loose members, that are written in pages of their own.
    fresh: ClusterLists,
    /// Loose members that share pages, in the order of clusters.
    loose: ClusterLists,
    /// By token: twice the number of the cluster that is planned, plus 1 for a member, plus 2 for one that was found.
    marks: Vec<u32>,
}

impl<'a> ListPlan<'a> {
    fn new(clusters: &'a ClusterLists, tokens: u64, pages: &'a [EarlierPage], geometry: &PageGeometry) -> Self {
        Self {
            clusters,
            pages,
            page_entries: geometry.entries,
            disk_pages: geometry.disk_pages(),
            runs_max: RUNS_MAX,
            shares: shares(clusters, tokens, pages),
            allowed: vec![true; pages.len()],
            serving: Vec::new(),
            fresh: ClusterLists::new(),
            loose: ClusterLists::new(),
            marks: vec![0; tokens as usize],
        }
    }

    /// Returns the pages that serve a cluster.
    fn used(&self) -> impl Iterator<Item = &'a EarlierPage> + '_ {
        self.pages.iter().zip(&self.serving).filter(|(_, serving)| **serving > 0).map(|(page, _)| page)
    }

    /// Plans every cluster with the pages that may stay.
    fn decide(&mut self) {
        self.serving = vec![0; self.pages.len()];
        (self.fresh, self.loose) = (ClusterLists::new(), ClusterLists::new());
        self.marks.fill(0);
        let shares = std::mem::take(&mut self.shares);
        let mut left = &shares[..];
        for (cluster, members) in (0..).zip(self.clusters.iter()) {
            let (own, rest) = left.split_at(left.partition_point(|share| share.cluster <= cluster));
            left = rest;
            self.decide_cluster(cluster, members, own);
        }
        self.shares = shares;
    }

    /// Plans one cluster. `shares` are its own.
    fn decide_cluster(&mut self, cluster: u32, members: &[u32], shares: &[Share]) {
        let is_member = cluster * 2 + 1;
        members.iter().for_each(|token| self.marks[*token as usize] = is_member);
        let half = members.len().min(self.page_entries).div_ceil(2) as u32;
        let own = || shares.iter().filter(|share| self.allowed[share.page as usize]);
        let main: Vec<u32> = own().filter(|share| share.members >= half).map(|share| share.page).collect();
        let mut others: Vec<Share> = own().filter(|share| share.members < half).copied().collect();
        others.sort_by_key(|share| std::cmp::Reverse(share.members));
        let mut served: Vec<(u32, u32)> = main.iter().map(|page| (*page, self.find(*page, is_member))).collect();
        served.retain(|(_, found)| *found > 0);
        let mut runs = self.runs(&served).count();
        let missing = |plan: &Self| -> Vec<u32> {
            members.iter().filter(|token| plan.marks[**token as usize] == is_member).copied().collect()
        };
        let mut loose = missing(self);
        let mut has_own_run = loose.len() >= self.page_entries;
        if !has_own_run && !loose.is_empty() {
            let mut overflow = Vec::new();
            for share in others {
                if overflow.len() == OVERFLOW_PAGES_MAX {
                    break;
                }
                let found = self.find(share.page, is_member);
                overflow.extend((found > 0).then_some((share.page, found)));
            }
            let rest = missing(self);
            if rest.is_empty() || overflow.len() < OVERFLOW_PAGES_MAX {
                runs += overflow.len();
                served.extend(overflow);
                loose = rest;
            }
        }
        runs += usize::from(!loose.is_empty());
        if runs > self.runs_max {
            let staying = self.staying(&served, loose.len());
            members.iter().for_each(|token| self.marks[*token as usize] = is_member);
            served = staying.into_iter().map(|page| (page, self.find(page, is_member))).collect();
            loose = missing(self);
            has_own_run = served.is_empty() || loose.len() >= self.page_entries;
        }
        served.into_iter().for_each(|(page, found)| self.serving[page as usize] += found);
        let written = if has_own_run { &mut self.fresh } else { &mut self.loose };
        if !loose.is_empty() {
            written.push(&loose);
        }
    }

    /// Finds members in a page. Returns how many were not found before.
    fn find(&mut self, page: u32, is_member: u32) -> u32 {
        let mut found = 0;
        for token in &self.pages[page as usize].tokens {
            let Some(mark) = self.marks.get_mut(*token as usize).filter(|mark| **mark == is_member) else { continue };
            *mark = is_member + 1;
            found += 1;
        }
        found
    }

    /// Returns the pages of the runs that stay when a cluster has too many. `served` has the members that are found in
    /// each page, and `loose` ones are in none. Fewer than `runs_max` runs stay. Each has more members than all that
    /// are written: the loose ones and those of smaller runs.
    fn staying(&self, served: &[(u32, u32)], loose: usize) -> Vec<u32> {
        let found = |run: &&[(u32, u32)]| run.iter().map(|(_, found)| *found as usize).sum::<usize>();
        let mut runs: Vec<_> = self.runs(served).collect();
        runs.sort_by_key(|run| std::cmp::Reverse(found(run)));
        let mut written = loose;
        while let Some(smallest) = runs.last() {
            if runs.len() < self.runs_max && found(smallest) > written {
                break;
            }
            written += found(smallest);
            runs.pop();
        }
        runs.concat().into_iter().map(|(page, _)| page).collect()
    }

    /// Returns runs of neighbouring pages.
    fn runs<'p>(&self, pages: &'p [(u32, u32)]) -> impl Iterator<Item = &'p [(u32, u32)]> {
        let place = |at: &(u32, u32)| self.pages[at.0 as usize].place;
        let is_next =
            |one: &PagePlace, next: &PagePlace| one.frame == next.frame && one.page + self.disk_pages == next.page;
        pages.chunk_by(move |one, next| is_next(&place(one), &place(next)))
    }

    /// Drops used pages with too few entries that serve, and those of frames that go. Returns their number.
    fn drop_pages(&mut self, frame_goes: &dyn Fn(FrameId) -> bool) -> usize {
        let mut dropped = 0;
        for (at, page) in self.pages.iter().enumerate().filter(|(at, _)| self.serving[*at] > 0) {
            if frame_goes(page.place.frame) || self.serving[at] * SERVING_PART < page.place.valid {
                self.allowed[at] = false;
                dropped += 1;
            }
        }
        dropped
    }

    /// Returns the result. Loose members of neighbours share pages.
    fn finish(self, tokens: u64) -> GrownList<'a> {
        let kept: Vec<_> = self.used().collect();
        if !kept.is_empty() && !self.loose.is_empty() {
            coverage!(ClustersOverflowed);
        }
        let mut fresh = packed(&self.fresh, tokens, self.page_entries);
        if !planted!(LooseEntriesLost) {
            packed(&self.loose, tokens, self.page_entries).iter().for_each(|members| fresh.push(members));
        }
        GrownList { kept, fresh }
    }
}

/// Returns the members of each cluster in each page, by cluster and page.
fn shares(clusters: &ClusterLists, tokens: u64, pages: &[EarlierPage]) -> Vec<Share> {
    if pages.is_empty() {
        return Vec::new();
    }
    let mut starts = vec![0_u32; tokens as usize + 1];
    clusters.iter().flatten().for_each(|token| starts[*token as usize + 1] += 1);
    (0..tokens as usize).for_each(|at| starts[at + 1] += starts[at]);
    let mut next = starts.clone();
    let mut of_token = vec![0_u32; clusters.stored()];
    for (cluster, members) in (0..).zip(clusters.iter()) {
        for token in members {
            let at = &mut next[*token as usize];
            of_token[*at as usize] = cluster;
            *at += 1;
        }
    }
    let mut out = Vec::new();
    let mut found: Vec<u32> = Vec::new();
    for (number, page) in (0..).zip(pages) {
        found.clear();
        for token in page.tokens.iter().map(|token| *token as usize).filter(|token| *token < tokens as usize) {
            found.extend_from_slice(&of_token[starts[token] as usize..starts[token + 1] as usize]);
        }
        found.sort_unstable();
        let own = found.chunk_by(|one, other| one == other);
        out.extend(own.map(|same| Share { cluster: same[0], page: number, members: same.len() as u32 }));
    }
    out.sort_by_key(|share| share.cluster);
    out
}

/// Returns the stored clusters of a list, and the places of kept pages. Neighbouring kept pages are a cluster, and what
/// was written follows.
pub(super) fn joined(
    heads: EntryHeads,
    list: &GrownList<'_>,
    tokens: u64,
    geometry: &PageGeometry,
) -> (HeadClusters, Vec<PagePlace>) {
    let mut clusters = ClusterLists::new();
    let mut open: Vec<u32> = Vec::new();
    let mut before: Option<PagePlace> = None;
    // One more than the number of the last cluster of each token.
    let mut last = vec![0_usize; tokens as usize];
    for page in &list.kept {
        let continues = before.is_some_and(|before| {
            before.frame == page.place.frame
                && before.page + geometry.disk_pages() == page.place.page
                && before.valid as usize == geometry.entries
        });
        let number = clusters.len() + 1;
        let is_known = |token: &u32| last[*token as usize] == number;
        let fits =
            continues && open.len() + page.tokens.len() <= CLUSTER_ENTRIES_MAX && !page.tokens.iter().any(is_known);
        if !fits && !open.is_empty() {
            clusters.push(&open);
            open.clear();
        }
        page.tokens.iter().for_each(|token| last[*token as usize] = clusters.len() + 1);
        open.extend_from_slice(&page.tokens);
        before = Some(page.place);
    }
    if !open.is_empty() {
        clusters.push(&open);
    }
    list.fresh.iter().for_each(|members| clusters.push(members));
    let mut counts = vec![0_u16; tokens as usize];
    clusters.iter().flatten().for_each(|token| counts[*token as usize] = counts[*token as usize].saturating_add(1));
    let memberships = counts.into_iter().max().unwrap_or(0).max(1);
    (HeadClusters { heads, clusters, memberships }, list.kept.iter().map(|page| page.place).collect())
}
