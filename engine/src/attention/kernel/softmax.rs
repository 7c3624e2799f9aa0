//! Pass 2: running maxima, weights and their sums.
#![allow(unsafe_code)]

use super::Scores;
use super::simd::Simd;

/// # Safety
/// As asserted by `Kernel::softmax`; the CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(
    scores: *mut f32,
    tokens: usize,
    columns: usize,
    max: *mut f32,
    sum: *mut f32,
    factor: *mut f32,
) -> Scores {
    // SAFETY: `tokens` rows of `columns` (whole vectors), as the caller says.
    unsafe {
        // x * 0 is NaN for NaN and the infinities, and the sum keeps it.
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
            // The new maximum waits here until all scores have proved finite.
            S::store(factor.add(c), m);
            c += S::LANES;
        }
        if S::any_nan(bad) {
            return Scores::NotFinite;
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
        Scores::Finite
    }
}

/// `exp(x)` for `x <= 0` (`-inf` too), relative error below 2e-7; 0 below -87 (where f32 leaves its normal range).
///
/// Cody-Waite reduction and the polynomial of Cephes `expf` (Moshier).
#[inline(always)]
unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    const LIMIT: f32 = -87.0;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
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
    // SAFETY: arithmetic only; the CPU has the instruction set.
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
