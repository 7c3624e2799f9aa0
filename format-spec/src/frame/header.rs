//! The header of a frame, and the checks that need no tables.

use crate::error::{FormatError, FormatErrorCode};
use crate::ids::{Location, RawLocation};
use crate::manifest::KEY_BYTES_MAX;
use crate::verify::check_zeros;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The magic of a frame.
pub const MAGIC: [u8; 4] = *b"SKFR";
/// The most pages of a header.
pub const HEADER_PAGES_MAX: u32 = 1024;
/// The most pages of a frame.
pub const TOTAL_PAGES_MAX: u32 = 1 << 16;
/// The most descriptors of a frame.
pub const DESCRIPTORS_MAX: u32 = 1 << 15;
/// The most bytes of caller state.
pub const CALLER_STATE_BYTES_MAX: usize = 64 << 10;

/// The header of a frame.
///
/// Its tables follow: the encoded layout, the key of the sequence, the descriptors and the checksums. Each starts at a
/// multiple of 8. Zeros follow up to the end of the last header page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the segment (8 bytes) and all header pages with this field zero.
    pub crc: U32,
    /// The pages of the header.
    pub header_pages: U32,
    /// The pages of the frame, header included.
    pub total_pages: U32,
    /// The id of the frame.
    pub frame: U64,
    /// The log sequence number. It grows with every frame of the store.
    pub lsn: U64,
    /// The location of this copy of the frame.
    pub location: RawLocation,
    /// The id of the store.
    pub store_id: [u8; 16],
    /// The generation of the segment.
    pub segment_generation: U64,
    /// A random number of this frame, kept by a move. It seeds the payload checksums.
    pub nonce: U64,
    /// The sequence that wrote the frame.
    pub sequence: U64,
    /// The sequence that it was forked from, 0 = none.
    pub parent: U64,
    /// The number of tokens inherited from the parent.
    pub parent_tokens: U64,
    /// The time of the write, milliseconds since 1970.
    pub created_unix_ms: U64,
    /// The number of the layout in the manifest.
    pub layout: U32,
    /// Bytes of the encoded layout.
    pub layout_bytes: U32,
    /// Bytes of the key of the sequence.
    pub key_bytes: U32,
    /// The number of descriptors.
    pub descriptors: U32,
    /// The number of checksums, 8 bytes each.
    pub checksums: U32,
    /// The pages of the front: header, sections, then the other extents without groups.
    pub front_pages: U32,
    /// The summaries that the sequence carries, as in its SequenceCreate record.
    pub summaries: U32,
    /// Zero.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<FrameHeader>() == 144);

/// The place of a frame. Its checksum and header must match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePlace {
    /// The id of the store.
    pub store_id: [u8; 16],
    /// The location of the frame. `pages` may be 0 if the caller does not know the length.
    pub location: Location,
    /// The generation of the segment.
    pub segment_generation: u64,
    /// The nonce of the segment.
    pub segment_nonce: u64,
}

impl FrameHeader {
    /// Compares store, location and segment generation with the place where the reader found the frame.
    pub(super) fn check_identity(&self, place: &FramePlace) -> Result<(), FormatError> {
        if self.store_id != place.store_id {
            return Err(different_store(&place.store_id, &self.store_id));
        }
        let (own, location) = (&self.location, &place.location);
        FormatError::check_identity("frame segment", 32, location.segment.0.into(), own.segment.get().into())?;
        FormatError::check_identity("frame page", 36, location.page.into(), own.page.get().into())?;
        FormatError::check_identity("frame device", 44, location.device.0.into(), own.device.get().into())?;
        let generation = self.segment_generation.get();
        FormatError::check_identity("segment generation", 64, place.segment_generation, generation)?;
        if location.pages != 0 {
            FormatError::check_identity("frame pages", 40, location.pages.into(), own.pages.get().into())?;
        }
        check_zeros(own.reserved.as_bytes(), "frame location", 46)
    }

    /// Checks the numbers of pages, descriptors and key bytes.
    pub(super) fn check_sizes(&self) -> Result<(), FormatError> {
        let range = |field, offset, bound: u32, found: u32| {
            Err(FormatError::range(field, offset, u64::from(bound), u64::from(found)))
        };
        let (header, front, total) = (self.header_pages.get(), self.front_pages.get(), self.total_pages.get());
        if total > TOTAL_PAGES_MAX || header > total {
            return range("total pages", 12, TOTAL_PAGES_MAX, total);
        }
        if self.location.pages.get() != total {
            return range("frame pages", 40, total, self.location.pages.get());
        }
        if front < header || front > total {
            return range("front pages", 132, total, front);
        }
        if self.descriptors.get() > DESCRIPTORS_MAX {
            return range("descriptors", 124, DESCRIPTORS_MAX, self.descriptors.get());
        }
        if self.key_bytes.get() as usize > KEY_BYTES_MAX {
            return range("key bytes", 120, KEY_BYTES_MAX as u32, self.key_bytes.get());
        }
        Ok(())
    }
}

/// Returns the error for two different store ids. It shows their first 8 bytes, or 0 and 1 if those are equal.
fn different_store(expected: &[u8; 16], found: &[u8; 16]) -> FormatError {
    let half = |id: &[u8; 16]| u64::from_le_bytes([id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7]]);
    let (expected, found) = match (half(expected), half(found)) {
        (expected, found) if expected == found => (0, 1),
        halves => halves,
    };
    FormatError::new(FormatErrorCode::Identity, "frame store id", 48, expected, found)
}
