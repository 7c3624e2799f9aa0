//! Planning reads of summary records. A section of a frame is one read and one part, because one checksum covers it.

use super::balance::Pieces;
use super::parts::{DeviceLoads, PlannedRead, ReadPart};
use super::section::{Section, SectionAt};
use std::sync::Arc;

/// Returns a part per section, read from the copy whose device ends first with it.
pub(crate) fn plan_records(sections: &[Section], loads: &DeviceLoads) -> Vec<ReadPart> {
    let mut pieces = Pieces::default();
    for section in sections {
        let devices = (0..section.frame.copies()).map(|copy| loads.device(section.frame.copy(copy).0));
        pieces.push(section.bytes(), devices);
    }
    let copies = pieces.balance(&loads.by_device, loads.policy);
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
            reads: vec![read],
            buffer_bytes: bytes,
            records: Some(SectionAt { section: section.clone(), at }),
            ..ReadPart::new(0, 0..0, Vec::new())
        }
    };
    sections.iter().zip(copies).map(part).collect()
}
