//! A directory that counts its failures in the counters of its device, as queued requests do.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory, DirectoryEntry, DirectoryIdentity, DiskSpace};
use crate::io::file::poison::Poison;
use crate::io::file::probe::DirectIo;
use crate::metrics::{DeviceCounters, OpKind};

/// A directory with the counters of its device.
pub(crate) struct InstrumentedDirectory {
    directory: Arc<dyn Directory>,
    counters: Arc<DeviceCounters>,
}

impl InstrumentedDirectory {
    pub(crate) fn new(directory: Arc<dyn Directory>, counters: &Arc<DeviceCounters>) -> Arc<Self> {
        Arc::new(Self { directory, counters: Arc::clone(counters) })
    }

    /// Counts a failure of the system. A refusal by the engine itself and a missing file do not count.
    fn count<T>(&self, op: OpKind, outcome: Result<T>) -> Result<T> {
        use ErrorKind::{Closed, InvalidArgument, NoSpace, NotFound, Poisoned};
        outcome.inspect_err(|e: &Error| match e.kind() {
            NotFound | Poisoned | Closed | InvalidArgument => {}
            kind => self.counters.failed(op, kind == NoSpace),
        })
    }
}

impl Directory for InstrumentedDirectory {
    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn identity(&self) -> DirectoryIdentity {
        self.directory.identity()
    }

    fn direct_io(&self) -> &DirectIo {
        self.directory.direct_io()
    }

    fn poison(&self) -> &Arc<Poison> {
        self.directory.poison()
    }

    fn lock_fd(&self) -> Option<BorrowedFd<'_>> {
        self.directory.lock_fd()
    }

    fn access(&self) -> Access {
        self.directory.access()
    }

    fn sync_covers_overwrites(&self) -> bool {
        self.directory.sync_covers_overwrites()
    }

    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>> {
        self.count(OpKind::Names, self.directory.create_file(path, len))
    }

    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>> {
        self.count(OpKind::Names, self.directory.open_file(path, access))
    }

    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()> {
        self.count(OpKind::Names, self.directory.grow_file(file, len))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.count(OpKind::Names, self.directory.rename(from, to))
    }

    fn remove_file(&self, path: &str) -> Result<()> {
        self.count(OpKind::Names, self.directory.remove_file(path))
    }

    fn list(&self, path: &str) -> Result<Vec<DirectoryEntry>> {
        self.count(OpKind::Names, self.directory.list(path))
    }

    fn mkdir(&self, path: &str) -> Result<()> {
        self.count(OpKind::Names, self.directory.mkdir(path))
    }

    fn sync_dir(&self, path: &str) -> Result<()> {
        self.count(OpKind::Sync, self.directory.sync_dir(path))
    }

    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.count(OpKind::Read, self.directory.read_small(file, offset, len))
    }

    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()> {
        self.count(OpKind::Write, self.directory.write_small(file, offset, bytes))
    }

    fn sync_small(&self, file: &DeviceFile) -> Result<()> {
        self.count(OpKind::Sync, self.directory.sync_small(file))
    }

    fn space(&self) -> Result<DiskSpace> {
        self.directory.space()
    }
}
