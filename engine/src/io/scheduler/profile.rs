//! What a device is expected to take for a read: seconds per request, seconds per byte, and what is queued. Probe when
//! a store is created on it, refreshed from what reads really took.
//!
//! A batch of `n` requests and `b` bytes takes about `n * request_s + b * byte_s`: one device under load ends a request
//! every `request_s`, or is held up by bytes. A single request takes `latency_s` on top.

use crate::metrics::lock;
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Share of a new sample in the running estimate.
const SHARE: f64 = 0.15;
/// A sample outside of this factor counts as one at its edge: one hiccup does not turn the estimate over.
const SAMPLE_RANGE: f64 = 4.0;
/// Reads that fail one after the other until a device is avoided, and for how long.
const FAILURES_MAX: usize = 4;
const AVOIDED_FOR: Duration = Duration::from_secs(2);
/// Bounds of the best request size.
const REQUEST_BYTES: std::ops::RangeInclusive<usize> = (64 << 10)..=(512 << 10);
/// What a transfer may lose to the cost of its requests at the best request size.
const REQUEST_SHARE: f64 = 1.0 / 16.0;

/// The estimate of a device as they stand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ProfileStatus {
    /// Microseconds of a single small read.
    pub latency_us: f64,
    /// Microseconds that each request of a batch adds.
    pub request_us: f64,
    /// Bytes per second of large reads.
    pub bytes_per_s: f64,
    /// Neighbours this far apart are read as one request: the gap costs less than another request.
    pub gap_bytes: usize,
    /// Reads are cut to this size at most.
    pub best_request_bytes: usize,
    /// Bytes of reads that are queued or under way.
    pub queued_bytes: u64,
    /// Samples that the estimate rest on, the measurement at creation not counted.
    pub samples: u64,
    /// Reads failed here of late: copies on other devices are read first.
    pub avoided: bool,
}

#[derive(Clone, Copy, Debug)]
struct DeviceEstimate {
    latency_s: f64,
    request_s: f64,
    byte_s: f64,
    samples: u64,
    /// The end of the batch that ended last: the next one was not served before.
    last_end: Option<Instant>,
    avoided_until: Option<Instant>,
}

/// The live profile of a device.
pub(crate) struct Profile {
    estimate: Mutex<DeviceEstimate>,
    queued_bytes: AtomicU64,
    queued_requests: AtomicUsize,
    failures: AtomicUsize,
    /// Simulated devices keep their estimate: their time is not ours.
    live: bool,
}

impl Default for Profile {
    /// Of a device that is not there.
    fn default() -> Self {
        Self::new(false)
    }
}

/// Read batches measured at creation: what a small read, many small ones, and large ones took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probe {
    pub(crate) single: Duration,
    pub(crate) small: (usize, Duration),
    pub(crate) large: (u64, Duration),
}

impl Profile {
    /// DeviceEstimate of an ordinary NVMe drive, until there are better ones.
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

    pub(crate) fn measured(&self, measured: &Probe) {
        let byte_s = (measured.large.1.as_secs_f64() / measured.large.0.max(1) as f64).clamp(1e-11, 1e-5);
        let small = measured.small.1.as_secs_f64() / measured.small.0.max(1) as f64;
        let mut estimate = lock(&self.estimate);
        estimate.byte_s = byte_s;
        estimate.request_s = (small - byte_s * 4096.0).clamp(5e-7, 1e-2);
        estimate.latency_s = measured.single.as_secs_f64().clamp(1e-6, 1.0);
    }

    /// Takes note of requests on their way.
    pub(crate) fn queue(&self, requests: usize, bytes: u64) {
        self.queued_requests.fetch_add(requests, Ordering::Relaxed);
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn unqueue(&self, requests: usize, bytes: u64) {
        self.queued_requests.fetch_sub(requests, Ordering::Relaxed);
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A read failed.
    pub(crate) fn failed(&self) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX && self.live {
            lock(&self.estimate).avoided_until = Some(Instant::now() + AVOIDED_FOR);
        }
    }

    /// A batch of reads without failure, submitted at `start`, ended now.
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

    /// Seconds until what is queued is done, seconds per request and per byte, and whether to avoid the device.
    pub(crate) fn load(&self) -> (f64, f64, f64, bool) {
        let estimate = *lock(&self.estimate);
        let requests = self.queued_requests.load(Ordering::Relaxed) as f64;
        let bytes = self.queued_bytes.load(Ordering::Relaxed) as f64;
        let avoided = self.live && estimate.avoided_until.is_some_and(|until| Instant::now() < until);
        (requests * estimate.request_s + bytes * estimate.byte_s, estimate.request_s, estimate.byte_s, avoided)
    }

    /// How long a batch that is queued now takes at most, by the estimate: for telling what is late.
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
    /// The gap that takes as long as a request, in whole pages; no more than a small piece, so that a wrong figure
    /// costs little.
    fn gap_bytes(&self) -> usize {
        let bytes = self.request_s / self.byte_s;
        (bytes.min(65536.0) as usize) / 4096 * 4096
    }

    /// The smallest power of two at which requests cost a small share of the transfer.
    fn best_request_bytes(&self) -> usize {
        let bytes = (self.request_s / self.byte_s / REQUEST_SHARE).min(1e9) as usize;
        bytes.next_power_of_two().clamp(*REQUEST_BYTES.start(), *REQUEST_BYTES.end())
    }

    fn sample(&mut self, took_s: f64, requests: usize, bytes: u64) {
        let (by_request, by_byte) = (requests as f64 * self.request_s, bytes as f64 * self.byte_s);
        self.samples += 1;
        let share = if self.samples < 8 { 0.4 } else { SHARE };
        if requests < 4 {
            // Too few to tell from the latency.
            let latency = (took_s - by_byte).clamp(self.latency_s / SAMPLE_RANGE, self.latency_s * SAMPLE_RANGE);
            self.latency_s += share * (latency.max(1e-7) - self.latency_s);
            return;
        }
        let expected = by_request + by_byte;
        let ratio = (took_s / expected).clamp(1.0 / SAMPLE_RANGE, SAMPLE_RANGE);
        // What has more part in the time has more part in its error.
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
    fn figures_find_the_speed_of_a_device() {
        for (request_s, byte_s) in [(6e-6, 4e-9), (3e-6, 0.3e-9), (60e-6, 16e-9)] {
            let mut estimate = estimate();
            for round in 0..400 {
                // Small and large batches in turn.
                let (requests, bytes) = if round % 2 == 0 { (64, 64 * 4096) } else { (16, 16 << 17) };
                estimate.sample(requests as f64 * request_s + bytes as f64 * byte_s, requests, bytes);
            }
            assert!((estimate.byte_s / byte_s - 1.0).abs() < 0.05, "{estimate:?}");
            assert!((estimate.request_s / request_s - 1.0).abs() < 0.3, "{estimate:?}");
        }
    }

    #[test]
    fn one_hiccup_does_not_turn_the_figures_over() {
        let mut estimate = estimate();
        for _ in 0..50 {
            estimate.sample(64.0 * 6e-6 + 4e6 * 0.5e-9, 64, 4_000_000);
        }
        let before = estimate.byte_s;
        estimate.sample(30.0, 64, 4_000_000);
        assert!(estimate.byte_s < before * 1.6);
    }

    #[test]
    fn gaps_and_sizes_follow_from_the_figures() {
        let mut estimate = estimate();
        (estimate.request_s, estimate.byte_s) = (6e-6, 0.3e-9);
        assert_eq!((estimate.gap_bytes(), estimate.best_request_bytes()), (16384, 512 << 10));
        (estimate.request_s, estimate.byte_s) = (6e-6, 4e-9);
        assert_eq!((estimate.gap_bytes(), estimate.best_request_bytes()), (0, 64 << 10));
    }

    #[test]
    fn a_device_that_fails_is_avoided_until_it_answers() {
        let profile = Profile::new(true);
        (0..FAILURES_MAX).for_each(|_| profile.failed());
        assert!(profile.status().avoided);
        lock(&profile.estimate).avoided_until = Some(Instant::now());
        assert!(!profile.status().avoided);
        profile.failed();
        assert!(profile.status().avoided, "one more is enough while none succeeded");
        profile.ended(Instant::now(), 8, 1 << 20);
        lock(&profile.estimate).avoided_until = None;
        profile.failed();
        assert!(!profile.status().avoided);
    }

    #[test]
    fn the_queue_counts() {
        let profile = Profile::new(false);
        profile.queue(10, 1_000_000);
        let (queued, request, byte, _) = profile.load();
        assert!((queued - (10.0 * request + 1e6 * byte)).abs() < 1e-9);
        profile.unqueue(10, 1_000_000);
        profile.ended(Instant::now(), 10, 1_000_000);
        assert_eq!((profile.load().0, profile.status().samples), (0.0, 0));
    }
}
