//! Directories of a run: made below the device, settled before a measurement, removed at the end.

use crate::support::interrupt::check_interrupt;
use anyhow::{Context, Result, bail};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv::ByteSize;
use tempfile::TempDir;

/// Makes a directory for this run below `device`. It is removed when dropped.
///
/// # Errors
/// The file system has fewer than `bytes` and a sixteenth free, or the directory cannot be made.
pub(crate) fn work_directory(device: &Path, bytes: u64) -> Result<TempDir> {
    let stat = rustix::fs::statvfs(device).with_context(|| format!("--device {}", device.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < bytes + bytes / 16 {
        let (device, needed, free) = (device.display(), ByteSize(bytes + bytes / 16), ByteSize(free));
        bail!("--device {device}: the run needs {needed}, but only {free} are free; give smaller sizes");
    }
    tempfile::Builder::new()
        .prefix("kvbench-")
        .tempdir_in(device)
        .with_context(|| format!("make a directory below {}", device.display()))
}

/// Makes a directory that only its owner may enter.
///
/// # Errors
/// It exists already, or cannot be made.
pub(crate) fn make_private(directory: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().mode(0o700).create(directory);
    made.with_context(|| format!("make {}", directory.display()))
}

/// The time without a change of its counters after which a block device counts as idle.
const IDLE: Duration = Duration::from_millis(150);
/// The longest wait for an idle block device.
const IDLE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Waits until the file system has finished the deletions and writes of earlier turns.
///
/// The sync alone is not enough: a file system that discards deleted blocks does so in the background afterwards. The
/// block device is therefore watched as well, if its counters can be read.
///
/// # Errors
/// The directory cannot be opened or synced, or the run was interrupted.
pub(crate) fn settle(directory: &Path) -> Result<()> {
    let handle = std::fs::File::open(directory).with_context(|| format!("open {}", directory.display()))?;
    rustix::fs::syncfs(&handle).with_context(|| format!("syncfs of {}", directory.display()))?;
    let device = rustix::fs::fstat(&handle).with_context(|| format!("stat of {}", directory.display()))?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let counters = || std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok();
    let deadline = Instant::now() + IDLE_WAIT_MAX;
    let mut seen = counters();
    while seen.is_some() && Instant::now() < deadline {
        check_interrupt()?;
        std::thread::sleep(IDLE);
        let now = counters();
        // A large discard changes no counter while it runs. Field 8 is the number of requests in flight.
        let in_flight = now.as_ref().and_then(|now| now.split_whitespace().nth(8));
        if now == seen && in_flight.is_none_or(|requests| requests == "0") {
            break;
        }
        seen = now;
    }
    Ok(())
}

/// Empties the page cache as far as this process may, and says how far: all of it with names and inodes, or only the
/// files below `directory`.
///
/// # Errors
/// The directory cannot be listed, or a file cannot be opened.
pub(crate) fn drop_caches(directory: &Path) -> Result<&'static str> {
    rustix::fs::sync();
    if std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok() {
        return Ok("page cache, names and inodes dropped");
    }
    let mut left = vec![directory.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                left.push(entry.path());
            } else {
                let file = std::fs::File::open(entry.path())?;
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
            }
        }
    }
    Ok("file contents dropped; names and inodes may be cached")
}

/// Returns the bytes that the files below a directory take on disk.
///
/// # Errors
/// A directory cannot be listed.
pub(crate) fn disk_bytes(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += if meta.is_dir() { disk_bytes(&entry.path())? } else { meta.blocks() * 512 };
    }
    Ok(sum)
}
