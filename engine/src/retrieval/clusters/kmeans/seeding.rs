//! The first centroids: k-means++ (Arthur and Vassilvitskii, 2007, "The advantages of careful seeding").
//!
//! 1. The first centroid is a random point.
//! 2. Each other one is a random point, with a probability in proportion to its squared distance to the nearest
//!    centroid so far.
//! 3. If every point equals a centroid, there are no more centroids to choose.
//!
//! [`random_points`] chooses points without a comparison.

use super::points::PointRows;
use crate::kernels::lower_distances;
use crate::retrieval::clusters::random::SeededRandom;

/// Returns at most `count` centroids, and at least one.
pub(super) fn plus_plus(points: PointRows<'_>, count: usize, random: &mut SeededRandom) -> Vec<f32> {
    let mut centroids = Vec::with_capacity(count * points.dim);
    let mut distances = vec![f32::INFINITY; points.len()];
    let mut next = random.below(points.len());
    loop {
        let centroid = points.row(next);
        centroids.extend_from_slice(centroid);
        if centroids.len() == count * points.dim {
            return centroids;
        }
        lower_distances(points.rows, centroid, &mut distances);
        let Some(picked) = pick_by_distance(&distances, random) else { return centroids };
        next = picked;
    }
}

/// Picks a point with a probability in proportion to its squared distance. `None` if all distances are zero.
pub(super) fn pick_by_distance(distances: &[f32], random: &mut SeededRandom) -> Option<usize> {
    let total: f64 = distances.iter().map(|distance| f64::from(*distance)).sum();
    if total <= 0.0 {
        return None;
    }
    let (aim, mut reached) = (random.unit() * total, 0.0);
    let passed = |distance: &f32| {
        reached += f64::from(*distance);
        reached > aim
    };
    Some(distances.iter().position(passed).unwrap_or(distances.len() - 1))
}

/// Returns `count` points as centroids, each point once at most. There are at least as many points.
pub(super) fn random_points(points: PointRows<'_>, count: usize, random: &mut SeededRandom) -> Vec<f32> {
    let mut chosen: Vec<u32> = (0..points.len() as u32).collect();
    for at in 0..count {
        chosen.swap(at, at + random.below(points.len() - at));
    }
    chosen.truncate(count);
    chosen.sort_unstable();
    points.gather(&chosen)
}
