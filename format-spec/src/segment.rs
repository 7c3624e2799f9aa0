//! Segments: preallocated files of frames. The first page is the header, and the last page repeats it as the trailer.

use crate::error::FormatError;
use crate::features::Features;
use crate::ids::SegmentId;
use crate::page::PAGE_BYTES;
use crate::superblock::{SEGMENT_PAGES_MAX, SEGMENT_PAGES_MIN};
use crate::verify::{Unverified, Verified, check_page, check_zeros, seal_page};
use alloc::format;
use alloc::string::String;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of the header and trailer page.
pub const MAGIC: [u8; 8] = *b"SKVSEGMT";
/// The directory of the segments, in the device directory.
pub const DIRECTORY: &str = "segments";
/// Kind: frames that are not derived.
pub const KIND_LOG: u8 = 1;
/// Kind: derived frames.
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
    /// The version and features.
    pub features: Features,
    /// The id of the store.
    pub store_id: [u8; 16],
    /// The number of lives of this file. It grows each time the file is recycled.
    pub generation: U64,
    /// A random number of this life. It seeds the checksums of the frame headers in the segment.
    pub nonce: U64,
    /// The start of this life, seconds since 1970.
    pub created_unix_s: U64,
    /// The id of this segment.
    pub segment: U32,
    /// The pages of the file, header and trailer included.
    pub pages: U32,
    /// The index of its device.
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
    /// Returns the bytes of the page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        seal_page(self)
    }
}

impl Unverified<'_, SegmentPage> {
    /// Checks the page itself. The caller compares store, device, segment, generation and position with the place.
    ///
    /// # Errors
    /// The page is damaged, or this code does not know its version, a feature or its kind.
    pub fn verify(&self) -> Result<Verified<SegmentPage>, FormatError> {
        check_page(self.bytes(), "segment page", MAGIC, size_of::<SegmentPage>())?;
        let page = self.peek();
        if !matches!(page.kind, KIND_LOG | KIND_POOL) {
            return Err(FormatError::unsupported("segment kind", 90, 2, u64::from(page.kind)));
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

/// Returns the path of a segment file in the device directory.
#[must_use]
pub fn file_name(segment: SegmentId) -> String {
    format!("{DIRECTORY}/{:08x}", segment.0)
}

/// Returns the segment whose file has this name in [`DIRECTORY`], or `None` if no segment has it.
#[must_use]
pub fn parse_file_name(name: &str) -> Option<SegmentId> {
    if name.len() != 8 || name.bytes().any(|b| !matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    u32::from_str_radix(name, 16).ok().map(SegmentId)
}
