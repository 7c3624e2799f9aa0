//! The pace of calls with and without the helper, which decides whether the next call uses it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Calls with fewer bytes than this do not use the helper, because handing over costs more than it saves.
const BYTES_MIN: usize = 1 << 20;
/// Calls of each kind that are measured before a choice.
const FIRST: u32 = 4;
/// One in this many calls measures the slower kind again, and looks how many CPUs the process may use.
const AGAIN: u32 = 64;
/// A new measurement counts for one in this many.
const WEIGHT: u64 = 8;

/// The pace of calls with and without the helper.
pub(crate) struct HelperPace {
    /// Whether calls use the helper, or none if the faster kind is chosen.
    fixed: Option<bool>,
    calls: AtomicU32,
    has_cores: AtomicBool,
    /// Picoseconds per byte: alone, with the helper. 0 before the first measurement.
    paces: [AtomicU64; 2],
}

impl HelperPace {
    pub(crate) fn new(fixed: Option<bool>) -> Self {
        Self { fixed, calls: AtomicU32::new(0), has_cores: AtomicBool::new(false), paces: Default::default() }
    }

    /// Returns whether a call that reads `bytes` is to use the helper.
    pub(crate) fn wants_helper(&self, bytes: usize) -> bool {
        if let Some(fixed) = self.fixed {
            return fixed;
        }
        if bytes < BYTES_MIN {
            return false;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call.is_multiple_of(AGAIN) {
            let cores = rustix::thread::sched_getaffinity(None).is_ok_and(|cpus| cpus.count() > 1);
            self.has_cores.store(cores, Ordering::Relaxed);
        }
        if !self.has_cores.load(Ordering::Relaxed) {
            return false;
        }
        let [alone, helped] = [0, 1].map(|kind| self.paces[kind].load(Ordering::Relaxed));
        // A second core is used only for a clear win.
        let helps = helped + helped / 10 < alone;
        if call < 2 * FIRST { !call.is_multiple_of(2) } else { helps != call.is_multiple_of(AGAIN) }
    }

    /// Counts a call.
    pub(crate) fn took(&self, with_helper: bool, bytes: usize, took: Duration) {
        if bytes < BYTES_MIN {
            return;
        }
        let pace = &self.paces[usize::from(with_helper)];
        let new = (took.as_nanos() as u64).saturating_mul(1000) / bytes as u64;
        let _ = pace.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            Some(if old == 0 { new } else { (old * (WEIGHT - 1) + new) / WEIGHT })
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helper_is_used_if_it_was_faster_and_measured_again_from_time_to_time() {
        let bytes = 2 << 20;
        let pace = HelperPace::new(None);
        assert!(!pace.wants_helper(4096), "a small read");
        if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
            assert!((0..200).all(|_| !pace.wants_helper(bytes)), "one core");
            return;
        }
        for with_helper in [false, true] {
            pace.took(with_helper, bytes, Duration::from_millis(if with_helper { 1 } else { 2 }));
        }
        let used = (0..640).filter(|_| pace.wants_helper(bytes)).count();
        assert!((600..640).contains(&used), "{used} of 640");
        for _ in 0..100 {
            pace.took(true, bytes, Duration::from_millis(9));
        }
        let used = (0..640).filter(|_| pace.wants_helper(bytes)).count();
        assert!((1..40).contains(&used), "{used} of 640");
        assert!(!HelperPace::new(Some(false)).wants_helper(bytes));
        assert!(HelperPace::new(Some(true)).wants_helper(4096));
    }
}
