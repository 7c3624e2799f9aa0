//! Copies keys and values from groups to pages.
//!
//! A stretch of pages is in memory. The groups that hold its entries are visited once, in order.

use super::layer_clusters::LayerClusters;
use super::page_plan::PlannedPage;
use crate::error::Result;
use stratakv_format::pool::{EntryHeads, PageGeometry};

/// Takes a group with its decoded planes: K `[kv_heads, G, key_dim]` and V `[kv_heads, G, value_dim]`.
pub(crate) type PlaneVisitor<'a> = dyn FnMut(u64, &[u8], &[u8]) -> Result<()> + 'a;

/// The source of the groups of a layer.
pub(crate) trait GroupPlanes {
    /// Passes these groups, which rise, to `each`.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`](crate::ErrorKind::Corruption), [`ErrorKind::Io`](crate::ErrorKind::Io): a group that
    /// no copy has undamaged. Errors of `each`.
    fn each(&self, groups: &[u64], each: &mut PlaneVisitor<'_>) -> Result<()>;
}

/// The place of an entry in a stretch of pages.
#[derive(Clone, Copy)]
struct EntryPlace {
    token: u32,
    /// The index of the page in the stretch.
    page: u32,
    slot: u32,
}

/// Bytes of memory for an entry of a stretch, beside its page.
pub(super) const ENTRY_BYTES: usize = size_of::<EntryPlace>() + size_of::<u64>();

/// Returns the bytes of a stretch of pages of a layer.
///
/// # Errors
/// As [`GroupPlanes::each`].
pub(super) fn fill(
    layer: &LayerClusters,
    pages: &[PlannedPage],
    group_tokens: usize,
    source: &dyn GroupPlanes,
) -> Result<Vec<u8>> {
    let mut places = Vec::with_capacity(pages.iter().map(|page| page.valid as usize).sum());
    for (index, page) in pages.iter().enumerate() {
        let members = layer.lists[usize::from(page.list)].clusters.members(page.cluster as usize)?;
        let own = &members[page.first as usize..(page.first + page.valid) as usize];
        let index = PlannedPage::place(pages, index) as u32;
        places.extend((0..).zip(own).map(|(slot, token)| EntryPlace { token: *token, page: index, slot }));
    }
    places.sort_unstable_by_key(|place| place.token);
    let group_of = |place: &EntryPlace| u64::from(place.token) / group_tokens as u64;
    let mut groups: Vec<u64> = places.iter().map(group_of).collect();
    groups.dedup();
    let mut out = vec![0; pages.len() * layer.geometry.page_bytes];
    let mut left = &places[..];
    source.each(&groups, &mut |group, keys, values| {
        let (own, rest) = left.split_at(left.partition_point(|place| group_of(place) <= group));
        left = rest;
        for place in own {
            let page = place.page as usize;
            let heads = layer.lists[usize::from(pages[page].list)].heads;
            let out = &mut out[page * layer.geometry.page_bytes..][..layer.geometry.page_bytes];
            let row = place.token as usize % group_tokens;
            put_entry(&layer.geometry, heads, out, place.slot as usize, [keys, values], (row, group_tokens));
        }
        Ok(())
    })?;
    Ok(out)
}

/// Copies an entry to a slot of a page: row `row` of each of its heads, from planes with `stride` rows per head.
pub(crate) fn put_entry(
    geometry: &PageGeometry,
    heads: EntryHeads,
    page: &mut [u8],
    slot: usize,
    planes: [&[u8]; 2],
    (row, stride): (usize, usize),
) {
    for (plane, source) in planes.into_iter().enumerate() {
        for own in 0..geometry.heads {
            let head = if let EntryHeads::One(head) = heads { usize::from(head) } else { own };
            let to = geometry.row(plane, own, slot);
            let from = (head * stride + row) * to.len();
            let bytes = to.len();
            page[to].copy_from_slice(&source[from..from + bytes]);
        }
    }
}

/// Copies the entry of a slot of a page to row `row` of each of its heads, in planes with `stride` rows per head.
pub(crate) fn take_entry(
    geometry: &PageGeometry,
    heads: EntryHeads,
    page: &[u8],
    slot: usize,
    planes: &mut [Vec<u8>; 2],
    (row, stride): (usize, usize),
) {
    for (plane, out) in planes.iter_mut().enumerate() {
        for own in 0..geometry.heads {
            let head = if let EntryHeads::One(head) = heads { usize::from(head) } else { own };
            let from = geometry.row(plane, own, slot);
            let to = (head * stride + row) * from.len();
            let bytes = from.len();
            out[to..to + bytes].copy_from_slice(&page[from]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::page_plan::tests::pages;
    use super::*;
    use crate::retrieval::clusters::ClusterLists;
    use stratakv_format::DType;
    use stratakv_format::layout::{LayerGeometry, RAW_PLANES};

    /// Groups of 4 tokens, 2 heads, keys of 2 and values of 1 elements. An element tells its plane, head, token and
    /// index.
    struct Numbers;

    fn element(plane: usize, head: usize, token: usize, at: usize) -> f32 {
        (plane * 10_000 + head * 1000 + token * 10 + at) as f32
    }

    impl GroupPlanes for Numbers {
        fn each(&self, groups: &[u64], each: &mut PlaneVisitor<'_>) -> Result<()> {
            for &group in groups {
                let plane = |plane: usize, dim: usize| -> Vec<u8> {
                    let rows = (0..2).flat_map(|head| (0..4).map(move |row| (head, group as usize * 4 + row)));
                    let elements =
                        rows.flat_map(|(head, token)| (0..dim).map(move |at| element(plane, head, token, at)));
                    elements.flat_map(f32::to_le_bytes).collect()
                };
                each(group, &plane(0, 2), &plane(1, 1))?;
            }
            Ok(())
        }
    }

    fn layer(lists: &[ClusterLists]) -> LayerClusters {
        let layer =
            LayerGeometry { kv_heads: 2, key_dim: 2, value_dim: 1, window: None, rope: None, codecs: RAW_PLANES };
        LayerClusters::covering(lists, 12, &layer, DType::F32).unwrap()
    }

    fn numbers(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn pages_have_the_rows_of_their_entries_and_zeros() {
        let clusters: [&[u32]; 2] = [&[11, 0, 5], &[1, 2, 3, 4, 6, 7, 8, 9, 10]];
        let list = ClusterLists::of_clusters(clusters.iter());
        for joint in [true, false] {
            let lists = if joint { vec![list.clone()] } else { vec![list.clone(), list.clone()] };
            let layer = layer(&lists);
            let pages = pages(&layer);
            let bytes = fill(&layer, &pages, 4, &Numbers).unwrap();
            for (page, bytes) in pages.iter().zip(bytes.chunks_exact(layer.geometry.page_bytes)) {
                let tokens = &clusters[page.cluster as usize][page.first as usize..][..page.valid as usize];
                let heads = if joint { 0..2 } else { usize::from(page.list)..usize::from(page.list) + 1 };
                for (own, head) in heads.enumerate() {
                    for (slot, token) in tokens.iter().enumerate() {
                        let expected = |plane, at| element(plane, head, *token as usize, at);
                        let row = |plane| numbers(&bytes[layer.geometry.row(plane, own, slot)]);
                        assert_eq!(row(0), [expected(0, 0), expected(0, 1)], "{page:?}, head {head}");
                        assert_eq!(row(1), [expected(1, 0)], "{page:?}, head {head}");
                    }
                }
                assert_eq!(layer.geometry.first_stray(bytes, tokens.len()), None, "{page:?}");
            }
        }
    }

    #[test]
    fn a_cluster_begins_with_a_page_of_its_own() {
        let clusters: [&[u32]; 2] = [&[11, 0, 5], &[1, 2, 3, 4, 6, 7, 8, 9, 10]];
        let mut layer = layer(&[ClusterLists::of_clusters(clusters.iter())]);
        layer.geometry.entries = 4;
        let page = |cluster, first, valid| PlannedPage { list: 0, lane: 0, cluster, first, valid };
        assert_eq!(pages(&layer), [page(0, 0, 3), page(1, 0, 4), page(1, 4, 4), page(1, 8, 1)]);
    }
}
