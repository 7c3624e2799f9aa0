//! The rate at which the background moves frames. A writer that waits for space suspends the limit.

use crate::metrics::EventCount;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often a waiting thread checks whether to stop, when nothing wakes it. Dropping a handle of the store does not.
const POLL: Duration = Duration::from_millis(100);

/// A rate limit with urgent callers that suspend it.
#[derive(Default)]
pub(crate) struct RateLimiter {
    /// Bytes per second, at most. `None` for no limit.
    rate: Option<u64>,
    /// How many [`UrgentGuard`]s live.
    urgent: AtomicUsize,
    changed: EventCount,
}

/// Suspends the limit while it lives.
pub(crate) struct UrgentGuard<'a>(&'a RateLimiter);

impl Drop for UrgentGuard<'_> {
    fn drop(&mut self) {
        self.0.urgent.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RateLimiter {
    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate: rate.map(|rate| rate.max(1)), ..Self::default() }
    }

    /// Suspends the limit while the guard lives.
    pub(crate) fn suspend(&self) -> UrgentGuard<'_> {
        self.urgent.fetch_add(1, Ordering::SeqCst);
        self.changed.notify();
        UrgentGuard(self)
    }

    /// Wakes waiting threads, so that they check whether to stop.
    pub(crate) fn wake(&self) {
        self.changed.notify();
    }

    /// Returns when `bytes` moved since `start` are within the rate.
    fn due(&self, start: Instant, bytes: u64) -> Option<Instant> {
        let rate = self.rate?;
        start.checked_add(Duration::from_millis((u128::from(bytes) * 1000 / u128::from(rate)).min(1 << 40) as u64))
    }

    /// Waits until `bytes` moved since `start` are within the rate, a guard lives, or `is_stopping`.
    pub(crate) fn wait(&self, start: Instant, bytes: u64, is_stopping: impl Fn() -> bool) {
        let Some(due) = self.due(start, bytes) else { return };
        loop {
            let seen = self.changed.epoch();
            let now = Instant::now();
            if is_stopping() || self.urgent.load(Ordering::SeqCst) > 0 || now >= due {
                return;
            }
            self.changed.wait_past(seen, Some(due.min(now + POLL)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_says_when_the_next_bytes_are_due() {
        let start = Instant::now();
        let after = |rate: u64, bytes| RateLimiter::new(Some(rate)).due(start, bytes).map(|due| due - start);
        assert_eq!(after(1 << 20, 3 << 19), Some(Duration::from_millis(1500)));
        assert_eq!(after(1 << 20, 0), Some(Duration::ZERO));
        // Without a rate there is no wait. A rate of 0 counts as 1, and no sum overflows.
        assert_eq!(RateLimiter::new(None).due(start, u64::MAX), None);
        assert_eq!(after(0, 2), Some(Duration::from_secs(2)));
        assert!(after(1, u64::MAX).is_some_and(|rest| rest > Duration::from_secs(1 << 20)));
    }

    #[test]
    fn a_wait_ends_for_urgent_callers_and_for_the_stop() {
        let limiter = RateLimiter::new(Some(1));
        let urgent = limiter.suspend();
        limiter.wait(Instant::now(), 1 << 40, || false);
        drop(urgent);
        limiter.wait(Instant::now(), 1 << 40, || true);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.wait(Instant::now(), 1 << 40, || false));
            let _urgent = limiter.suspend();
            assert!(waiting.join().is_ok());
        });
    }
}
