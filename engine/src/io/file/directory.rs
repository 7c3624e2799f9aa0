//! The control plane of a device as an interface: directories, names, small reads and writes. Real in `dir`; the simulator
//! brings its own.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::io::file::device_file::{DeviceFile, Poison};
use crate::io::file::probe::DirectIo;

/// The most that [`Directory::read_small`] reads at once.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 20;

/// How a directory is opened, or a file in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    ReadWrite,
}

/// Tells two names of one directory from two directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    /// The file system's device number.
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// Space of the file system behind a directory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) total: u64,
    /// What this process may still take.
    pub(crate) available: u64,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) is_dir: bool,
    /// Length in bytes of a file.
    pub(crate) len: u64,
}

/// The control plane of a device: all that is done to it besides queued I/O. Paths are relative to its root.
pub(crate) trait Directory: Send + Sync {
    fn path(&self) -> &Path;
    #[allow(dead_code, reason = "tests tell directories apart by it")]
    fn identity(&self) -> Identity;
    fn direct_io(&self) -> &DirectIo;
    /// Raised by the first failed sync, of whatever kind; then nothing is written any more.
    fn poison(&self) -> &Arc<Poison>;
    /// The descriptor that holds the lock, for a ring to keep.
    fn lock_fd(&self) -> Option<BorrowedFd<'_>>;

    /// What it was opened for, and what its files can be opened for.
    fn access(&self) -> Access {
        Access::ReadWrite
    }

    /// Whether it is memory of a simulation, whose operations run on the calling thread.
    fn is_simulated(&self) -> bool {
        false
    }

    /// Whether a sync of any file also makes durable what was completely written before to places of other files that had
    /// been written and synced already: the file system writes them in place and flushes the whole device in every sync.
    fn sync_covers_overwrites(&self) -> bool {
        false
    }

    /// A new file of `len` bytes, their blocks reserved where the file system can ([`DeviceFile::is_preallocated`]).
    /// `NoSpace` leaves nothing behind.
    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>>;
    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>>;
    /// Makes a file longer, its new blocks reserved where the file system can. `NoSpace` leaves it as it was.
    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()>;
    /// Replaces what is at `to`.
    fn rename(&self, from: &str, to: &str) -> Result<()>;
    fn remove_file(&self, path: &str) -> Result<()>;
    /// The files and directories in `path` (`.` for the root), sorted by name. Anything else there is an error.
    fn list(&self, path: &str) -> Result<Vec<Entry>>;
    /// Fine when it exists.
    fn mkdir(&self, path: &str) -> Result<()>;
    /// Makes the names in `path` durable. Never retried: a failure poisons the device.
    fn sync_dir(&self, path: &str) -> Result<()>;

    /// `len` bytes (at most [`SMALL_BYTES_MAX`]) from `offset`, fewer only where the file ends. `offset` in whole pages.
    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>>;
    /// Whole pages at a page. Not durable before [`Directory::sync_small`].
    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Makes completed writes durable. Never retried: a failure poisons the device.
    fn sync_small(&self, file: &DeviceFile) -> Result<()>;

    fn space(&self) -> Result<Space>;
}
