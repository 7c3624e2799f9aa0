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
    let mut medoids: Vec<f32> = lists.iter().flat_map(|members| key(members[0])).copied().collect();
    let mut norms: Vec<f32> = medoids.chunks_exact(dim).map(|medoid| dot(medoid, medoid)).collect();
    let mut batch = vec![0.0; dim * BATCH];
    let mut products = Vec::new();
    for loose in loose.chunks(BATCH) {
        for (column, entry) in loose.iter().enumerate() {
            key(*entry).iter().enumerate().for_each(|(row, x)| batch[row * BATCH + column] = *x);
        }
        products.clear();
        products.resize(norms.len() * BATCH, 0.0);
        multiply_add(&mut products, &medoids, &batch, dim, BATCH);
        for (column, entry) in loose.iter().enumerate() {
            let known = products.len() / BATCH;
            let distance = |cluster: usize| {
                let product = match cluster {
                    cluster if cluster < known => products[cluster * BATCH + column],
                    _ => dot(&medoids[cluster * dim..][..dim], key(*entry)),
                };
                norms[cluster] - 2.0 * product
            };
            let room = (0..norms.len()).filter(|cluster| clusters[*cluster].len() < max_size);
            let nearest = room.map(|cluster| (distance(cluster), cluster)).min_by(|a, b| a.0.total_cmp(&b.0));
            match nearest {
                Some((_, cluster)) => clusters[cluster].push(*entry),
                None => {
                    clusters.push(vec![*entry]);
                    medoids.extend_from_slice(key(*entry));
                    norms.push(dot(key(*entry), key(*entry)));
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
