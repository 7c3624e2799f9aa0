//! Reads of the records of summaries: each section of a frame is one read and one part, as its checksum covers all of it.

use super::{DeviceLoads, Pieces, PlannedRead, ReadPart};
use crate::catalog::{FrameBody, SummaryPlace};
use std::sync::Arc;
use stratakv_format::PAGE_BYTES;

/// Records of consecutive groups of a layer, in the front of a frame.
#[derive(Clone)]
pub(crate) struct Section {
    pub(crate) frame: Arc<FrameBody>,
    pub(crate) place: SummaryPlace,
}

impl Section {
    /// In the segment of copy 0.
    pub(crate) fn offset(&self) -> u64 {
        u64::from(self.frame.page) * PAGE_BYTES as u64 + self.place.offset
    }

    pub(crate) fn bytes(&self) -> usize {
        self.place.bytes as usize
    }

    /// Bytes that reading it takes.
    pub(crate) fn read_bytes(&self) -> usize {
        let readable = self.frame.readable(self.offset(), self.bytes());
        (readable.end - readable.start) as usize
    }

    /// Whether both are the same bytes, wherever the frame lies.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (self.frame.nonce, self.frame.origin, &self.place) == (other.frame.nonce, other.frame.origin, &other.place)
    }
}

/// Where a part has the records that it reads.
#[derive(Clone)]
pub(crate) struct SectionAt {
    pub(crate) section: Section,
    /// In its buffer.
    pub(crate) at: usize,
}

/// A part per section, each read from the copy whose device ends first with it.
pub(crate) fn plan_records(sections: &[Section], spread: &DeviceLoads) -> Vec<ReadPart> {
    let mut pieces = Pieces::default();
    for section in sections {
        let devices = (0..section.frame.copies()).map(|copy| spread.device(section.frame.copy(copy).0));
        pieces.push(section.bytes(), devices);
    }
    let copies = pieces.balance(&spread.loads, spread.policy);
    let part = |(section, copy): (&Section, u8)| {
        let (frame, offset) = (&section.frame, section.offset());
        let readable = frame.readable(offset, section.bytes());
        let (segment, own) = (frame.copy(usize::from(copy)).0, frame.offset_in(usize::from(copy), offset));
        let (at, bytes) = ((offset - readable.start) as usize, (readable.end - readable.start) as usize);
        let read = PlannedRead {
            segment: Arc::clone(segment),
            offset: own - at as u64,
            bytes,
            to: 0,
            frame: Arc::clone(frame),
            copy,
            first: readable.start,
        };
        ReadPart {
            view: 0,
            units: 0..0,
            blocks: Vec::new(),
            resident: Vec::new(),
            shared: Vec::new(),
            reads: vec![read],
            buffer_bytes: bytes,
            records: Some(SectionAt { section: section.clone(), at }),
        }
    };
    sections.iter().zip(copies).map(part).collect()
}
