//! Read regions: memory of the embedder that reads fill directly.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::Arena;
use crate::io::buffer::sizes::PAGE_BYTES;
use crate::io::buffer::sizes::SLAB_BYTES;
use crate::io::buffer::slab::Slab;

/// Memory of the embedder that [`ReadRequest::into_region`] fills directly, without a copy.
///
/// The memory may be pinned for a GPU or shared with another process, for example. It is divided into slabs of 2 MiB,
/// which io_uring registers. Each part of a read is inside one slab.
///
/// Clones share the memory. It is in use until the last clone, every [`ReadBatch`] in it and every read in flight are
/// dropped. Then `owner` is dropped. A ring that has slabs registered keeps `owner` until it next wakes, at most until
/// the store closes.
///
/// ```
/// use std::alloc::{Layout, alloc_zeroed};
/// use std::{ptr::NonNull, sync::Arc};
/// use stratakv::read::ReadRegion;
/// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
/// # let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).group_tokens(16).build()?;
/// # let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
/// # let rows = vec![0.5_f32; 160 * 8];
/// # let tensor = TensorView::token_major(&rows, 160, 1, 8);
/// # sequence.append(0, tensor, tensor)?;
/// # sequence.commit(Durability::Sync)?;
/// let bytes = ReadRegion::SLAB_BYTES;
/// // SAFETY: the size is not zero.
/// let start = NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(bytes, 4096)?) }).ok_or("out of memory")?;
/// // SAFETY: this memory is never freed, and only the store writes it. Pass an owner that frees yours.
/// let region = unsafe { ReadRegion::from_raw(start, bytes, Arc::new(())) }?;
///
/// let selection = sequence.select(0, SelectRequest::groups(&[3]))?;
/// let batch = store.read(&[&selection]).into_region(&region).wait()?;
/// let (keys, _values) = batch.get(0)?.group(0)?;
/// assert!(region.offset_of(&keys).is_some());
/// # Ok(()) }
/// ```
///
/// [`ReadRequest::into_region`]: crate::store::ReadRequest::into_region
/// [`ReadBatch`]: crate::ReadBatch
#[derive(Clone)]
pub struct ReadRegion {
    pub(crate) arena: Arena,
    addresses: Range<usize>,
}

impl ReadRegion {
    /// Bytes of a slab. A region is a whole number of slabs.
    pub const SLAB_BYTES: usize = SLAB_BYTES;

    /// Returns a region of the `len` bytes at `start`, which live as long as `owner` does.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: `start` is not a multiple of 4096, or `len` is zero or not a multiple of
    /// [`Self::SLAB_BYTES`].
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes are mapped, readable, writable and initialised, as memory from the system
    /// is. Only the store writes them. Others, such as a device, read only blocks that a living
    /// [`ReadBatch`](crate::ReadBatch) holds.
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let address = start.as_ptr().addr();
        let whole = address.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(SLAB_BYTES);
        if !whole || len == 0 || address.checked_add(len).is_none() {
            let text = format!(
                "read region: {len} bytes at {address:#x}; the address must be a multiple of {PAGE_BYTES} and the \
                 length a multiple of {SLAB_BYTES}"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // SAFETY: the slabs are adjacent parts of the memory that the caller guarantees.
        let slab = |nth: usize| unsafe { Slab::lent(start.add(nth * SLAB_BYTES), Arc::clone(&owner)) };
        let arena = Arena::over((0..len / SLAB_BYTES).map(slab).collect());
        Ok(Self { arena, addresses: address..address + len })
    }

    /// Returns the bytes of the region.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the bytes that batches and reads in flight hold, in whole pages.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.arena.usage().leased_bytes
    }

    /// Returns the offset of a slice in this region, in bytes.
    ///
    /// Returns none for blocks that the store held in memory, because tails and cached blocks are not copied into the
    /// region.
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
