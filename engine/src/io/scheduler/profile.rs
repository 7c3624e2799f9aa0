//! The profile of a device: how long a read is expected to take, and what is queued.
//!
//! Model: a batch of `n` requests and `b` bytes takes `n * request_s + b * byte_s` seconds on a busy device. A single
//! request takes `latency_s` on top.
//!
//! How the estimate follows the device:
//! 1. [`Profile::new`] begins with an ordinary NVMe drive, also when a store is opened again.
//! 2. [`Profile::measured`] replaces the estimate by the [`Probe`] that a store makes when it takes a new device.
//! 3. [`Profile::queue`] and [`Profile::unqueue`] count the reads that are queued or in flight.
//! 4. [`Profile::ended`] takes each batch of reads as a sample. The part of the model that explains more of the time
//!    takes more of the error.
//! 5. [`Profile::failed`] counts failed reads. After several in a row, reads avoid the device for a while.
//!
//! Invariants:
//! - A sample changes the estimate by a bounded factor, so one slow read does not ruin it.
//! - The estimates stay within fixed bounds and are never zero.
//! - A simulated device keeps its first estimate, because its time says nothing.
//!
//! The planner asks for [`Profile::load`] and the sizes of requests. The lock on the estimate is a leaf.

use crate::metrics::lock;
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The share of a new sample in the running estimate.
const SHARE: f64 = 0.15;
/// The largest factor between a sample and the estimate. A sample beyond it counts as one at this factor.
const SAMPLE_RANGE: f64 = 4.0;
/// Failed reads in a row after which reads avoid the device.
const FAILURES_MAX: usize = 4;
/// How long reads avoid a device that failed.
const AVOIDED_FOR: Duration = Duration::from_secs(2);
/// Bounds of the best request size.
const REQUEST_BYTES: std::ops::RangeInclusive<usize> = (64 << 10)..=(512 << 10);
/// The share of a transfer that its requests may cost at the best request size.
const REQUEST_SHARE: f64 = 1.0 / 16.0;

/// The estimate of a device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ProfileStatus {
    /// Microseconds of a single small read.
    pub latency_us: f64,
    /// Microseconds that each request of a batch adds.
    pub request_us: f64,
    /// Bytes per second of large reads.
    pub bytes_per_s: f64,
    /// Blocks at most this many bytes apart are read with one request, because the gap costs less than a request.
    pub gap_bytes: usize,
    /// The most bytes of one request.
    pub best_request_bytes: usize,
    /// Bytes of reads that are queued or in flight.
    pub queued_bytes: u64,
    /// Number of samples since the store was opened. The measurement at creation does not count.
    pub samples: u64,
    /// True if reads failed lately. Copies on other devices are then read first.
    pub avoided: bool,
}

#[derive(Clone, Copy, Debug)]
struct DeviceEstimate {
    latency_s: f64,
    request_s: f64,
    byte_s: f64,
    samples: u64,
    /// The end of the batch that ended last. The device did not serve the next batch before that.
    last_end: Option<Instant>,
    avoided_until: Option<Instant>,
}

/// The live profile of a device.
pub(crate) struct Profile {
    estimate: Mutex<DeviceEstimate>,
    queued_bytes: AtomicU64,
    queued_requests: AtomicUsize,
    failures: AtomicUsize,
    /// False for simulated devices, which keep their first estimate.
    live: bool,
}

impl Default for Profile {
    /// Returns the profile of a device that is absent.
    fn default() -> Self {
        Self::new(false)
    }
}

/// The durations of the reads that a store measures when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probe {
    /// The duration of a single read of a page.
    pub(crate) single: Duration,
    /// The number of page reads in a batch, and its duration.
    pub(crate) small: (usize, Duration),
    /// The bytes of a batch of large reads, and its duration.
    pub(crate) large: (u64, Duration),
}

impl Profile {
    /// Returns a profile that begins with the estimate of an ordinary NVMe drive.
    pub(crate) fn new(live: bool) -> Self {
        let estimate = DeviceEstimate {
            latency_s: 80e-6,
            request_s: 6e-6,
            byte_s: 0.5e-9,
            samples: 0,
            last_end: None,
            avoided_until: None,
        };
        Self {
            estimate: Mutex::new(estimate),
            queued_bytes: AtomicU64::new(0),
            queued_requests: AtomicUsize::new(0),
            failures: AtomicUsize::new(0),
            live,
        }
    }

    /// Replaces the estimate by measurements.
    pub(crate) fn measured(&self, measured: &Probe) {
        let byte_s = (measured.large.1.as_secs_f64() / measured.large.0.max(1) as f64).clamp(1e-11, 1e-5);
        let small = measured.small.1.as_secs_f64() / measured.small.0.max(1) as f64;
        let mut estimate = lock(&self.estimate);
        estimate.byte_s = byte_s;
        estimate.request_s = (small - byte_s * 4096.0).clamp(5e-7, 1e-2);
        estimate.latency_s = measured.single.as_secs_f64().clamp(1e-6, 1.0);
    }

    /// Counts requests that were submitted.
    pub(crate) fn queue(&self, requests: usize, bytes: u64) {
        self.queued_requests.fetch_add(requests, Ordering::Relaxed);
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Removes requests that completed from the count.
    pub(crate) fn unqueue(&self, requests: usize, bytes: u64) {
        self.queued_requests.fetch_sub(requests, Ordering::Relaxed);
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts a read that failed.
    pub(crate) fn failed(&self) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX && self.live {
            lock(&self.estimate).avoided_until = Some(Instant::now() + AVOIDED_FOR);
        }
    }

    /// Samples a batch of reads that was submitted at `start` and completed now without a failure.
    pub(crate) fn ended(&self, start: Instant, requests: usize, bytes: u64) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
        if !self.live || requests == 0 {
            return;
        }
        let now = Instant::now();
        let mut estimate = lock(&self.estimate);
        let begun = estimate.last_end.map_or(start, |last| last.max(start));
        estimate.last_end = Some(now);
        estimate.sample(now.saturating_duration_since(begun).as_secs_f64(), requests, bytes);
    }

    /// Returns the seconds until the queued reads complete, the seconds per request and per byte, and whether to avoid
    /// the device.
    pub(crate) fn load(&self) -> (f64, f64, f64, bool) {
        let estimate = *lock(&self.estimate);
        let requests = self.queued_requests.load(Ordering::Relaxed) as f64;
        let bytes = self.queued_bytes.load(Ordering::Relaxed) as f64;
        let avoided = self.live && estimate.avoided_until.is_some_and(|until| Instant::now() < until);
        (requests * estimate.request_s + bytes * estimate.byte_s, estimate.request_s, estimate.byte_s, avoided)
    }

    /// Returns the expected time until the reads that are queued now complete. A read that takes much longer is late.
    pub(crate) fn expected(&self) -> Duration {
        let (queued, ..) = self.load();
        Duration::from_secs_f64((lock(&self.estimate).latency_s + queued).min(3600.0))
    }

    pub(crate) fn gap_bytes(&self) -> usize {
        lock(&self.estimate).gap_bytes()
    }

    pub(crate) fn best_request_bytes(&self) -> usize {
        lock(&self.estimate).best_request_bytes()
    }

    pub(crate) fn status(&self) -> ProfileStatus {
        let (.., avoided) = self.load();
        let estimate = *lock(&self.estimate);
        ProfileStatus {
            latency_us: estimate.latency_s * 1e6,
            request_us: estimate.request_s * 1e6,
            bytes_per_s: 1.0 / estimate.byte_s,
            gap_bytes: estimate.gap_bytes(),
            best_request_bytes: estimate.best_request_bytes(),
            queued_bytes: self.queued_bytes.load(Ordering::Relaxed),
            samples: estimate.samples,
            avoided,
        }
    }
}

impl DeviceEstimate {
    /// Returns the gap that takes as long to read as a request, in whole pages. It is at most 64 KiB, so that a wrong
    /// estimate costs little.
    fn gap_bytes(&self) -> usize {
        let bytes = self.request_s / self.byte_s;
        (bytes.min(65536.0) as usize) / 4096 * 4096
    }

    /// Returns the smallest power of two at which requests cost at most [`REQUEST_SHARE`] of the transfer, within
    /// [`REQUEST_BYTES`].
    fn best_request_bytes(&self) -> usize {
        let bytes = (self.request_s / self.byte_s / REQUEST_SHARE).min(1e9) as usize;
        bytes.next_power_of_two().clamp(*REQUEST_BYTES.start(), *REQUEST_BYTES.end())
    }

    /// Moves the estimate towards a batch that took `took_s` seconds.
    fn sample(&mut self, took_s: f64, requests: usize, bytes: u64) {
        let (by_request, by_byte) = (requests as f64 * self.request_s, bytes as f64 * self.byte_s);
        self.samples += 1;
        let share = if self.samples < 8 { 0.4 } else { SHARE };
        if requests < 4 {
            // So few requests show the latency, not the cost per request.
            let latency = (took_s - by_byte).clamp(self.latency_s / SAMPLE_RANGE, self.latency_s * SAMPLE_RANGE);
            self.latency_s += share * (latency.max(1e-7) - self.latency_s);
            return;
        }
        let expected = by_request + by_byte;
        let ratio = (took_s / expected).clamp(1.0 / SAMPLE_RANGE, SAMPLE_RANGE);
        // The larger term of the expected time takes the larger part of the error.
        let part = by_request / expected;
        self.request_s = (self.request_s * (1.0 + share * part * (ratio - 1.0))).clamp(5e-7, 1e-2);
        self.byte_s = (self.byte_s * (1.0 + share * (1.0 - part) * (ratio - 1.0))).clamp(1e-11, 1e-5);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate() -> DeviceEstimate {
        *lock(&Profile::new(true).estimate)
    }

    #[test]
    fn the_estimate_finds_the_speed_of_a_device() {
        for (request_s, byte_s) in [(6e-6, 4e-9), (3e-6, 0.3e-9), (60e-6, 16e-9)] {
            let mut estimate = estimate();
            for round in 0..400 {
                // Small and large batches alternate.
                let (requests, bytes) = if round % 2 == 0 { (64, 64 * 4096) } else { (16, 16 << 17) };
                estimate.sample(requests as f64 * request_s + bytes as f64 * byte_s, requests, bytes);
            }
            assert!((estimate.byte_s / byte_s - 1.0).abs() < 0.05, "{estimate:?}");
            assert!((estimate.request_s / request_s - 1.0).abs() < 0.3, "{estimate:?}");
        }
    }

    #[test]
    fn one_slow_batch_does_not_ruin_the_estimate() {
        let mut estimate = estimate();
        for _ in 0..50 {
            estimate.sample(64.0 * 6e-6 + 4e6 * 0.5e-9, 64, 4_000_000);
        }
        let before = estimate.byte_s;
        estimate.sample(30.0, 64, 4_000_000);
        assert!(estimate.byte_s < before * 1.6);
    }

    #[test]
    fn gaps_and_request_sizes_follow_from_the_estimate() {
        let mut estimate = estimate();
        (estimate.request_s, estimate.byte_s) = (6e-6, 0.3e-9);
        assert_eq!((estimate.gap_bytes(), estimate.best_request_bytes()), (16384, 512 << 10));
        (estimate.request_s, estimate.byte_s) = (6e-6, 4e-9);
        assert_eq!((estimate.gap_bytes(), estimate.best_request_bytes()), (0, 64 << 10));
    }

    #[test]
    fn a_failing_device_is_avoided_until_it_answers() {
        let profile = Profile::new(true);
        (0..FAILURES_MAX).for_each(|_| profile.failed());
        assert!(profile.status().avoided);
        lock(&profile.estimate).avoided_until = Some(Instant::now());
        assert!(!profile.status().avoided);
        profile.failed();
        assert!(profile.status().avoided, "one more failure is enough while no read succeeded");
        profile.ended(Instant::now(), 8, 1 << 20);
        lock(&profile.estimate).avoided_until = None;
        profile.failed();
        assert!(!profile.status().avoided);
    }

    #[test]
    fn queued_reads_count_as_load() {
        let profile = Profile::new(false);
        profile.queue(10, 1_000_000);
        let (queued, request, byte, _) = profile.load();
        assert!((queued - (10.0 * request + 1e6 * byte)).abs() < 1e-9);
        profile.unqueue(10, 1_000_000);
        profile.ended(Instant::now(), 10, 1_000_000);
        assert_eq!((profile.load().0, profile.status().samples), (0.0, 0));
    }
}
