//! [`ClusterStats`]: size, centroid and variance of a cluster, updated in O(d) per entry.
//!
//! Source: DynaKV, section 4.2 (UPDATEVAR and UPDATESTATS of Algorithm 1), by the recurrence of Welford (1962). With
//! d the distance of a key to the centroid before it joins n - 1 others:
//! - the centroid moves by 1/n of the way to the key,
//! - the sum of squared distances to the centroid rises by `d^2 (n - 1) / n`.
//!
//! Invariants:
//! - The variance is the mean squared distance of the members to their centroid, summed over the dimensions.
//! - Without a member, the centroid and the sum are 0.

use crate::kernels::{add_row, lower_distances, scale_row};

/// Size and spread of a cluster. Its centroid is kept beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClusterStats {
    size: u32,
    /// The sum of squared distances of the members to the centroid.
    squares: f64,
}

impl ClusterStats {
    /// Returns the statistics of a cluster of this size and this sum of squared distances.
    pub(super) fn of(size: u32, squares: f64) -> Self {
        Self { size, squares }
    }

    /// Returns the sum of squared distances of the members to their centroid.
    pub(super) fn squares(&self) -> f64 {
        self.squares
    }

    /// Returns the number of members.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the mean squared distance of the members to the centroid, or 0 without a member.
    #[must_use]
    pub fn variance(&self) -> f64 {
        self.squares / f64::from(self.size.max(1))
    }

    /// Returns the variance that the cluster has once `key` joins.
    #[must_use]
    pub fn variance_with(&self, centroid: &[f32], key: &[f32]) -> f64 {
        self.variance_at(squared_distance(centroid, key))
    }

    /// Returns the variance that the cluster has once a key with this squared distance to the centroid joins.
    fn variance_at(&self, distance: f64) -> f64 {
        let size = f64::from(self.size);
        (self.squares + distance * size / (size + 1.0)) / (size + 1.0)
    }

    /// Adds a key.
    pub fn add(&mut self, centroid: &mut [f32], key: &[f32]) {
        self.add_at(squared_distance(centroid, key), centroid, key);
    }

    /// Adds a key, if the variance is then at most `threshold`. Returns whether it was added.
    pub(super) fn add_within(&mut self, threshold: f64, centroid: &mut [f32], key: &[f32]) -> bool {
        let distance = squared_distance(centroid, key);
        let is_within = self.variance_at(distance) <= threshold;
        if is_within {
            self.add_at(distance, centroid, key);
        }
        is_within
    }

    /// Adds a key with this squared distance to the centroid.
    fn add_at(&mut self, distance: f64, centroid: &mut [f32], key: &[f32]) {
        let before = f64::from(self.size);
        self.squares += distance * before / (before + 1.0);
        self.size += 1;
        let share = 1.0 / (before + 1.0);
        scale_row(centroid, (before * share) as f32);
        add_row(centroid, key, share as f32);
    }

    /// Keeps `left` of the members, whose keys are not known. The variance does not change.
    pub(super) fn shrink(&mut self, left: u32) {
        self.squares = self.variance() * f64::from(left.min(self.size));
        self.size = left.min(self.size);
    }

    /// Removes a key that was added. A cluster without members stays as it is.
    pub fn remove(&mut self, centroid: &mut [f32], key: &[f32]) {
        if self.size == 0 {
            return;
        }
        self.size -= 1;
        let left = f64::from(self.size);
        if self.size == 0 {
            self.squares = 0.0;
            return centroid.fill(0.0);
        }
        self.squares = (self.squares - squared_distance(centroid, key) * (left + 1.0) / left).max(0.0);
        scale_row(centroid, ((left + 1.0) / left) as f32);
        add_row(centroid, key, (-1.0 / left) as f32);
    }
}

fn squared_distance(centroid: &[f32], key: &[f32]) -> f64 {
    let mut distance = [f32::INFINITY];
    lower_distances(key, centroid, &mut distance);
    f64::from(distance[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_from_a_cluster_without_members_changes_nothing() {
        let (mut stats, mut centroid) = (ClusterStats::default(), [1.0, 2.0]);
        stats.remove(&mut centroid, &[3.0, 4.0]);
        assert_eq!((stats, centroid), (ClusterStats::default(), [1.0, 2.0]));
    }

    use crate::retrieval::clusters::random::SeededRandom;

    #[test]
    fn statistics_equal_a_recomputation_after_ten_thousand_updates() {
        for (dim, bias) in [(1, 0.0), (16, 0.6), (33, -0.3)] {
            let mut random = SeededRandom::new(dim as u64);
            let (mut stats, mut centroid) = (ClusterStats::default(), vec![0.0; dim]);
            let mut members: Vec<Vec<f32>> = Vec::new();
            for update in 0..10_000 {
                if members.is_empty() || random.unit() < 0.505 {
                    let key: Vec<f32> = (0..dim).map(|_| (random.normal() + bias) as f32).collect();
                    let (size, with) = (members.len() as f64 + 1.0, stats.variance_with(&centroid, &key));
                    stats.add(&mut centroid, &key);
                    assert!((with - stats.variance()).abs() < 1e-9 * size);
                    members.push(key);
                } else {
                    let key = members.swap_remove(random.below(members.len()));
                    stats.remove(&mut centroid, &key);
                }
                if update % 499 != 0 && update != 9_999 {
                    continue;
                }
                let size = members.len().max(1) as f64;
                let mean: Vec<f64> =
                    (0..dim).map(|d| members.iter().map(|key| f64::from(key[d])).sum::<f64>() / size).collect();
                let squares =
                    |key: &Vec<f32>| key.iter().zip(&mean).map(|(x, m)| (f64::from(*x) - m).powi(2)).sum::<f64>();
                let variance = members.iter().map(squares).sum::<f64>() / size;
                assert_eq!(stats.size() as usize, members.len());
                assert!(
                    (stats.variance() - variance).abs() <= 1e-4 * variance.max(0.1),
                    "{} {variance}",
                    stats.variance()
                );
                assert!(centroid.iter().zip(&mean).all(|(c, m)| (f64::from(*c) - m).abs() < 1e-4));
            }
        }
    }
}
