//! How fast the background moves frames: no faster than it was told to, unless somebody waits for the room.

use crate::metrics::EventCount;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The pace of the background, and who is in a hurry.
#[derive(Default)]
pub(crate) struct RateLimiter {
    /// Bytes moved per second, at most.
    rate: Option<u64>,
    waiting: AtomicUsize,
    changed: EventCount,
}

/// Somebody waits for room as long as this lives: nobody rests.
pub(crate) struct UrgentGuard<'a>(&'a RateLimiter);

impl Drop for UrgentGuard<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RateLimiter {
    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate: rate.map(|rate| rate.max(1)), ..Self::default() }
    }

    pub(crate) fn hurry(&self) -> UrgentGuard<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.changed.notify();
        UrgentGuard(self)
    }

    /// Ends a rest, so that whoever rests looks around.
    pub(crate) fn wake(&self) {
        self.changed.notify();
    }

    /// When `bytes` moved since `start` are no longer more than the rate allows.
    fn due(&self, start: Instant, bytes: u64) -> Option<Instant> {
        let rate = self.rate?;
        start.checked_add(Duration::from_millis((u128::from(bytes) * 1000 / u128::from(rate)).min(1 << 40) as u64))
    }

    /// Rests after moving `bytes` since `start`, until the rate allows more, somebody is in a hurry, or `ends`.
    pub(crate) fn rest(&self, start: Instant, bytes: u64, ends: impl Fn() -> bool) {
        let Some(due) = self.due(start, bytes) else { return };
        loop {
            let seen = self.changed.epoch();
            if ends() || self.waiting.load(Ordering::SeqCst) > 0 || Instant::now() >= due {
                return;
            }
            self.changed.wait_past(seen, Some(due));
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
        // No rate is no rest; a rate of nothing moves on all the same, and no sum is too large.
        assert_eq!(RateLimiter::new(None).due(start, u64::MAX), None);
        assert_eq!(after(0, 2), Some(Duration::from_secs(2)));
        assert!(after(1, u64::MAX).is_some_and(|rest| rest > Duration::from_secs(1 << 20)));
    }

    #[test]
    fn a_hurry_and_an_end_end_a_rest() {
        let pace = RateLimiter::new(Some(1));
        let hurry = pace.hurry();
        pace.rest(Instant::now(), 1 << 40, || false);
        drop(hurry);
        pace.rest(Instant::now(), 1 << 40, || true);
        std::thread::scope(|scope| {
            let resting = scope.spawn(|| pace.rest(Instant::now(), 1 << 40, || false));
            let _hurry = pace.hurry();
            assert!(resting.join().is_ok());
        });
    }
}
