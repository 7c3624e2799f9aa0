//! What a driver is: it takes operations and gives each back with its outcome. Priorities, queues and callers are the
//! shard's business; a driver neither blocks on nor calls anything but the operating system. It serves the devices of its thread,
//! each under a number of its own.
//!
//! Invariant: the memory and file of an operation belong to the driver from `queue` until its completion, whatever happens.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::error::Result;
use crate::io::buffer::arena::{ReadTarget, WriteSource};
use crate::io::file::device_file::DeviceFile;
use crate::metrics::DeviceCounters;

/// One operation. Direct files want offset, length and buffer position in multiples of the device's block, at most a page.
pub(crate) enum Op {
    /// Fills `into` from `offset`. A file that ends earlier is an error.
    Read { file: Arc<DeviceFile>, offset: u64, into: ReadTarget },
    /// Writes all of `from` at `offset`.
    Write { file: Arc<DeviceFile>, offset: u64, from: WriteSource },
    /// Makes durable what was *completed* on this file before the sync was submitted. Never retried.
    Sync { file: Arc<DeviceFile> },
}

impl Op {
    pub(crate) fn file(&self) -> &Arc<DeviceFile> {
        match self {
            Self::Read { file, .. } | Self::Write { file, .. } | Self::Sync { file } => file,
        }
    }

    /// What a write writes.
    pub(in crate::io) fn write_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Write { from, .. } => Some(from.bytes()),
            Self::Read { .. } | Self::Sync { .. } => None,
        }
    }

    /// Bytes to move.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write { from, .. } => from.len(),
            Self::Sync { .. } => 0,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// The operation in words, for errors.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Read { file, offset, into } => format!("read {} bytes at {offset} of {}", into.len(), file.path()),
            Self::Write { file, offset, from } => format!("write {} bytes at {offset} of {}", from.len(), file.path()),
            Self::Sync { file } => format!("sync {}", file.path()),
        }
    }
}

/// An operation that ended.
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) outcome: Result<()>,
}

/// How long [`Driver::drive`] may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    No,
    /// Until about this many operations ended, or some and about two milliseconds passed, or a wake-up came; io_uring counts a
    /// wake-up as one more operation that ended.
    Completions(usize),
    /// Until a wake-up or any completion.
    Wake,
}

/// Ends a driver's wait from another thread.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self);
}

/// A device as a driver knows it.
pub(crate) struct ServedDevice<'a> {
    /// For the threads that serve it alone.
    pub(crate) name: &'a str,
    /// What holds its lock, to be kept until its last operation has ended, whatever becomes of the process.
    pub(crate) lock: Option<BorrowedFd<'a>>,
    pub(crate) counters: &'a Arc<DeviceCounters>,
}

/// What a driver keeps of the devices that it serves, by their numbers.
pub(in crate::io) struct DeviceTable<T>(Vec<Option<T>>);

impl<T> Default for DeviceTable<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> DeviceTable<T> {
    pub(in crate::io) fn put(&mut self, port: usize, kept: T) {
        if self.0.len() <= port {
            self.0.resize_with(port + 1, || None);
        }
        self.0[port] = Some(kept);
    }

    pub(in crate::io) fn take(&mut self, port: usize) -> Option<T> {
        self.0.get_mut(port)?.take()
    }

    pub(in crate::io) fn get_mut(&mut self, port: usize) -> Option<&mut T> {
        self.0.get_mut(port)?.as_mut()
    }

    pub(in crate::io) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().flatten()
    }

    pub(in crate::io) fn len(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

/// Moves bytes between files and memory. Lives on one thread.
pub(crate) trait Driver {
    /// From now on it serves this device, under a small number that no other one has.
    ///
    /// # Errors
    /// What the device needs for itself cannot be had; the others are served as before.
    fn add(&mut self, port: usize, device: &ServedDevice<'_>) -> Result<()>;

    /// Lets go of a device that has nothing in flight, its lock included.
    fn remove(&mut self, port: usize);

    /// How many operations of one device may be under way, whatever the others do.
    fn depth(&self) -> usize;

    /// Takes an operation on a device under an id of the caller's choice, unique among those in flight, and at most
    /// [`Driver::depth`] of a device at a time.
    fn queue(&mut self, port: usize, id: u64, op: Op);

    /// Submits what is queued, waits as told, and appends what ended. Each id queued comes back exactly once.
    ///
    /// # Errors
    /// The driver itself is broken; nothing more will complete.
    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()>;

    fn waker(&self) -> Arc<dyn Wake>;

    fn name(&self) -> &'static str;

    /// What it has to do without, so far; only grows.
    fn notes(&self) -> &[String];
}

/// Which driver to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DriverKind {
    /// io_uring, or where that is absent or forbidden threads, with a note that says why.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Threads that call pread and pwrite.
    Posix,
    /// glommio or an error.
    #[cfg(feature = "glommio")]
    Glommio,
    /// tokio-uring or an error.
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

/// Which driver runs, and what it has to do without.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriverStatus {
    pub(crate) name: &'static str,
    /// What is missing, why, and what would help; one sentence each.
    pub(crate) notes: Vec<String>,
}

/// Keeps RLIMIT_FSIZE from killing the process: where SIGXFSZ has its default action (kill), it is ignored from now on, and
/// the write fails with EFBIG, which becomes `NoSpace`. A handler that the host installed stays.
pub(crate) fn ignore_file_size_signal() {
    // SAFETY: sigaction with a null pointer for the new action only reads into `old`, which is large enough and for which
    // zeros are a valid value; SIG_IGN is a valid action.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &raw mut old) == 0 && old.sa_sigaction == libc::SIG_DFL {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
    }
}
