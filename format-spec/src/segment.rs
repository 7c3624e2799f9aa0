//! Segments: preallocated files of frames or of cluster pools. The first page is the header, the last repeats it.

use crate::error::{FormatError, FormatErrorCode};
use crate::features::Features;
use crate::ids::SegmentId;
use crate::page::PAGE_BYTES;
use crate::superblock::{SEGMENT_PAGES_MAX, SEGMENT_PAGES_MIN};
use crate::verify::{Unverified, Verified, check_page, check_zeros, seal_page};
use alloc::format;
use alloc::string::String;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic of the header and the trailer.
pub const MAGIC: [u8; 8] = *b"SKVSEGMT";
/// Directory of the segments, inside the device directory.
pub const DIRECTORY: &str = "segments";
/// Kind: frames back to back.
pub const KIND_LOG: u8 = 1;
/// Kind: cluster pools (room kept).
pub const KIND_POOL: u8 = 2;
/// Position: the first page of the file.
pub const POSITION_HEADER: u8 = 0;
/// Position: the last page of the file.
pub const POSITION_TRAILER: u8 = 1;

/// The header or trailer page of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SegmentPage {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Version and features.
    pub features: Features,
    /// The store.
    pub store_id: [u8; 16],
    /// Counts the lives of this file: grows each time it is recycled.
    pub generation: U64,
    /// Random number of this life; seeds the checksums of the frame headers in it.
    pub nonce: U64,
    /// When this life began, seconds since 1970.
    pub created_unix_s: U64,
    /// This segment.
    pub segment: U32,
    /// Pages of the file, header and trailer included.
    pub pages: U32,
    /// Its device.
    pub device: U16,
    /// [`KIND_LOG`] or [`KIND_POOL`].
    pub kind: u8,
    /// [`POSITION_HEADER`] or [`POSITION_TRAILER`].
    pub position: u8,
    /// Zero.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<SegmentPage>() == 96);

impl SegmentPage {
    /// The page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }
}

impl Unverified<'_, SegmentPage> {
    /// Checks the page by itself. Whether it is the page of this store, place and generation is for the caller to compare.
    ///
    /// # Errors
    /// Damage, or a version or feature this code does not know.
    pub fn verify(&self) -> Result<Verified<SegmentPage>, FormatError> {
        check_page(self.bytes(), "segment page", MAGIC, size_of::<SegmentPage>())?;
        let page = self.peek();
        if !matches!(page.kind, KIND_LOG | KIND_POOL) {
            return Err(FormatError::new(FormatErrorCode::Unsupported, "segment kind", 90, 2, u64::from(page.kind)));
        }
        if page.position > POSITION_TRAILER {
            return Err(FormatError::range("segment page position", 91, 1, u64::from(page.position)));
        }
        let pages = u64::from(page.pages.get());
        if !(SEGMENT_PAGES_MIN..=SEGMENT_PAGES_MAX).contains(&pages) {
            return Err(FormatError::range("segment pages", 84, SEGMENT_PAGES_MAX, pages));
        }
        check_zeros(&page.reserved, "segment page", 92)?;
        Ok(Verified::new(*page))
    }
}

/// The file of a segment, inside the device directory.
#[must_use]
pub fn file_name(segment: SegmentId) -> String {
    format!("{DIRECTORY}/{:08x}", segment.0)
}

/// The segment whose file has this name inside [`DIRECTORY`], if it is one.
#[must_use]
pub fn parse_file_name(name: &str) -> Option<SegmentId> {
    if name.len() != 8 || name.bytes().any(|b| !matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    u32::from_str_radix(name, 16).ok().map(SegmentId)
}
