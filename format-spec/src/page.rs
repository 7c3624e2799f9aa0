//! The page: the unit of alignment of every structure and of every direct read.

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The part of a single-page structure that may hold anything but zeros: one atomic sector. A page written over another
/// of its kind can therefore never be torn: the sector is old or new, the rest is zero in both.
pub const SECTOR_BYTES: usize = 512;

/// Offset of the CRC-32 of single-page structures, over the whole page with this field zero.
pub const PAGE_CRC_OFFSET: usize = SECTOR_BYTES - 4;

/// `bytes` rounded up to whole pages, in pages. `None` when that does not fit in 32 bits.
#[must_use]
pub fn pages_for(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).ok()
}

/// `bytes` rounded up to a multiple of the page.
#[must_use]
pub const fn round_up_to_page(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES)
}
