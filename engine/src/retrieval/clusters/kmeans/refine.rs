//! Passes of Lloyd's algorithm that compare a point only with the centroids near its own.
//!
//! 1. Each centroid has a list of its nearest centroids, itself included.
//! 2. Each point joins the nearest centroid of its own centroid's list.
//! 3. Centroids become means. The lists are made again every third pass.
//!
//! A full pass compares each point with all k centroids. A pass here compares it with [`NEAR`] of them, and the lists
//! cost as much as a full pass of k points.
//!
//! Invariant: a point joins a centroid only if it is at least as near as its own.

use super::points::{NearestCentroids, PointRows, update};
use crate::kernels::{multiply_add, squared_norms, transpose};
use crate::retrieval::clusters::lists::ClusterLists;

/// Centroids of a list.
const NEAR: usize = 64;
/// Passes for which a list is used.
const PASSES_PER_LIST: usize = 3;
/// Centroids whose lists are made at once.
const BATCH: usize = 64;

/// Improves centroids `[clusters, dim]` and the cluster of each point by `passes` passes.
pub(super) fn refine(points: PointRows<'_>, assignment: &mut [u32], centroids: &mut [f32], passes: usize) {
    let clusters = centroids.len() / points.dim;
    let (mut near, mut nearest) = (Vec::new(), NearestCentroids::default());
    let (mut joined, mut rows, count) = (Vec::new(), Vec::new(), NEAR.min(clusters));
    for pass in 0..passes {
        if pass % PASSES_PER_LIST == 0 {
            near = near_centroids(PointRows::new(centroids, points.dim), count);
        }
        let lists = ClusterLists::of_partition(assignment, clusters);
        for (members, near) in lists.iter().zip(near.chunks_exact(count)) {
            PointRows::new(centroids, points.dim).gather_into(near, &mut rows);
            nearest.set(PointRows::new(&rows, points.dim));
            joined.resize(members.len(), 0);
            points.gather_into(members, &mut rows);
            nearest.assign(PointRows::new(&rows, points.dim), &mut joined);
            members.iter().zip(&joined).for_each(|(at, of)| assignment[*at as usize] = near[*of as usize]);
        }
        update(points, assignment, centroids);
    }
}

/// Returns the `count` nearest centroids of each centroid, itself included, in rising order.
fn near_centroids(centroids: PointRows<'_>, count: usize) -> Vec<u32> {
    let (clusters, dim) = (centroids.len(), centroids.dim);
    let mut norms = vec![0.0; clusters];
    squared_norms(centroids.rows, dim, &mut norms);
    let mut transposed = vec![0.0; centroids.rows.len()];
    transpose(centroids.rows, dim, &mut transposed);
    let (mut near, mut products, mut order) = (Vec::with_capacity(clusters * count), Vec::new(), Vec::new());
    for (batch, first) in centroids.rows.chunks(BATCH * dim).zip((0..).step_by(BATCH)) {
        products.clear();
        products.resize(batch.len() / dim * clusters, 0.0);
        multiply_add(&mut products, batch, &transposed, dim, clusters);
        for (own, products) in (first..).zip(products.chunks_exact(clusters)) {
            // A centroid is its own nearest, also if rounding or an equal centroid says otherwise.
            let distance = |at: usize| if at == own { f32::NEG_INFINITY } else { norms[at] - 2.0 * products[at] };
            order.clear();
            order.extend((0..clusters).map(|at| (distance(at), at as u32)));
            if count < clusters {
                order.select_nth_unstable_by(count, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            }
            let start = near.len();
            near.extend(order[..count].iter().map(|(_, at)| *at));
            near[start..].sort_unstable();
        }
    }
    near
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_join_the_nearest_centroid_in_reach() {
        let rows: Vec<f32> = (0..100).map(|at| at as f32).collect();
        let points = PointRows::new(&rows, 1);
        // Two clusters with the wrong border.
        let mut assignment: Vec<u32> = (0..100).map(|at| u32::from(at >= 90)).collect();
        let mut centroids = vec![44.5, 94.5];
        refine(points, &mut assignment, &mut centroids, 20);
        // The point in the middle belongs to the lower centroid.
        assert_eq!(centroids, [25.0, 75.0]);
        assert!(assignment.iter().enumerate().all(|(at, of)| *of == u32::from(at > 50)));
    }

    #[test]
    fn lists_hold_the_nearest_centroids() {
        let near = near_centroids(PointRows::new(&[0.0, 10.0, 11.0, 12.5, 30.0, 30.0], 1), 2);
        assert_eq!(near, [0, 1, 1, 2, 1, 2, 2, 3, 4, 5, 4, 5]);
    }
}
