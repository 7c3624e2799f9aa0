//! Memory of the embedder that reads fill directly.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Arena, PAGE_BYTES};
use crate::io::buffer::slab::{SLAB_BYTES, Slab};

/// Memory of the embedder (pinned for a GPU, say, or shared with another process) that [`Store::read_into`] fills directly,
/// without a copy. Cut into slabs of 2 MiB, each of which io_uring registers; a part of a read lies inside one of them.
///
/// Clones share the memory. It stays in use until the last clone, every [`ReadBatch`] in it and every read under way are gone;
/// then `owner` is dropped, or, where a ring has slabs registered, when that ring next wakes: at the latest when the store closes.
///
/// [`Store::read_into`]: crate::Store::read_into
/// [`ReadBatch`]: crate::ReadBatch
#[derive(Clone)]
pub struct ReadRegion {
    pub(crate) arena: Arena,
    addresses: Range<usize>,
}

impl ReadRegion {
    /// Bytes that a region is made of.
    pub const SLAB_BYTES: usize = SLAB_BYTES;

    /// A region of `len` bytes from `start` on, which live as long as `owner` does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: `start` is not a multiple of 4096 or `len` not one of [`Self::SLAB_BYTES`], or nothing.
    ///
    /// # Safety
    /// Until `owner` is dropped the bytes are mapped, readable, writable and initialised (memory that the system maps is), and
    /// nobody writes them; others, such as a device, read only blocks that a living [`ReadBatch`](crate::ReadBatch) holds.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let address = start.as_ptr().addr();
        let whole = address.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(SLAB_BYTES);
        if !whole || len == 0 || address.checked_add(len).is_none() {
            let text = format!(
                "a region of {len} bytes at {address:#x}: it takes pages of {PAGE_BYTES} bytes and a multiple of {SLAB_BYTES}"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // SAFETY: the slabs lie inside the memory that the caller vouches for, side by side.
        let slab = |nth: usize| unsafe { Slab::lent(start.add(nth * SLAB_BYTES), Arc::clone(&owner)) };
        let arena = Arena::over((0..len / SLAB_BYTES).map(slab).collect());
        Ok(Self { arena, addresses: address..address + len })
    }

    /// Bytes in all.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.addresses.len()
    }

    /// Bytes that batches and reads under way hold, in whole pages.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.arena.usage().leased_bytes
    }

    /// Where a slice lies in this region, in bytes from its start. None for blocks that were resident in the store: tails and
    /// cached blocks stay where they are.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        let start = bytes.as_ptr().addr();
        let inside = self.addresses.contains(&start) && bytes.len() <= self.addresses.end - start;
        inside.then(|| start - self.addresses.start)
    }
}

impl std::fmt::Debug for ReadRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadRegion").field("capacity", &self.capacity()).field("in_use", &self.in_use()).finish()
    }
}
