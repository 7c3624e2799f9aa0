//! Entries that no query activated: each joins the cluster of the medoid with the nearest key.
//!
//! 1. Entries are taken in rising order, sixteen at a time, and compared with the keys of all medoids by one product.
//! 2. An entry joins the nearest medoid whose cluster has room, ties by the lower cluster.
//! 3. If every cluster is full, the entry becomes the medoid of a new cluster, which later entries may join.
//!
//! The squared distance of key x to medoid m is compared as `|m|^2 - 2 x . m`, because `|x|^2` is the same for all
//! medoids.
//!
//! Invariant: the result does not depend on how many entries are compared at once.

use super::key_matrix::check_keys;
use super::lists::ClusterLists;
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::multiply_add;

/// Entries that are compared at once.
const BATCH: usize = 16;

/// The keys of medoids, in the order of their clusters.
#[derive(Clone, Debug)]
pub(crate) struct MedoidKeys {
    dim: usize,
    /// `[clusters, dim]`.
    keys: Vec<f32>,
    norms: Vec<f32>,
}

/// The products of all medoids with a batch of keys.
pub(crate) struct KeyProducts {
    columns: usize,
    /// `[clusters, columns]`.
    products: Vec<f32>,
}

impl MedoidKeys {
    /// Returns no keys, which have `dim` elements each, with room for `clusters` of them.
    pub(crate) fn with_capacity(dim: usize, clusters: usize) -> Self {
        Self { dim, keys: Vec::with_capacity(clusters * dim), norms: Vec::with_capacity(clusters) }
    }

    /// Adds the key of the medoid of the next cluster.
    pub(crate) fn push(&mut self, key: &[f32]) {
        let (used, clusters) = (self.keys.len(), self.norms.len());
        if self.keys.capacity() < used + self.dim {
            // A quarter at a time, because keys are most of what a method keeps.
            self.keys.reserve_exact(self.dim.max(used / 4));
            self.norms.reserve_exact(1.max(clusters / 4));
        }
        self.keys.extend_from_slice(key);
        self.norms.push(dot(key, key));
    }

    /// Returns the number of keys.
    pub(crate) fn len(&self) -> usize {
        self.norms.len()
    }

    /// Returns the keys, `[clusters, dim]`.
    pub(crate) fn vectors(&self) -> &[f32] {
        &self.keys
    }

    /// Keeps the keys of the clusters for which `keep` holds.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let mut left = Self::with_capacity(self.dim, (0..self.len()).filter(|cluster| keep(*cluster)).count());
        for (_, key) in self.keys.chunks_exact(self.dim).enumerate().filter(|(cluster, _)| keep(*cluster)) {
            left.push(key);
        }
        *self = left;
    }

    /// Returns the most bytes once there are `clusters` keys.
    pub(crate) fn bytes_for(&self, clusters: usize) -> usize {
        let most = match clusters * self.dim > self.keys.capacity() || clusters > self.norms.capacity() {
            true => (clusters + clusters / 4 + 1) * (self.dim + 1),
            false => self.keys.capacity() + self.norms.capacity(),
        };
        most * size_of::<f32>()
    }

    /// Returns the products with each of `keys`.
    pub(crate) fn products(&self, keys: &[&[f32]]) -> KeyProducts {
        let columns = keys.len();
        let mut batch = vec![0.0; self.dim * columns];
        for (column, key) in keys.iter().enumerate() {
            key.iter().enumerate().for_each(|(row, x)| batch[row * columns + column] = *x);
        }
        let mut products = vec![0.0; self.len() * columns];
        multiply_add(&mut products, &self.keys, &batch, self.dim, columns);
        KeyProducts { columns, products }
    }

    /// Returns the cluster that has room and whose medoid is nearest to `key`, which is `column` of `products`. Ties go
    /// to the lower cluster. Clusters may have been added since the products were computed.
    pub(crate) fn nearest(
        &self,
        (products, column): (&KeyProducts, usize),
        key: &[f32],
        has_room: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let known = products.products.len() / products.columns.max(1);
        let distance = |cluster: usize| {
            let product = match cluster < known {
                true => products.products[cluster * products.columns + column],
                false => dot(&self.keys[cluster * self.dim..][..self.dim], key),
            };
            self.norms[cluster] - 2.0 * product
        };
        let room = (0..self.len()).filter(|cluster| has_room(*cluster));
        room.map(|cluster| (distance(cluster), cluster)).min_by(|a, b| a.0.total_cmp(&b.0)).map(|nearest| nearest.1)
    }
}

/// Returns the lists with each entry of `loose` added to the cluster of the nearest medoid that has fewer than
/// `max_size` members.
///
/// `keys` is `[entries, dim]`. The medoid of a cluster is its first member.
pub(super) fn assign_nearest(
    lists: &ClusterLists,
    loose: &[u32],
    (keys, dim): (&[f32], usize),
    max_size: usize,
) -> Result<ClusterLists> {
    let entries = check_keys("medoid clusters", keys, dim)?;
    let last = lists.iter().flatten().chain(loose).max();
    if let Some(last) = last.filter(|last| **last as usize >= entries) {
        let context = format!("medoid clusters: there are keys of {entries} entries, but a cluster has entry {last}");
        return Err(Error::new(ErrorKind::InvalidArgument, context));
    }
    let key = |entry: u32| &keys[entry as usize * dim..][..dim];
    let mut clusters: Vec<Vec<u32>> = lists.iter().map(<[u32]>::to_vec).collect();
    let mut medoids = MedoidKeys::with_capacity(dim, lists.len());
    lists.iter().for_each(|members| medoids.push(key(members[0])));
    for loose in loose.chunks(BATCH) {
        let batch: Vec<&[f32]> = loose.iter().map(|entry| key(*entry)).collect();
        let products = medoids.products(&batch);
        for (column, entry) in loose.iter().enumerate() {
            let has_room = |cluster: usize| clusters[cluster].len() < max_size;
            match medoids.nearest((&products, column), batch[column], has_room) {
                Some(cluster) => clusters[cluster].push(*entry),
                None => {
                    clusters.push(vec![*entry]);
                    medoids.push(batch[column]);
                }
            }
        }
    }
    let mut assigned = ClusterLists::new();
    clusters.iter().for_each(|members| assigned.push(members));
    Ok(assigned)
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
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_entry_joins_the_nearest_medoid_with_room(
            keys in prop::collection::vec(-9_i8..9, 60 * 3), medoids in 0_usize..9, max_size in 1_usize..9,
        ) {
            let keys: Vec<f32> = keys.into_iter().map(f32::from).collect();
            let mut lists = ClusterLists::new();
            (0..medoids).for_each(|medoid| lists.push(&[medoid as u32]));
            let loose: Vec<u32> = (medoids as u32..60).collect();
            let found = assign_nearest(&lists, &loose, (&keys, 3), max_size).unwrap();
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
        for (keys, dim) in [(&[0.0; 4][..], 3), (&[0.0; 2], 2), (&[], 0), (&[0.0, f32::NAN], 1), (&[0.0, 2e15], 1)] {
            let error = assign_nearest(&lists, &[0], (keys, dim), 16).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(assign_nearest(&lists, &[0], (&[0.0, 1e15], 1), 16).unwrap().members(0).unwrap(), [1, 0]);
    }
}
