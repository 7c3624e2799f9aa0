//! [`ComputeThreads`]: threads of the host that compute parts of a call.
//!
//! A host has a pool of threads for its own products already. Threads of the engine beside it would compete for the
//! same cores, so the engine asks the host instead.
//!
//! Invariants:
//! - The results of a call do not depend on the number of threads, or on which thread computes a part.
//! - Every part is computed exactly once, even if the host calls too few or too many parts.
//! - A call whose part panicked panics too, even if the host loses the panic.

use crate::metrics::lock;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of the host, on which the engine computes parts of a selection and builds summaries.
///
/// A pool of rayon:
///
/// ```
/// struct Rayon;
///
/// impl stratakv::ComputeThreads for Rayon {
///     fn threads(&self) -> usize {
///         rayon::current_num_threads()
///     }
///
///     fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
///         rayon::scope(|scope| {
///             (1..parts).for_each(|_| scope.spawn(|_| part()));
///             part();
///         });
///     }
/// }
/// ```
pub trait ComputeThreads: Send + Sync {
    /// Returns how many threads compute at a time, the calling one among them.
    fn threads(&self) -> usize;

    /// Calls `part` this many times, on any threads, and returns when all calls have returned. At least one call should
    /// be on the calling thread. No call waits for another. A call that panics ends this one with the same panic.
    fn run(&self, parts: usize, part: &(dyn Fn() + Sync));
}

impl fmt::Debug for dyn ComputeThreads + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} threads", self.threads())
    }
}

/// Calls `work` with each item, on several threads if there are any. `state` makes what a thread keeps between items.
pub(crate) fn for_each<T: Send, S>(
    threads: Option<&dyn ComputeThreads>,
    items: impl ExactSizeIterator<Item = T> + Send,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let parts = threads.map_or(1, ComputeThreads::threads).min(items.len());
    let Some(threads) = threads.filter(|_| parts > 1) else {
        let mut state = state();
        return items.for_each(|item| work(&mut state, item));
    };
    let (all, finished) = (items.len(), AtomicUsize::new(0));
    let left = Mutex::new(items);
    // The lock is released before the work begins.
    let next = || lock(&left).next();
    let part = || {
        let Some(mut item) = next() else { return };
        let mut state = state();
        loop {
            work(&mut state, item);
            finished.fetch_add(1, Ordering::Release);
            match next() {
                Some(following) => item = following,
                None => return,
            }
        }
    };
    threads.run(parts, &part);
    // A host that called no part leaves the work to this thread.
    part();
    assert_eq!(finished.load(Ordering::Acquire), all, "a thread of the host panicked, or works on after its call");
}

/// A host that starts new threads, and makes a given number of calls instead of the one that it is asked for.
#[cfg(test)]
pub(crate) struct NewThreads {
    pub(crate) threads: usize,
    pub(crate) calls: usize,
}

#[cfg(test)]
impl ComputeThreads for NewThreads {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, _parts: usize, part: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| (0..self.calls).for_each(|_| drop(scope.spawn(part))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once_whatever_the_host_calls() {
        for (threads, calls) in [(0, 0), (1, 1), (2, 0), (2, 1), (3, 3), (4, 9)] {
            let host = NewThreads { threads, calls };
            for items in [0, 1, 2, 100] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                let states = AtomicUsize::new(0);
                let state = || states.fetch_add(1, Ordering::Relaxed);
                for_each(Some(&host), counts.iter(), state, |_, count: &AtomicUsize| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {calls} {items}");
                assert!(states.load(Ordering::Relaxed) <= calls + 1);
            }
        }
        assert_eq!(format!("{:?}", &NewThreads { threads: 2, calls: 2 } as &dyn ComputeThreads), "2 threads");
    }

    /// A host that loses the panics of its threads.
    struct LosesPanics;

    impl ComputeThreads for LosesPanics {
        fn threads(&self) -> usize {
            2
        }

        fn run(&self, parts: usize, part: &(dyn Fn() + Sync)) {
            (0..parts).for_each(|_| drop(std::thread::scope(|scope| scope.spawn(part).join())));
        }
    }

    #[test]
    #[should_panic(expected = "a thread of the host panicked")]
    fn a_panic_that_the_host_loses_ends_the_call() {
        for_each(Some(&LosesPanics), [1, 2, 3].iter(), || (), |(), item| assert_ne!(*item, 2, "a planted panic"));
    }
}
