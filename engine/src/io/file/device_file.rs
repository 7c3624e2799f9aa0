//! An open file of a device directory.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::io::replacement::Replacement;

/// Files closed since the process started. A ring looks for closed files to unregister after this number has changed.
static CLOSED: AtomicU64 = AtomicU64::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The seam for files: a file that is not one of the operating system.
pub(crate) trait ReplacedFile: Any + Send + Sync {
    /// Returns the length in bytes.
    ///
    /// # Errors
    /// The file cannot be reached.
    fn len(&self) -> Result<u64>;
}

/// The file behind a [`DeviceFile`].
enum FileHandle {
    Os(OwnedFd),
    Replaced(Replacement<dyn ReplacedFile>),
}

/// A file of a device directory, open as long as anything refers to it.
pub(crate) struct DeviceFile {
    handle: FileHandle,
    path: String,
    direct: bool,
    #[allow(dead_code, reason = "see is_preallocated")]
    preallocated: bool,
    id: u64,
}

impl DeviceFile {
    pub(crate) fn new(fd: OwnedFd, path: &str, direct: bool, preallocated: bool) -> Self {
        Self::with_handle(FileHandle::Os(fd), path, direct, preallocated)
    }

    /// Returns a file that is not one of the operating system. Its I/O is aligned like direct I/O.
    #[cfg_attr(not(feature = "sim"), allow(dead_code, reason = "the simulator makes such files"))]
    pub(crate) fn replaced(file: Replacement<dyn ReplacedFile>, path: &str, preallocated: bool) -> Self {
        Self::with_handle(FileHandle::Replaced(file), path, true, preallocated)
    }

    fn with_handle(handle: FileHandle, path: &str, direct: bool, preallocated: bool) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { handle, path: path.to_owned(), direct, preallocated, id }
    }

    /// Returns the file if it is a replaced one of type `T`.
    #[cfg_attr(not(feature = "sim"), allow(dead_code, reason = "the simulator asks for its own files"))]
    pub(crate) fn as_replaced<T: ReplacedFile>(&self) -> Option<&T> {
        match &self.handle {
            FileHandle::Os(_) => None,
            FileHandle::Replaced(file) => {
                let file: &dyn Any = &**file;
                file.downcast_ref()
            }
        }
    }

    /// Returns the path inside its device directory, for messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Returns whether I/O on the file bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns whether the file's blocks were reserved at creation, so that writes within its length cannot run out of
    /// space.
    #[allow(dead_code, reason = "only tests call it so far")]
    pub(crate) fn is_preallocated(&self) -> bool {
        self.preallocated
    }

    /// Returns the file's id, which is unique within the process and never reused.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(in crate::io) fn fd(&self) -> BorrowedFd<'_> {
        match &self.handle {
            FileHandle::Os(fd) => fd.as_fd(),
            FileHandle::Replaced(_) => unreachable!("a driver of the operating system met a replaced file"),
        }
    }

    /// Returns the length in bytes.
    ///
    /// # Errors
    /// The system does not report the length.
    pub(crate) fn len(&self) -> Result<u64> {
        if let FileHandle::Replaced(file) = &self.handle {
            return file.len();
        }
        let stat = rustix::fs::fstat(self.fd())
            .map_err(|e| Error::io(format!("read the length of {}", self.path), e.into()))?;
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
