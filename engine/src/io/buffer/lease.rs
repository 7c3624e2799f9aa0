//! Leases: pages of an arena, and the tokens by which drivers move bytes into and out of them.
//!
//! Soundness:
//! - One [`Lease`] owns a range of pages. Slices over the range exist only through the lease: `&[u8]` while no read
//!   into it is in flight, `&mut [u8]` while no I/O is.
//! - A [`ReadTarget`] can only be made from `&mut Lease`, so no slice is alive when the kernel starts to write.
//! - The tokens share the range with the lease. Its pages return to the arena after the lease and the last token are
//!   dropped.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::sizes::PAGE_BYTES;
use super::slab::Slab;
use super::slab_table::{ArenaState, SlabSlot};
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use crate::sync::atomic::{AtomicU32, Ordering};

/// A range of taken pages, and the I/O in flight on it.
struct PageRange {
    slab: Arc<Slab>,
    slot: usize,
    first: usize,
    pages: usize,
    start: NonNull<u8>,
    /// Number of read targets. While there is one, the kernel may write into the range.
    reads: AtomicU32,
    /// Number of write sources. While there is one, the kernel may read from the range.
    writes: AtomicU32,
    arena: Weak<ArenaState>,
}

// SAFETY: the pointer leads into the slab, which the range keeps mapped. Access follows the rules at the top of the
// file.
unsafe impl Send for PageRange {}
// SAFETY: as above. The counters are atomic.
unsafe impl Sync for PageRange {}

impl PageRange {
    fn reading(&self) -> bool {
        // Acquire pairs with the Release of the target's drop, so what the kernel wrote is visible after this.
        self.reads.load(Ordering::Acquire) > 0
    }

    fn writing(&self) -> bool {
        self.writes.load(Ordering::Acquire) > 0
    }

    fn memory(&self, range: &Range<usize>) -> IoMemory<'_> {
        // SAFETY: `Lease::check` made sure that the range is inside these pages.
        let address = unsafe { self.start.add(range.start) };
        IoMemory { address, len: range.len(), slab: &self.slab }
    }
}

impl Drop for PageRange {
    fn drop(&mut self) {
        // A range may outlive its arena. The slab is then unmapped with its last range.
        let Some(arena) = self.arena.upgrade() else { return };
        lock(&arena.table).give(self.slot, self.first, self.pages);
        arena.budget.returned().notify();
    }
}

/// Pages leased from an arena. They return to it after the lease and the last I/O on them are dropped.
pub(crate) struct Lease {
    range: Arc<PageRange>,
    len: usize,
}

impl Lease {
    /// Returns the lease of pages that were just taken from `arena`.
    pub(super) fn new(arena: &Arc<ArenaState>, taken: SlabSlot) -> Self {
        let SlabSlot { slab, slot, first, pages, len } = taken;
        // SAFETY: the page is inside the slab.
        let start = unsafe { slab.start().add(first * PAGE_BYTES) };
        let (reads, writes) = (AtomicU32::new(0), AtomicU32::new(0));
        let range = PageRange { slab, slot, first, pages, start, reads, writes, arena: Arc::downgrade(arena) };
        Self { range: Arc::new(range), len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes of the leased pages: the length rounded up to pages.
    pub(crate) fn capacity(&self) -> usize {
        self.range.pages * PAGE_BYTES
    }

    /// Returns the bytes, or none while a read into them is in flight.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        if self.range.reading() {
            return None;
        }
        // SAFETY: the range keeps `capacity >= len` initialised bytes mapped. No read is in flight, none can start
        // while the slice lives because that takes `&mut self`, and no other lease has these pages.
        Some(unsafe { std::slice::from_raw_parts(self.range.start.as_ptr(), self.len) })
    }

    /// Returns the bytes for writing, or none while any I/O on them is in flight.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.range.reading() || self.range.writing() {
            return None;
        }
        // SAFETY: as in `bytes`. The exclusive borrow keeps I/O in either direction from starting while the slice
        // lives.
        Some(unsafe { std::slice::from_raw_parts_mut(self.range.start.as_ptr(), self.len) })
    }

    /// Returns a token to read into these bytes of the lease.
    ///
    /// Several tokens may be in flight. Their ranges should not overlap.
    ///
    /// # Errors
    /// `InvalidArgument`: the bytes are outside of the pages. `Busy`: a write from the lease is in flight.
    pub(crate) fn read_target(&mut self, range: Range<usize>) -> Result<ReadTarget> {
        self.check(&range)?;
        if self.range.writing() {
            return Err(Error::new(ErrorKind::Busy, "read: a write from the same buffer is in flight"));
        }
        self.range.reads.fetch_add(1, Ordering::AcqRel);
        Ok(ReadTarget { pages: Arc::clone(&self.range), range })
    }

    /// Returns a token to write these bytes of the lease.
    ///
    /// # Errors
    /// `InvalidArgument`: the bytes are outside of the pages. `Busy`: a read into the lease is in flight.
    pub(crate) fn write_source(&self, range: Range<usize>) -> Result<WriteSource> {
        self.check(&range)?;
        if self.range.reading() {
            return Err(Error::new(ErrorKind::Busy, "write: a read into the same buffer is in flight"));
        }
        self.range.writes.fetch_add(1, Ordering::AcqRel);
        Ok(WriteSource { pages: Arc::clone(&self.range), range })
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.capacity() {
            let (start, end, capacity) = (range.start, range.end, self.capacity());
            let text = format!("I/O buffer: bytes {start}..{end} are outside of its {capacity} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(())
    }
}

/// The memory of one token, as drivers see it.
#[derive(Clone, Copy)]
pub(crate) struct IoMemory<'a> {
    pub(crate) address: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) slab: &'a Arc<Slab>,
}

/// Permission for a driver to write into a part of a lease. The read is in flight until the target is dropped.
pub(crate) struct ReadTarget {
    pages: Arc<PageRange>,
    range: Range<usize>,
}

impl ReadTarget {
    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    pub(in crate::io) fn memory(&self) -> IoMemory<'_> {
        self.pages.memory(&self.range)
    }
}

impl Drop for ReadTarget {
    fn drop(&mut self) {
        self.pages.reads.fetch_sub(1, Ordering::Release);
    }
}

/// Permission for a driver to read from a part of a lease. The write is in flight until the source is dropped.
pub(crate) struct WriteSource {
    pages: Arc<PageRange>,
    range: Range<usize>,
}

impl WriteSource {
    pub(in crate::io) fn bytes(&self) -> &[u8] {
        // SAFETY: the range is in the pages, which are mapped and initialised. While a write source lives, no read into
        // the lease can start and no `&mut` slice over it can be made, so the bytes do not change.
        unsafe { std::slice::from_raw_parts(self.memory().address.as_ptr(), self.range.len()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    pub(in crate::io) fn memory(&self) -> IoMemory<'_> {
        self.pages.memory(&self.range)
    }
}

impl Drop for WriteSource {
    fn drop(&mut self) {
        self.pages.writes.fetch_sub(1, Ordering::Release);
    }
}
