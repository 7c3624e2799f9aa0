//! Maxima of scores: the best units of groups, over lanes that are weighted and added in different ways.
//!
//! A lane is a query head. A unit is a token or a group, and a group has `per_group` units.

use super::dispatch::multiversion;

multiversion! {
    /// Writes, for each group, the highest of its units. A unit is the sum of its lanes times their weights. `units` is
    /// `[groups * per_group, lanes]`.
    pub(crate) fn best_scores(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32])
        = best_of_groups;
}

multiversion! {
    /// Writes the sum of each unit's lanes times their weights. Units are packed side by side in rows of 16 lanes,
    /// `[scores.len(), lanes]`, and a row has 16 weights. `lanes` is 1, 2, 4 or 8.
    pub(crate) fn packed_sums(units: &[f32], weights: &[f32], lanes: usize, scores: &mut [f32]) = sums_of_packed;
}

#[inline(always)]
fn sums_of_packed(units: &[f32], weights: &[f32], lanes: usize, scores: &mut [f32]) {
    let Some(weights) = weights.first_chunk::<16>() else { return };
    match lanes {
        1 => sums_of_packed_by::<1>(units, weights, scores),
        2 => sums_of_packed_by::<2>(units, weights, scores),
        4 => sums_of_packed_by::<4>(units, weights, scores),
        _ => sums_of_packed_by::<8>(units, weights, scores),
    }
}

#[inline(always)]
fn sums_of_packed_by<const LANES: usize>(units: &[f32], weights: &[f32; 16], scores: &mut [f32]) {
    for (row, scores) in units.as_chunks::<16>().0.iter().zip(scores.chunks_mut(16 / LANES)) {
        let products: [f32; 16] = std::array::from_fn(|i| row[i] * weights[i]);
        for (unit, score) in products.as_chunks::<LANES>().0.iter().zip(scores) {
            // A sum begins with zero, so that it is never negative zero.
            let sum = unit.iter().fold(0.0, |sum, x| sum + x);
            *score = if sum > f32::NEG_INFINITY { sum } else { f32::NEG_INFINITY };
        }
    }
}

#[inline(always)]
fn best_of_groups(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) {
    match (lanes, per_group) {
        (1, 8) if units.len().is_multiple_of(8) => {
            let weight = weights[0];
            for (units, score) in units.as_chunks::<8>().0.iter().zip(scores) {
                let x = units.map(|x| x * weight);
                let half: [f32; 4] = std::array::from_fn(|i| x[i].max(x[i + 4]));
                *score = half[0].max(half[2]).max(half[1].max(half[3]));
            }
        }
        (1, 1) => {
            let weight = weights[0];
            for (unit, score) in units.iter().zip(scores) {
                // A sum over lanes begins with zero, so that it is never negative zero.
                let sum = unit * weight + 0.0;
                *score = if sum > f32::NEG_INFINITY { sum } else { f32::NEG_INFINITY };
            }
        }
        (8, 1) => sum_of_eight_lanes(units, weights, scores),
        (16, _) => best_of_lanes::<16>(units, weights, per_group, scores),
        (32, _) => best_of_lanes::<32>(units, weights, per_group, scores),
        _ => best_of_any(units, weights, lanes, per_group, scores),
    }
}

#[inline(always)]
fn best_of_lanes<const N: usize>(units: &[f32], weights: &[f32], per_group: usize, scores: &mut [f32]) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    for (group, score) in units.chunks(per_group.saturating_mul(N)).zip(scores) {
        let mut highest = f32::NEG_INFINITY;
        for unit in group.as_chunks::<N>().0 {
            let mut sums = [0.0_f32; 16];
            for first in (0..N).step_by(16) {
                for i in 0..16 {
                    sums[i] += unit[first + i] * weights[first + i];
                }
            }
            let sums: [f32; 8] = std::array::from_fn(|i| sums[i] + sums[i + 8]);
            highest = highest.max(sum8(sums));
        }
        *score = highest;
    }
}

/// Writes the weighted sum of eight lanes of each unit, eight units at a time.
#[inline(always)]
fn sum_of_eight_lanes(units: &[f32], weights: &[f32], scores: &mut [f32]) {
    let Some(weights) = weights.first_chunk::<8>() else { return };
    let (blocks, rest) = units.as_chunks::<64>();
    let (block_scores, rest_scores) = scores.split_at_mut((blocks.len() * 8).min(scores.len()));
    for (block, scores) in blocks.iter().zip(block_scores.chunks_mut(8)) {
        let mut halves = [[0.0_f32; 4]; 8];
        for (unit, half) in block.as_chunks::<8>().0.iter().zip(&mut halves) {
            let x: [f32; 8] = std::array::from_fn(|i| unit[i] * weights[i] + 0.0);
            *half = std::array::from_fn(|i| x[i] + x[i + 4]);
        }
        for (half, score) in halves.iter().zip(scores) {
            *score = f32::NEG_INFINITY.max((half[0] + half[2]) + (half[1] + half[3]));
        }
    }
    best_of_any(rest, weights, 8, 1, rest_scores);
}

#[inline(always)]
fn best_of_any(units: &[f32], weights: &[f32], lanes: usize, per_group: usize, scores: &mut [f32]) {
    for (group, score) in units.chunks(lanes.saturating_mul(per_group)).zip(scores) {
        let mut highest = f32::NEG_INFINITY;
        for unit in group.chunks_exact(lanes) {
            let mut sums = [0.0_f32; 8];
            let ((units, rest), (weights, rest_weights)) = (unit.as_chunks::<8>(), weights.as_chunks::<8>());
            for (x, weights) in units.iter().zip(weights) {
                for i in 0..8 {
                    sums[i] += x[i] * weights[i];
                }
            }
            for ((sum, x), weight) in sums.iter_mut().zip(rest).zip(rest_weights) {
                *sum += x * weight;
            }
            highest = highest.max(sum8(sums));
        }
        *score = highest;
    }
}

/// Returns the sum of eight numbers, added in pairs so that the additions do not wait for each other.
#[inline(always)]
fn sum8(x: [f32; 8]) -> f32 {
    let x: [f32; 4] = std::array::from_fn(|i| x[i] + x[i + 4]);
    (x[0] + x[2]) + (x[1] + x[3])
}

multiversion! {
    /// Writes the highest unit of each group, lane by lane: `[units, lanes]` to `[groups, lanes]`.
    pub(crate) fn best_units(units: &[f32], lanes: usize, per_group: usize, out: &mut [f32]) = best_units_of_lanes;
}

#[inline(always)]
fn best_units_of_lanes(units: &[f32], lanes: usize, per_group: usize, out: &mut [f32]) {
    match lanes {
        8 => best_units_by::<8>(units, per_group, out),
        16 => best_units_by::<16>(units, per_group, out),
        32 => best_units_by::<32>(units, per_group, out),
        _ => {
            for (group, out) in units.chunks(lanes.saturating_mul(per_group)).zip(out.chunks_exact_mut(lanes)) {
                out.fill(f32::MIN);
                for unit in group.chunks_exact(lanes) {
                    for (best, x) in out.iter_mut().zip(unit) {
                        *best = if *x > *best { *x } else { *best };
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn best_units_by<const N: usize>(units: &[f32], per_group: usize, out: &mut [f32]) {
    for (group, out) in units.as_chunks::<N>().0.chunks(per_group).zip(out.as_chunks_mut::<N>().0) {
        let mut best = [f32::MIN; N];
        for unit in group {
            for i in 0..N {
                best[i] = if unit[i] > best[i] { unit[i] } else { best[i] };
            }
        }
        *out = best;
    }
}

multiversion! {
    /// Writes the best token of each group for each KV head, by the weighted sum of the lanes of that head.
    ///
    /// `lanes` are the columns and the lanes of a head. `best` is `[kv_heads, row]`, and `place` has the index of the
    /// first group and `row`.
    pub(crate) fn best_by_head(
        units: &[f32],
        weights: &[f32],
        lanes: (usize, usize),
        group: usize,
        place: (usize, usize),
        best: &mut [f32],
    ) = best_of_heads;
}

#[inline(always)]
fn best_of_heads(
    units: &[f32],
    weights: &[f32],
    (columns, ratio): (usize, usize),
    group: usize,
    (first, row): (usize, usize),
    best: &mut [f32],
) {
    match (columns, ratio) {
        (8, 1) => best_of::<8, 1>(units, weights, group, (first, row), best),
        (16, 2) => best_of::<16, 2>(units, weights, group, (first, row), best),
        (32, 4) => best_of::<32, 4>(units, weights, group, (first, row), best),
        _ => {
            for (tokens, at) in units.chunks_exact(columns * group).zip(first..) {
                for (head, best) in best.chunks_exact_mut(row).enumerate() {
                    let lanes = head * ratio..(head + 1) * ratio;
                    let mut highest = f32::NEG_INFINITY;
                    for unit in tokens.chunks_exact(columns) {
                        let lanes = unit[lanes.clone()].iter().zip(&weights[lanes.clone()]);
                        highest = highest.max(lanes.map(|(x, w)| x * w).sum());
                    }
                    best[at] = highest;
                }
            }
        }
    }
}

/// [`best_by_head`] for `N` columns and `R` lanes of a head, if the columns have no padding.
#[inline(always)]
fn best_of<const N: usize, const R: usize>(
    units: &[f32],
    weights: &[f32],
    group: usize,
    (first, row): (usize, usize),
    best: &mut [f32],
) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    let mut rows = best.chunks_exact_mut(row);
    let mut best: [&mut [f32]; 8] = std::array::from_fn(|_| rows.next().unwrap_or_default());
    for (tokens, at) in units.chunks_exact(N * group).zip(first..) {
        let mut highest = [f32::NEG_INFINITY; 8];
        for unit in tokens.as_chunks::<N>().0 {
            for head in 0..8 {
                let mut sum = 0.0;
                for i in 0..R {
                    sum += unit[head * R + i] * weights[head * R + i];
                }
                highest[head] = if sum > highest[head] { sum } else { highest[head] };
            }
        }
        // There may be fewer than 8 heads.
        for (best, highest) in best.iter_mut().zip(highest) {
            if let Some(best) = best.get_mut(at) {
                *best = highest;
            }
        }
    }
}

multiversion! {
    /// Writes, for each unit, the sum over KV heads of the best of their `ratio` query heads. `lanes` are the heads
    /// and the columns.
    pub(crate) fn best_query_heads(
        units: &[f32],
        weights: &[f32],
        lanes: (usize, usize),
        ratio: usize,
        scores: &mut [f32],
    ) = sums_of_best;
}

#[inline(always)]
fn sums_of_best(units: &[f32], weights: &[f32], (heads, lanes): (usize, usize), ratio: usize, scores: &mut [f32]) {
    match ratio {
        1 => sums_of::<1>(units, weights, (heads, lanes), scores),
        2 => sums_of::<2>(units, weights, (heads, lanes), scores),
        4 => sums_of::<4>(units, weights, (heads, lanes), scores),
        8 => sums_of::<8>(units, weights, (heads, lanes), scores),
        _ => {
            for (score, unit) in scores.iter_mut().zip(units.chunks_exact(lanes)) {
                let mut sum = 0.0;
                for (x, w) in unit[..heads].chunks_exact(ratio).zip(weights.chunks_exact(ratio)) {
                    sum += x.iter().zip(w).fold(f32::NEG_INFINITY, |best, (x, w)| best.max(x * w));
                }
                *score = sum;
            }
        }
    }
}

#[inline(always)]
fn sums_of<const R: usize>(units: &[f32], weights: &[f32], (heads, lanes): (usize, usize), scores: &mut [f32]) {
    for (score, unit) in scores.iter_mut().zip(units.chunks_exact(lanes)) {
        let mut sum = 0.0;
        for (x, w) in unit[..heads].as_chunks::<R>().0.iter().zip(weights.as_chunks::<R>().0) {
            let mut best = f32::NEG_INFINITY;
            for i in 0..R {
                let x = x[i] * w[i];
                best = if x > best { x } else { best };
            }
            sum += best;
        }
        *score = sum;
    }
}

multiversion! {
    /// Returns whether all scores are below `limit`. A NaN is not.
    pub(crate) fn all_below(scores: &[f32], limit: f32) -> bool = are_all_below;
}

#[inline(always)]
fn are_all_below(scores: &[f32], limit: f32) -> bool {
    scores.iter().fold(true, |all, score| all & (*score < limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_score_is_the_highest_weighted_sum_of_lanes(
            lanes in prop_oneof![Just(1_usize), Just(8), Just(16), Just(32), 2_usize..34], per_group in 1_usize..10,
            groups in 0_usize..30, elements in prop::collection::vec(-9_i8..9, 34 * 9 * 30),
            weights in prop::collection::vec(-3_i8..4, 34),
        ) {
            // Small integers, so that all sums are exact.
            let units: Vec<f32> = elements[..groups * per_group * lanes].iter().copied().map(f32::from).collect();
            let weights: Vec<f32> = weights[..lanes].iter().copied().map(f32::from).collect();
            let mut scores = vec![7.0; groups];
            best_scores(&units, &weights, lanes, per_group, &mut scores);
            for (group, score) in units.chunks(lanes * per_group).zip(&scores) {
                let sum = |unit: &[f32]| unit.iter().zip(&weights).map(|(x, w)| x * w).sum::<f32>();
                let expected = group.chunks(lanes).map(sum).fold(f32::NEG_INFINITY, f32::max);
                // A score of zero is positive, because the order of clusters tells the zeros apart.
                let is_negative_zero = *score == 0.0 && score.is_sign_negative();
                prop_assert!(*score == expected && !(is_negative_zero && per_group == 1), "{} {}", score, expected);
            }
        }
    }

    #[test]
    fn packed_sums_are_those_of_each_unit() {
        for lanes in [1, 2, 4, 8] {
            let units: Vec<f32> = (0..48).map(|at| (at % 7) as f32 - 3.0).collect();
            let weights: Vec<f32> = (0..16).map(|at| (at % 5) as f32 - 2.0).collect();
            let mut scores = vec![7.0; 48 / lanes];
            packed_sums(&units, &weights, lanes, &mut scores);
            for (at, score) in scores.iter().enumerate() {
                let sum: f32 = (at * lanes..(at + 1) * lanes).map(|at| units[at] * weights[at % 16]).sum();
                assert_eq!((*score, score.is_sign_negative()), (sum, sum < 0.0), "{lanes} lanes, unit {at}");
            }
            packed_sums(&[f32::NAN; 16], &weights, lanes, &mut scores[..16 / lanes]);
            assert_eq!(scores[0], f32::NEG_INFINITY);
        }
    }

    #[test]
    fn a_unit_that_is_not_a_number_loses() {
        for lanes in [1, 8, 16, 5] {
            let units: Vec<f32> = [f32::NAN, 2.0, f32::NEG_INFINITY].into_iter().flat_map(|x| vec![x; lanes]).collect();
            let mut scores = [7.0; 3];
            best_scores(&units, &vec![1.0; lanes], lanes, 1, &mut scores);
            assert_eq!(scores, [f32::NEG_INFINITY, 2.0 * lanes as f32, f32::NEG_INFINITY]);
            let mut score = [7.0];
            best_scores(&units, &vec![1.0; lanes], lanes, 3, &mut score);
            assert_eq!(score, [2.0 * lanes as f32]);
        }
    }
}
