//! Passes of Lloyd's algorithm, and k-means made of them.
//!
//! [`relocated`] finds clusters:
//! 1. The first centroids are random points. At most 64 centroids are seeded by k-means++. See `seeding`.
//! 2. Each point joins the nearest of all centroids, and centroids become means.
//! 3. Centroids are relocated. See `relocation`. Each relocation is followed by a pass as in step 2.
//!
//! A pass compares points and centroids as signed bytes. Processors without sums of products of bytes take five times
//! as long for it, and cluster on two levels instead. See `two_level`.
//!
//! Invariant: there are at least as many points as clusters, and each cluster has a member.

use super::points::{NearestCentroids, PointRows, set_means, update};
use super::relocation::relocate;
use super::seeding::{plus_plus, random_points};
use crate::kernels::{
    ByteBlocks, BytePoints, NearestBytes, POINTS, nearest_bytes, nearest_rows, point_block, point_products,
    squared_norms,
};
use crate::retrieval::clusters::random::SeededRandom;

/// The most clusters that are seeded by k-means++, which compares every point with every centroid.
const SEEDED: usize = 64;
/// Relocations, each with a pass.
const ROUNDS: usize = 3;

/// Clusters of points.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    /// `[clusters, dim]`.
    pub(super) centroids: Vec<f32>,
    pub(super) assignment: Vec<u32>,
}

/// Finds `count` clusters by passes over all points and relocations of centroids.
pub(super) fn relocated(
    nearest: NearestBytes,
    points: PointRows<'_>,
    count: usize,
    random: &mut SeededRandom,
) -> Partition {
    let dim = points.dim;
    let mut centroids =
        if count <= SEEDED { plus_plus(points, count, random) } else { random_points(points, count, random) };
    // Bytes are of what is left without the mean.
    let origin = mean(points);
    let bytes = BytePoints::new(points.rows, &origin);
    let mut assignment = vec![0; points.len()];
    nearest(&bytes, &ByteBlocks::new(&centroids, &origin), false, &mut assignment);
    // Centroids that seeding did not find belong to empty clusters.
    centroids.resize(count * dim, 0.0);
    update(points, &mut assignment, &mut centroids);
    let rounds = if count > 1 { ROUNDS } else { 0 };
    for _ in 0..rounds {
        let mut others = vec![0; count];
        let blocks = ByteBlocks::new(&centroids, &origin);
        nearest(&BytePoints::new(&centroids, &origin), &blocks, true, &mut others);
        relocate(points, &mut assignment, &others, &mut centroids, random);
        nearest(&bytes, &ByteBlocks::new(&centroids, &origin), false, &mut assignment);
        update(points, &mut assignment, &mut centroids);
    }
    Partition { centroids, assignment }
}

/// Returns the bytes that k-means takes beside the points and what it keeps per entry, with its result.
pub(super) fn bytes_for(entries: usize, dim: usize, clusters: usize) -> usize {
    let rows = |count: usize| count.saturating_mul(dim).saturating_mul(size_of::<f32>());
    // Points and centroids as bytes, or the rows of all cells and centroids that points are compared with.
    let bytes = BytePoints::bytes_for(entries, dim)
        .saturating_add(BytePoints::bytes_for(clusters, dim))
        .saturating_add(ByteBlocks::bytes_for(clusters, dim));
    let products = clusters.saturating_mul(64 * size_of::<f32>());
    let cells = rows(entries).saturating_add(rows(clusters)).saturating_add(products);
    // The halves of a relocation.
    let halves = rows(clusters / 2 + 2);
    let result = rows(clusters);
    if nearest_bytes().is_some() { bytes } else { cells }.saturating_add(halves).saturating_add(result)
}

/// Returns the mean of the points.
fn mean(points: PointRows<'_>) -> Vec<f32> {
    let mut sums = vec![0.0_f64; points.dim];
    for point in points.rows.chunks_exact(points.dim) {
        sums.iter_mut().zip(point).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.into_iter().map(|sum| (sum / points.len().max(1) as f64) as f32).collect()
}

/// Finds `count` clusters by k-means++ and `passes` passes of Lloyd's algorithm.
pub(super) fn one_level(points: PointRows<'_>, count: usize, passes: usize, random: &mut SeededRandom) -> Partition {
    let mut centroids = plus_plus(points, count, random);
    let (mut nearest, mut assignment) = (NearestCentroids::default(), vec![0; points.len()]);
    for pass in 0..passes.max(1) {
        nearest.set(PointRows::new(&centroids, points.dim));
        nearest.assign(points, false, &mut assignment);
        if pass == 0 {
            // Centroids that seeding did not find belong to empty clusters.
            centroids.resize(count * points.dim, 0.0);
        }
        update(points, &mut assignment, &mut centroids);
    }
    Partition { centroids, assignment }
}

/// Returns the assignment that [`one_level`] finds for two clusters.
///
/// The points are laid out once for all passes, and the passes end when none changes anything.
pub(super) fn two_clusters(points: PointRows<'_>, passes: usize, random: &mut SeededRandom) -> Vec<u32> {
    let dim = points.dim;
    let mut centroids = plus_plus(points, 2, random);
    let mut blocks = vec![[0.0; POINTS]; points.len().div_ceil(POINTS) * dim];
    for (rows, block) in points.rows.chunks(POINTS * dim).zip(blocks.chunks_exact_mut(dim)) {
        point_block(rows, block);
    }
    let (mut assignment, mut last) = (vec![0; points.len()], Vec::new());
    let (mut norms, mut products) = ([0.0; 2], [[0.0; POINTS]; 2]);
    for _ in 0..passes.max(1) {
        let count = centroids.len() / dim;
        squared_norms(&centroids, dim, &mut norms[..count]);
        for (block, assignment) in blocks.chunks_exact(dim).zip(assignment.chunks_mut(POINTS)) {
            point_products(block, &centroids, &mut products[..count]);
            let (_, nearest) = nearest_rows(&products[..count], &norms);
            assignment.copy_from_slice(&nearest[..assignment.len()]);
        }
        // A centroid that seeding did not find belongs to an empty cluster.
        centroids.resize(2 * dim, 0.0);
        update(points, &mut assignment, &mut centroids);
        if assignment == last {
            break;
        }
        last.clone_from(&assignment);
    }
    assignment
}

/// Sets the centroids `[clusters, dim]` of an assignment.
pub(super) fn means(points: PointRows<'_>, assignment: &[u32], clusters: usize) -> Vec<f32> {
    let mut centroids = vec![0.0; clusters * points.dim];
    set_means(points, assignment, &mut centroids);
    centroids
}
