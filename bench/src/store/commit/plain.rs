//! Plain calls that write as much as a commit: the least that two ordered syncs can cost.

use crate::support::bare::{Pages, open_direct};
use anyhow::{Context, Result, bail};
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// The largest commit that plain calls repeat in full. A commit that completes the groups of 64 tokens has this size.
const PLAIN_BYTES_MAX: usize = 16 << 20;
/// Bytes written to measure the bandwidth of the device.
const BANDWIDTH_BYTES: usize = 512 << 20;
/// Threads that write to measure the bandwidth of the device.
const BANDWIDTH_THREADS: usize = 4;
const PAGE: usize = 4096;

/// Two preallocated files: one for data, one for a log of pages.
pub(super) struct PlainFiles {
    data: File,
    log: File,
    pages: Pages,
    data_offset: u64,
    log_offset: u64,
}

impl PlainFiles {
    /// Makes files for `steps` steps of `bytes` in all.
    ///
    /// # Errors
    /// A file cannot be made or preallocated.
    pub(super) fn new(directory: &Path, bytes: u64, steps: u64) -> Result<Self> {
        let create = |name: &str, bytes: u64| -> Result<File> {
            let path = directory.join(name);
            let file = open_direct(&path, true)?;
            let context = || format!("preallocate {bytes} bytes for {}", path.display());
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).with_context(context)?;
            file.sync_all().with_context(context)?;
            Ok(file)
        };
        let mut pages = Pages::new(PLAIN_BYTES_MAX)?;
        fastrand::Rng::with_seed(13).fill(pages.bytes_mut());
        Ok(Self {
            data: create("data", (bytes + 4 * PLAIN_BYTES_MAX as u64).max(BANDWIDTH_BYTES as u64))?,
            log: create("log", (steps + 2) * PAGE as u64)?,
            pages,
            data_offset: 0,
            log_offset: 0,
        })
    }

    /// Writes and syncs `bytes` of data, then writes and syncs one page of the log. Returns the seconds taken.
    ///
    /// # Errors
    /// A write or a sync fails.
    pub(super) fn step(&mut self, bytes: u64) -> Result<f64> {
        let buffer = self.pages.bytes_mut();
        let len = (bytes as usize).next_multiple_of(PAGE).min(buffer.len());
        let start = Instant::now();
        self.data.write_all_at(&buffer[..len], self.data_offset).context("write the data file")?;
        self.data.sync_data().context("fdatasync of the data file")?;
        self.log.write_all_at(&buffer[..PAGE], self.log_offset).context("write the log file")?;
        self.log.sync_data().context("fdatasync of the log file")?;
        let seconds = start.elapsed().as_secs_f64();
        self.data_offset += len as u64;
        self.log_offset += PAGE as u64;
        Ok(seconds)
    }

    /// Returns the bytes per second of four threads that overwrite the data file by a MiB at a time, with a sync at the
    /// end.
    ///
    /// # Errors
    /// A write or the sync fails.
    pub(super) fn bandwidth(&mut self) -> Result<f64> {
        let (file, buffer) = (&self.data, &*self.pages.bytes_mut());
        let each = BANDWIDTH_BYTES / BANDWIDTH_THREADS;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let write = |at: usize| -> Result<()> {
                (0..each)
                    .step_by(1 << 20)
                    .try_for_each(|offset| Ok(file.write_all_at(&buffer[..1 << 20], (at * each + offset) as u64)?))
            };
            let threads: Vec<_> = (0..BANDWIDTH_THREADS).map(|at| scope.spawn(move || write(at))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome.context("write the data file"),
                Err(_) => bail!("write the data file: a thread panicked"),
            })
        })?;
        file.sync_data().context("fdatasync of the data file")?;
        Ok(BANDWIDTH_BYTES as f64 / start.elapsed().as_secs_f64())
    }
}
