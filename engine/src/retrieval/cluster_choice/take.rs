//! The choice of clusters under a budget of distinct entries.
//!
//! Clusters are taken by falling score, ties by the lower cluster. A cluster that no longer fits is passed over, and
//! smaller ones behind it are tried.

use crate::kernels::prefetch;
use std::ops::Range;

/// The scores that say which score is about as high as enough others.
const SAMPLE: usize = 128;
/// The fewest clusters that are sorted after the first ones. Each further run of them has twice as many.
const SORTED_NEXT: usize = 64;
/// Members in a cache line.
const LINE_MEMBERS: usize = 16;

/// Which tokens may be taken twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// No token is in two clusters, or in one and among the first tokens.
    None,
    /// A token may be in several clusters and among the first tokens.
    Some,
}

/// The tokens and clusters that were taken for one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Distinct tokens, in the order in which they were taken.
    pub(crate) tokens: Vec<u32>,
    /// The clusters that they are in, in the order in which they were taken.
    pub(crate) clusters: Vec<u32>,
}

impl Taken {
    /// Returns the runs of neighbours among the clusters.
    pub(crate) fn runs(&self) -> usize {
        runs_of_neighbours(&self.clusters)
    }
}

/// Returns the runs of consecutive numbers among distinct ones.
pub(crate) fn runs_of_neighbours(numbers: &[u32]) -> usize {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a + 1 == *b).count()
}

/// Takes clusters until `budget` distinct tokens of `tokens` are taken. `first` are tokens that are taken before any
/// cluster, such as entries that wait in a buffer. A cluster whose score is negative infinity is never taken.
pub(crate) fn take_clusters<'a>(
    scores: &[f32],
    (members, overlap): (impl Fn(usize) -> &'a [u32], Overlap),
    first: impl Iterator<Item = u32>,
    tokens: &Range<usize>,
    budget: usize,
) -> Taken {
    let mut taking = Taking::new(tokens, budget, overlap);
    taking.take_first(first);
    // Most budgets are used by a few of the clusters, so the best are sorted first, and the others only if needed.
    let enough = scores.len() as u128 * budget as u128 / tokens.len().max(1) as u128;
    let high = score_of_about(scores, enough.min(scores.len() as u128) as usize);
    let mut keys: Vec<u64> = Vec::with_capacity(scores.len());
    keys.extend(scores.iter().enumerate().filter(|(_, score)| **score >= high).map(order_key));
    keys.sort_unstable();
    taking.take(&keys, &members);
    if taking.is_full() {
        return taking.taken;
    }
    keys.clear();
    let low = |score: &f32| *score > f32::NEG_INFINITY && *score < high;
    keys.extend(scores.iter().enumerate().filter(|(_, score)| low(score)).map(order_key));
    let (mut rest, mut run) = (keys.as_mut_slice(), SORTED_NEXT);
    while !taking.is_full() && !rest.is_empty() {
        let (best, others) = best_of(rest, run);
        (rest, run) = (others, run.saturating_mul(2));
        taking.take(best, &members);
    }
    taking.taken
}

/// Returns a score that about `enough` scores reach, and rather more than fewer. It is above negative infinity.
fn score_of_about(scores: &[f32], enough: usize) -> f32 {
    let step = (scores.len() / SAMPLE).max(1);
    let mut sample = [0; SAMPLE];
    let sampled = scores.iter().step_by(step).enumerate().filter(|(_, score)| **score > f32::NEG_INFINITY);
    let mut count = 0;
    for ((_, score), key) in sampled.zip(&mut sample) {
        *key = order_key((0, score));
        count += 1;
    }
    // The rank varies by the root of itself from sample to sample.
    let rank = enough / step;
    let rank = rank + 2 * rank.isqrt() + 2;
    let sample = &mut sample[..count];
    if rank >= count {
        return f32::MIN;
    }
    let (_, key, _) = sample.select_nth_unstable(rank);
    score_of_key(*key)
}

/// A choice while clusters are taken.
struct Taking<'a> {
    taken: Taken,
    tokens: &'a Range<usize>,
    budget: usize,
    /// The tokens that may be chosen and are taken already. Empty if no token is met twice.
    is_taken: Vec<bool>,
    overlap: Overlap,
}

impl<'a> Taking<'a> {
    fn new(tokens: &'a Range<usize>, budget: usize, overlap: Overlap) -> Self {
        let mut taken = Taken::default();
        taken.tokens.reserve(budget.min(tokens.len()));
        let is_taken = if overlap == Overlap::Some { vec![false; tokens.len()] } else { Vec::new() };
        Self { taken, tokens, budget, is_taken, overlap }
    }

    fn is_full(&self) -> bool {
        self.taken.tokens.len() >= self.budget
    }

    /// Takes single tokens.
    fn take_first(&mut self, first: impl Iterator<Item = u32>) {
        for token in first.filter(|token| self.tokens.contains(&(*token as usize))) {
            if self.is_full() {
                return;
            }
            let seen = self.is_taken.get_mut(token as usize - self.tokens.start);
            if !seen.is_some_and(|seen| std::mem::replace(seen, true)) {
                self.taken.tokens.push(token);
            }
        }
    }

    /// Takes the clusters of sorted keys as far as they fit.
    fn take<'b>(&mut self, keys: &[u64], members: impl Fn(usize) -> &'b [u32]) {
        if self.is_full() {
            return;
        }
        fetch_members(keys.iter().map(|key| members(*key as u32 as usize)));
        for key in keys {
            let (cluster, before) = (*key as u32, self.taken.tokens.len());
            let members = members(cluster as usize);
            let fits = match self.overlap {
                Overlap::None => self.take_all(members),
                Overlap::Some => self.take_new(members),
            };
            if !fits {
                self.taken.tokens.truncate(before);
            }
            let own = &self.taken.tokens[before..];
            if own.is_empty() {
                continue;
            }
            if self.overlap == Overlap::Some {
                own.iter().for_each(|token| self.is_taken[*token as usize - self.tokens.start] = true);
            }
            self.taken.clusters.push(cluster);
            if self.is_full() {
                return;
            }
        }
    }

    /// Adds the members that may be chosen. Returns false if there are then more than the budget.
    fn take_all(&mut self, members: &[u32]) -> bool {
        let tokens = &mut self.taken.tokens;
        // A token before the first one wraps around, to a number above all others.
        let is_within = |token: &u32| (*token as usize).wrapping_sub(self.tokens.start) < self.tokens.len();
        if members.iter().fold(true, |all, token| all & is_within(token)) {
            if members.len() <= self.budget - tokens.len() {
                tokens.extend_from_slice(members);
                return true;
            }
            return false;
        }
        let most = self.budget + 1 - tokens.len();
        tokens.extend(members.iter().filter(|token| is_within(token)).take(most));
        tokens.len() <= self.budget
    }

    /// Adds the members that may be chosen and are not taken yet. Returns false as soon as there are more than the
    /// budget.
    fn take_new(&mut self, members: &[u32]) -> bool {
        for token in members {
            // A token before the first one wraps around, to a number above all others.
            if self.is_taken.get((*token as usize).wrapping_sub(self.tokens.start)) != Some(&false) {
                continue;
            }
            if self.is_full() {
                return false;
            }
            self.taken.tokens.push(*token);
        }
        true
    }
}

/// Has the processor fetch the members of some clusters all at once, because the lists are far apart in memory.
fn fetch_members<'a>(lists: impl Iterator<Item = &'a [u32]> + Clone) {
    // What a list is read through is fetched first.
    std::hint::black_box(lists.clone().map(<[u32]>::len).sum::<usize>());
    for members in lists {
        members.iter().step_by(LINE_MEMBERS).chain(members.last()).for_each(prefetch);
    }
}

/// Returns a key that is lower for a higher score. Among equal scores it is lower for a lower cluster, which is its
/// lower half.
fn order_key((cluster, score): (usize, &f32)) -> u64 {
    let bits = score.to_bits();
    // Integers in the total order of floats: negative ones have all bits inverted, others the sign.
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | cluster as u64
}

/// Returns the score of a key.
fn score_of_key(key: u64) -> f32 {
    let rising = !(key >> 32) as u32;
    f32::from_bits(if rising >> 31 == 1 { rising ^ 1 << 31 } else { !rising })
}

/// Returns the lowest `count` keys, sorted, and the others.
fn best_of(keys: &mut [u64], count: usize) -> (&mut [u64], &mut [u64]) {
    let count = count.min(keys.len());
    if count < keys.len() {
        keys.select_nth_unstable(count);
    }
    let (best, others) = keys.split_at_mut(count);
    best.sort_unstable();
    (best, others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Follows the rule word by word.
    fn by_definition(scores: &[f32], lists: &[Vec<u32>], first: &[u32], tokens: &Range<usize>, budget: usize) -> Taken {
        let mut taken = Taken::default();
        for token in first.iter().filter(|token| tokens.contains(&(**token as usize))) {
            if taken.tokens.len() < budget && !taken.tokens.contains(token) {
                taken.tokens.push(*token);
            }
        }
        let mut order: Vec<usize> = (0..scores.len()).filter(|at| scores[*at] > f32::NEG_INFINITY).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        for cluster in order {
            let is_new = |token: &&u32| tokens.contains(&(**token as usize)) && !taken.tokens.contains(token);
            let own: Vec<u32> = lists[cluster].iter().filter(is_new).copied().collect();
            if !own.is_empty() && taken.tokens.len() + own.len() <= budget {
                taken.tokens.extend(own);
                taken.clusters.push(cluster as u32);
            }
        }
        taken
    }

    #[test]
    fn neighbouring_clusters_are_one_run() {
        let taken = Taken { tokens: vec![5], clusters: vec![7, 3, 2, 9, 8] };
        assert_eq!((taken.runs(), Taken::default().runs()), (2, 0));
    }

    #[test]
    fn keys_order_scores_and_give_them_back() {
        let scores = [f32::MAX, 2.5, f32::MIN_POSITIVE, 0.0, -0.0, -1e-40, -2.5, f32::MIN];
        let keys: Vec<u64> = scores.iter().map(|score| order_key((7, score))).collect();
        assert!(
            keys.is_sorted() && keys.iter().zip(scores).all(|(key, x)| score_of_key(*key).to_bits() == x.to_bits())
        );
    }

    proptest! {
        #[test]
        fn clusters_are_taken_by_falling_score_while_they_fit(
            lists in prop::collection::vec(prop::collection::btree_set(0_u32..90, 0..9), 0..120),
            picks in prop::collection::vec(-3_i8..4, 120), first in prop::collection::vec(0_u32..90, 0..4),
            start in 0_usize..20, len in 1_usize..80, budget in 0_usize..70, disjoint in any::<bool>(),
        ) {
            let mut seen: BTreeSet<u32> = if disjoint { first.iter().copied().collect() } else { BTreeSet::new() };
            let mut is_new = |token: &u32| !disjoint || seen.insert(*token);
            let lists: Vec<Vec<u32>> =
                lists.into_iter().map(|list| list.into_iter().filter(&mut is_new).collect()).collect();
            let first: Vec<u32> = if disjoint { BTreeSet::from_iter(first).into_iter().collect() } else { first };
            let overlap = if disjoint { Overlap::None } else { Overlap::Some };
            let score = |pick: &i8| if *pick == -3 { f32::NEG_INFINITY } else { f32::from(*pick) };
            let scores: Vec<f32> = picks[..lists.len()].iter().map(score).collect();
            let tokens = start..start + len;
            let found = take_clusters(&scores, (|at| &lists[at], overlap), first.iter().copied(), &tokens, budget);
            prop_assert_eq!(&found, &by_definition(&scores, &lists, &first, &tokens, budget));
            let distinct: BTreeSet<u32> = found.tokens.iter().copied().collect();
            prop_assert!(distinct.len() == found.tokens.len() && found.tokens.len() <= budget);
        }
    }
}
