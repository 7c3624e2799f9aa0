//! When a read was with the devices, and for how long somebody waited for it. For reports only: nothing is decided by it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Default)]
pub(super) struct Times {
    begun: OnceLock<Instant>,
    /// Nanoseconds from there to the end of the last part.
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

    /// A part has ended.
    pub(super) fn ended(&self) {
        if let Some(begun) = self.begun.get() {
            self.ended_ns.fetch_max(nanoseconds(*begun), Ordering::Relaxed);
        }
    }

    /// Counts the time until what it returns is dropped.
    pub(super) fn wait(&self) -> Waiting<'_> {
        Waiting { times: self, since: Instant::now() }
    }

    /// From submission to the end of the last part that has ended; none before submission.
    pub(super) fn at_devices(&self) -> Option<(Instant, Instant)> {
        let begun = *self.begun.get()?;
        Some((begun, begun + Duration::from_nanos(self.ended_ns.load(Ordering::Relaxed))))
    }

    pub(super) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

pub(super) struct Waiting<'a> {
    times: &'a Times,
    since: Instant,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.times.waited_ns.fetch_add(nanoseconds(self.since), Ordering::Relaxed);
    }
}
