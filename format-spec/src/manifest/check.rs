//! Ranges and reserved bytes of a record's body.

use super::record::{
    ADAPTER_BYTES_MAX, ADAPTER_NAME_BYTES_MAX, KEY_BYTES_MAX, MEMBER_ACTIVE, MEMBER_REMOVED, REPLICAS_MAX, Record,
    RecordHeader,
};
use crate::error::{FormatError, FormatErrorCode};
use crate::export::SUMMARIES_KNOWN;
use crate::frame::{HEADER_PAGES_MAX, TOKENS_MAX, TOTAL_PAGES_MAX};
use crate::ids::{INDEX_MAX, NUMBER_MAX, RawLocation};
use crate::segment::{KIND_LOG, KIND_POOL};
use crate::superblock::{DEVICES_MAX, SEGMENT_PAGES_MAX, SEGMENT_PAGES_MIN};
use crate::verify::check_zeros;
use core::mem::offset_of;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Checks one body at a time; `base` is the offset of the record's header in the records of its batch.
struct Checker {
    name: &'static str,
    base: usize,
}

impl Checker {
    const fn at(&self, offset: usize) -> usize {
        self.base + size_of::<RecordHeader>() + offset
    }

    fn zero(&self, offset: usize, bytes: &[u8]) -> Result<(), FormatError> {
        check_zeros(bytes, self.name, self.at(offset))
    }

    fn within(&self, offset: usize, found: u64, low: u64, high: u64) -> Result<(), FormatError> {
        if found < low {
            return Err(FormatError::range(self.name, self.at(offset), low, found));
        }
        if found > high {
            return Err(FormatError::range(self.name, self.at(offset), high, found));
        }
        Ok(())
    }

    /// One of the numbers that only grow.
    fn number(&self, offset: usize, number: U64) -> Result<(), FormatError> {
        self.within(offset, number.get(), 0, NUMBER_MAX)
    }

    /// The number of a segment or layout.
    fn index(&self, offset: usize, index: U32) -> Result<(), FormatError> {
        self.within(offset, u64::from(index.get()), 0, u64::from(INDEX_MAX))
    }

    fn key(&self, offset: usize, key_bytes: u16, tail: &[u8]) -> Result<(), FormatError> {
        self.within(offset, u64::from(key_bytes), 0, KEY_BYTES_MAX as u64)?;
        let found = tail.len() as u64;
        self.within(offset, found, u64::from(key_bytes), u64::from(key_bytes))
    }

    fn device(&self, offset: usize, device: u16) -> Result<(), FormatError> {
        self.within(offset, u64::from(device), 0, u64::from(DEVICES_MAX) - 1)
    }

    /// A frame's place: never the header page of its segment, never up to its trailer in the largest segment.
    fn location(&self, offset: usize, location: &RawLocation) -> Result<(), FormatError> {
        let (page, pages) = (u64::from(location.page.get()), u64::from(location.pages.get()));
        self.within(offset + offset_of!(RawLocation, pages), pages, 1, u64::from(TOTAL_PAGES_MAX))?;
        self.within(offset + offset_of!(RawLocation, page), page, 1, SEGMENT_PAGES_MAX - 1 - pages)?;
        self.device(offset + offset_of!(RawLocation, device), location.device.get())?;
        self.zero(offset + offset_of!(RawLocation, reserved), location.reserved.as_bytes())
    }
}

/// Checks what can be checked of a record alone.
pub(super) fn check(record: &Record<'_>, base: usize) -> Result<(), FormatError> {
    use super::record as r;
    let at = |name| Checker { name, base };
    match record {
        Record::Member(m) => {
            let c = at("Member");
            c.number(offset_of!(r::Member, epoch), m.epoch)?;
            c.device(offset_of!(r::Member, device), m.device.get())?;
            let (low, high) = (u64::from(MEMBER_ACTIVE), u64::from(MEMBER_REMOVED));
            c.within(offset_of!(r::Member, state), u64::from(m.state), low, high)?;
            c.within(offset_of!(r::Member, manifest_copies), u64::from(m.manifest_copies), 0, 2)
        }
        Record::Layout(l, _) => {
            let c = at("Layout");
            c.index(offset_of!(r::LayoutDefined, layout), l.layout)?;
            c.zero(offset_of!(r::LayoutDefined, reserved), l.reserved.as_bytes())
        }
        Record::SequenceCreate(s, key) => {
            let c = at("SequenceCreate");
            c.number(offset_of!(r::SequenceCreate, sequence), s.sequence)?;
            c.key(offset_of!(r::SequenceCreate, key_bytes), s.key_bytes.get(), key)?;
            c.within(offset_of!(r::SequenceCreate, replicas), u64::from(s.replicas), 0, u64::from(REPLICAS_MAX))?;
            let (known, found) = (u64::from(SUMMARIES_KNOWN), u64::from(s.summaries.get()));
            if found & !known != 0 {
                let offset = c.at(offset_of!(r::SequenceCreate, summaries));
                return Err(FormatError::new(FormatErrorCode::Unsupported, "summaries", offset, known, found));
            }
            c.zero(offset_of!(r::SequenceCreate, reserved), s.reserved.as_bytes())
        }
        Record::Fork(f, key) => {
            let c = at("Fork");
            c.number(offset_of!(r::Fork, sequence), f.sequence)?;
            c.within(offset_of!(r::Fork, tokens), f.tokens.get(), 0, TOKENS_MAX)?;
            c.key(offset_of!(r::Fork, key_bytes), f.key_bytes.get(), key)?;
            c.zero(offset_of!(r::Fork, reserved), &f.reserved)
        }
        Record::SequenceTruncate(t) => {
            at("SequenceTruncate").within(offset_of!(r::SequenceTruncate, tokens), t.tokens.get(), 0, TOKENS_MAX)
        }
        Record::Frame(f) => {
            let c = at("Frame");
            c.number(offset_of!(r::Frame, frame), f.frame)?;
            c.number(offset_of!(r::Frame, lsn), f.lsn)?;
            c.location(offset_of!(r::Frame, location), &f.location)?;
            let (header, front) = (u64::from(f.header_pages.get()), u64::from(f.front_pages.get()));
            let total = u64::from(f.location.pages.get());
            c.within(offset_of!(r::Frame, header_pages), header, 1, u64::from(HEADER_PAGES_MAX).min(total))?;
            c.within(offset_of!(r::Frame, front_pages), front, header, total)?;
            c.zero(offset_of!(r::Frame, reserved), f.reserved.as_bytes())
        }
        Record::FrameMoved(f) => {
            let c = at("FrameMoved");
            c.location(offset_of!(r::FrameMoved, location), &f.location)?;
            c.zero(offset_of!(r::FrameMoved, reserved), f.reserved.as_bytes())
        }
        Record::Replica(f) => {
            let c = at("Replica");
            c.number(offset_of!(r::Replica, generation), f.generation)?;
            c.location(offset_of!(r::Replica, location), &f.location)?;
            c.zero(offset_of!(r::Replica, reserved), f.reserved.as_bytes())
        }
        Record::SegmentOpen(s) => {
            let c = at("SegmentOpen");
            c.number(offset_of!(r::SegmentOpen, generation), s.generation)?;
            c.index(offset_of!(r::SegmentOpen, segment), s.segment)?;
            let pages = u64::from(s.pages.get());
            c.within(offset_of!(r::SegmentOpen, pages), pages, SEGMENT_PAGES_MIN, SEGMENT_PAGES_MAX)?;
            c.device(offset_of!(r::SegmentOpen, device), s.device.get())?;
            let (low, high) = (u64::from(KIND_LOG), u64::from(KIND_POOL));
            c.within(offset_of!(r::SegmentOpen, kind), u64::from(s.kind), low, high)?;
            c.zero(offset_of!(r::SegmentOpen, reserved), &s.reserved)
        }
        Record::SegmentSeal(s) => {
            let c = at("SegmentSeal");
            let used = u64::from(s.used_pages.get());
            c.within(offset_of!(r::SegmentSeal, used_pages), used, 1, SEGMENT_PAGES_MAX - 1)?;
            c.device(offset_of!(r::SegmentSeal, device), s.device.get())?;
            c.zero(offset_of!(r::SegmentSeal, reserved), &s.reserved)
        }
        Record::SegmentFree(s) => {
            let c = at("SegmentFree");
            c.number(offset_of!(r::SegmentFree, generation), s.generation)?;
            c.index(offset_of!(r::SegmentFree, segment), s.segment)?;
            c.device(offset_of!(r::SegmentFree, device), s.device.get())?;
            c.within(offset_of!(r::SegmentFree, removed), u64::from(s.removed), 0, 1)?;
            c.zero(offset_of!(r::SegmentFree, reserved), &[s.reserved])
        }
        Record::PoolAllocation(p) => {
            let c = at("PoolAllocation");
            c.location(offset_of!(r::PoolAllocation, location), &p.location)?;
            c.within(offset_of!(r::PoolAllocation, allocated), u64::from(p.allocated), 0, 1)?;
            c.zero(offset_of!(r::PoolAllocation, reserved), &p.reserved)
        }
        Record::SequenceCommit(s) => {
            let c = at("SequenceCommit");
            c.within(offset_of!(r::SequenceCommit, tokens), s.tokens.get(), 0, TOKENS_MAX)?;
            c.within(offset_of!(r::SequenceCommit, token_ids), s.token_ids.get(), 0, TOKENS_MAX)
        }
        Record::Counters(s) => {
            let c = at("Counters");
            c.number(offset_of!(r::Counters, next_frame), s.next_frame)?;
            c.number(offset_of!(r::Counters, next_sequence), s.next_sequence)?;
            c.number(offset_of!(r::Counters, next_lsn), s.next_lsn)?;
            c.number(offset_of!(r::Counters, lifetime_bytes), s.lifetime_bytes)?;
            c.index(offset_of!(r::Counters, next_layout), s.next_layout)?;
            c.zero(offset_of!(r::Counters, reserved), s.reserved.as_bytes())
        }
        Record::Superseded(s) => at("Superseded").number(offset_of!(r::Superseded, generation), s.generation),
        Record::Adapter(a, name) => {
            let c = at("Adapter");
            let name_bytes = u64::from(a.name_bytes.get());
            c.within(offset_of!(r::AdapterDefined, name_bytes), name_bytes, 1, ADAPTER_NAME_BYTES_MAX as u64)?;
            c.within(offset_of!(r::AdapterDefined, name_bytes), name.len() as u64, name_bytes, name_bytes)?;
            c.within(offset_of!(r::AdapterDefined, bytes), a.bytes.get(), 1, ADAPTER_BYTES_MAX)?;
            c.zero(offset_of!(r::AdapterDefined, reserved), a.reserved.as_bytes())
        }
        Record::SequenceDelete(_)
        | Record::FrameRef(_)
        | Record::FrameRelease(_)
        | Record::CheckpointEnd(_)
        | Record::Unknown(_) => Ok(()),
    }
}
