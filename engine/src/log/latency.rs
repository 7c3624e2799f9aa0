//! How long parts of reads take, so that a late read can be tried on another copy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Steps of the histogram per doubling.
const STEPS: u32 = 4;
const BUCKETS: usize = 128;
/// Parts that must be counted before any of them is called late.
const SAMPLES_MIN: u64 = 256;
/// Parts at which every bucket is halved, so that old parts fade.
const SAMPLES_MAX: u64 = 65_536;

/// A histogram of the durations of read parts, in microseconds, with four buckets per doubling.
pub(crate) struct Latencies {
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
    /// The share of parts that are not late: `StoreOptions::hedge_percentile`. `None` switches the histogram off.
    share: Option<f64>,
}

impl Latencies {
    pub(crate) fn new(share: Option<f64>) -> Self {
        let share = share.filter(|share| share.is_finite()).map(|share| share.clamp(0.5, 1.0));
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], count: AtomicU64::new(0), share }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.share.is_some()
    }

    /// Counts one part.
    pub(crate) fn add(&self, took: Duration) {
        if self.share.is_none() {
            return;
        }
        let micros = (took.as_secs_f64() * 1e6).max(1.0);
        let at = ((micros.log2() * f64::from(STEPS)) as usize).min(BUCKETS - 1);
        self.buckets[at].fetch_add(1, Ordering::Relaxed);
        if self.count.fetch_add(1, Ordering::Relaxed) + 1 == SAMPLES_MAX {
            self.count.store(0, Ordering::Relaxed);
            let mut left = 0;
            for bucket in &self.buckets {
                let half = bucket.load(Ordering::Relaxed) / 2;
                bucket.store(half, Ordering::Relaxed);
                left += half;
            }
            self.count.fetch_add(left, Ordering::Relaxed);
        }
    }

    /// Returns the duration from which on a part is late, or none before enough parts were counted.
    pub(crate) fn late(&self) -> Option<Duration> {
        let share = self.share?;
        let count = self.count.load(Ordering::Relaxed);
        if count < SAMPLES_MIN {
            return None;
        }
        let wanted = (count as f64 * share) as u64;
        let mut seen = 0;
        let at = self.buckets.iter().position(|bucket| {
            seen += bucket.load(Ordering::Relaxed);
            seen >= wanted
        });
        let steps = (at.unwrap_or(BUCKETS - 1) + 1) as f64 / f64::from(STEPS);
        Some(Duration::from_secs_f64(steps.exp2() * 1e-6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_late_above_the_percentile() {
        let latencies = Latencies::new(Some(0.99));
        for at in 0..2000_u64 {
            latencies.add(Duration::from_micros(if at % 200 == 0 { 50_000 } else { 900 }));
        }
        let late = latencies.late().expect("enough parts were counted");
        assert!(late > Duration::from_micros(900) && late < Duration::from_micros(1300), "{late:?}");
        (0..200_000).for_each(|_| latencies.add(Duration::from_millis(10)));
        assert!(latencies.late().expect("old parts fade") >= Duration::from_millis(10));
        assert!(Latencies::new(None).late().is_none() && Latencies::new(Some(0.9)).late().is_none());
    }
}
