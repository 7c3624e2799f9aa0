//! How long a read was at the devices, and how long callers waited for it. For reports only.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The times of one read.
#[derive(Default)]
pub(super) struct Times {
    begun: OnceLock<Instant>,
    /// Nanoseconds from `begun` to the end of the last part.
    ended_ns: AtomicU64,
    waited_ns: AtomicU64,
}

pub(super) fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Times {
    pub(super) fn begun(&self) {
        let _ = self.begun.set(Instant::now());
    }

    /// Notes that a part has ended.
    pub(super) fn ended(&self) {
        if let Some(begun) = self.begun.get() {
            self.ended_ns.fetch_max(nanoseconds(*begun), Ordering::Relaxed);
        }
    }

    /// Counts the time until the guard is dropped.
    pub(super) fn wait(&self) -> WaitTimer<'_> {
        WaitTimer { times: self, since: Instant::now() }
    }

    /// Counts time that a caller waited.
    pub(super) fn waited_for(&self, time: Duration) {
        self.waited_ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the submission and the end of the last part that has ended, or none before submission.
    pub(super) fn at_devices(&self) -> Option<(Instant, Instant)> {
        let begun = *self.begun.get()?;
        Some((begun, begun + Duration::from_nanos(self.ended_ns.load(Ordering::Relaxed))))
    }

    pub(super) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

/// Counts the time it lives as waiting.
pub(super) struct WaitTimer<'a> {
    times: &'a Times,
    since: Instant,
}

impl Drop for WaitTimer<'_> {
    fn drop(&mut self) {
        self.times.waited_for(self.since.elapsed());
    }
}
