//! Page-aligned memory on the heap, for the few reads and writes that do not use the arena.

use crate::io::buffer::sizes::PAGE_BYTES;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Whole pages of heap memory.
pub(crate) struct AlignedBuf(Vec<Page>);

impl AlignedBuf {
    /// Returns at least `len` bytes, all zero.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self(vec![Page([0; PAGE_BYTES]); len.div_ceil(PAGE_BYTES)])
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: pages are plain bytes without padding (size == alignment == 4096), contiguous in the vector.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE_BYTES) }
    }
}
