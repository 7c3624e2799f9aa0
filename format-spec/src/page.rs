//! Pages and sectors, the units of alignment and of atomic writes.

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Bytes of a sector, the unit that a disk writes atomically.
///
/// A single-page structure keeps all nonzero bytes in its first sector. A crash therefore never tears a write over an
/// older page of its kind. The first sector is old or new, and the other sectors are zero in both.
pub const SECTOR_BYTES: usize = 512;

/// Offset of the CRC-32 of a single-page structure. It covers the whole page with this field taken as zero.
pub const PAGE_CRC_OFFSET: usize = SECTOR_BYTES - 4;

/// Returns the number of pages that hold `bytes`, or `None` if it does not fit in 32 bits.
#[must_use]
pub fn pages_for(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).ok()
}

/// Returns `bytes` rounded up to a multiple of the page.
#[must_use]
pub const fn round_up_to_page(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES)
}
