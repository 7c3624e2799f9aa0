//! Threads of rayon's pool that stay awake while one thread works between two products.
//!
//! An idle thread of the pool sleeps after some microseconds, and waking it takes longer than many products of a
//! decode step. A thread that stays awake takes work at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a thread waits for work. A longer wait, such as that for a device, lets the thread sleep.
const WAIT_MAX: Duration = Duration::from_millis(1);

/// Calls `work` while the other threads of the pool wait for parts of it.
pub(crate) fn with_threads_awake<R>(work: impl FnOnce() -> R) -> R {
    beside_waits(|done| wait_for_work(done, WAIT_MAX), work)
}

/// Calls `work`, and `wait` on every other thread of the pool. The argument of `wait` is true once `work` has ended.
fn beside_waits<R>(wait: impl Fn(&AtomicBool) + Send + Sync + 'static, work: impl FnOnce() -> R) -> R {
    let Some(own) = rayon::current_thread_index().filter(|_| rayon::current_num_threads() > 1) else { return work() };
    let done = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&done);
    rayon::spawn_broadcast(move |thread| {
        if thread.index() != own {
            wait(&seen);
        }
    });
    let result = work();
    done.store(true, Ordering::Relaxed);
    result
}

/// Does work of the pool until `done` is set, or until there was none for `longest`.
fn wait_for_work(done: &AtomicBool, longest: Duration) {
    let mut since = Instant::now();
    while !done.load(Ordering::Relaxed) && since.elapsed() < longest {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            since = Instant::now();
        } else {
            // Other threads of the process may need this processor.
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn work_is_done_in_pools_of_any_size_and_outside() {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let sum = pool.install(|| with_threads_awake(|| (0..10_000_u64).into_par_iter().sum::<u64>()));
            assert_eq!(sum, 49_995_000, "{threads} threads");
            // The threads serve the pool again.
            assert_eq!(pool.broadcast(|thread| thread.index()), (0..threads).collect::<Vec<_>>());
        }
        assert_eq!(with_threads_awake(|| 7), 7, "outside of a pool");
    }

    #[test]
    fn the_other_threads_wait_and_end_with_the_call() {
        const LONGEST: Duration = Duration::from_secs(60);
        let [entered, left] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let counts = (Arc::clone(&entered), Arc::clone(&left));
        let wait = move |done: &AtomicBool| {
            counts.0.fetch_add(1, Ordering::Relaxed);
            wait_for_work(done, LONGEST);
            counts.1.fetch_add(1, Ordering::Relaxed);
        };
        let begun = Instant::now();
        let until_two = |count: &AtomicUsize| {
            while count.load(Ordering::Relaxed) < 2 && begun.elapsed() < LONGEST / 2 {
                std::thread::yield_now();
            }
            count.load(Ordering::Relaxed)
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let during = pool.install(|| beside_waits(wait, || (until_two(&entered), left.load(Ordering::Relaxed))));
        assert_eq!(during, (2, 0), "threads that wait, and that have ended");
        assert_eq!(until_two(&left), 2, "the threads have ended");
    }

    #[test]
    fn a_wait_ends_without_work() {
        let begun = Instant::now();
        wait_for_work(&AtomicBool::new(false), WAIT_MAX);
        assert!(begun.elapsed() >= WAIT_MAX);
    }
}
