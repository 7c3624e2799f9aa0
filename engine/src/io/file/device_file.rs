//! An open file of a device directory, and the mark that a device must not be written any more.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// Files closed since the process began: rings that registered files look for closed ones when it has moved.
static CLOSED: AtomicU64 = AtomicU64::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What stands behind a file: the simulator adds its own variant.
enum Handle {
    Os(OwnedFd),
    #[cfg(feature = "sim")]
    Sim(crate::io::sim::SimFile),
}

/// A file of a device directory, held open as long as anything refers to it. An opaque handle for drivers.
pub(crate) struct DeviceFile {
    handle: Handle,
    path: String,
    direct: bool,
    #[allow(dead_code, reason = "see is_preallocated")]
    preallocated: bool,
    id: u64,
}

impl DeviceFile {
    pub(crate) fn new(fd: OwnedFd, path: &str, direct: bool, preallocated: bool) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { handle: Handle::Os(fd), path: path.to_owned(), direct, preallocated, id }
    }

    /// A file of a simulated disk.
    #[cfg(feature = "sim")]
    pub(in crate::io) fn simulated(file: crate::io::sim::SimFile, path: &str, preallocated: bool) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { handle: Handle::Sim(file), path: path.to_owned(), direct: true, preallocated, id }
    }

    #[cfg(feature = "sim")]
    pub(crate) fn as_simulated(&self) -> Option<&crate::io::sim::SimFile> {
        match &self.handle {
            Handle::Os(_) => None,
            Handle::Sim(file) => Some(file),
        }
    }

    /// Path inside its device directory, for messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Whether I/O on it bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether its blocks were reserved at creation, so that writes within its length cannot run out of space.
    #[allow(dead_code, reason = "tests ask; capacity accounting will")]
    pub(crate) fn is_preallocated(&self) -> bool {
        self.preallocated
    }

    /// Unique within the process; never reused.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(in crate::io) fn fd(&self) -> BorrowedFd<'_> {
        match &self.handle {
            Handle::Os(fd) => fd.as_fd(),
            #[cfg(feature = "sim")]
            Handle::Sim(_) => unreachable!("a simulated file never meets a driver of the operating system"),
        }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> Result<u64> {
        #[cfg(feature = "sim")]
        if let Handle::Sim(file) = &self.handle {
            return file.len();
        }
        let stat = rustix::fs::fstat(self.fd()).map_err(|e| Error::io(format!("length of {}", self.path), e.into()))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    pub(in crate::io) fn closed_count() -> u64 {
        CLOSED.load(Ordering::Acquire)
    }
}

impl Drop for DeviceFile {
    fn drop(&mut self) {
        CLOSED.fetch_add(1, Ordering::Release);
    }
}

/// Set once a sync failed: what the device holds is unknown from then on, and a repeated sync would report success falsely.
#[derive(Default)]
pub(crate) struct Poison(OnceLock<String>);

impl Poison {
    /// Keeps the first cause.
    pub(crate) fn set(&self, cause: &Error) {
        let _ = self.0.set(cause.to_string());
    }

    pub(crate) fn cause(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// # Errors
    /// `Poisoned` with the first cause.
    pub(crate) fn check(&self) -> Result<()> {
        match self.cause() {
            None => Ok(()),
            Some(cause) => {
                let text = format!("the device is read-only until it is opened again, because a sync failed: {cause}");
                Err(Error::new(ErrorKind::Poisoned, text))
            }
        }
    }
}
