//! Sparse segment files. Each frame has a whole header. Its keys and values are zeros in a hole.

use crate::store::start::geometry::{
    CREATED_S, FRAMES_PER_SEQUENCE, GROUP, NONCE, SEGMENT_BYTES, SEGMENT_PAGES, STORE_ID, create,
};
use crate::support::model::TOKEN_LAYER_BYTES;
use anyhow::{Context, Result};
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;
use stratakv::SequenceId;
use stratakv::store::DeviceIndex;
use stratakv_format::features::Features;
use stratakv_format::frame::{CODEC_RAW, Descriptor, FramePlace, HeaderBuilder, KIND_GROUPS};
use stratakv_format::layout::Layout;
use stratakv_format::manifest::Frame;
use stratakv_format::segment::{self, KIND_LOG, POSITION_HEADER, POSITION_TRAILER, SegmentPage};
use stratakv_format::{FrameId, LayoutId, Location, PAGE_BYTES, PayloadChecksum, PlaneIdentity, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

/// A writer of segments. Its frames follow one another, each of `pages` pages.
pub(super) struct SegmentWriter<'a> {
    /// The directory of the store.
    pub(super) path: &'a Path,
    pub(super) layout: &'a Layout,
    /// Pages of a frame.
    pub(super) pages: u32,
    /// The manifest records of the frames written so far.
    pub(super) records: Vec<Frame>,
}

impl SegmentWriter<'_> {
    /// Writes segment `number` with these frames. Returns the pages that are used.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&mut self, number: u32, frames: RangeInclusive<u64>) -> Result<u32> {
        let file = create(&self.path.join(segment::file_name(SegmentId(number))))?;
        file.set_len(SEGMENT_BYTES)?;
        for (position, page) in [(POSITION_HEADER, 0), (POSITION_TRAILER, SEGMENT_PAGES - 1)] {
            let own = segment_page(number, position);
            file.write_all_at(&own.encode(), u64::from(page) * PAGE_BYTES as u64)?;
        }
        let mut page = 1;
        for id in frames {
            let location = Location { device: DeviceIndex(0), segment: SegmentId(number), page, pages: self.pages };
            self.write_frame(&file, id, location)?;
            page += self.pages;
        }
        Ok(page)
    }

    /// Writes the header of frame `id` and keeps its record.
    fn write_frame(&mut self, file: &File, id: u64, location: Location) -> Result<()> {
        let sequence = SequenceId((id - 1) / FRAMES_PER_SEQUENCE + 1);
        let first_token = (id - 1) % FRAMES_PER_SEQUENCE * u64::from(GROUP);
        let nonce = NONCE ^ (id << 20);
        let zeros = vec![0; TOKEN_LAYER_BYTES as usize * usize::from(GROUP) / 2];
        let checksums = [0, 1].map(|plane| {
            let identity =
                PlaneIdentity::new(nonce, sequence, KIND_GROUPS, 0, first_token, u32::from(GROUP)).with_plane(plane);
            PayloadChecksum::Crc64Nvme.compute(&identity, &zeros)
        });
        let key = format!("session-{sequence}");
        let header = HeaderBuilder {
            frame: FrameId(id),
            lsn: id,
            nonce,
            sequence,
            parent: None,
            created_unix_ms: CREATED_S * 1000,
            layout_id: LayoutId(1),
            layout: self.layout,
            key: key.as_bytes(),
            summaries: 0,
            descriptors: &[descriptor(first_token, 2 * zeros.len() as u64)],
            checksums: &checksums,
            front_pages: 1,
        };
        let place = FramePlace {
            store_id: STORE_ID,
            location,
            segment_generation: 1,
            segment_nonce: segment_nonce(location.segment.0),
        };
        let mut bytes = [0; PAGE_BYTES];
        let crc = header.write(&place, &mut bytes).with_context(|| format!("encode the header of frame {id}"))?;
        file.write_all_at(&bytes, location.offset())?;
        self.records.push(Frame {
            frame: U64::new(id),
            origin: U64::new(sequence.0),
            lsn: U64::new(id),
            nonce: U64::new(nonce),
            location: location.to_raw(),
            header_crc: U32::new(crc),
            header_pages: U32::new(1),
            front_pages: U32::new(1),
            flags: U32::new(0),
        });
        Ok(())
    }
}

/// Returns the nonce of a segment.
pub(super) fn segment_nonce(number: u32) -> u64 {
    NONCE + u64::from(number)
}

fn segment_page(number: u32, position: u8) -> SegmentPage {
    SegmentPage {
        magic: segment::MAGIC,
        features: Features::current(),
        store_id: STORE_ID,
        generation: U64::new(1),
        nonce: U64::new(segment_nonce(number)),
        created_unix_s: U64::new(CREATED_S),
        segment: U32::new(number),
        pages: U32::new(SEGMENT_PAGES),
        device: U16::new(0),
        kind: KIND_LOG,
        position,
        reserved: [0; 4],
    }
}

/// Returns the descriptor of a frame's only extent: one raw group.
fn descriptor(first_token: u64, bytes: u64) -> Descriptor {
    Descriptor {
        kind: U16::new(KIND_GROUPS),
        layer: U16::new(0),
        codec: U16::new(CODEC_RAW),
        summary: U16::new(0),
        first_token: U64::new(first_token),
        tokens: U32::new(u32::from(GROUP)),
        pieces: U32::new(1),
        offset: U64::new(PAGE_BYTES as u64),
        bytes: U64::new(bytes),
        checksum_first: U32::new(0),
        checksum_count: U32::new(2),
        element: 0,
        cipher: 0,
        key: U16::new(0),
        record_bytes: U32::new(0),
    }
}
