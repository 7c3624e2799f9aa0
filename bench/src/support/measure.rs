//! Clocks of the processor, counters of the kernel, and sleeping to a deadline.

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Returns the CPU seconds of this process so far: all threads, user and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the CPU seconds of the calling thread so far, user and system.
pub(crate) fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the bytes that this process has written to devices, as the kernel counts them.
///
/// # Errors
/// `/proc/self/io` cannot be read or has no `write_bytes`.
pub(crate) fn process_written_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io").context("read /proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.trim().parse().ok()).context("/proc/self/io has no write_bytes")
}

/// Returns the resident bytes of this process, as the kernel counts them; none if the kernel does not say.
pub(crate) fn process_resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Returns the most bytes that this process has had resident; none if the kernel does not say.
pub(crate) fn process_peak_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

fn status_bytes(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Waits until `due`, as a thread waits for a GPU: it sleeps, then spins for the last 150 microseconds to be on time.
pub(crate) fn sleep_until(due: Instant) {
    const SPIN: Duration = Duration::from_micros(150);
    let left = due.saturating_duration_since(Instant::now());
    if left > SPIN {
        std::thread::sleep(left - SPIN);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}
