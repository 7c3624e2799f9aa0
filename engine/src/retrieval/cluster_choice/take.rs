//! The choice of clusters under a budget of distinct entries.
//!
//! Clusters are taken by falling score, ties by the lower cluster. A cluster that no longer fits is passed over, and
//! smaller ones behind it are tried.

use crate::kernels::prefetch;
use std::ops::Range;

/// The fewest clusters that are sorted first. Each further run of them has twice as many.
const SORTED_FIRST: usize = 64;
/// Members in a cache line.
const LINE_MEMBERS: usize = 16;

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
    members: impl Fn(usize) -> &'a [u32],
    first: impl Iterator<Item = u32>,
    tokens: &Range<usize>,
    budget: usize,
) -> Taken {
    let mut taken = Taken::default();
    taken.tokens.reserve(budget.min(tokens.len()));
    let mut is_taken = vec![false; tokens.len()];
    for token in first.filter(|token| tokens.contains(&(*token as usize))) {
        let seen = &mut is_taken[token as usize - tokens.start];
        if taken.tokens.len() < budget && !*seen {
            *seen = true;
            taken.tokens.push(token);
        }
    }
    let mut keys: Vec<u64> = Vec::with_capacity(scores.len());
    keys.extend(scores.iter().enumerate().filter(|(_, score)| **score > f32::NEG_INFINITY).map(order_key));
    // Most budgets are used by a few of the clusters, so the best are sorted first, and the others only if needed. If
    // the best are as large as the others, the first run is just enough.
    let enough = keys.len() as u128 * budget as u128 / tokens.len().max(1) as u128;
    let mut run = (enough.min(keys.len() as u128) as usize).max(SORTED_FIRST);
    let mut rest = keys.as_mut_slice();
    while taken.tokens.len() < budget && !rest.is_empty() {
        let (best, others) = best_of(rest, run);
        (rest, run) = (others, run.saturating_mul(2));
        fetch_members(best.iter().map(|key| members(*key as u32 as usize)));
        for key in best {
            let cluster = *key as u32;
            let before = taken.tokens.len();
            let fits = take_new(members(cluster as usize), tokens.start, &is_taken, (budget, &mut taken.tokens));
            if !fits {
                taken.tokens.truncate(before);
            }
            let own = &taken.tokens[before..];
            if own.is_empty() {
                continue;
            }
            own.iter().for_each(|token| is_taken[*token as usize - tokens.start] = true);
            taken.clusters.push(cluster);
            if taken.tokens.len() == budget {
                break;
            }
        }
    }
    taken
}

/// Has the processor fetch the members of some clusters all at once, because the lists are far apart in memory.
fn fetch_members<'a>(lists: impl Iterator<Item = &'a [u32]> + Clone) {
    // What a list is read through is fetched first.
    std::hint::black_box(lists.clone().map(<[u32]>::len).sum::<usize>());
    for members in lists {
        members.iter().step_by(LINE_MEMBERS).chain(members.last()).for_each(prefetch);
    }
}

/// Adds the members that may be chosen and are not taken yet. Returns false as soon as there are more than `budget`.
///
/// `is_taken` has the tokens that may be chosen, from `start` on.
fn take_new(members: &[u32], start: usize, is_taken: &[bool], (budget, taken): (usize, &mut Vec<u32>)) -> bool {
    for token in members {
        // A token before the first one wraps around, to a number above all others.
        if is_taken.get((*token as usize).wrapping_sub(start)) != Some(&false) {
            continue;
        }
        if taken.len() == budget {
            return false;
        }
        taken.push(*token);
    }
    true
}

/// Returns a key that is lower for a higher score. Among equal scores it is lower for a lower cluster, which is its
/// lower half.
fn order_key((cluster, score): (usize, &f32)) -> u64 {
    let bits = score.to_bits();
    // Integers in the total order of floats: negative ones have all bits inverted, others the sign.
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | cluster as u64
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

    proptest! {
        #[test]
        fn clusters_are_taken_by_falling_score_while_they_fit(
            lists in prop::collection::vec(prop::collection::btree_set(0_u32..90, 0..9), 0..120),
            picks in prop::collection::vec(-3_i8..4, 120), first in prop::collection::vec(0_u32..90, 0..4),
            start in 0_usize..20, len in 1_usize..80, budget in 0_usize..70,
        ) {
            let lists: Vec<Vec<u32>> = lists.into_iter().map(|list| list.into_iter().collect()).collect();
            let score = |pick: &i8| if *pick == -3 { f32::NEG_INFINITY } else { f32::from(*pick) };
            let scores: Vec<f32> = picks[..lists.len()].iter().map(score).collect();
            let tokens = start..start + len;
            let found = take_clusters(&scores, |at| &lists[at], first.iter().copied(), &tokens, budget);
            prop_assert_eq!(&found, &by_definition(&scores, &lists, &first, &tokens, budget));
            let distinct: BTreeSet<u32> = found.tokens.iter().copied().collect();
            prop_assert!(distinct.len() == found.tokens.len() && found.tokens.len() <= budget);
        }
    }
}
