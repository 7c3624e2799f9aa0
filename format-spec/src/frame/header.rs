//! The frame header.

use super::descriptor::{Descriptor, KIND_GROUPS};
use crate::checksum::crc_with_hole;
use crate::error::{FormatError, FormatErrorCode};
use crate::ids::{Location, RawLocation};
use crate::layout::Layout;
use crate::manifest::KEY_BYTES_MAX;
use crate::page::PAGE_BYTES;
use crate::verify::check_zeros;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic of a frame.
pub const MAGIC: [u8; 4] = *b"SKFR";
/// The most pages of a header.
pub const HEADER_PAGES_MAX: u32 = 1024;
/// The most pages of a frame.
pub const TOTAL_PAGES_MAX: u32 = 1 << 16;
/// The most descriptors of a frame.
pub const DESCRIPTORS_MAX: u32 = 1 << 15;
/// The most bytes of caller state.
pub const CALLER_STATE_BYTES_MAX: usize = 64 << 10;

/// Front of a frame. Behind it stand, in this order and without gaps but to multiples of 8: the encoded layout, the key
/// of the sequence, the descriptors, the checksums; zeros up to the end of the last header page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32 of the nonce of the segment (8 bytes) and all header pages with this field zero.
    pub crc: U32,
    /// Header pages.
    pub header_pages: U32,
    /// Pages of the frame, header included.
    pub total_pages: U32,
    /// Id.
    pub frame: U64,
    /// Log sequence number: grows with every frame of the store.
    pub lsn: U64,
    /// Where the frame is.
    pub location: RawLocation,
    /// The store.
    pub store_id: [u8; 16],
    /// Generation of the segment.
    pub segment_generation: U64,
    /// Random number of this frame, kept when it is moved; seeds its payload checksums.
    pub nonce: U64,
    /// The sequence that wrote it.
    pub sequence: U64,
    /// The sequence that one was forked from, 0 = none.
    pub parent: U64,
    /// Tokens inherited from the parent.
    pub parent_tokens: U64,
    /// When it was written, milliseconds since 1970.
    pub created_unix_ms: U64,
    /// Layout as numbered in the manifest.
    pub layout: U32,
    /// Bytes of the encoded layout.
    pub layout_bytes: U32,
    /// Bytes of the key of the sequence.
    pub key_bytes: U32,
    /// Descriptors.
    pub descriptors: U32,
    /// Checksums, 8 bytes each.
    pub checksums: U32,
    /// Pages before the first groups extent: header, summaries, then the other small pieces.
    pub front_pages: U32,
    /// Summaries the sequence carries, as in its create record.
    pub summaries: U32,
    /// Zero.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<FrameHeader>() == 144);

/// Where a frame belongs: what its checksum and header are held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePlace {
    /// The store.
    pub store_id: [u8; 16],
    /// Where it is; `pages` may be 0 when the caller does not know.
    pub location: Location,
    /// Generation of the segment.
    pub segment_generation: u64,
    /// Nonce of the segment.
    pub segment_nonce: u64,
}

/// A frame header that was checked, with its tables.
#[derive(Clone, Debug)]
pub struct FrameView<'a> {
    header: &'a FrameHeader,
    layout: Layout,
    key: &'a [u8],
    descriptors: &'a [Descriptor],
    checksums: &'a [U64],
}

impl<'a> FrameView<'a> {
    /// Header pages the frame at the front of `bytes` claims to have, if its magic and that number are plausible. A hint
    /// for reading just enough; nothing is verified.
    #[must_use]
    pub fn claimed_header_pages(bytes: &[u8]) -> Option<u32> {
        let (header, _) = FrameHeader::ref_from_prefix(bytes).ok()?;
        let pages = header.header_pages.get();
        (header.magic == MAGIC && (1..=HEADER_PAGES_MAX).contains(&pages)).then_some(pages)
    }

    /// Checks the header pages at the front of `bytes` and everything in them.
    ///
    /// # Errors
    /// No frame, a damaged one, or one of another place.
    pub fn verify(bytes: &'a [u8], place: &FramePlace) -> Result<Self, FormatError> {
        let Ok((header, rest)) = FrameHeader::ref_from_prefix(bytes) else {
            return Err(FormatError::truncated("frame header", size_of::<FrameHeader>(), bytes.len()));
        };
        if header.magic != MAGIC {
            return Err(FormatError::new(
                FormatErrorCode::Magic,
                "frame header",
                0,
                u64::from(u32::from_be_bytes(MAGIC)),
                u64::from(u32::from_be_bytes(header.magic)),
            ));
        }
        let pages = header.header_pages.get();
        if !(1..=HEADER_PAGES_MAX).contains(&pages) {
            return Err(FormatError::range("header pages", 8, u64::from(HEADER_PAGES_MAX), u64::from(pages)));
        }
        let header_bytes = pages as usize * PAGE_BYTES;
        let Some(whole) = bytes.get(..header_bytes) else {
            return Err(FormatError::truncated("frame header", header_bytes, bytes.len()));
        };
        let crc = crc_with_hole(&place.segment_nonce.to_le_bytes(), whole, 4..8);
        if crc != header.crc.get() {
            return Err(FormatError::new(
                FormatErrorCode::Checksum,
                "frame header",
                4,
                u64::from(crc),
                u64::from(header.crc.get()),
            ));
        }
        header.check_identity(place)?;
        header.check_sizes()?;
        check_zeros(&header.reserved, "frame header", 140)?;

        let rest = &rest[..header_bytes - size_of::<FrameHeader>()];
        let base = size_of::<FrameHeader>();
        let mut cut = Cutter { rest, base };
        let layout = Layout::decode(cut.take(header.layout_bytes.get() as usize, "layout")?)?;
        if layout.encoded_bytes() != header.layout_bytes.get() as usize {
            let (expected, found) = (layout.encoded_bytes() as u64, u64::from(header.layout_bytes.get()));
            return Err(FormatError::range("layout bytes", 116, expected, found));
        }
        let key = cut.take(header.key_bytes.get() as usize, "key")?;
        let descriptors_at = cut.base;
        let bytes = cut.take(header.descriptors.get() as usize * size_of::<Descriptor>(), "descriptors")?;
        let descriptors =
            <[Descriptor]>::ref_from_bytes(bytes).map_err(|_| FormatError::truncated("descriptors", 0, bytes.len()))?;
        let bytes = cut.take(header.checksums.get() as usize * 8, "checksums")?;
        let checksums =
            <[U64]>::ref_from_bytes(bytes).map_err(|_| FormatError::truncated("checksums", 0, bytes.len()))?;
        check_zeros(cut.rest, "frame header", cut.base)?;

        let frame_bytes = u64::from(header.total_pages.get()) * PAGE_BYTES as u64;
        let mut end = header_bytes as u64;
        let mut checksum_end = 0;
        for (index, descriptor) in descriptors.iter().enumerate() {
            let at = descriptors_at + index * size_of::<Descriptor>();
            descriptor.check(&layout, frame_bytes, checksums.len() as u64, at)?;
            // Everything but groups is in the front, so that it can be read without them.
            let front_bytes = u64::from(header.front_pages.get()) * PAGE_BYTES as u64;
            let (start, extent_end) = (descriptor.offset.get(), descriptor.offset.get() + descriptor.bytes.get());
            let in_place =
                if descriptor.kind.get() == KIND_GROUPS { start >= front_bytes } else { extent_end <= front_bytes };
            if !in_place {
                return Err(FormatError::range("extent on the wrong side of the front", at + 24, front_bytes, start));
            }
            if descriptor.offset.get() < end {
                return Err(FormatError::range("extent overlaps", at + 24, end, descriptor.offset.get()));
            }
            if descriptor.checksum_first.get() != checksum_end {
                let first = u64::from(descriptor.checksum_first.get());
                return Err(FormatError::range("extent checksums", at + 40, u64::from(checksum_end), first));
            }
            end = descriptor.offset.get() + descriptor.bytes.get();
            checksum_end += descriptor.checksum_count.get();
        }
        if checksum_end as usize != checksums.len() {
            return Err(FormatError::range("checksums", 128, u64::from(checksum_end), checksums.len() as u64));
        }
        Ok(Self { header, layout, key, descriptors, checksums })
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &'a FrameHeader {
        self.header
    }

    /// The layout of the sequence.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The key of the sequence.
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        self.key
    }

    /// The descriptors, in the order of their extents, which do not overlap.
    #[must_use]
    pub fn descriptors(&self) -> &'a [Descriptor] {
        self.descriptors
    }

    /// The checksums of a descriptor of this frame.
    #[must_use]
    pub fn checksums(&self, descriptor: &Descriptor) -> &'a [U64] {
        let first = descriptor.checksum_first.get() as usize;
        self.checksums.get(first..first + descriptor.checksum_count.get() as usize).unwrap_or_default()
    }
}

impl FrameHeader {
    fn check_identity(&self, place: &FramePlace) -> Result<(), FormatError> {
        let identity = |field, offset, expected: u64, found: u64| {
            if expected == found {
                return Ok(());
            }
            Err(FormatError::new(FormatErrorCode::Identity, field, offset, expected, found))
        };
        if self.store_id != place.store_id {
            let half = |id: &[u8; 16]| u64::from_le_bytes([id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7]]);
            return identity("frame store id", 48, half(&place.store_id), half(&self.store_id))
                .and(Err(FormatError::new(FormatErrorCode::Identity, "frame store id", 48, 0, 1)));
        }
        identity("frame segment", 32, u64::from(place.location.segment.0), u64::from(self.location.segment.get()))?;
        identity("frame page", 36, u64::from(place.location.page), u64::from(self.location.page.get()))?;
        identity("frame device", 44, u64::from(place.location.device.0), u64::from(self.location.device.get()))?;
        identity("segment generation", 64, place.segment_generation, self.segment_generation.get())?;
        if place.location.pages != 0 {
            identity("frame pages", 40, u64::from(place.location.pages), u64::from(self.location.pages.get()))?;
        }
        check_zeros(self.location.reserved.as_bytes(), "frame location", 46)
    }

    fn check_sizes(&self) -> Result<(), FormatError> {
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

/// Takes tables off the front of the header, each padded with zeros to a multiple of 8.
struct Cutter<'a> {
    rest: &'a [u8],
    base: usize,
}

impl<'a> Cutter<'a> {
    fn take(&mut self, bytes: usize, what: &'static str) -> Result<&'a [u8], FormatError> {
        let padded = bytes.next_multiple_of(8);
        let Some((table, rest)) = self.rest.split_at_checked(padded) else {
            return Err(FormatError::truncated(what, padded, self.rest.len()));
        };
        check_zeros(&table[bytes..], what, self.base + bytes)?;
        self.rest = rest;
        self.base += padded;
        Ok(&table[..bytes])
    }
}
