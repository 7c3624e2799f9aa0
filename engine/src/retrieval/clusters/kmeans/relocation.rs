//! Relocation of centroids: from where two clusters are as good as one, to where one cluster should be two.
//!
//! Lloyd's algorithm moves a centroid only among its own points. Centroids that were seeded badly stay where they are.
//! 1. Merging two clusters of sizes a and b adds `a b / (a + b)` times the squared distance of their centroids to the
//!    sum of squared distances (Ward, 1963). The cost of a centroid is that of a merge with its nearest centroid.
//! 2. The clusters with the largest sums are halved by 2-means. The gain of a halving is the cost of the merge of both
//!    halves.
//! 3. The cheapest merges are paired with the largest gains. While the gain is larger, the centroid of the merge moves
//!    into the halved cluster.
//!
//! Invariants:
//! - A cluster takes part in one merge or one halving at most.
//! - All ties are broken by the lower cluster.

use super::points::PointRows;
use super::seeding::pick_by_distance;
use crate::kernels::{add_row, lower_distances, scale_row};
use crate::retrieval::clusters::lists::ClusterLists;
use crate::retrieval::clusters::random::SeededRandom;

/// The part of the clusters that is halved: one in this number, those with the largest sums.
const HALVED: usize = 4;
/// Passes of the 2-means of a halving. The passes over all points come later.
const HALVING_PASSES: usize = 2;

/// A cluster that should be two.
struct Halving {
    cluster: usize,
    gain: f64,
    /// The half of each member, 0 or 1.
    of_members: Vec<u32>,
    /// The centroids of both halves.
    halves: [Vec<f32>; 2],
}

/// Moves centroids `[clusters, dim]`, which are the means of this assignment, and their members. `nearest` has the
/// nearest other centroid of each.
pub(super) fn relocate(
    points: PointRows<'_>,
    assignment: &mut [u32],
    nearest: &[u32],
    centroids: &mut [f32],
    random: &mut SeededRandom,
) {
    let clusters = nearest.len();
    let lists = ClusterLists::of_partition(assignment, clusters);
    let members: Vec<&[u32]> = lists.iter().collect();
    let sizes: Vec<usize> = members.iter().map(|members| members.len()).collect();
    let own = PointRows::new(centroids, points.dim);
    let cost = |at: usize| {
        let other = nearest[at] as usize;
        merge_cost((sizes[at], own.row(at)), (sizes[other], own.row(other)))
    };
    let mut merges: Vec<(f64, usize)> = (0..clusters).map(|at| (cost(at), at)).collect();
    merges.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let halvings = halvings(points, &members, own, random);
    let mut is_used = vec![false; clusters];
    let mut halvings = halvings.into_iter().peekable();
    for (cost, from) in merges {
        let other = nearest[from] as usize;
        if is_used[from] || is_used[other] {
            continue;
        }
        // A cluster that was merged since is not halved.
        let is_open = |halving: &Halving| !is_used[halving.cluster] && ![from, other].contains(&halving.cluster);
        while halvings.next_if(|halving| !is_open(halving)).is_some() {}
        let Some(Halving { cluster, of_members, halves: [first, second], .. }) =
            halvings.next_if(|halving| halving.gain > cost)
        else {
            return;
        };
        [from, other, cluster].into_iter().for_each(|at| is_used[at] = true);
        merge(centroids, points.dim, (from, sizes[from]), (other, sizes[other]));
        members[from].iter().for_each(|at| assignment[*at as usize] = other as u32);
        let moved = members[cluster].iter().zip(&of_members).filter(|(_, half)| **half == 1);
        moved.for_each(|(at, _)| assignment[*at as usize] = from as u32);
        centroids[cluster * points.dim..][..points.dim].copy_from_slice(&first);
        centroids[from * points.dim..][..points.dim].copy_from_slice(&second);
    }
}

/// Returns what a merge of two clusters, each with its size and centroid, adds to the sum of squared distances.
fn merge_cost((a, first): (usize, &[f32]), (b, second): (usize, &[f32])) -> f64 {
    let mut distance = [f32::INFINITY];
    lower_distances(first, second, &mut distance);
    a as f64 * b as f64 / (a + b).max(1) as f64 * f64::from(distance[0])
}

/// Sets the centroid of `into` to the mean of both clusters.
fn merge(centroids: &mut [f32], dim: usize, (from, a): (usize, usize), (into, b): (usize, usize)) {
    let share = a as f32 / (a + b).max(1) as f32;
    for d in 0..dim {
        let other = centroids[from * dim + d];
        let own = &mut centroids[into * dim + d];
        *own += share * (other - *own);
    }
}

/// Returns the halvings of the clusters with the largest sums of squared distances, by falling gain.
fn halvings(
    points: PointRows<'_>,
    members: &[&[u32]],
    centroids: PointRows<'_>,
    random: &mut SeededRandom,
) -> Vec<Halving> {
    let mut sums: Vec<(f64, usize)> = (0..members.len())
        .filter(|cluster| members[*cluster].len() > 1)
        .map(|cluster| (distances(points, members[cluster], centroids.row(cluster)).map(f64::from).sum(), cluster))
        .filter(|(sum, _)| *sum > 0.0)
        .collect();
    sums.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    sums.truncate(members.len().div_ceil(HALVED));
    let halve = |(_, cluster): (f64, usize)| halve(points, cluster, members[cluster], random);
    let mut halvings: Vec<Halving> = sums.into_iter().filter_map(halve).collect();
    halvings.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(a.cluster.cmp(&b.cluster)));
    halvings
}

/// Returns the squared distances of these points to a centroid.
fn distances<'a>(points: PointRows<'a>, members: &'a [u32], centroid: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    members.iter().map(move |at| {
        let mut distance = [f32::INFINITY];
        lower_distances(points.row(*at as usize), centroid, &mut distance);
        distance[0]
    })
}

/// Halves a cluster by k-means++ and passes. Returns none if a half would have no member.
fn halve(points: PointRows<'_>, cluster: usize, members: &[u32], random: &mut SeededRandom) -> Option<Halving> {
    let first = points.row(members[random.below(members.len())] as usize).to_vec();
    let to_first: Vec<f32> = distances(points, members, &first).collect();
    let second = points.row(members[pick_by_distance(&to_first, random)?] as usize).to_vec();
    let mut halves = [first, second];
    let mut of_members = Vec::new();
    let mut sizes = [0; 2];
    for _ in 0..HALVING_PASSES {
        let [first, second] = &halves;
        let both = distances(points, members, first).zip(distances(points, members, second));
        of_members = both.map(|(first, second)| u32::from(second < first)).collect();
        let ones = of_members.iter().filter(|half| **half == 1).count();
        sizes = [members.len() - ones, ones];
        if sizes.contains(&0) {
            return None;
        }
        halves.iter_mut().for_each(|half| half.fill(0.0));
        for (at, half) in members.iter().zip(&of_members) {
            add_row(&mut halves[*half as usize], points.row(*at as usize), 1.0);
        }
        halves.iter_mut().zip(sizes).for_each(|(half, size)| scale_row(half, 1.0 / size as f32));
    }
    let gain = merge_cost((sizes[0], &halves[0]), (sizes[1], &halves[1]));
    Some(Halving { cluster, gain, of_members, halves })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_centroid_moves_to_where_two_are_needed() {
        // Two centroids share the points around 0, and one has those around 50 and 60.
        let rows = [0.0, 1.0, 2.0, 3.0, 50.0, 51.0, 60.0, 61.0, 200.0];
        let mut assignment = [0, 0, 1, 1, 2, 2, 2, 2, 3];
        let mut centroids = vec![0.5, 2.5, 55.5, 200.0];
        relocate(PointRows::new(&rows, 1), &mut assignment, &[1, 0, 1, 2], &mut centroids, &mut SeededRandom::new(1));
        let mut found = centroids.clone();
        found.sort_by(f32::total_cmp);
        assert_eq!(found, [1.5, 50.5, 60.5, 200.0]);
        assert_eq!((centroids[1], centroids[3]), (1.5, 200.0));
        assert!(rows.iter().zip(assignment).all(|(x, of)| (x - centroids[of as usize]).abs() <= 1.5));
    }

    #[test]
    fn good_centroids_stay() {
        let rows = [0.0, 1.0, 50.0, 51.0, 90.0, 91.0];
        let mut centroids = vec![0.5, 50.5, 90.5];
        let mut assignment = [0, 0, 1, 1, 2, 2];
        relocate(PointRows::new(&rows, 1), &mut assignment, &[1, 2, 1], &mut centroids, &mut SeededRandom::new(1));
        assert_eq!((centroids, assignment), (vec![0.5, 50.5, 90.5], [0, 0, 1, 1, 2, 2]));
    }
}
