//! The files and buffers that a ring has registered: files, locks of its devices, and slabs as fixed buffers.
//!
//! Both tables are sparse. The first request that uses a file or slab registers it. If the table is full or the kernel
//! refuses, requests use the file or slab unregistered.
//!
//! Invariants:
//! - A registered slab stays mapped until it is unregistered, because the kernel has its pages pinned.
//! - A file that no operation holds has nothing in flight, so a sweep may unregister it once it is closed.
//!
//! The tables use the hash of `rustc-hash`: their keys are ids and addresses of this process, and one multiplication
//! per request is enough.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Weak};

use io_uring::IoUring;
use rustc_hash::FxHashMap;

use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::slab::Slab;
use crate::io::file::device_file::DeviceFile;

const FILES_MAX: u32 = 1024;
const BUFFERS_MAX: usize = 16_384;
/// Slots for slabs of the embedder's read regions, in addition to the store's own slabs.
const BUFFERS_OF_REGIONS: usize = 1024;

/// The registered files of a ring.
#[derive(Default)]
pub(in crate::io) struct FileTable {
    slots: Vec<Option<(u64, Weak<DeviceFile>)>>,
    by_id: FxHashMap<u64, u32>,
    free: Vec<u32>,
    closed_seen: u64,
}

impl FileTable {
    /// Registers an empty table. Adds a note if the kernel refuses.
    pub(in crate::io) fn new(ring: &IoUring, notes: &mut Vec<String>) -> Self {
        let mut table = Self::default();
        // The kernel refuses a table larger than the limit of open files.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let size = FILES_MAX.min(u32::try_from(limit).unwrap_or(FILES_MAX));
        let empty = vec![-1; size as usize];
        let submitter = ring.submitter();
        let registered = submitter.register_files_sparse(size).or_else(|_| submitter.register_files(&empty));
        if let Err(e) = registered {
            notes.push(format!("files cannot be registered with io_uring ({e}), so each request looks its file up"));
            return table;
        }
        table.slots.resize_with(size as usize, || None);
        table.free = (0..size).rev().collect();
        table
    }

    /// Registers a lock until [`Self::release`] or the end of the ring. Returns its slot, or adds a note and returns
    /// none.
    pub(in crate::io) fn hold(&mut self, ring: &IoUring, lock: BorrowedFd<'_>, notes: &mut Vec<String>) -> Option<u32> {
        let registered = match self.free.pop() {
            // `new` has added the note.
            None if self.slots.is_empty() => return None,
            None => Err("the table of files is full".to_owned()),
            Some(slot) => match ring.submitter().register_files_update(slot, &[lock.as_raw_fd()]) {
                Ok(_) => Ok(slot),
                Err(e) => {
                    self.free.push(slot);
                    Err(e.to_string())
                }
            },
        };
        registered.inspect_err(|e| notes.push(format!("the lock cannot be registered with io_uring ({e})"))).ok()
    }

    pub(in crate::io) fn release(&mut self, ring: &IoUring, slot: u32) {
        if ring.submitter().register_files_update(slot, &[-1]).is_ok() {
            self.free.push(slot);
        }
    }

    /// Returns the slot of a file, which it registers if a slot is free.
    pub(in crate::io) fn slot(&mut self, ring: &IoUring, file: &Arc<DeviceFile>) -> Option<u32> {
        if let Some(&slot) = self.by_id.get(&file.id()) {
            return Some(slot);
        }
        let slot = self.free.pop()?;
        if ring.submitter().register_files_update(slot, &[file.fd().as_raw_fd()]).is_err() {
            self.free.push(slot);
            return None;
        }
        self.slots[slot as usize] = Some((file.id(), Arc::downgrade(file)));
        self.by_id.insert(file.id(), slot);
        Some(slot)
    }

    /// Unregisters files that are closed, so that the file system can free the space of deleted ones.
    pub(in crate::io) fn sweep(&mut self, ring: &IoUring) {
        let closed = DeviceFile::closed_count();
        if closed == self.closed_seen {
            return;
        }
        self.closed_seen = closed;
        for (slot, entry) in (0..).zip(&mut self.slots) {
            // An operation in flight holds its file, so a closed file has nothing in flight.
            if entry.as_ref().is_some_and(|(_, file)| file.strong_count() == 0)
                && ring.submitter().register_files_update(slot, &[-1]).is_ok()
                && let Some((id, _)) = entry.take()
            {
                self.by_id.remove(&id);
                self.free.push(slot);
            }
        }
    }
}

/// The slabs that a ring has registered as fixed buffers.
#[derive(Default)]
pub(in crate::io) struct BufferTable {
    /// Keeps each registered slab mapped until it is unregistered, because the kernel has its pages pinned.
    slots: Vec<Option<Arc<Slab>>>,
    by_address: FxHashMap<usize, u16>,
    free: Vec<u16>,
    retired_seen: u64,
}

impl BufferTable {
    pub(in crate::io) fn new(ring: &IoUring, slabs_max: usize, notes: &mut Vec<String>) -> Self {
        let mut table = Self::default();
        let size = u16::try_from(slabs_max.saturating_add(BUFFERS_OF_REGIONS).min(BUFFERS_MAX)).unwrap_or(u16::MAX);
        match ring.submitter().register_buffers_sparse(u32::from(size)) {
            Ok(()) => {
                table.slots.resize_with(usize::from(size), || None);
                table.free = (0..size).rev().collect();
            }
            Err(e) => notes.push(format!(
                "buffers cannot be registered with io_uring ({e}), so reads take a little more CPU time"
            )),
        }
        table
    }

    /// Returns the slot of a slab, which it registers if a slot is free.
    pub(in crate::io) fn slot(&mut self, ring: &IoUring, slab: &Arc<Slab>, notes: &mut Vec<String>) -> Option<u16> {
        let address = slab.start().as_ptr().addr();
        if let Some(&slot) = self.by_address.get(&address) {
            return Some(slot);
        }
        let slot = self.free.pop()?;
        let range = libc::iovec { iov_base: slab.start().as_ptr().cast(), iov_len: SLAB_BYTES };
        // SAFETY: the range is mapped as long as the slab lives, and the table holds the slab until it is unregistered.
        let registered = unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[range], None) };
        if let Err(e) = registered {
            // No other slab is tried, because a limit that refuses now refuses later too.
            self.free.clear();
            notes.push(format!(
                "only {} slabs of I/O buffers could be registered with io_uring ({e}), so reads take a little more CPU \
                 time; raise the limit of locked memory (ulimit -l)",
                self.by_address.len()
            ));
            return None;
        }
        self.slots[usize::from(slot)] = Some(Arc::clone(slab));
        self.by_address.insert(address, slot);
        Some(slot)
    }

    /// Returns whether slabs were retired since the last sweep.
    pub(in crate::io) fn is_stale(&self) -> bool {
        Slab::retired_count() != self.retired_seen
    }

    /// Unregisters slabs that the arena has retired.
    pub(in crate::io) fn sweep(&mut self, ring: &IoUring) {
        self.retired_seen = Slab::retired_count();
        for (slot, entry) in (0..).zip(&mut self.slots) {
            if !entry.as_ref().is_some_and(|slab| slab.is_retired()) {
                continue;
            }
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty range needs no memory. It replaces the range of the slab, which lives until after the
            // call.
            let gone = unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[none], None) };
            if gone.is_ok()
                && let Some(slab) = entry.take()
            {
                self.by_address.remove(&slab.start().as_ptr().addr());
                self.free.push(slot);
            }
        }
    }
}
