//! Passes of Lloyd's algorithm that compare a point only with the centroids near its own.
//!
//! 1. Each centroid has a list of its nearest centroids, itself included.
//! 2. Each point joins the nearest centroid of its own centroid's list. The points of a cluster are compared side by
//!    side, so that centroids are read where they are.
//! 3. Centroids become means. The lists are made again every third pass.
//!
//! A full pass compares each point with all k centroids. A pass here compares it with [`NEAR`] of them, and the lists
//! cost as much as a full pass of k points.
//!
//! Invariant: a point joins a centroid only if it is at least as near as its own.

use super::points::{PointRows, update};
use crate::kernels::{
    POINTS, PointLanes, indexed_point_products, multiply_add, nearest_rows, point_block, squared_norms, transpose,
};
use crate::retrieval::clusters::lists::ClusterLists;
use crate::retrieval::top_k::highest;

/// Centroids of a list.
const NEAR: usize = 64;
/// Passes for which a list is used.
const PASSES_PER_LIST: usize = 3;
/// Centroids whose lists are made at once.
const BATCH: usize = 64;

/// Improves centroids `[clusters, dim]` and the cluster of each point by `passes` passes.
pub(super) fn refine(points: PointRows<'_>, assignment: &mut [u32], centroids: &mut [f32], passes: usize) {
    let clusters = centroids.len() / points.dim;
    let (mut near, count) = (Vec::new(), NEAR.min(clusters));
    let mut scratch = NearScratch::new(points.dim, count);
    let mut norms = vec![0.0; clusters];
    for pass in 0..passes {
        squared_norms(centroids, points.dim, &mut norms);
        if pass % PASSES_PER_LIST == 0 {
            near = near_centroids(PointRows::new(centroids, points.dim), &norms, count);
        }
        let lists = ClusterLists::of_partition(assignment, clusters);
        for (members, near) in lists.iter().zip(near.chunks_exact(count)) {
            scratch.assign(points, members, (centroids, &norms, near), assignment);
        }
        update(points, assignment, centroids);
    }
}

/// The points of a cluster side by side, and their products with the centroids of a list.
struct NearScratch {
    rows: Vec<f32>,
    block: Vec<PointLanes>,
    products: Vec<PointLanes>,
    norms: Vec<f32>,
}

impl NearScratch {
    fn new(dim: usize, count: usize) -> Self {
        let rows = Vec::with_capacity(POINTS * dim);
        Self { rows, block: vec![[0.0; POINTS]; dim], products: vec![[0.0; POINTS]; count], norms: Vec::new() }
    }

    /// Assigns each member to the nearest of the `near` centroids, ties by the lower one.
    fn assign(
        &mut self,
        points: PointRows<'_>,
        members: &[u32],
        (centroids, norms, near): (&[f32], &[f32], &[u32]),
        assignment: &mut [u32],
    ) {
        self.norms.clear();
        self.norms.extend(near.iter().map(|centroid| norms[*centroid as usize]));
        for members in members.chunks(POINTS) {
            points.gather_into(members, &mut self.rows);
            point_block(&self.rows, &mut self.block);
            indexed_point_products(&self.block, centroids, near, &mut self.products);
            let (_, nearest) = nearest_rows(&self.products, &self.norms);
            members.iter().zip(nearest).for_each(|(at, of)| assignment[*at as usize] = near[of as usize]);
        }
    }
}

/// Returns the `count` nearest centroids of each centroid, itself included, in rising order.
fn near_centroids(centroids: PointRows<'_>, norms: &[f32], count: usize) -> Vec<u32> {
    let (clusters, dim) = (centroids.len(), centroids.dim);
    let mut transposed = vec![0.0; centroids.rows.len()];
    transpose(centroids.rows, dim, &mut transposed);
    let (mut near, mut products) = (Vec::with_capacity(clusters * count), Vec::new());
    for (batch, first) in centroids.rows.chunks(BATCH * dim).zip((0..).step_by(BATCH)) {
        products.clear();
        products.resize(batch.len() / dim * clusters, 0.0);
        multiply_add(&mut products, batch, &transposed, dim, clusters);
        for (own, products) in (first..).zip(products.chunks_exact_mut(clusters)) {
            // A score is the negative distance, without the norm of the centroid itself.
            products.iter_mut().zip(norms).for_each(|(product, norm)| *product = 2.0 * *product - norm);
            // A centroid is its own nearest, also if rounding or an equal centroid says otherwise.
            products[own] = f32::INFINITY;
            let start = near.len();
            near.extend(highest(products, count, |_| true).into_iter().map(|(_, at)| at as u32));
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
        let centroids = PointRows::new(&[0.0, 10.0, 11.0, 12.5, 30.0, 30.0], 1);
        let mut norms = vec![0.0; 6];
        squared_norms(centroids.rows, 1, &mut norms);
        assert_eq!(near_centroids(centroids, &norms, 2), [0, 1, 1, 2, 1, 2, 2, 3, 4, 5, 4, 5]);
    }
}
