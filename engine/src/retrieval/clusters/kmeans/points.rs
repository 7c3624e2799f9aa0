//! Points and centroids: assignment to the nearest, means, and clusters that are empty.
//!
//! Invariants:
//! - The nearest centroid of a point does not depend on the points beside it.
//! - [`set_means`] divides by the size of a cluster only if it has a member, so no centroid is NaN.

use crate::kernels::{add_row, lower_distances, multiply_add, nearest_columns, scale_row, squared_norms, transpose};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Points that are compared with all centroids at once.
const BATCH: usize = 64;

/// Points or centroids `[len, dim]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct PointRows<'a> {
    pub(super) rows: &'a [f32],
    pub(super) dim: usize,
}

impl<'a> PointRows<'a> {
    pub(super) fn new(rows: &'a [f32], dim: usize) -> Self {
        Self { rows, dim }
    }

    /// Returns the number of points.
    pub(super) fn len(self) -> usize {
        self.rows.len() / self.dim
    }

    /// Returns a point.
    pub(super) fn row(self, at: usize) -> &'a [f32] {
        &self.rows[at * self.dim..][..self.dim]
    }

    /// Returns consecutive points.
    pub(super) fn slice(self, range: std::ops::Range<usize>) -> Self {
        Self { rows: &self.rows[range.start * self.dim..range.end * self.dim], dim: self.dim }
    }

    /// Returns the points of these indices.
    pub(super) fn gather(self, indices: &[u32]) -> Vec<f32> {
        let mut rows = Vec::new();
        self.gather_into(indices, &mut rows);
        rows
    }

    /// Replaces `rows` by the points of these indices.
    pub(super) fn gather_into(self, indices: &[u32], rows: &mut Vec<f32>) {
        rows.clear();
        rows.reserve(indices.len() * self.dim);
        indices.iter().for_each(|at| rows.extend_from_slice(self.row(*at as usize)));
    }
}

/// Centroids in the form that points are compared with, and scratch.
#[derive(Clone, Debug, Default)]
pub(super) struct NearestCentroids {
    /// `[dim, centroids]`.
    transposed: Vec<f32>,
    norms: Vec<f32>,
    products: Vec<f32>,
}

impl NearestCentroids {
    /// Takes the centroids of the next assignments.
    pub(super) fn set(&mut self, centroids: PointRows<'_>) {
        let count = centroids.len();
        self.norms.resize(count, 0.0);
        squared_norms(centroids.rows, centroids.dim, &mut self.norms);
        self.transposed.resize(centroids.rows.len(), 0.0);
        transpose(centroids.rows, centroids.dim, &mut self.transposed);
    }

    /// Writes the nearest centroid of each point, ties by the lower centroid.
    ///
    /// With `others`, centroid `i` is not compared with point `i`, and there are at least two centroids.
    pub(super) fn assign(&mut self, points: PointRows<'_>, others: bool, nearest: &mut [u32]) {
        let count = self.norms.len();
        for (batch, first) in points.rows.chunks(BATCH * points.dim).zip((0..).step_by(BATCH)) {
            let nearest = &mut nearest[first..][..batch.len() / points.dim];
            self.products.clear();
            self.products.resize(nearest.len() * count, 0.0);
            multiply_add(&mut self.products, batch, &self.transposed, points.dim, count);
            if others {
                // The squared distance of such a product is infinite.
                (0..nearest.len()).for_each(|at| self.products[at * count + first + at] = f32::NEG_INFINITY);
            }
            nearest_columns(&self.products, &self.norms, nearest);
        }
    }
}

/// Sets each centroid with a member to the mean of its members. Returns the sizes.
pub(super) fn set_means(points: PointRows<'_>, assignment: &[u32], centroids: &mut [f32]) -> Vec<u32> {
    let dim = points.dim;
    let mut sizes = vec![0_u32; centroids.len() / dim];
    assignment.iter().for_each(|cluster| sizes[*cluster as usize] += 1);
    for (centroid, size) in centroids.chunks_exact_mut(dim).zip(&sizes) {
        if *size > 0 {
            centroid.fill(0.0);
        }
    }
    for (at, cluster) in assignment.iter().enumerate() {
        add_row(&mut centroids[*cluster as usize * dim..][..dim], points.row(at), 1.0);
    }
    for (centroid, size) in centroids.chunks_exact_mut(dim).zip(&sizes) {
        if *size > 0 {
            scale_row(centroid, 1.0 / *size as f32);
        }
    }
    sizes
}

/// Sets the centroids to the means of their members. Each empty cluster takes the farthest member of the largest one.
///
/// Ties are broken by the lower cluster, and by the newer member. There are at least as many points as clusters.
pub(super) fn update(points: PointRows<'_>, assignment: &mut [u32], centroids: &mut [f32]) {
    let sizes = set_means(points, assignment, centroids);
    if sizes.iter().all(|size| *size > 0) {
        return;
    }
    // The members of each donor, the farthest last. A cluster becomes a donor at most once.
    let mut members: Vec<Vec<(f32, u32)>> = vec![Vec::new(); sizes.len()];
    let mut largest: BinaryHeap<(u32, Reverse<usize>)> = (sizes.iter().copied().zip((0..).map(Reverse))).collect();
    for (empty, _) in sizes.iter().enumerate().filter(|(_, size)| **size == 0) {
        let Some((size, Reverse(donor))) = largest.pop() else { return };
        if members[donor].is_empty() {
            let centroid = &centroids[donor * points.dim..][..points.dim];
            members[donor] = members_by_distance(points, assignment, donor as u32, centroid);
        }
        if let Some((_, farthest)) = members[donor].pop() {
            assignment[farthest as usize] = empty as u32;
        }
        largest.push((size - 1, Reverse(donor)));
    }
    set_means(points, assignment, centroids);
}

/// Returns the members of a cluster by rising distance to its centroid.
fn members_by_distance(points: PointRows<'_>, assignment: &[u32], cluster: u32, centroid: &[f32]) -> Vec<(f32, u32)> {
    let of_cluster = (0..).zip(assignment).filter(|(_, of)| **of == cluster);
    let mut members: Vec<(f32, u32)> = of_cluster
        .map(|(at, _): (u32, _)| {
            let mut distance = [f32::INFINITY];
            lower_distances(points.row(at as usize), centroid, &mut distance);
            (distance[0], at)
        })
        .collect();
    members.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_clusters_take_the_farthest_members_of_the_largest() {
        let points = PointRows::new(&[0.0, 1.0, 2.0, 9.0, 20.0, 21.0], 1);
        let (mut assignment, mut centroids) = (vec![1, 1, 1, 1, 3, 3], vec![5.0; 4]);
        update(points, &mut assignment, &mut centroids);
        assert_eq!(assignment, [2, 1, 1, 0, 3, 3]);
        assert_eq!(centroids, [9.0, 1.5, 0.0, 20.5]);
    }
}
