//! A frame header that was checked, with its tables.
//!
//! A header is checked in this order:
//!
//! 1. Magic and number of header pages.
//! 2. CRC of all header pages, seeded with the nonce of the segment.
//! 3. Identity, against the place where the reader found the frame.
//! 4. Sizes and reserved bytes.
//! 5. Tables: layout, key, descriptors and checksums, with zeros between and after them.
//! 6. Each descriptor, and the order of extents and checksums.

use super::descriptor::{Descriptor, KIND_CLUSTER_DIRECTORY};
use super::header::{FrameHeader, FramePlace, HEADER_PAGES_MAX, MAGIC};
use crate::checksum::crc_with_hole;
use crate::error::FormatError;
use crate::layout::Layout;
use crate::page::PAGE_BYTES;
use crate::verify::{check_crc, check_short_magic, check_zeros};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

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
    /// Returns the header pages that the frame at the start of `bytes` claims, if magic and number are plausible.
    ///
    /// A reader uses it to read just enough bytes. Nothing is verified.
    #[must_use]
    pub fn claimed_header_pages(bytes: &[u8]) -> Option<u32> {
        let (header, _) = FrameHeader::ref_from_prefix(bytes).ok()?;
        let pages = header.header_pages.get();
        (header.magic == MAGIC && (1..=HEADER_PAGES_MAX).contains(&pages)).then_some(pages)
    }

    /// Checks the header pages at the start of `bytes` and everything in them.
    ///
    /// # Errors
    /// The bytes are no frame, a damaged one, or one of another place.
    pub fn verify(bytes: &'a [u8], place: &FramePlace) -> Result<Self, FormatError> {
        let (header, tables) = header_of(bytes, place)?;
        header.check_identity(place)?;
        header.check_sizes()?;
        check_zeros(&header.reserved, "frame header", 140)?;
        let mut reader = TableReader { rest: tables, base: size_of::<FrameHeader>() };
        let layout_bytes = header.layout_bytes.get() as usize;
        let layout = Layout::decode(reader.take(layout_bytes, "layout")?)?;
        if layout.encoded_bytes() != layout_bytes {
            let (expected, found) = (layout.encoded_bytes() as u64, layout_bytes as u64);
            return Err(FormatError::range("layout bytes", 116, expected, found));
        }
        let key = reader.take(header.key_bytes.get() as usize, "key")?;
        let descriptors_at = reader.base;
        let bytes = reader.take(header.descriptors.get() as usize * size_of::<Descriptor>(), "descriptors")?;
        let descriptors =
            <[Descriptor]>::ref_from_bytes(bytes).map_err(|_| FormatError::truncated("descriptors", 0, bytes.len()))?;
        let bytes = reader.take(header.checksums.get() as usize * 8, "checksums")?;
        let checksums =
            <[U64]>::ref_from_bytes(bytes).map_err(|_| FormatError::truncated("checksums", 0, bytes.len()))?;
        check_zeros(reader.rest, "frame header", reader.base)?;
        let view = Self { header, layout, key, descriptors, checksums };
        view.check_descriptors(descriptors_at)?;
        Ok(view)
    }

    /// Checks each descriptor, the order of extents and checksums, and the front.
    ///
    /// `base` is the offset of the first descriptor.
    fn check_descriptors(&self, base: usize) -> Result<(), FormatError> {
        let page = PAGE_BYTES as u64;
        let frame_bytes = u64::from(self.header.total_pages.get()) * page;
        let front_bytes = u64::from(self.header.front_pages.get()) * page;
        let mut end = u64::from(self.header.header_pages.get()) * page;
        let (mut checksum_end, mut directories) = (0, 0);
        for (index, descriptor) in self.descriptors.iter().enumerate() {
            let at = base + index * size_of::<Descriptor>();
            descriptor.check(&self.layout, frame_bytes, self.checksums.len() as u64, at)?;
            let start = descriptor.offset.get();
            let extent_end = start + descriptor.bytes.get();
            let in_place = if descriptor.is_behind_front() { start >= front_bytes } else { extent_end <= front_bytes };
            if !in_place {
                return Err(FormatError::range("extent on the wrong side of the front", at + 24, front_bytes, start));
            }
            if start < end {
                return Err(FormatError::range("extent overlaps", at + 24, end, start));
            }
            if descriptor.checksum_first.get() != checksum_end {
                let first = u64::from(descriptor.checksum_first.get());
                return Err(FormatError::range("extent checksums", at + 40, u64::from(checksum_end), first));
            }
            if descriptor.is_derived() != self.is_derived() {
                let kind = u64::from(descriptor.kind.get());
                return Err(FormatError::range("extents of a derived frame", at, 0, kind));
            }
            if descriptor.kind.get() == KIND_CLUSTER_DIRECTORY {
                let number = descriptor.first_token.get();
                if number != directories {
                    return Err(FormatError::range("number of a directory piece", at + 8, directories, number));
                }
                directories += 1;
            }
            end = extent_end;
            checksum_end += descriptor.checksum_count.get();
        }
        if checksum_end as usize != self.checksums.len() {
            let found = self.checksums.len() as u64;
            return Err(FormatError::range("checksums", 128, u64::from(checksum_end), found));
        }
        Ok(())
    }

    /// Returns whether the frame is derived: its extents are pools and directories of clusters.
    #[must_use]
    pub fn is_derived(&self) -> bool {
        self.descriptors.first().is_some_and(Descriptor::is_derived)
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &'a FrameHeader {
        self.header
    }

    /// Returns the layout of the sequence.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the key of the sequence.
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        self.key
    }

    /// Returns the descriptors, in the order of their extents.
    #[must_use]
    pub fn descriptors(&self) -> &'a [Descriptor] {
        self.descriptors
    }

    /// Returns the checksums of a descriptor of this frame.
    #[must_use]
    pub fn checksums(&self, descriptor: &Descriptor) -> &'a [U64] {
        let first = descriptor.checksum_first.get() as usize;
        self.checksums.get(first..first + descriptor.checksum_count.get() as usize).unwrap_or_default()
    }
}

/// Checks magic, number of pages and CRC of the header at the start of `bytes`. Returns it and the bytes of its tables.
fn header_of<'a>(bytes: &'a [u8], place: &FramePlace) -> Result<(&'a FrameHeader, &'a [u8]), FormatError> {
    let Ok((header, _)) = FrameHeader::ref_from_prefix(bytes) else {
        return Err(FormatError::truncated("frame header", size_of::<FrameHeader>(), bytes.len()));
    };
    check_short_magic(header.magic, "frame header", MAGIC)?;
    let pages = header.header_pages.get();
    if !(1..=HEADER_PAGES_MAX).contains(&pages) {
        return Err(FormatError::range("header pages", 8, u64::from(HEADER_PAGES_MAX), u64::from(pages)));
    }
    let header_bytes = pages as usize * PAGE_BYTES;
    let Some(whole) = bytes.get(..header_bytes) else {
        return Err(FormatError::truncated("frame header", header_bytes, bytes.len()));
    };
    let crc = crc_with_hole(&place.segment_nonce.to_le_bytes(), whole, 4..8);
    check_crc(crc, header.crc.get(), "frame header")?;
    Ok((header, &whole[size_of::<FrameHeader>()..]))
}

/// Reads tables from the header pages, each padded with zeros to a multiple of 8. `base` is the offset of `rest`.
struct TableReader<'a> {
    rest: &'a [u8],
    base: usize,
}

impl<'a> TableReader<'a> {
    /// Returns the next table, of `bytes` bytes.
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
