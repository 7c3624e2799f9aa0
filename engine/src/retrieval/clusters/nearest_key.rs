//! Entries that no query activated: each joins the cluster of the medoid with the nearest key.
//!
//! 1. Entries are taken in rising order, sixty-four at a time, and compared with the keys of all medoids.
//! 2. An entry joins the nearest medoid whose cluster has room, ties by the lower cluster.
//! 3. If every cluster is full, the entry becomes the medoid of a new cluster, which later entries may join.
//!
//! The squared distance of key x to medoid m is compared as `|m|^2 - 2 x . m`, because `|x|^2` is the same for all
//! medoids.
//!
//! Invariant: the result does not depend on how many entries are compared at once.

use super::key_matrix::check_keys;
use super::lists::ClusterLists;
use crate::error::Result;
use crate::kernels::{POINTS, PointLanes, multiply_add, point_block, point_products};
use crate::retrieval::cluster_state::{StateError, StateReader, StateWriter, require};
use crate::retrieval::scaled_rows::ScaledRows;
use crate::retrieval::summary_records::Records;

/// Entries that are compared at once.
const BATCH: usize = 64;
/// Keys of medoids that are read at a time.
const TILE: usize = 16;

/// Reads the key of an entry: appends its elements.
pub(crate) type ReadKey<'a> = dyn FnMut(u32, &mut Vec<f32>) + 'a;

/// The representatives of clusters, in their order: the keys of medoids, or centroids that do not move.
#[derive(Clone, Debug)]
pub(crate) struct Representatives {
    keys: ScaledRows,
    norms: Records<f32>,
}

/// The products of all representatives with a batch of keys.
pub(crate) struct KeyProducts {
    medoids: usize,
    /// For each sixteen keys of the batch, the products of each medoid with them.
    blocks: Vec<Vec<PointLanes>>,
}

impl KeyProducts {
    /// Computes the products of `medoids` keys with `keys`. `read` appends the keys of some medoids.
    fn new(
        (medoids, dim): (usize, usize),
        keys: &[&[f32]],
        mut read: impl FnMut(std::ops::Range<usize>, &mut Vec<f32>),
    ) -> Self {
        let mut rows = Vec::with_capacity(TILE * dim);
        let side_by_side = |keys: &[&[f32]]| {
            let mut block = vec![[0.0; POINTS]; dim];
            point_block(&keys.concat(), &mut block);
            block
        };
        let points: Vec<Vec<PointLanes>> = keys.chunks(POINTS).map(side_by_side).collect();
        let mut blocks = vec![vec![[0.0; POINTS]; medoids]; points.len()];
        for first in (0..medoids).step_by(TILE) {
            let tile = first..(first + TILE).min(medoids);
            rows.clear();
            read(tile.clone(), &mut rows);
            for (points, products) in points.iter().zip(&mut blocks) {
                point_products(points, &rows, &mut products[tile.clone()]);
            }
        }
        Self { medoids, blocks }
    }

    /// Returns the bytes of the products and the scratch.
    fn bytes_for(medoids: usize, dim: usize, keys: usize) -> usize {
        let blocks = keys.div_ceil(POINTS);
        let products = blocks.saturating_mul(medoids).saturating_mul(size_of::<PointLanes>());
        // The keys of a block are copied before they are laid side by side.
        products.saturating_add(((blocks + 1) * POINTS + TILE).saturating_mul(dim).saturating_mul(size_of::<f32>()))
    }

    /// Returns the product of a medoid with a key of the batch, or none if the medoid was added later.
    fn get(&self, medoid: usize, column: usize) -> Option<f32> {
        (medoid < self.medoids).then(|| self.blocks[column / POINTS][medoid][column % POINTS])
    }
}

impl Representatives {
    /// Returns no keys, which have `dim` elements each, with room for `clusters` of them.
    pub(crate) fn with_capacity(dim: usize, clusters: usize) -> Self {
        let mut norms = Records::new(1);
        norms.reserve(clusters);
        Self { keys: ScaledRows::with_capacity(dim, clusters), norms }
    }

    /// Adds the representative of the next cluster.
    pub(crate) fn push(&mut self, key: &[f32]) {
        self.keys.push(key);
        let key = self.key(self.len() - 1);
        self.norms.add()[0] = dot(&key, &key);
    }

    /// Returns the number of keys.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the keys.
    pub(crate) fn rows(&self) -> &ScaledRows {
        &self.keys
    }

    /// Returns a representative.
    pub(crate) fn key(&self, cluster: usize) -> Vec<f32> {
        let mut key = vec![0.0; self.keys.dim()];
        self.keys.read(cluster, &mut key);
        key
    }

    /// Appends the representatives as they are.
    pub(crate) fn put_state(&self, out: &mut StateWriter) {
        self.keys.put_state(out);
    }

    /// Returns the representatives of a state, one for each of `clusters` clusters.
    ///
    /// # Errors
    /// There are others, or the norm of one is not finite.
    pub(crate) fn from_state(state: &mut StateReader<'_>, dim: usize, clusters: usize) -> Result<Self, StateError> {
        let keys = ScaledRows::from_state(state, dim, clusters)?;
        let mut own = Self { keys, norms: Records::new(1) };
        own.norms.reserve(clusters);
        for cluster in 0..clusters {
            let key = own.key(cluster);
            let norm = dot(&key, &key);
            require(norm.is_finite(), || format!("a norm of {norm}"))?;
            own.norms.add()[0] = norm;
        }
        Ok(own)
    }

    /// Keeps the keys of the clusters for which `keep` holds.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        self.keys.retain(&keep);
        let mut left = Records::new(1);
        left.reserve(self.keys.len());
        for cluster in (0..self.norms.count()).filter(|cluster| keep(*cluster)) {
            left.add().copy_from_slice(self.norms.slice(cluster..cluster + 1));
        }
        self.norms = left;
    }

    /// Returns the most bytes once there are `clusters` keys.
    pub(crate) fn bytes_for(&self, clusters: usize) -> usize {
        let more = clusters.saturating_sub(self.len());
        self.keys.bytes_for(more) + self.norms.bytes_for(more)
    }

    /// Returns the products with each of `keys`.
    pub(crate) fn products(&self, keys: &[&[f32]]) -> KeyProducts {
        let dim = self.keys.dim();
        KeyProducts::new((self.len(), dim), keys, |tile, rows| {
            for cluster in tile {
                let start = rows.len();
                rows.resize(start + dim, 0.0);
                self.keys.read(cluster, &mut rows[start..]);
            }
        })
    }

    /// Returns the bytes of [`Self::products`] with `keys` keys, once there are `clusters` medoids.
    pub(crate) fn product_bytes(&self, clusters: usize, keys: usize) -> usize {
        KeyProducts::bytes_for(clusters, self.keys.dim(), keys)
    }

    /// Returns the cluster that has room and whose representative is nearest to `key`, which is `column` of `products`.
    /// Ties go to the lower cluster. Clusters may have been added since the products were computed.
    pub(crate) fn nearest(
        &self,
        (products, column): (&KeyProducts, usize),
        key: &[f32],
        has_room: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let product = |cluster| products.get(cluster, column).unwrap_or_else(|| dot(&self.key(cluster), key));
        nearest_with_room(self.norms.slice(0..self.len()), product, has_room)
    }
}

/// Returns the medoid that has room with the least `norm - 2 * product`, ties by the lower one.
fn nearest_with_room(norms: &[f32], product: impl Fn(usize) -> f32, has_room: impl Fn(usize) -> bool) -> Option<usize> {
    let room = (0..norms.len()).filter(|cluster| has_room(*cluster));
    let each = room.map(|cluster| (norms[cluster] - 2.0 * product(cluster), cluster));
    each.min_by(|a, b| a.0.total_cmp(&b.0)).map(|nearest| nearest.1)
}

/// Returns the lists with each entry of `loose` added to the cluster of the nearest medoid that has fewer than
/// `max_size` members.
///
/// A key has `dim` elements. The medoid of a cluster is its first member.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument): a key that was read is not finite or above 1e15.
pub(super) fn assign_nearest(
    lists: &ClusterLists,
    loose: &[u32],
    (key, dim): (&mut ReadKey<'_>, usize),
    max_size: usize,
) -> Result<ClusterLists> {
    let mut clusters: Vec<Vec<u32>> = lists.iter().map(<[u32]>::to_vec).collect();
    let (mut medoids, mut norms, mut rows) = (Vec::with_capacity(lists.len()), Vec::new(), Vec::new());
    for members in lists.iter() {
        medoids.push(members[0]);
        read_keys((&mut *key, dim), &members[..1], &mut rows)?;
        norms.push(dot(&rows, &rows));
    }
    let mut batch = Vec::new();
    for loose in loose.chunks(BATCH) {
        read_keys((&mut *key, dim), loose, &mut batch)?;
        let keys: Vec<&[f32]> = batch.chunks_exact(dim).collect();
        let products = KeyProducts::new((medoids.len(), dim), &keys, |tile, rows| {
            medoids[tile].iter().for_each(|medoid| key(*medoid, rows));
        });
        for (column, (entry, own)) in loose.iter().zip(&keys).enumerate() {
            // Medoids that are opened in this batch are entries of it.
            let of_batch = |medoid: u32| loose.binary_search(&medoid).map_or(&keys[column], |at| &keys[at]);
            let product = |cluster: usize| match products.get(cluster, column) {
                Some(product) => product,
                None => dot(of_batch(medoids[cluster]), own),
            };
            let nearest = nearest_with_room(&norms, product, |cluster| clusters[cluster].len() < max_size);
            match nearest {
                Some(cluster) => clusters[cluster].push(*entry),
                None => {
                    clusters.push(vec![*entry]);
                    medoids.push(*entry);
                    norms.push(dot(own, own));
                }
            }
        }
    }
    let mut assigned = ClusterLists::new();
    clusters.iter().for_each(|members| assigned.push(members));
    Ok(assigned)
}

/// Replaces `rows` by the keys of these entries.
fn read_keys((key, dim): (&mut ReadKey<'_>, usize), entries: &[u32], rows: &mut Vec<f32>) -> Result<()> {
    rows.clear();
    entries.iter().for_each(|entry| key(*entry, rows));
    check_keys("medoid clusters", rows, dim)?;
    Ok(())
}

/// Returns the most bytes that [`assign_nearest`] takes beside the keys, for lists of all entries in `clusters`
/// clusters. Its result is not included.
pub(super) fn assign_bytes_for(clusters: usize, entries: usize, dim: usize) -> usize {
    // A list that grows doubles, from four members on.
    let lists = clusters.saturating_mul(2 * size_of::<Vec<u32>>() + 4 * size_of::<u32>());
    let members = entries.saturating_mul(2 * size_of::<u32>());
    let medoids = clusters.saturating_mul(2 * (size_of::<u32>() + size_of::<f32>()));
    let batch = (2 * BATCH).saturating_mul(dim).saturating_mul(size_of::<f32>());
    let products = KeyProducts::bytes_for(clusters, dim, BATCH);
    [lists, members, medoids, batch, products].into_iter().fold(0, usize::saturating_add)
}

/// Returns the product of two keys, with the bits that a product of many keys has.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut product = [0.0];
    multiply_add(&mut product, a, b, a.len(), 1);
    product[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use proptest::prelude::*;

    fn assign(
        lists: &ClusterLists,
        loose: &[u32],
        (keys, dim): (&[f32], usize),
        max_size: usize,
    ) -> Result<ClusterLists> {
        let mut read = |entry: u32, row: &mut Vec<f32>| row.extend_from_slice(&keys[entry as usize * dim..][..dim]);
        assign_nearest(lists, loose, (&mut read, dim), max_size)
    }

    #[test]
    fn representatives_of_a_state_have_finite_norms() {
        let mut own = Representatives::with_capacity(2, 1);
        own.push(&[1.0, -2.0]);
        let mut out = StateWriter::new();
        own.put_state(&mut out);
        let mut bytes = out.into_bytes();
        let read = |bytes: &[u8]| Representatives::from_state(&mut StateReader::new(bytes), 2, 1);
        assert_eq!(read(&bytes).unwrap().key(0), [1.0, -2.0]);
        for exponent in [-128_i8, -101, 100, 127] {
            bytes[28] = exponent.to_le_bytes()[0];
            assert!(read(&bytes).is_err(), "exponent {exponent}");
        }
    }

    proptest! {
        #[test]
        fn each_entry_joins_the_nearest_medoid_with_room(
            keys in prop::collection::vec(-9_i8..9, 60 * 3), medoids in 0_usize..9, max_size in 1_usize..9,
        ) {
            let keys: Vec<f32> = keys.into_iter().map(f32::from).collect();
            let mut lists = ClusterLists::new();
            (0..medoids).for_each(|medoid| lists.push(&[medoid as u32]));
            let loose: Vec<u32> = (medoids as u32..60).collect();
            let found = assign(&lists, &loose, (&keys, 3), max_size).unwrap();
            let mut expected: Vec<Vec<u32>> = (0..medoids as u32).map(|medoid| vec![medoid]).collect();
            let distance = |a: u32, b: u32| -> f32 {
                (0..3).map(|i| (keys[a as usize * 3 + i] - keys[b as usize * 3 + i]).powi(2)).sum()
            };
            for entry in loose {
                let room = expected.iter_mut().filter(|members| members.len() < max_size);
                match room.min_by(|a, b| distance(a[0], entry).total_cmp(&distance(b[0], entry))) {
                    Some(members) => members.push(entry),
                    None => expected.push(vec![entry]),
                }
            }
            prop_assert_eq!(found.iter().map(<[u32]>::to_vec).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn wrong_keys_are_refused() {
        let mut lists = ClusterLists::new();
        lists.push(&[1]);
        for keys in [[0.0, f32::NAN], [2e15, 0.0], [0.0, f32::INFINITY]] {
            let error = assign(&lists, &[0], (&keys, 1), 16).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(assign(&lists, &[0], (&[0.0, 1e15], 1), 16).unwrap().members(0).unwrap(), [1, 0]);
    }

    #[test]
    fn representatives_are_read_back_and_found() {
        let mut medoids = Representatives::with_capacity(2, 0);
        for at in 0..40 {
            let bytes = medoids.bytes_for(medoids.len() + 1);
            medoids.push(&[at as f32, 1.0]);
            assert!(medoids.bytes_for(medoids.len()) <= bytes);
        }
        medoids.retain(|cluster| cluster % 2 == 1);
        let keys: Vec<[f32; 2]> = (0..20).map(|at| [at as f32 + 0.25, 1.0]).collect();
        let views: Vec<&[f32]> = keys.iter().map(<[f32; 2]>::as_slice).collect();
        let products = medoids.products(&views);
        medoids.push(&[0.25, 1.0]);
        for (column, key) in keys.iter().enumerate() {
            let expected = if column == 0 { 20 } else { column / 2 };
            assert_eq!(medoids.nearest((&products, column), key, |_| true), Some(expected), "{key:?}");
        }
        assert_eq!((medoids.key(3), medoids.nearest((&products, 9), &keys[9], |_| false)), (vec![7.0, 1.0], None));
    }
}
