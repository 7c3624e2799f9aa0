//! Where threads meet, and what a simulation does instead of letting one wait: everything there runs on a single thread, so
//! whoever waits does what is under way until it has happened.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::{Duration, Instant};

#[cfg(feature = "sim")]
use std::cell::Cell;

/// The same types as of the standard library, but under `cfg(loom)` those whose interleavings loom explores.
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};

#[cfg(all(debug_assertions, not(loom)))]
mod order;

use atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// A bounded queue of many producers.
#[cfg(not(loom))]
pub(crate) use crossbeam_queue::ArrayQueue;
#[cfg(loom)]
pub(crate) use model::ArrayQueue;

/// The same as [`lock`] for what loom explores.
pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock that [`lock`] took.
#[cfg(all(debug_assertions, not(loom)))]
pub(crate) use order::Guard;
#[cfg(any(not(debug_assertions), loom))]
pub(crate) use std::sync::MutexGuard as Guard;

/// Locks a mutex whose data stays valid when a holder panics. Loom does not know it; the order of such locks is watched where
/// assertions are.
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> Guard<'_, T> {
    #[cfg(all(debug_assertions, not(loom)))]
    return Guard::new(mutex);
    #[cfg(any(not(debug_assertions), loom))]
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets go of a lock until something is told, or at most for so long.
pub(crate) fn wait_for<'a, T>(told: &std::sync::Condvar, guard: Guard<'a, T>, most: Option<Duration>) -> Guard<'a, T> {
    let wait = |guard| match most {
        Some(most) => told.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner).0,
        None => told.wait(guard).unwrap_or_else(PoisonError::into_inner),
    };
    #[cfg(all(debug_assertions, not(loom)))]
    return guard.through(wait);
    #[cfg(any(not(debug_assertions), loom))]
    wait(guard)
}

/// What loom does not know, in terms of what it knows.
#[cfg(loom)]
mod model {
    use super::{Mutex, hold};
    use std::collections::VecDeque;

    pub(crate) struct ArrayQueue<T> {
        items: Mutex<VecDeque<T>>,
        most: usize,
    }

    impl<T> ArrayQueue<T> {
        pub(crate) fn new(most: usize) -> Self {
            Self { items: Mutex::new(VecDeque::new()), most }
        }

        pub(crate) fn push(&self, item: T) -> Result<(), T> {
            let mut items = hold(&self.items);
            if items.len() == self.most {
                return Err(item);
            }
            items.push_back(item);
            Ok(())
        }

        pub(crate) fn pop(&self) -> Option<T> {
            hold(&self.items).pop_front()
        }

        pub(crate) fn is_empty(&self) -> bool {
            hold(&self.items).is_empty()
        }
    }
}

#[cfg(feature = "sim")]
thread_local! {
    /// Does a piece of what is under way; `false` when nothing is. None outside of a simulation.
    static DRIVE: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// From now on waiting on this thread means driving the simulation.
#[cfg(feature = "sim")]
pub(crate) fn set_drive(drive: Option<fn() -> bool>) {
    DRIVE.set(drive);
}

/// In a simulation, drives it until `done` or until nothing is under way any more; whether this is a simulation.
/// Elsewhere nothing: block.
#[inline]
pub(crate) fn drive_until(done: impl FnMut() -> bool) -> bool {
    #[cfg(feature = "sim")]
    if let Some(drive) = DRIVE.get() {
        let mut done = done;
        while !done() && drive() {}
        return true;
    }
    let _ = done;
    false
}

/// Lets threads and tasks wait until "something happened since I looked".
///
/// Protocol of a waiter: read [`EventCount::epoch`], try, and on failure wait for the epoch to pass. A notification between
/// the two ends the wait at once. Ordering: the waiter raises `waiters`, then reads the epoch; the notifier raises the
/// epoch, then reads `waiters`; both pairs are separated by a sequentially consistent fence, so one of the two sees the other.
pub(crate) struct EventCount {
    epoch: AtomicU64,
    waiters: AtomicUsize,
    wakers: Mutex<Vec<Waker>>,
    condvar: Condvar,
}

impl Default for EventCount {
    fn default() -> Self {
        Self {
            epoch: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            wakers: Mutex::new(Vec::new()),
            condvar: Condvar::new(),
        }
    }
}

impl EventCount {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn notify(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) == 0 {
            return;
        }
        let wakers = {
            let mut wakers = hold(&self.wakers);
            self.waiters.fetch_sub(wakers.len(), Ordering::Relaxed);
            std::mem::take(&mut *wakers)
        };
        self.condvar.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Blocks until the epoch is past `seen` or the deadline came; `true` for the former.
    pub(crate) fn wait_past(&self, seen: u64, deadline: Option<Instant>) -> bool {
        if drive_until(|| self.epoch() != seen) && (deadline.is_some() || self.epoch() != seen) {
            // Where nothing is under way any more, time passes.
            return self.epoch() != seen;
        }
        let mut guard = hold(&self.wakers);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut passed = self.epoch() != seen;
        while !passed {
            let rest = deadline.map_or(Duration::from_secs(3600), |d| d.saturating_duration_since(Instant::now()));
            if rest.is_zero() {
                break;
            }
            guard = self.condvar.wait_timeout(guard, rest).unwrap_or_else(PoisonError::into_inner).0;
            passed = self.epoch() != seen;
        }
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        passed
    }

    /// Registers a task to be woken once by the next notification. `false` when the epoch is past `seen` already: try again.
    pub(crate) fn wake_past(&self, seen: u64, waker: &Waker) -> bool {
        let mut wakers = hold(&self.wakers);
        // A task that is polled again before the notification is woken once all the same.
        let is_known = wakers.iter().any(|known| known.will_wake(waker));
        if !is_known {
            self.waiters.fetch_add(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        if self.epoch() != seen {
            if !is_known {
                self.waiters.fetch_sub(1, Ordering::Relaxed);
            }
            return false;
        }
        if !is_known {
            wakers.push(waker.clone());
        }
        true
    }

    #[cfg(test)]
    pub(crate) fn waiters(&self) -> usize {
        self.waiters.load(Ordering::Relaxed)
    }
}
