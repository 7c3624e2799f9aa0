//! Locks, queues and events between threads.
//!
//! A simulation runs on one thread. A caller that would wait there drives the simulation until its event has happened.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::{Duration, Instant};

#[cfg(feature = "sim")]
use std::cell::Cell;

/// The types of the standard library, or loom's under `cfg(loom)`.
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};

#[cfg(all(debug_assertions, not(loom)))]
mod order;

use atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// A bounded queue with many producers.
#[cfg(not(loom))]
pub(crate) use crossbeam_queue::ArrayQueue;
#[cfg(loom)]
pub(crate) use model::ArrayQueue;

/// Locks as [`lock`] does, for types that loom explores.
pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guard that [`lock`] returns.
#[cfg(all(debug_assertions, not(loom)))]
pub(crate) use order::Guard;
#[cfg(any(not(debug_assertions), loom))]
pub(crate) use std::sync::MutexGuard as Guard;

/// Locks a mutex whose data stays valid if a holder panics. Loom does not explore it. Builds with assertions check the
/// order of these locks.
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> Guard<'_, T> {
    #[cfg(all(debug_assertions, not(loom)))]
    return Guard::new(mutex);
    #[cfg(any(not(debug_assertions), loom))]
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Releases a lock until it is notified, or for at most `most`.
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

/// Types that loom lacks, built from those it has.
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
    /// Runs one step of the simulation. Returns false if there is none. `None` outside a simulation.
    static DRIVE: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// Makes waiting on this thread drive the simulation.
#[cfg(feature = "sim")]
pub(crate) fn set_drive(drive: Option<fn() -> bool>) {
    DRIVE.set(drive);
}

/// Drives the simulation until `done` or until no step is left. Returns whether this is a simulation. Elsewhere it does
/// nothing.
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

/// An event that threads and tasks wait for: "something happened since I looked".
///
/// A waiter reads [`EventCount::epoch`], tries, and on failure waits for the epoch to pass. A notification between the
/// two ends the wait at once.
///
/// Ordering: the waiter raises `waiters` and then reads the epoch. The notifier raises the epoch and then reads
/// `waiters`. A sequentially consistent fence separates both pairs, so that one of the two sees the other.
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

    /// Blocks until the epoch is past `seen` or the deadline passes. Returns true for the epoch.
    pub(crate) fn wait_past(&self, seen: u64, deadline: Option<Instant>) -> bool {
        if drive_until(|| self.epoch() != seen) && (deadline.is_some() || self.epoch() != seen) {
            // If the simulation has no step left, time passes.
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

    /// Registers a task to be woken once by the next notification. Returns false if the epoch is past `seen`: try
    /// again.
    pub(crate) fn wake_past(&self, seen: u64, waker: &Waker) -> bool {
        let mut wakers = hold(&self.wakers);
        // A task that is polled again before the notification is woken only once.
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
