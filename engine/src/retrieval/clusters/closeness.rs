//! How close two entries are, and the radius: in integers.
//!
//! Source: SWARM, equations 2 and 3. The distance of two entries is `1 - P`, and an entry is within the radius of
//! another if its distance is below it. Equation 2 divides by the sum over all pairs, so that every distance is about
//! 0.99999. Distances in floats would lose the counts. Here closeness takes the place of `P`, as an integer with 32
//! fractional bits, and the radius is a threshold of closeness: `distance < radius` is `closeness > threshold`.
//!
//! | normalisation | closeness of entry j to entry i | threshold of distance t |
//! |---|---|---|
//! | `Frequency` | `f(i, j)` | `(1 - t) * sum f` |
//! | `Conditional` | `f(i, j) / f(i, i)` | `1 - t` |
//! | `Jaccard` | `f(i, j) / (f(i, i) + f(j, j) - f(i, j))` | `1 - t` |
//!
//! Invariants:
//! - Closeness is exact for `Frequency`, and rounded down to 2^-32 for the others. The mean over a cluster is the sum
//!   of these integers, so the order of addition is free.
//! - Entries without a common query have closeness 0, which is never above a threshold.

use super::coactivation::CoActivation;
use crate::error::{Error, ErrorKind, Result};

/// A closeness of one: one common query, or a ratio of 1.
pub(super) const ONE: u64 = 1 << 32;

/// How the counts of common queries become a distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Normalisation {
    /// Equation 2 of SWARM: the count, divided by the sum over all pairs.
    #[default]
    Frequency,
    /// The probability that a query activates the other entry, if it activates this one.
    Conditional,
    /// The share of the queries that activate both, of those that activate at least one of them.
    Jaccard,
}

impl Normalisation {
    /// Returns the closeness of two entries with `common` common queries: of `other`, which has `other` queries, to the
    /// member of a cluster, which has `member` queries. Both are at least 1.
    pub(super) fn closeness(self, common: u32, member: u32, other: u32) -> u64 {
        let common = u64::from(common);
        match self {
            Self::Frequency => common * ONE,
            Self::Conditional => common * (ONE / u64::from(member)),
            Self::Jaccard => common * ONE / (u64::from(member) + u64::from(other) - common),
        }
    }

    /// Returns the least number of common queries that makes the closeness exceed `threshold`. It is at least 1.
    pub(super) fn least_common(self, threshold: u64, member: u32, other: u32) -> u64 {
        match self {
            Self::Frequency => threshold / ONE + 1,
            Self::Conditional => threshold / (ONE / u64::from(member)) + 1,
            Self::Jaccard => {
                // floor(f * ONE / (sum - f)) > threshold is f * (ONE + threshold + 1) >= (threshold + 1) * sum.
                let (sum, above) = (u64::from(member) + u64::from(other), threshold.saturating_add(1).min(2 * ONE));
                (above * sum).div_ceil(ONE + above)
            }
        }
    }
}

/// The radius of clusters: the threshold that a closeness exceeds within the radius.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterRadius {
    threshold: u64,
}

impl ClusterRadius {
    /// Returns the radius for a distance as the papers write it. Two entries are within the radius if their distance is
    /// below it. The queries of `profile` are all recorded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the distance is not between 0 and 1, NaN included.
    pub fn from_distance(distance: f64, normalisation: Normalisation, profile: &CoActivation) -> Result<Self> {
        if !(0.0..=1.0).contains(&distance) {
            let context = format!("cluster radius: {distance} is not a distance from 0 to 1");
            return Err(Error::new(ErrorKind::InvalidArgument, context));
        }
        let scale = match normalisation {
            Normalisation::Frequency => profile.total() as f64,
            Normalisation::Conditional | Normalisation::Jaccard => 1.0,
        };
        Ok(Self { threshold: ((1.0 - distance) * scale * ONE as f64) as u64 })
    }

    /// Returns the radius for [`Normalisation::Frequency`] within which entries have more than `common` queries in
    /// common.
    #[must_use]
    pub fn above_common(common: u32) -> Self {
        Self { threshold: u64::from(common) * ONE }
    }

    /// Returns the radius of this threshold, in steps of 2^-32.
    pub(super) fn above(threshold: u64) -> Self {
        Self { threshold }
    }

    /// Returns the closeness that entries within the radius exceed, in steps of 2^-32.
    pub(super) fn threshold(self) -> u64 {
        self.threshold
    }

    /// Returns the distance of this radius.
    #[must_use]
    pub fn distance(self, normalisation: Normalisation, profile: &CoActivation) -> f64 {
        let scale = match normalisation {
            Normalisation::Frequency => profile.total().max(1) as f64,
            Normalisation::Conditional | Normalisation::Jaccard => 1.0,
        };
        1.0 - self.threshold as f64 / ONE as f64 / scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Normalisation; 3] = [Normalisation::Frequency, Normalisation::Conditional, Normalisation::Jaccard];

    proptest! {
        #[test]
        fn the_least_common_count_is_where_closeness_exceeds_the_threshold(
            member in 1_u32..300, other in 1_u32..300, threshold in 0_u64..3 * ONE,
            normalisation in prop::sample::select(ALL.to_vec()),
        ) {
            let least = normalisation.least_common(threshold, member, other);
            prop_assert!(least >= 1);
            for common in 0..=member.min(other) {
                let within = normalisation.closeness(common, member, other) > threshold;
                prop_assert_eq!(within, u64::from(common) >= least, "common {}", common);
            }
        }
    }

    #[test]
    fn a_radius_is_a_distance_from_zero_to_one() {
        let mut profile = CoActivation::new(4, 8).unwrap();
        profile.record(&[0, 1, 2]).unwrap();
        profile.record(&[0, 1]).unwrap();
        for wrong in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
            let error = ClusterRadius::from_distance(wrong, Normalisation::Frequency, &profile).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        // Of 13 pairs, entries 0 and 1 have 2: their distance is 1 - 2 / 13.
        let radius = |distance| ClusterRadius::from_distance(distance, Normalisation::Frequency, &profile).unwrap();
        let close = Normalisation::Frequency.closeness(2, 2, 2);
        assert!(close > radius(1.0 - 1.9 / 13.0).threshold());
        assert!(close <= radius(1.0 - 2.1 / 13.0).threshold());
        assert!((radius(0.9).distance(Normalisation::Frequency, &profile) - 0.9).abs() < 1e-9);
        assert_eq!(ClusterRadius::above_common(3).threshold(), 3 * ONE);
    }
}
