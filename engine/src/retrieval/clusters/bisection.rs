//! Clusters of equal size, which fill pages: recursive bisection of the keys.
//!
//! How [`bisect`] divides the entries:
//! 1. 2-means of a sample gives two centres. All entries are put in order along the line through them.
//! 2. They are cut at the multiple of the size that makes the squared distances to the means of both sides least.
//! 3. Both sides are divided in the same way, until a side has at most `size` entries.
//!
//! Cuts are tried at multiples of the size alone. So every cluster has exactly `size` entries, except one with the
//! rest. The sides of a cut follow each other, so that clusters that are neighbours have similar keys.
//!
//! Invariant: each side of a large set has an eighth of it or more. So the rounds grow with the logarithm of the
//! entries, whatever the keys are.

use super::key_matrix::check_keys;
use super::kmeans::{KMeans, KMeansOptions, two_means};
use super::lists::ClusterLists;
use super::random::SeededRandom;
use crate::error::{Error, ErrorKind, Result};
use std::ops::Range;

/// The most entries whose halves say where the line is.
const SAMPLE: usize = 1024;
/// One over the least share of a side.
const LEAST_SHARE: usize = 8;

/// Returns clusters of `size` similar keys each, of keys `[entries, dim]`. The last entries of the order may be fewer.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: `size` is 0, `keys` are no whole finite keys, or there are more than `u32` counts.
pub fn bisect(keys: &[f32], dim: usize, size: usize, seed: u64) -> Result<ClusterLists> {
    let entries = check_keys("bisection", keys, dim)?;
    if size == 0 || entries > u32::MAX as usize {
        let text = format!("bisection: {entries} entries in clusters of {size}; each has at least 1, of u32::MAX");
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let mut sets = Sets { keys, dim, size, order: (0..entries as u32).collect() };
    let mut random = SeededRandom::new(seed);
    let mut lists = ClusterLists::with_capacity(entries.div_ceil(size), entries);
    let all = 0..entries;
    let mut left = vec![all];
    while let Some(set) = left.pop() {
        if set.len() > size {
            let cut = set.start + sets.divide(set.clone(), &mut random);
            left.extend([cut..set.end, set.start..cut]);
        } else if !set.is_empty() {
            let members = &mut sets.order[set];
            members.sort_unstable();
            lists.push(members);
        }
    }
    Ok(lists)
}

/// Returns the most bytes that [`bisect`] takes, its result included.
#[must_use]
pub fn bisect_bytes_for(entries: usize, dim: usize, size: usize) -> usize {
    let per_entry = size_of::<u32>() + size_of::<(f32, u32)>();
    let sample = SAMPLE.min(entries).saturating_mul(dim).saturating_mul(size_of::<f32>());
    let halves = KMeansOptions { clusters: 2, seed: 0, metric: None };
    let two_means = KMeans::bytes_for(SAMPLE.min(entries), dim, &halves);
    let sums = dim.saturating_mul(4 * size_of::<f64>());
    let stack = 256 * size_of::<Range<usize>>();
    let lists = ClusterLists::bytes_for(entries.div_ceil(size.max(1)), entries);
    [entries.saturating_mul(per_entry), sample, two_means, sums, stack, lists]
        .into_iter()
        .fold(0, usize::saturating_add)
}

/// The entries, in an order in which each set is a range.
struct Sets<'a> {
    keys: &'a [f32],
    dim: usize,
    size: usize,
    order: Vec<u32>,
}

impl<'a> Sets<'a> {
    fn key(&self, entry: u32) -> &'a [f32] {
        &self.keys[entry as usize * self.dim..][..self.dim]
    }

    /// Orders a set of more than `size` entries along its line. Returns how many entries its first side has.
    fn divide(&mut self, set: Range<usize>, random: &mut SeededRandom) -> usize {
        let direction = self.direction(&self.order[set.clone()], random);
        let mut along: Vec<(f32, u32)> =
            self.order[set.clone()].iter().map(|entry| (dot(self.key(*entry), &direction), *entry)).collect();
        along.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (place, (_, entry)) in self.order[set.clone()].iter_mut().zip(along) {
            *place = entry;
        }
        self.best_cut(&self.order[set])
    }

    /// Returns the difference of the means of the two halves of a sample.
    fn direction(&self, set: &[u32], random: &mut SeededRandom) -> Vec<f32> {
        let mut sample = Vec::with_capacity(set.len().min(SAMPLE) * self.dim);
        set.iter().step_by(set.len().div_ceil(SAMPLE)).for_each(|entry| sample.extend_from_slice(self.key(*entry)));
        let halves = two_means(&sample, self.dim, random);
        let mut sums = [vec![0.0_f64; self.dim], vec![0.0_f64; self.dim]];
        let mut counts = [0.0_f64; 2];
        for (half, key) in halves.iter().zip(sample.chunks_exact(self.dim)) {
            let half = *half as usize;
            counts[half] += 1.0;
            add(&mut sums[half], key);
        }
        let [first, second] = &sums;
        first.iter().zip(second).map(|(a, b)| (b / counts[1].max(1.0) - a / counts[0].max(1.0)) as f32).collect()
    }

    /// Returns the multiple of the size at which a cut of the ordered set leaves the least squared distances to the
    /// means of both sides; the one nearest to the middle among equal ones.
    fn best_cut(&self, set: &[u32]) -> usize {
        let blocks = set.len().div_ceil(self.size);
        let least = blocks.div_ceil(LEAST_SHARE).min(blocks / 2);
        let (mut left, mut right) = (vec![0.0_f64; self.dim], vec![0.0_f64; self.dim]);
        set.iter().for_each(|entry| add(&mut right, self.key(*entry)));
        let mut best: Option<(f64, usize, usize)> = None;
        for (block, entries) in (1..blocks).zip(set.chunks(self.size)) {
            for entry in entries {
                let key = self.key(*entry);
                add(&mut left, key);
                right.iter_mut().zip(key).for_each(|(sum, x)| *sum -= f64::from(*x));
            }
            if block < least || block > blocks - least {
                continue;
            }
            // The squared distances to two means are least when the squared sums over the counts are most.
            let cut = block * self.size;
            let saved = square(&left) / cut as f64 + square(&right) / (set.len() - cut) as f64;
            let from_middle = block.abs_diff(blocks / 2);
            if best.is_none_or(|(most, distance, _)| saved > most || (saved == most && from_middle < distance)) {
                best = Some((saved, from_middle, cut));
            }
        }
        best.map_or(self.size, |(_, _, cut)| cut)
    }
}

fn add(sums: &mut [f64], key: &[f32]) {
    sums.iter_mut().zip(key).for_each(|(sum, x)| *sum += f64::from(*x));
}

fn square(sums: &[f64]) -> f64 {
    sums.iter().map(|x| x * x).sum()
}

/// Returns the product of two keys, in an order of additions that processors do side by side.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retrieval::clusters::{PlantedOptions, PlantedTopics};
    use proptest::prelude::*;

    fn squares(keys: &[f32], dim: usize, lists: &ClusterLists) -> f64 {
        let of = |members: &[u32]| {
            let key = |at: u32| &keys[at as usize * dim..][..dim];
            let mut sums = vec![0.0; dim];
            members.iter().for_each(|at| add(&mut sums, key(*at)));
            let all: f64 = members.iter().flat_map(|at| key(*at)).map(|x| f64::from(*x) * f64::from(*x)).sum();
            all - square(&sums) / members.len() as f64
        };
        lists.iter().map(of).sum()
    }

    proptest! {
        #[test]
        fn each_entry_is_in_one_cluster_and_all_but_one_are_full(
            elements in prop::collection::vec(prop::sample::select(vec![-1e15_f32, -2.0, 0.0, 1.0, 3.0, 1e15]), 0..400),
            dim in 1_usize..5, size in 1_usize..40, seed in any::<u64>(),
        ) {
            let keys = &elements[..elements.len() / dim * dim];
            let lists = bisect(keys, dim, size, seed).unwrap();
            let mut entries: Vec<u32> = lists.iter().flatten().copied().collect();
            entries.sort_unstable();
            prop_assert!(entries.into_iter().eq(0..(keys.len() / dim) as u32));
            prop_assert!(lists.iter().all(|members| members.is_sorted() && members.len() <= size));
            prop_assert!(lists.iter().filter(|members| members.len() < size).count() <= 1);
            prop_assert_eq!(lists, bisect(keys, dim, size, seed).unwrap());
        }
    }

    #[test]
    fn clusters_are_nearly_as_tight_as_those_of_k_means_and_follow_similar_ones() {
        let topics = PlantedOptions { entries: 4096, topics: 256, ..PlantedOptions::default() };
        let keys = PlantedTopics::new(topics).unwrap().keys(16, 0.3);
        let means = KMeans::fit(&keys, 16, &KMeansOptions { clusters: 512, seed: 1, metric: None }).unwrap();
        let ratio = squares(&keys, 16, &bisect(&keys, 16, 8, 1).unwrap()) / squares(&keys, 16, &means.lists());
        // Clusters of k-means may have any size, so theirs are tighter.
        assert!(ratio < 2.2, "{ratio}");
        let runs = ClusterLists::of_clusters((0..512_u32).map(|run| (8 * run..8 * run + 8).collect::<Vec<u32>>()));
        let over_runs = squares(&keys, 16, &bisect(&keys, 16, 8, 1).unwrap()) / squares(&keys, 16, &runs);
        assert!(over_runs < 0.8, "{over_runs}");
        // Neighbouring clusters have similar keys: two of them are tighter than two that are far apart.
        let lists = bisect(&keys, 16, 8, 1).unwrap();
        let all: Vec<&[u32]> = lists.iter().collect();
        let pairs = |distance: usize| {
            let joined = (0..all.len()).step_by(2).map(|at| [all[at], all[(at + distance) % all.len()]].concat());
            squares(&keys, 16, &ClusterLists::of_clusters(joined))
        };
        assert!(pairs(1) < 0.8 * pairs(257), "{} {}", pairs(1), pairs(257));
    }

    #[test]
    fn keys_that_peel_off_one_by_one_take_few_rounds() {
        // Each key is ten times as far as the one before it, so that a cut without a least share takes one block.
        let keys: Vec<f32> = (0..30_000).map(|at| 10_f32.powi(at / 2000) * (1.0 + at as f32 / 1e5)).collect();
        let lists = bisect(&keys, 1, 8, 7).unwrap();
        assert_eq!((lists.len(), lists.stored()), (3750, 30_000));
    }

    #[test]
    fn wrong_input_is_refused() {
        for (keys, dim, size) in
            [(&[1.0, 2.0][..], 1, 0), (&[1.0, 2.0, 3.0], 2, 1), (&[f32::NAN], 1, 1), (&[1.0], 0, 1)]
        {
            assert_eq!(bisect(keys, dim, size, 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert!(bisect(&[], 3, 8, 0).unwrap().is_empty());
    }
}
