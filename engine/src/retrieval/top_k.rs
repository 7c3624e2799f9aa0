//! The choice of groups: the forced ones, then the best by score until the budget is used.

use crate::kernels::all_below;
use std::cmp::Ordering;
use std::ops::Range;

/// Orders higher scores first, and lower groups first among equal scores. The order does not depend on the order in
/// which scores were computed.
pub(crate) fn score_order(a: (f32, u64), b: (f32, u64)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Returns at most `count` groups of `range`, in rising order.
///
/// Groups of `forced` come first, from the last to the first while they fit. The best by `scores` fill the rest.
/// `forced` is rising and within the range, and `scores` has one entry per group of the range.
pub(crate) fn choose(range: Range<u64>, count: usize, forced: &[Range<u64>], scores: &[f32]) -> Vec<u64> {
    let total = (range.end - range.start) as usize;
    if count >= total {
        return range.collect();
    }
    let mut chosen: Vec<u64> = Vec::with_capacity(count);
    let mut is_chosen = vec![false; total];
    for group in forced.iter().rev().flat_map(|r| r.clone().rev()) {
        let slot = &mut is_chosen[(group - range.start) as usize];
        if chosen.len() < count && !*slot {
            *slot = true;
            chosen.push(group);
        }
    }
    let left = count - chosen.len();
    if left > 0 {
        let rest = highest(scores, left, |at| !is_chosen[at]);
        chosen.extend(rest.into_iter().map(|(_, at)| range.start + at));
    }
    chosen.sort_unstable();
    chosen
}

/// Scores that are skipped together if each of them is too low.
const RUN: usize = 64;

/// Returns the best `count` of the scores for which `counts` holds, each with its index, in no order.
pub(crate) fn highest(scores: &[f32], count: usize, counts: impl Fn(usize) -> bool) -> Vec<(f32, u64)> {
    let mut found: Vec<(f32, u64)> = Vec::with_capacity(count.saturating_mul(2).min(scores.len()));
    let keep = |found: &mut Vec<(f32, u64)>| {
        if 0 < count && count < found.len() {
            found.select_nth_unstable_by(count - 1, |a, b| score_order(*a, *b));
        }
        found.truncate(count);
    };
    // Scores below it come after at least `count` others.
    let mut lowest = f32::NEG_INFINITY;
    for (run, first) in scores.chunks(RUN).zip((0..).step_by(RUN)) {
        if all_below(run, lowest) {
            continue;
        }
        for (&score, at) in run.iter().zip(first..) {
            if score < lowest || !counts(at) {
                continue;
            }
            found.push((score, at as u64));
            if found.len() >= 2 * count.max(RUN) {
                keep(&mut found);
                lowest = found.last().map_or(f32::INFINITY, |last| last.0);
            }
        }
    }
    keep(&mut found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_are_chosen_beside_the_forced(
            scores in prop_oneof![
                prop::collection::vec((-4_i8..4).prop_map(f32::from), 1..60),
                prop::collection::vec((-90_i8..90).prop_map(f32::from), 200..600),
            ],
            start in 0_u64..5, count in 0_usize..70, sinks in 0_u64..4, recent in 0_u64..4,
        ) {
            let range = start..start + scores.len() as u64;
            let forced = [
                range.start..(range.start + sinks).min(range.end),
                range.end.saturating_sub(recent).max(range.start)..range.end,
            ];
            let chosen = choose(range.clone(), count, &forced, &scores);
            prop_assert_eq!(chosen.len(), count.min(scores.len()));
            prop_assert!(chosen.windows(2).all(|w| w[0] < w[1]) && chosen.iter().all(|g| range.contains(g)));
            // No group that is left out beats one that is chosen by score.
            let is_forced = |g: u64| forced.iter().any(|r| r.contains(&g));
            let score = |g: u64| (scores[(g - start) as usize], g);
            let worst = chosen.iter().filter(|g| !is_forced(**g)).map(|g| score(*g)).max_by(|a, b| score_order(*a, *b));
            if let Some(worst) = worst {
                for group in range.clone().filter(|g| !chosen.contains(g)) {
                    prop_assert_eq!(score_order(worst, score(group)), Ordering::Less);
                }
                prop_assert!(range.clone().filter(|g| is_forced(*g)).all(|g| chosen.contains(&g)));
            }
            // The newest forced group has precedence.
            if count > 0 && recent > 0 {
                prop_assert!(chosen.contains(&(range.end - 1)));
            }
        }
    }
}
