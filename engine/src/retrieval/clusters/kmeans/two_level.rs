//! k-means on two levels, refined among near centroids, for processors without sums of products of bytes.
//!
//! A full pass of Lloyd's algorithm compares each of n points with each of k centroids. Two levels of about sqrt(k)
//! clusters compare it with 2 sqrt(k).
//! 1. About sqrt(k) coarse centroids are seeded and improved on a sample of the points.
//! 2. Each point joins the cell of its nearest coarse centroid.
//! 3. Each cell has centroids of its own: as many of the k as its share of the squared distances. A cell with many
//!    centroids is cut into cells itself.
//! 4. Passes among near centroids move points across the borders of cells. See `refine`.
//! 5. Centroids are relocated once, and passes follow. See `relocation`.
//!
//! Invariant: there are at least as many points as clusters, and each cluster has a member.

use super::passes::{Partition, one_level};
use super::points::{NearestCentroids, PointRows};
use super::refine::refine;
use super::relocation::relocate;
use crate::kernels::lower_distances;
use crate::retrieval::clusters::lists::ClusterLists;
use crate::retrieval::clusters::random::SeededRandom;

/// The most clusters that are found on one level.
const ONE_LEVEL: usize = 64;
/// Cells of cells of cells are not cut again: the points are nearly equal.
const LEVELS: usize = 3;
/// Points of the sample per coarse centroid.
const SAMPLE: usize = 64;
/// Passes over the sample, over a cell, and among near centroids.
const COARSE_PASSES: usize = 6;
const CELL_PASSES: usize = 2;
const REFINING_PASSES: usize = 6;
/// Passes behind a relocation.
const LAST_PASSES: usize = 3;

/// Finds `count` clusters on two levels.
pub(super) fn two_level(points: PointRows<'_>, count: usize, random: &mut SeededRandom) -> Partition {
    let mut found = cluster_cell(points, count, random, LEVELS);
    if count > ONE_LEVEL {
        refine(points, &mut found.assignment, &mut found.centroids, REFINING_PASSES);
        let nearest = nearest_others(PointRows::new(&found.centroids, points.dim));
        relocate(points, &mut found.assignment, &nearest, &mut found.centroids, random);
        refine(points, &mut found.assignment, &mut found.centroids, LAST_PASSES);
    }
    found
}

/// Returns the nearest other centroid of each of at least two centroids.
fn nearest_others(centroids: PointRows<'_>) -> Vec<u32> {
    let (mut nearest, mut others) = (NearestCentroids::default(), vec![0; centroids.len()]);
    nearest.set(centroids);
    nearest.assign(centroids, true, &mut others);
    others
}

/// Finds `count` clusters on at most `levels` levels.
fn cluster_cell(points: PointRows<'_>, count: usize, random: &mut SeededRandom, levels: usize) -> Partition {
    if count <= ONE_LEVEL || levels <= 1 {
        return one_level(points, count, CELL_PASSES, random);
    }
    let cells = Cells::new(points, (count as f64).sqrt().round() as usize, random);
    let shares = cells.shares(count);
    let mut centroids = Vec::with_capacity(count * points.dim);
    let mut assignment = Vec::with_capacity(points.len());
    for (cell, share) in shares.iter().enumerate().filter(|(_, share)| **share > 0) {
        let found = cluster_cell(cells.points(cell), *share, random, levels - 1);
        let first = (centroids.len() / points.dim) as u32;
        assignment.extend(found.assignment.iter().map(|cluster| first + cluster));
        centroids.extend(found.centroids);
    }
    let mut by_point = vec![0; points.len()];
    let order = cells.members.iter().flatten();
    order.zip(assignment).for_each(|(point, cluster)| by_point[*point as usize] = cluster);
    Partition { centroids, assignment: by_point }
}

/// Points by their nearest coarse centroid.
struct Cells {
    dim: usize,
    coarse: Vec<f32>,
    members: ClusterLists,
    /// The points in the order of the cells.
    rows: Vec<f32>,
    /// The first point of each cell, and the number of points.
    starts: Vec<usize>,
}

impl Cells {
    fn new(points: PointRows<'_>, count: usize, random: &mut SeededRandom) -> Self {
        let mut sample: Vec<u32> = (0..points.len() as u32).collect();
        let size = (count * SAMPLE).min(points.len());
        for at in 0..size {
            sample.swap(at, at + random.below(points.len() - at));
        }
        sample.truncate(size);
        sample.sort_unstable();
        let sample = points.gather(&sample);
        let coarse = one_level(PointRows::new(&sample, points.dim), count, COARSE_PASSES, random).centroids;
        let (mut nearest, mut assignment) = (NearestCentroids::default(), vec![0; points.len()]);
        nearest.set(PointRows::new(&coarse, points.dim));
        nearest.assign(points, false, &mut assignment);
        let members = ClusterLists::of_partition(&assignment, count);
        let mut starts = vec![0];
        starts.extend(members.iter().scan(0, |start, members| {
            *start += members.len();
            Some(*start)
        }));
        let mut rows = Vec::with_capacity(points.rows.len());
        members.iter().flatten().for_each(|at| rows.extend_from_slice(points.row(*at as usize)));
        Self { dim: points.dim, coarse, members, rows, starts }
    }

    /// Returns the points of a cell.
    fn points(&self, cell: usize) -> PointRows<'_> {
        PointRows::new(&self.rows, self.dim).slice(self.starts[cell]..self.starts[cell + 1])
    }

    /// Returns the sum of squared distances of the points of each cell to the coarse centroid.
    fn spreads(&self) -> Vec<f64> {
        let spread = |cell: usize| {
            let centroid = &self.coarse[cell * self.dim..][..self.dim];
            let mut distances = vec![f32::INFINITY; self.starts[cell + 1] - self.starts[cell]];
            lower_distances(self.points(cell).rows, centroid, &mut distances);
            distances.iter().map(|x| f64::from(*x)).sum()
        };
        (0..self.members.len()).map(spread).collect()
    }

    /// Divides `count` clusters among the cells in proportion to their spreads, as k-means++ would. A cell with points
    /// has at least one cluster, and no cell has more clusters than points.
    fn shares(&self, count: usize) -> Vec<usize> {
        let sizes: Vec<usize> = self.members.iter().map(<[u32]>::len).collect();
        let spreads = self.spreads();
        let total = spreads.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let share = |cell: usize| (spreads[cell] * count as f64 / total).floor() as usize;
        let limited = |cell: usize| share(cell).clamp(sizes[cell].min(1), sizes[cell]);
        let mut shares: Vec<usize> = (0..sizes.len()).map(limited).collect();
        // One cluster at a time: to the cell with the largest spread per cluster, or from the one with the least.
        while shares.iter().sum::<usize>() != count {
            let is_short = shares.iter().sum::<usize>() < count;
            let per_cluster = |cell: &usize| spreads[*cell] / shares[*cell].max(1) as f64;
            let cells = 0..sizes.len();
            let change = if is_short {
                let open = cells.filter(|cell| shares[*cell] < sizes[*cell]);
                open.max_by(|a, b| per_cluster(a).total_cmp(&per_cluster(b)).then(b.cmp(a)))
            } else {
                let open = cells.filter(|cell| shares[*cell] > 1);
                open.min_by(|a, b| per_cluster(a).total_cmp(&per_cluster(b)).then(a.cmp(b)))
            };
            let Some(cell) = change else { break };
            shares[cell] = if is_short { shares[cell] + 1 } else { shares[cell] - 1 };
        }
        shares
    }
}
