//! The writer of a frame header.

use super::descriptor::Descriptor;
use super::header::{DESCRIPTORS_MAX, FrameHeader, FramePlace, HEADER_PAGES_MAX, MAGIC, TOTAL_PAGES_MAX};
use crate::checksum::crc_with_hole;
use crate::error::FormatError;
use crate::ids::{FrameId, LayoutId, SequenceId};
use crate::layout::Layout;
use crate::manifest::KEY_BYTES_MAX;
use crate::page::PAGE_BYTES;
use alloc::vec::Vec;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// The contents of a frame header.
#[derive(Clone, Debug)]
pub struct HeaderBuilder<'a> {
    /// The id of the frame.
    pub frame: FrameId,
    /// The log sequence number.
    pub lsn: u64,
    /// The random number of the frame.
    pub nonce: u64,
    /// The sequence that writes the frame.
    pub sequence: SequenceId,
    /// The sequence that it was forked from, and the number of tokens inherited.
    pub parent: Option<(SequenceId, u64)>,
    /// The time of the write, milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The number of the layout.
    pub layout_id: LayoutId,
    /// The layout.
    pub layout: &'a Layout,
    /// The key of the sequence.
    pub key: &'a [u8],
    /// The summaries that the sequence carries.
    pub summaries: u32,
    /// The descriptors in the order of their extents. Offsets count from the start of the frame.
    pub descriptors: &'a [Descriptor],
    /// The checksums in the order of the descriptors.
    pub checksums: &'a [u64],
    /// The pages of the front.
    pub front_pages: u32,
}

/// Returns the bytes of a header with these tables, whole pages.
#[must_use]
pub fn header_bytes(layout: &Layout, key_bytes: usize, descriptors: usize, checksums: usize) -> usize {
    let tables = layout.encoded_bytes().next_multiple_of(8)
        + key_bytes.next_multiple_of(8)
        + (descriptors * size_of::<Descriptor>()).next_multiple_of(8)
        + checksums * 8;
    (size_of::<FrameHeader>() + tables).next_multiple_of(PAGE_BYTES)
}

impl HeaderBuilder<'_> {
    /// Returns the bytes of the header, whole pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        header_bytes(self.layout, self.key.len(), self.descriptors.len(), self.checksums.len())
    }

    /// Writes the header for `place` to the start of `out` and returns its CRC.
    ///
    /// `place.location.pages` is the length of the whole frame.
    ///
    /// # Errors
    /// A header, frame, key or table is over its limit, or `out` is too short.
    pub fn write(&self, place: &FramePlace, out: &mut [u8]) -> Result<u32, FormatError> {
        let bytes = self.bytes();
        self.check_limits((bytes / PAGE_BYTES) as u64, place.location.pages)?;
        let Some(out) = out.get_mut(..bytes) else {
            return Err(FormatError::truncated("frame header buffer", bytes, out.len()));
        };
        let mut layout = Vec::with_capacity(self.layout.encoded_bytes());
        self.layout.encode(&mut layout);
        out.fill(0);
        let mut at = 0;
        let mut put = |table: &[u8]| {
            out[at..at + table.len()].copy_from_slice(table);
            at += table.len().next_multiple_of(8);
        };
        put(self.header(place, (bytes / PAGE_BYTES) as u32, layout.len() as u32).as_bytes());
        put(&layout);
        put(self.key);
        put(self.descriptors.as_bytes());
        for &checksum in self.checksums {
            put(&checksum.to_le_bytes());
        }
        let crc = crc_with_hole(&place.segment_nonce.to_le_bytes(), out, 4..8);
        out[4..8].copy_from_slice(&crc.to_le_bytes());
        Ok(crc)
    }

    fn check_limits(&self, pages: u64, total_pages: u32) -> Result<(), FormatError> {
        if pages > u64::from(HEADER_PAGES_MAX) {
            return Err(FormatError::range("header pages", 8, u64::from(HEADER_PAGES_MAX), pages));
        }
        let total = u64::from(total_pages);
        if total_pages > TOTAL_PAGES_MAX || total < pages {
            return Err(FormatError::range("total pages", 12, u64::from(TOTAL_PAGES_MAX), total));
        }
        let front = u64::from(self.front_pages);
        if front < pages || front > total {
            return Err(FormatError::range("front pages", 132, total, front));
        }
        if self.key.len() > KEY_BYTES_MAX {
            return Err(FormatError::range("key bytes", 120, KEY_BYTES_MAX as u64, self.key.len() as u64));
        }
        if self.descriptors.len() > DESCRIPTORS_MAX as usize {
            let count = self.descriptors.len() as u64;
            return Err(FormatError::range("descriptors", 124, u64::from(DESCRIPTORS_MAX), count));
        }
        Ok(())
    }

    /// Returns the header with a CRC of zero.
    fn header(&self, place: &FramePlace, header_pages: u32, layout_bytes: u32) -> FrameHeader {
        FrameHeader {
            magic: MAGIC,
            crc: U32::new(0),
            header_pages: U32::new(header_pages),
            total_pages: U32::new(place.location.pages),
            frame: U64::new(self.frame.0),
            lsn: U64::new(self.lsn),
            location: place.location.to_raw(),
            store_id: place.store_id,
            segment_generation: U64::new(place.segment_generation),
            nonce: U64::new(self.nonce),
            sequence: U64::new(self.sequence.0),
            parent: U64::new(self.parent.map_or(0, |(id, _)| id.0)),
            parent_tokens: U64::new(self.parent.map_or(0, |(_, tokens)| tokens)),
            created_unix_ms: U64::new(self.created_unix_ms),
            layout: U32::new(self.layout_id.0),
            layout_bytes: U32::new(layout_bytes),
            key_bytes: U32::new(self.key.len() as u32),
            descriptors: U32::new(self.descriptors.len() as u32),
            checksums: U32::new(self.checksums.len() as u32),
            front_pages: U32::new(self.front_pages),
            summaries: U32::new(self.summaries),
            reserved: [0; 4],
        }
    }
}
