//! [`LayerClusters`]: the clusters of a layer as they are stored.
//!
//! A method may keep new tokens in no cluster, and an embedder's method may list anything. What is stored covers each
//! token of a range in every list, and names no other token. Small clusters are joined, because a page belongs to one
//! stored cluster.

use crate::error::{Error, ErrorKind, Result};
use crate::retrieval::clusters::ClusterLists;
use stratakv_format::layout::LayerGeometry;
use stratakv_format::pool::{EntryHeads, MEMBERSHIPS_MAX, PageGeometry};

/// The most entries of a stored cluster. Larger ones are cut, so that each fits in a piece of a directory.
pub(super) const CLUSTER_ENTRIES_MAX: usize = 1 << 16;

/// The clusters of one list: of one head, or of all heads.
pub(super) struct HeadClusters {
    pub(super) heads: EntryHeads,
    pub(super) clusters: ClusterLists,
    /// The most clusters that hold the same token.
    pub(super) memberships: u16,
}

/// The clusters of a layer. Each list has every token below `tokens`, and no other.
pub(crate) struct LayerClusters {
    pub(super) tokens: u64,
    pub(super) lists: Vec<HeadClusters>,
    pub(super) geometry: PageGeometry,
}

impl LayerClusters {
    /// Returns the end of the tokens that clusters of a layer can cover, at most `most`: behind the last token that
    /// every list has, rounded down to whole groups.
    pub(crate) fn end(lists: &[ClusterLists], group_tokens: usize, most: u64) -> u64 {
        let last = |list: &ClusterLists| list.iter().flatten().map(|token| u64::from(*token) + 1).max().unwrap_or(0);
        let end = lists.iter().map(last).min().unwrap_or(0).min(most);
        end - end % group_tokens as u64
    }

    /// Returns the clusters of a layer, cut to the tokens below `tokens`. Tokens in no cluster form clusters of one
    /// page in the order of tokens.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: neither one list nor one per head, or a token in too many clusters.
    pub(crate) fn covering(
        lists: &[ClusterLists],
        tokens: u64,
        layer: &LayerGeometry,
        dtype: stratakv_format::DType,
    ) -> Result<Self> {
        let refused = |what: String| Err(Error::new(ErrorKind::InvalidArgument, format!("store clusters: {what}")));
        let kv_heads = usize::from(layer.kv_heads);
        let heads: Vec<EntryHeads> = match lists.len() {
            1 => vec![EntryHeads::All],
            count if count == kv_heads => (0..layer.kv_heads).map(EntryHeads::One).collect(),
            count => return refused(format!("the method has {count} lists of clusters for {kv_heads} KV heads")),
        };
        let geometry = PageGeometry::new(layer, dtype, heads[0]);
        let lists: Vec<HeadClusters> =
            heads.into_iter().zip(lists).map(|(heads, list)| covering(heads, list, tokens, geometry.entries)).collect();
        let most = lists.iter().map(|list| list.memberships).max().unwrap_or(0);
        if most > MEMBERSHIPS_MAX {
            return refused(format!("a token is in {most} clusters; at most {MEMBERSHIPS_MAX} are stored"));
        }
        Ok(Self { tokens, lists, geometry })
    }

    /// Joins neighbouring clusters that then share a page. Each cluster is still in as few pages as by itself.
    pub(crate) fn packed(mut self) -> Self {
        for list in &mut self.lists {
            list.clusters = packed(&list.clusters, self.tokens, self.geometry.entries);
        }
        self
    }

    /// Returns lists of the same heads with other clusters.
    pub(super) fn replaced(&self, lists: impl Iterator<Item = ClusterLists>) -> Self {
        let lists = self.lists.iter().zip(lists);
        let lists = lists.map(|(own, clusters)| HeadClusters { clusters, ..*own }).collect();
        Self { tokens: self.tokens, lists, geometry: self.geometry }
    }

    /// Returns the entries of all lists. An entry counts once for each of its clusters.
    pub(super) fn entries(&self) -> usize {
        self.lists.iter().map(|list| list.clusters.stored()).sum()
    }

    /// Returns the pages of all lists.
    pub(super) fn pages(&self) -> usize {
        let most = self.geometry.entries;
        self.lists.iter().flat_map(|list| list.clusters.iter()).map(|members| members.len().div_ceil(most)).sum()
    }

    /// Returns the clusters of all lists.
    pub(super) fn clusters(&self) -> usize {
        self.lists.iter().map(|list| list.clusters.len()).sum()
    }
}

fn covering(heads: EntryHeads, list: &ClusterLists, tokens: u64, page_entries: usize) -> HeadClusters {
    let mut clusters = ClusterLists::new();
    let mut counts = vec![0_u16; tokens as usize];
    // One more than the last cluster of each token.
    let mut last = vec![0_usize; tokens as usize];
    let mut kept = Vec::new();
    for (number, members) in (1..).zip(list.iter()) {
        kept.clear();
        for &token in members.iter().filter(|token| u64::from(**token) < tokens) {
            if std::mem::replace(&mut last[token as usize], number) != number {
                counts[token as usize] = counts[token as usize].saturating_add(1);
                kept.push(token);
            }
        }
        kept.chunks(CLUSTER_ENTRIES_MAX).for_each(|part| clusters.push(part));
    }
    let loose: Vec<u32> = (0..).zip(&counts).filter(|(_, count)| **count == 0).map(|(token, _)| token).collect();
    loose.chunks(page_entries).for_each(|part| clusters.push(part));
    let memberships = counts.into_iter().max().unwrap_or(0).max(1);
    HeadClusters { heads, clusters, memberships }
}

/// Joins neighbours as [`LayerClusters::packed`] says. A joined cluster has each token at most once.
pub(super) fn packed(clusters: &ClusterLists, tokens: u64, page_entries: usize) -> ClusterLists {
    if page_entries == 1 {
        return clusters.clone();
    }
    let mut out = ClusterLists::new();
    let mut open: Vec<u32> = Vec::new();
    // One more than the number of the last joined cluster of each token.
    let mut last = vec![0_usize; tokens as usize];
    for members in clusters.iter() {
        let (start, end) = (open.len(), open.len() + members.len());
        let touched = end.div_ceil(page_entries) - start / page_entries;
        let is_known = |token: &u32| last[*token as usize] == out.len() + 1;
        let fits = !start.is_multiple_of(page_entries)
            && touched == members.len().div_ceil(page_entries)
            && end <= CLUSTER_ENTRIES_MAX
            && !members.iter().any(is_known);
        if !fits && !open.is_empty() {
            out.push(&open);
            open.clear();
        }
        open.extend_from_slice(members);
        members.iter().for_each(|token| last[*token as usize] = out.len() + 1);
    }
    if !open.is_empty() {
        out.push(&open);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::DType;
    use stratakv_format::layout::RAW_PLANES;

    fn lists(clusters: &[&[u32]]) -> ClusterLists {
        ClusterLists::of_clusters(clusters.iter())
    }

    fn layer(kv_heads: u16) -> LayerGeometry {
        LayerGeometry { kv_heads, key_dim: 128, value_dim: 128, window: None, rope: None, codecs: RAW_PLANES }
    }

    #[test]
    fn the_covered_tokens_end_with_a_group_that_every_list_has() {
        let (one, other) = (lists(&[&[0, 9], &[3, 1]]), lists(&[&[6]]));
        assert_eq!(LayerClusters::end(std::slice::from_ref(&one), 4, 100), 8);
        assert_eq!(LayerClusters::end(&[one, other], 4, 100), 4);
        assert_eq!(LayerClusters::end(&[lists(&[&[200]])], 4, 18), 16);
        assert_eq!((LayerClusters::end(&[], 4, 100), LayerClusters::end(&[lists(&[])], 4, 100)), (0, 0));
    }

    #[test]
    fn what_is_stored_has_each_covered_token_and_no_other() {
        // Token 2 twice in a cluster, tokens 8 and 9 beyond the end, 3, 6 and 7 in no cluster.
        let own = lists(&[&[5, 2, 2, 9], &[8], &[0, 1, 4, 5]]);
        let stored = LayerClusters::covering(&[own], 8, &layer(2), DType::F16).unwrap();
        let found: Vec<&[u32]> = stored.lists[0].clusters.iter().collect();
        assert_eq!(stored.geometry.entries, 4);
        assert_eq!(found, [&[5, 2][..], &[0, 1, 4, 5], &[3, 6, 7]]);
        assert_eq!((stored.lists[0].memberships, stored.entries(), stored.clusters()), (2, 9, 3));
    }

    #[test]
    fn lists_that_fit_no_heads_and_tokens_in_too_many_clusters_are_refused() {
        let one = || lists(&[&[0, 1, 2, 3]]);
        for (lists, heads) in [(vec![one(), one()], 3), (vec![], 2)] {
            let error = LayerClusters::covering(&lists, 4, &layer(heads), DType::F16).err().expect("a refusal");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        let many = lists(&vec![&[0_u32, 1, 2, 3][..]; 1025]);
        assert!(LayerClusters::covering(&[many], 4, &layer(1), DType::F16).is_err());
    }

    #[test]
    fn packed_clusters_share_pages_and_no_cluster_is_in_more_pages() {
        // Pages of 4 entries. Tokens 0, 5 and 12 are in two clusters, and those of token 12 are not joined.
        let own: [&[u32]; 9] =
            [&[0, 1], &[2, 3], &[4], &[5, 6, 7, 8, 9], &[10, 11], &[5, 13], &[14, 15], &[12], &[12, 0]];
        let own = lists(&own);
        let layer = LayerClusters::covering(std::slice::from_ref(&own), 16, &layer(2), DType::F16).unwrap().packed();
        let found: Vec<&[u32]> = layer.lists[0].clusters.iter().collect();
        let expected: [&[u32]; 5] = [&[0, 1, 2, 3], &[4, 5, 6, 7, 8, 9, 10, 11], &[5, 13, 14, 15], &[12], &[12, 0]];
        assert_eq!(found, expected);
        assert_eq!((layer.entries(), layer.lists[0].memberships), (own.stored(), 2));
        assert_eq!(packed(&own, 16, 1), own, "an entry has a page of its own");
    }

    #[test]
    fn a_large_cluster_is_cut() {
        let all: Vec<u32> = (0..70_000).collect();
        let stored = LayerClusters::covering(&[lists(&[&all])], 70_000, &layer(1), DType::F16).unwrap();
        let sizes: Vec<usize> = stored.lists[0].clusters.iter().map(<[u32]>::len).collect();
        assert_eq!(sizes, [65_536, 4464]);
    }
}
