//! The directory interface: names, small reads and writes, and syncs of one device. A seam for the simulator.
//!
//! [`Directory`] covers every access to a device except queued I/O. All operations block the calling thread.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::poison::Poison;
use crate::io::file::probe::DirectIo;

/// Bytes that [`Directory::read_small`] reads at most.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 20;

/// The access for which a directory or a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    ReadWrite,
}

/// The identity of a directory, which two paths to it share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DirectoryIdentity {
    /// The file system's device number.
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// The space of a directory's file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskSpace {
    pub(crate) total: u64,
    /// Bytes that this process may still use.
    pub(crate) available: u64,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DirectoryEntry {
    pub(crate) name: String,
    pub(crate) is_dir: bool,
    /// The length of a file in bytes.
    pub(crate) len: u64,
}

/// A device directory. Paths are relative to its root, with plain names only.
pub(crate) trait Directory: Send + Sync {
    fn path(&self) -> &Path;
    fn identity(&self) -> DirectoryIdentity;
    fn direct_io(&self) -> &DirectIo;
    /// Returns the mark that the first failed sync sets. Nothing is written after that.
    fn poison(&self) -> &Arc<Poison>;
    /// Returns the descriptor that holds the lock, so that a ring can keep it open.
    fn lock_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Returns the access for which the directory was opened. Its files can be opened for no more.
    fn access(&self) -> Access {
        Access::ReadWrite
    }

    /// Returns whether a sync of any file also makes completed overwrites of other files durable.
    ///
    /// An overwrite is a write to bytes that had been written and synced before. The file system must write these in
    /// place and flush the whole device in every sync.
    fn sync_covers_overwrites(&self) -> bool {
        false
    }

    /// Creates a file of `len` bytes and reserves its blocks if the file system can ([`DeviceFile::is_preallocated`]).
    ///
    /// After `NoSpace` there is no file.
    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>>;
    /// Opens a file that exists.
    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>>;
    /// Makes a file longer and reserves its new blocks if the file system can. After `NoSpace` the file is unchanged.
    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()>;
    /// Renames a file. A file at `to` is replaced.
    fn rename(&self, from: &str, to: &str) -> Result<()>;
    fn remove_file(&self, path: &str) -> Result<()>;
    /// Returns the files and directories in `path`, sorted by name. The path `.` is the root. An entry of another type
    /// is an error.
    fn list(&self, path: &str) -> Result<Vec<DirectoryEntry>>;
    /// Creates a directory unless it exists.
    fn mkdir(&self, path: &str) -> Result<()>;
    /// Makes the names in `path` durable. A failure poisons the device and is never retried.
    fn sync_dir(&self, path: &str) -> Result<()>;

    /// Reads `len` bytes at `offset`, or fewer if the file ends. `len` is at most [`SMALL_BYTES_MAX`], `offset` in
    /// whole pages.
    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>>;
    /// Writes whole pages at a page offset. They are durable after [`Directory::sync_small`].
    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Makes completed writes of a file durable. A failure poisons the device and is never retried.
    fn sync_small(&self, file: &DeviceFile) -> Result<()>;

    fn space(&self) -> Result<DiskSpace>;
}
