//! Which entries are in which page, and which device gets the page.
//!
//! 1. Clusters follow each other. Each begins with a page of its own.
//! 2. The pages of a cluster are dealt out in units, from the lane of a running pointer on. A lane is a device.
//! 3. The members of a cluster are rearranged lane by lane, so that each lane has one run of its pages.
//!
//! Source: SWARM section 5.2, equation 7, with pages in place of entries.

use super::layer_clusters::LayerClusters;
use crate::io::planted;
use crate::options::ClusterStripe;
use crate::retrieval::clusters::ClusterLists;

/// A page that is about to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedPage {
    /// The index of the list of its cluster.
    pub(super) list: u16,
    /// The index of its device among those that the layer is dealt to.
    pub(super) lane: u16,
    pub(super) cluster: u32,
    /// The index of its first entry among those of the cluster.
    pub(super) first: u32,
    /// The number of its entries.
    pub(super) valid: u32,
}

impl PlannedPage {
    /// Returns the index of the page that page `index` of these pages is put into: its own.
    pub(super) fn place(pages: &[Self], index: usize) -> usize {
        let is_next = |before: &Self, own: &Self| {
            (own.list, own.lane) == (before.list, before.lane) && own.cluster != before.cluster
        };
        let is_shared = planted!(PageFilledTwice) && index > 0 && is_next(&pages[index - 1], &pages[index]);
        index - usize::from(is_shared)
    }
}

/// Deals the pages of clusters to lanes.
pub(super) struct Stripes {
    stripe: ClusterStripe,
    /// The lane of the next unit, modulo the lanes.
    next: usize,
}

impl Stripes {
    /// Returns stripes whose first cluster begins at lane `first`, modulo the lanes.
    pub(super) fn new(stripe: ClusterStripe, first: usize) -> Self {
        Self { stripe, next: first }
    }

    /// Returns the pages of a layer, list after list and cluster after cluster. Rearranges the members of each cluster
    /// so that they are in the order of its pages.
    pub(super) fn deal(&mut self, layer: &mut LayerClusters, lanes: usize) -> Vec<PlannedPage> {
        let most = layer.geometry.entries;
        let mut pages = Vec::new();
        for (list, own) in (0..).zip(&mut layer.lists) {
            let mut dealt = ClusterLists::new();
            let mut order = Vec::new();
            for (cluster, members) in (0..).zip(own.clusters.iter()) {
                order.clear();
                for (page, lane) in self.cluster(members.len().div_ceil(most), lanes.max(1)) {
                    let from = page * most;
                    let entries = &members[from..members.len().min(from + most)];
                    let (first, valid) = (order.len() as u32, entries.len() as u32);
                    pages.push(PlannedPage { list, lane, cluster, first, valid });
                    order.extend_from_slice(entries);
                }
                dealt.push(&order);
            }
            own.clusters = dealt;
        }
        pages
    }

    /// Returns the pages of a cluster with their lanes, lane after lane. The last page, which may be partly filled,
    /// is the last one.
    fn cluster(&mut self, pages: usize, lanes: usize) -> Vec<(usize, u16)> {
        let unit = match self.stripe {
            ClusterStripe::Pages(unit) => unit.get() as usize,
            ClusterStripe::Cluster | ClusterStripe::Stretch => pages.max(1),
        };
        let units = pages.div_ceil(unit);
        let first = self.next % lanes;
        self.next = (first + units) % lanes;
        let mut out = Vec::with_capacity(pages);
        for behind in 0..lanes {
            let residue = (units + behind) % lanes;
            for own in (residue..units).step_by(lanes) {
                let lane = ((first + own) % lanes) as u16;
                out.extend((own * unit..pages.min((own + 1) * unit)).map(|page| (page, lane)));
            }
        }
        out
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::num::NonZeroU32;

    /// Returns the pages of a layer on one lane.
    pub(in super::super) fn pages(layer: &LayerClusters) -> Vec<PlannedPage> {
        let most = layer.geometry.entries;
        let mut pages = Vec::new();
        for (list, own) in (0..).zip(&layer.lists) {
            for (cluster, members) in (0..).zip(own.clusters.iter()) {
                pages.extend((0..members.len()).step_by(most).map(|first| {
                    let valid = most.min(members.len() - first) as u32;
                    PlannedPage { list, lane: 0, cluster, first: first as u32, valid }
                }));
            }
        }
        pages
    }

    pub(in super::super) fn unit(pages: u32) -> ClusterStripe {
        ClusterStripe::Pages(NonZeroU32::new(pages).expect("a unit"))
    }

    #[test]
    fn units_are_dealt_from_a_running_pointer_and_each_lane_has_one_run() {
        let mut stripes = Stripes::new(unit(1), 7);
        assert_eq!(stripes.cluster(5, 4), [(1, 0), (2, 1), (3, 2), (0, 3), (4, 3)]);
        assert_eq!(stripes.cluster(2, 4), [(0, 0), (1, 1)]);
        assert_eq!(stripes.cluster(0, 4), []);
        assert_eq!(stripes.cluster(1, 4), [(0, 2)]);
        let mut stripes = Stripes::new(unit(2), 0);
        assert_eq!(stripes.cluster(5, 2), [(2, 1), (3, 1), (0, 0), (1, 0), (4, 0)]);
        let mut stripes = Stripes::new(ClusterStripe::Cluster, 0);
        assert_eq!(stripes.cluster(3, 2), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(stripes.cluster(2, 2), [(0, 1), (1, 1)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn lanes_are_balanced_within_one_unit(
            sizes in prop::collection::vec(0_usize..40, 1..40),
            (lanes, own, first) in (1_usize..9, 1_u32..9, 0_usize..20),
        ) {
            let mut stripes = Stripes::new(unit(own), first);
            let mut units = vec![0_usize; lanes];
            for size in sizes {
                let dealt = stripes.cluster(size, lanes);
                let mut seen: Vec<usize> = dealt.iter().map(|(page, _)| *page).collect();
                prop_assert_eq!(seen.last().copied(), size.checked_sub(1));
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..size).collect::<Vec<_>>());
                let runs: Vec<u16> = dealt.chunk_by(|a, b| a.1 == b.1).map(|run| run[0].1).collect();
                let distinct: std::collections::BTreeSet<u16> = runs.iter().copied().collect();
                prop_assert_eq!(runs.len(), distinct.len(), "each lane has one run");
                for (page, lane) in dealt {
                    units[usize::from(lane)] += usize::from(page.is_multiple_of(own as usize));
                }
            }
            let (least, most) = (units.iter().min(), units.iter().max());
            prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "{:?}", units);
        }
    }
}
