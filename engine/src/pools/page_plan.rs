//! Which entries are in which page: clusters one after the other, each from a page of its own on.

use super::layer_clusters::LayerClusters;

/// A page that is about to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedPage {
    /// The index of the list of its cluster.
    pub(super) list: u16,
    pub(super) cluster: u32,
    /// The index of its first entry among those of the cluster.
    pub(super) first: u32,
    /// The number of its entries.
    pub(super) valid: u32,
}

/// Returns the pages of a layer, list after list and cluster after cluster.
pub(super) fn pages(layer: &LayerClusters) -> Vec<PlannedPage> {
    let most = layer.geometry.entries;
    let mut pages = Vec::new();
    for (list, own) in (0..).zip(&layer.lists) {
        for (cluster, members) in (0..).zip(own.clusters.iter()) {
            let firsts = (0..members.len()).step_by(most);
            pages.extend(firsts.map(|first| PlannedPage {
                list,
                cluster,
                first: first as u32,
                valid: most.min(members.len() - first) as u32,
            }));
        }
    }
    pages
}
