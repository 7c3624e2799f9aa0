//! The driver interface: a driver takes operations and returns each one with its outcome.
//!
//! A driver lives on one thread and serves the devices of that thread, each under a number of its own. Priorities,
//! queues and callers belong to the scheduler. A driver calls nothing but the operating system and blocks only in
//! [`Driver::drive`].
//!
//! Invariants:
//! - The driver owns the memory and the file of an operation from [`Driver::queue`] until its completion, whatever
//!   happens.
//! - Every queued operation completes exactly once, unless the driver breaks.
//! - A sync is never retried.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::error::Result;
use crate::io::buffer::lease::{ReadTarget, WriteSource};
use crate::io::file::device_file::DeviceFile;
use crate::metrics::DeviceCounters;

/// One operation. Direct files need offset, length and buffer address in multiples of the device's block size, at most
/// a page.
pub(crate) enum Op {
    /// Fills `into` with the file's bytes from `offset`. A file that ends earlier is an error.
    Read { file: Arc<DeviceFile>, offset: u64, into: ReadTarget },
    /// Writes all of `from` at `offset`.
    Write { file: Arc<DeviceFile>, offset: u64, from: WriteSource },
    /// Makes durable the writes to this file that had *completed* before the sync was submitted.
    Sync { file: Arc<DeviceFile> },
}

impl Op {
    pub(crate) fn file(&self) -> &Arc<DeviceFile> {
        match self {
            Self::Read { file, .. } | Self::Write { file, .. } | Self::Sync { file } => file,
        }
    }

    /// Returns the bytes of a write, or none for other operations.
    pub(in crate::io) fn write_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Write { from, .. } => Some(from.bytes()),
            Self::Read { .. } | Self::Sync { .. } => None,
        }
    }

    /// Returns how many bytes the operation moves.
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

    /// Describes the operation for error messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Read { file, offset, into } => format!("read {} bytes at {offset} of {}", into.len(), file.path()),
            Self::Write { file, offset, from } => format!("write {} bytes at {offset} of {}", from.len(), file.path()),
            Self::Sync { file } => format!("sync {}", file.path()),
        }
    }
}

/// An operation that completed.
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) outcome: Result<()>,
}

/// How long [`Driver::drive`] may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It may not block.
    No,
    /// It blocks until about this many operations have completed, or until a wake-up. It blocks no longer than about
    /// two milliseconds once an operation has completed. io_uring counts a wake-up as one more completion.
    Completions(usize),
    /// It blocks until a wake-up or any completion.
    Wake,
}

/// Ends a driver's wait from another thread.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self);
}

/// A device as a driver sees it.
pub(crate) struct ServedDevice<'a> {
    /// The name for threads that serve only this device.
    pub(crate) name: &'a str,
    /// The descriptor that holds the device's lock. The driver keeps it open until the device's last operation has
    /// completed, even if the process is killed.
    pub(crate) lock: Option<BorrowedFd<'a>>,
    pub(crate) counters: &'a Arc<DeviceCounters>,
}

/// A table of values by the number of the device in the driver.
pub(crate) struct DeviceTable<T>(Vec<Option<T>>);

impl<T> Default for DeviceTable<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> DeviceTable<T> {
    pub(crate) fn put(&mut self, device: usize, entry: T) {
        if self.0.len() <= device {
            self.0.resize_with(device + 1, || None);
        }
        self.0[device] = Some(entry);
    }

    pub(crate) fn take(&mut self, device: usize) -> Option<T> {
        self.0.get_mut(device)?.take()
    }

    pub(crate) fn get_mut(&mut self, device: usize) -> Option<&mut T> {
        self.0.get_mut(device)?.as_mut()
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
    /// Serves a device from now on, under a small number that no other served device has.
    ///
    /// # Errors
    /// The driver cannot get what the device needs. The other devices are served as before.
    fn add(&mut self, device: usize, served: &ServedDevice<'_>) -> Result<()>;

    /// Releases a device that has nothing in flight, and its lock.
    fn remove(&mut self, device: usize);

    /// Returns how many operations of one device may be in flight, whatever the other devices do.
    fn depth(&self) -> usize;

    /// Queues an operation on a device under an id that is unique among those in flight.
    ///
    /// At most [`Driver::depth`] operations of a device are queued or in flight at a time.
    fn queue(&mut self, device: usize, id: u64, op: Op);

    /// Submits the queued operations, waits as `wait` says, and appends the completions to `done`.
    ///
    /// # Errors
    /// The driver is broken, and no operation in flight will complete.
    fn drive(&mut self, wait: Wait, done: &mut Vec<Completion>) -> Result<()>;

    fn waker(&self) -> Arc<dyn Wake>;

    fn name(&self) -> &'static str;

    /// Returns which features of the system the driver lacks so far. The list only grows.
    fn notes(&self) -> &[String];
}

/// The driver in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriverStatus {
    pub(crate) name: &'static str,
    /// One sentence per feature of the system that is missing: which, why, and what would help.
    pub(crate) notes: Vec<String>,
}
