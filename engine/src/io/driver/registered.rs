//! What a ring keeps registered: files, with the locks of its devices first, and slabs as fixed buffers.
//!
//! Both tables are sparse and fill on first use. What does not fit or is refused is used unregistered.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Weak};

use io_uring::IoUring;

use crate::io::buffer::slab::{SLAB_BYTES, Slab};
use crate::io::file::device_file::DeviceFile;

const FILES_MAX: u32 = 1024;
const BUFFERS_MAX: usize = 16_384;
/// Slots beside those of the store's own slabs, for regions of the embedder.
const BUFFERS_BESIDE: usize = 1024;

/// For keys that we make ourselves (identifiers, addresses): one multiplication, where the default hash would show per request.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(b.into()));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = (self.0 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn write_usize(&mut self, key: usize) {
        self.write_u64(key as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type KeyMap<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

#[derive(Default)]
pub(in crate::io) struct FileTable {
    slots: Vec<Option<(u64, Weak<DeviceFile>)>>,
    by_id: KeyMap<u64, u32>,
    free: Vec<u32>,
    closed_seen: u64,
}

impl FileTable {
    /// Registers an empty table. Notes what could not be had.
    pub(in crate::io) fn new(ring: &IoUring, notes: &mut Vec<String>) -> Self {
        let mut table = Self::default();
        // A table larger than the limit of open files is refused.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let size = FILES_MAX.min(u32::try_from(limit).unwrap_or(FILES_MAX));
        let empty = vec![-1; size as usize];
        let submitter = ring.submitter();
        let registered = submitter.register_files_sparse(size).or_else(|_| submitter.register_files(&empty));
        if let Err(e) = registered {
            notes.push(format!("files could not be registered with io_uring ({e}); each request looks its file up"));
            return table;
        }
        table.slots.resize_with(size as usize, || None);
        table.free = (0..size).rev().collect();
        table
    }

    /// Keeps a lock until [`Self::release`] or the end of the ring. Its slot; notes why there is none.
    pub(in crate::io) fn hold(&mut self, ring: &IoUring, lock: BorrowedFd<'_>, notes: &mut Vec<String>) -> Option<u32> {
        let registered = match self.free.pop() {
            // Said already.
            None if self.slots.is_empty() => return None,
            None => Err("no room".to_owned()),
            Some(slot) => match ring.submitter().register_files_update(slot, &[lock.as_raw_fd()]) {
                Ok(_) => Ok(slot),
                Err(e) => {
                    self.free.push(slot);
                    Err(e.to_string())
                }
            },
        };
        registered.inspect_err(|e| notes.push(format!("the lock could not be registered with io_uring ({e})"))).ok()
    }

    pub(in crate::io) fn release(&mut self, ring: &IoUring, slot: u32) {
        if ring.submitter().register_files_update(slot, &[-1]).is_ok() {
            self.free.push(slot);
        }
    }

    /// The slot of a file, registering it if there is room.
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

    /// Lets go of files that nobody has open any more, so that their space can return.
    pub(in crate::io) fn sweep(&mut self, ring: &IoUring) {
        let closed = DeviceFile::closed_count();
        if closed == self.closed_seen {
            return;
        }
        self.closed_seen = closed;
        for (slot, entry) in (0..).zip(&mut self.slots) {
            // A file in flight is held by its operation, so a dead one has nothing in flight.
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

#[derive(Default)]
pub(in crate::io) struct BufferTable {
    /// Holds each registered slab until it is unregistered: the kernel has its pages pinned.
    slots: Vec<Option<Arc<Slab>>>,
    by_address: KeyMap<usize, u16>,
    free: Vec<u16>,
    retired_seen: u64,
}

impl BufferTable {
    pub(in crate::io) fn new(ring: &IoUring, slabs_max: usize, notes: &mut Vec<String>) -> Self {
        let mut table = Self::default();
        let size = u16::try_from(slabs_max.saturating_add(BUFFERS_BESIDE).min(BUFFERS_MAX)).unwrap_or(u16::MAX);
        match ring.submitter().register_buffers_sparse(u32::from(size)) {
            Ok(()) => {
                table.slots.resize_with(usize::from(size), || None);
                table.free = (0..size).rev().collect();
            }
            Err(e) => {
                notes.push(format!("buffers could not be registered with io_uring ({e}): a little more CPU per read"))
            }
        }
        table
    }

    /// The slot of a slab, registering it if there is room.
    pub(in crate::io) fn slot(&mut self, ring: &IoUring, slab: &Arc<Slab>, notes: &mut Vec<String>) -> Option<u16> {
        let address = slab.start().as_ptr().addr();
        if let Some(&slot) = self.by_address.get(&address) {
            return Some(slot);
        }
        let slot = self.free.pop()?;
        let range = libc::iovec { iov_base: slab.start().as_ptr().cast(), iov_len: SLAB_BYTES };
        // SAFETY: the range is mapped as long as the slab lives, and the table holds the slab until it has unregistered it.
        let registered = unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[range], None) };
        if let Err(e) = registered {
            // Not again for every request: what the limit refuses now it refuses later.
            self.free.clear();
            notes.push(format!(
                "only {} of the I/O buffer slabs could be registered with io_uring ({e}): a little more CPU per read; raise the limit \
                 of locked memory (ulimit -l)",
                self.by_address.len()
            ));
            return None;
        }
        self.slots[usize::from(slot)] = Some(Arc::clone(slab));
        self.by_address.insert(address, slot);
        Some(slot)
    }

    /// Whether slabs were given up since the last sweep.
    pub(in crate::io) fn is_stale(&self) -> bool {
        Slab::retired_count() != self.retired_seen
    }

    /// Unregisters slabs that the arena has given up.
    pub(in crate::io) fn sweep(&mut self, ring: &IoUring) {
        self.retired_seen = Slab::retired_count();
        for (slot, entry) in (0..).zip(&mut self.slots) {
            if !entry.as_ref().is_some_and(|slab| slab.is_retired()) {
                continue;
            }
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty range needs no memory; it replaces the slab's, which is alive until after the call.
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
