//! Pass 2 of attention: running maxima, weights and their sums, one column per query head.
//!
//! 1. The first loop finds the new maxima and checks that all scores are finite. It changes nothing but `factor`.
//! 2. The second loop rescales the sums, turns scores into weights and adds the weights.
//!
//! Columns are lanes, so nothing is reduced across a register.

use super::vector::Vector;

/// The outcome of [`Kernel::softmax`](super::Kernel::softmax).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoftmaxOutcome {
    /// All scores were finite. They are weights now.
    Finite,
    /// Some score is NaN or infinite. Scores, maxima and sums are unchanged.
    NotFinite,
}

/// Turns scores into weights, as [`Kernel::softmax`](super::Kernel::softmax) defines it.
///
/// # Safety
/// The arguments satisfy the assertions of `Kernel::softmax`. The processor has the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn softmax<S: Vector>(
    scores: *mut f32,
    tokens: usize,
    columns: usize,
    max: *mut f32,
    sum: *mut f32,
    factor: *mut f32,
) -> SoftmaxOutcome {
    // SAFETY: there are `tokens` rows of `columns`, which are whole vectors, as the caller asserted.
    unsafe {
        // x * 0 is NaN if x is NaN or infinite, and the sum stays NaN.
        let zero = S::splat(0.0);
        let mut bad = zero;
        let mut c = 0;
        while c < columns {
            let mut m = S::load(max.add(c));
            for t in 0..tokens {
                let score = S::load(scores.add(t * columns + c));
                bad = S::fma(score, zero, bad);
                m = S::max(m, score);
            }
            // `factor` holds the new maximum until all scores are known to be finite.
            S::store(factor.add(c), m);
            c += S::LANES;
        }
        if S::any_nan(bad) {
            return SoftmaxOutcome::NotFinite;
        }
        c = 0;
        while c < columns {
            let m = S::load(factor.add(c));
            let shrink = exp::<S>(S::sub(S::load(max.add(c)), m));
            let mut l = S::mul(S::load(sum.add(c)), shrink);
            for t in 0..tokens {
                let at = scores.add(t * columns + c);
                let weight = exp::<S>(S::sub(S::load(at), m));
                l = S::add(l, weight);
                S::store(at, weight);
            }
            S::store(max.add(c), m);
            S::store(sum.add(c), l);
            S::store(factor.add(c), shrink);
            c += S::LANES;
        }
        SoftmaxOutcome::Finite
    }
}

/// Returns `exp(x)` for `x <= 0`, `-inf` included, with a relative error below 2e-7. Below -87, where f32 leaves its
/// normal range, the result is 0.
///
/// Source: Cody-Waite reduction and the polynomial of Cephes `expf` (Moshier).
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn exp<S: Vector>(x: S::V) -> S::V {
    const LIMIT: f32 = -87.0;
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    #[allow(clippy::excessive_precision)] // as published
    const POLYNOMIAL: [f32; 6] = [
        1.987_569_150_0e-4,
        1.398_199_950_7e-3,
        8.333_451_907_3e-3,
        4.166_579_589_4e-2,
        1.666_666_545_9e-1,
        5.000_000_120_1e-1,
    ];
    // SAFETY: these are operations on registers, and the processor has the instruction set.
    unsafe {
        let limit = S::splat(LIMIT);
        let clamped = S::max(x, limit);
        let shifted = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(shifted, S::splat(ROUND));
        let r = S::fma(n, S::splat(-0.693_359_4), clamped);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::zero_below(S::add_exponent(p, shifted), x, limit)
    }
}
