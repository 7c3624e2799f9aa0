//! The state of a store's background threads: the threads, whether they stop, and how fast they work.

use super::rate_limiter::{RateLimiter, UrgentGuard};
use crate::error::Result;
use crate::metrics::{EventCount, lock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, ThreadId};
use std::time::Instant;

/// The background of a store: a maintenance thread, and a thread of lazy commits.
///
/// Invariants:
/// - At most one maintenance thread runs. It asks [`Self::is_stopping`] between steps, so it ends soon after
///   [`Self::stop`], or after every handle of the store was dropped.
/// - One caller at a time closes the store ([`Self::closing`]).
/// - `next_expiry_check_ms` is `u64::MAX` while the thread works or when no sequence expires. A handle that closes with
///   an earlier end wakes the thread.
pub(crate) struct Background {
    rate_limiter: RateLimiter,
    maintenance_thread: Mutex<Option<JoinHandle<()>>>,
    /// The last maintenance thread that was started.
    last_started: Mutex<Option<ThreadId>>,
    closing: Arc<Mutex<()>>,
    lazy_thread: Mutex<Option<JoinHandle<()>>>,
    stopping: AtomicBool,
    /// Returns whether one owner of the store is left. Set when the first maintenance thread starts.
    has_one_owner: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
    /// In milliseconds since 1970.
    next_expiry_check_ms: AtomicU64,
}

impl Background {
    /// Returns a background that runs no maintenance yet. `rate` is in bytes moved per second, `None` for no limit.
    pub(crate) fn new(rate: Option<u64>, lazy_thread: Option<JoinHandle<()>>) -> Self {
        Self {
            rate_limiter: RateLimiter::new(rate),
            maintenance_thread: Mutex::default(),
            last_started: Mutex::default(),
            closing: Arc::default(),
            lazy_thread: Mutex::new(lazy_thread),
            stopping: AtomicBool::new(false),
            has_one_owner: OnceLock::new(),
            next_expiry_check_ms: AtomicU64::new(u64::MAX),
        }
    }

    /// Sets how to find out whether one owner of the store is left. The first call counts.
    pub(crate) fn watch_owners(&self, has_one: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.has_one_owner.set(Box::new(has_one));
    }

    /// Starts the maintenance thread that `spawn` makes, unless there is one.
    ///
    /// # Errors
    /// The errors of `spawn`.
    pub(crate) fn start(&self, spawn: impl FnOnce() -> Result<JoinHandle<()>>) -> Result<()> {
        let mut thread = lock(&self.maintenance_thread);
        if thread.is_none() {
            self.stopping.store(false, Ordering::Relaxed);
            let started = spawn()?;
            *lock(&self.last_started) = Some(started.thread().id());
            *thread = Some(started);
        }
        Ok(())
    }

    /// Returns the lock that a caller holds while it closes the store.
    pub(crate) fn closing(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.closing)
    }

    /// Returns whether the caller is the maintenance thread.
    pub(crate) fn is_maintenance_thread(&self) -> bool {
        *lock(&self.last_started) == Some(std::thread::current().id())
    }

    /// Returns whether the maintenance thread is to end: the store is being closed, or the thread is the caller and
    /// holds the store alone.
    pub(crate) fn is_stopping(&self) -> bool {
        let is_alone = || self.has_one_owner.get().is_some_and(|has_one| has_one()) && self.is_maintenance_thread();
        self.stopping.load(Ordering::Relaxed) || is_alone()
    }

    /// Ends the maintenance thread and waits for it. `wake` is what it waits on.
    pub(crate) fn stop(&self, wake: &EventCount) {
        let thread = {
            let mut thread = lock(&self.maintenance_thread);
            self.stopping.store(true, Ordering::Relaxed);
            thread.take()
        };
        wake.notify();
        self.rate_limiter.wake();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }

    /// Forgets the threads, in a process that does not have them: a child of the one that opened the store.
    pub(crate) fn forget_threads(&self) {
        std::mem::forget(lock(&self.maintenance_thread).take());
        std::mem::forget(lock(&self.lazy_thread).take());
    }

    /// Waits for the thread of lazy commits, which ends with the committer.
    pub(crate) fn join_lazy(&self) {
        if let Some(thread) = lock(&self.lazy_thread).take() {
            let _ = thread.join();
        }
    }

    /// Suspends the rate limit while the guard lives.
    pub(crate) fn urgent(&self) -> UrgentGuard<'_> {
        self.rate_limiter.suspend()
    }

    /// Waits until `bytes` moved since `start` are within the rate, or the background stops.
    pub(crate) fn limit_rate(&self, start: Instant, bytes: u64) {
        self.rate_limiter.wait(start, bytes, || self.is_stopping());
    }

    /// Sets when the thread looks for expired sequences next, in milliseconds since 1970. `None`: it does not, or does
    /// now.
    pub(crate) fn set_next_expiry_check(&self, at_ms: Option<u64>) {
        self.next_expiry_check_ms.store(at_ms.unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Returns whether a sequence that ends at `end_ms` ends before the thread looks next.
    pub(crate) fn misses_expiry(&self, end_ms: u64) -> bool {
        end_ms < self.next_expiry_check_ms.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn background() -> Background {
        Background::new(None, None)
    }

    #[test]
    fn stop_ends_the_thread_and_start_begins_again() {
        let (background, wake) = (Arc::new(background()), Arc::new(EventCount::default()));
        for _ in 0..2 {
            let (own, event) = (Arc::clone(&background), Arc::clone(&wake));
            let run = move || {
                while !own.is_stopping() {
                    let seen = event.epoch();
                    if !own.is_stopping() {
                        event.wait_past(seen, None);
                    }
                }
            };
            background.start(|| Ok(std::thread::spawn(run))).unwrap();
            background.stop(&wake);
            assert!(background.is_stopping() && lock(&background.maintenance_thread).is_none());
        }
    }

    #[test]
    fn an_expiry_is_missed_when_it_is_before_the_next_check() {
        let background = background();
        assert!(background.misses_expiry(5), "no check is due");
        background.set_next_expiry_check(Some(10));
        assert!(background.misses_expiry(9) && !background.misses_expiry(10));
        background.set_next_expiry_check(None);
        assert!(background.misses_expiry(10));
    }
}
