//! Sizes of I/O memory.

/// Bytes of a page: the unit of alignment on disk and in memory.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Bytes of a slab, and of a huge page.
pub(crate) const SLAB_BYTES: usize = 2 << 20;
