//! Checks of a record by itself: ranges, lengths and reserved bytes.
//!
//! Each record has one method of [`BodyChecker`]. The code that applies records checks their references.

use super::body as b;
use super::body::{
    ADAPTER_BYTES_MAX, ADAPTER_NAME_BYTES_MAX, FLAG_DERIVED, KEY_BYTES_MAX, MEMBER_ACTIVE, MEMBER_REMOVED, REPLICAS_MAX,
};
use super::record::{Record, RecordHeader};
use crate::error::FormatError;
use crate::export::SUMMARIES_KNOWN;
use crate::frame::{HEADER_PAGES_MAX, TOKENS_MAX, TOTAL_PAGES_MAX};
use crate::ids::{INDEX_MAX, NUMBER_MAX, RawLocation};
use crate::segment::{KIND_LOG, KIND_POOL};
use crate::superblock::{DEVICES_MAX, SEGMENT_PAGES_MAX, SEGMENT_PAGES_MIN};
use crate::verify::check_zeros;
use core::mem::offset_of;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

type Checked = Result<(), FormatError>;

/// Checks the body of `record`. `base` is the offset of its header in the records of the batch.
pub(super) fn check(record: &Record<'_>, base: usize) -> Checked {
    let checker = |name| BodyChecker { name, base };
    match record {
        Record::Member(body) => checker("Member").member(body),
        Record::Layout(body, _) => checker("Layout").layout(body),
        Record::SequenceCreate(body, key) => checker("SequenceCreate").sequence_create(body, key),
        Record::Fork(body, key) => checker("Fork").fork(body, key),
        Record::SequenceTruncate(body) => {
            checker("SequenceTruncate").tokens(offset_of!(b::SequenceTruncate, tokens), body.tokens)
        }
        Record::Frame(body) => checker("Frame").frame(body),
        Record::FrameMoved(body) => checker("FrameMoved").frame_moved(body),
        Record::Replica(body) => checker("Replica").replica(body),
        Record::SegmentOpen(body) => checker("SegmentOpen").segment_open(body),
        Record::SegmentSeal(body) => checker("SegmentSeal").segment_seal(body),
        Record::SegmentFree(body) => checker("SegmentFree").segment_free(body),
        Record::PoolAllocation(body) => checker("PoolAllocation").pool_allocation(body),
        Record::SequenceCommit(body) => checker("SequenceCommit").sequence_commit(body),
        Record::Counters(body) => checker("Counters").counters(body),
        Record::Superseded(body) => {
            checker("Superseded").number(offset_of!(b::Superseded, generation), body.generation)
        }
        Record::Adapter(body, name) => checker("Adapter").adapter(body, name),
        Record::SequenceDelete(_)
        | Record::FrameRef(_)
        | Record::FrameRelease(_)
        | Record::CheckpointEnd(_)
        | Record::Unknown(_) => Ok(()),
    }
}

/// A check of one body. `name` names the record in errors, and `base` is the offset of its header.
struct BodyChecker {
    name: &'static str,
    base: usize,
}

/// Checks of single fields. `offset` is the offset of the field in the body.
impl BodyChecker {
    const fn at(&self, offset: usize) -> usize {
        self.base + size_of::<RecordHeader>() + offset
    }

    fn zero(&self, offset: usize, bytes: &[u8]) -> Checked {
        check_zeros(bytes, self.name, self.at(offset))
    }

    fn within(&self, offset: usize, found: u64, low: u64, high: u64) -> Checked {
        if found < low {
            return Err(FormatError::range(self.name, self.at(offset), low, found));
        }
        if found > high {
            return Err(FormatError::range(self.name, self.at(offset), high, found));
        }
        Ok(())
    }

    /// Checks a number that only grows.
    fn number(&self, offset: usize, number: U64) -> Checked {
        self.within(offset, number.get(), 0, NUMBER_MAX)
    }

    /// Checks the number of a segment or layout.
    fn index(&self, offset: usize, index: U32) -> Checked {
        self.within(offset, u64::from(index.get()), 0, u64::from(INDEX_MAX))
    }

    /// Checks a number of tokens.
    fn tokens(&self, offset: usize, tokens: U64) -> Checked {
        self.within(offset, tokens.get(), 0, TOKENS_MAX)
    }

    /// Checks that the variable part is a key of `key_bytes`, in UTF-8.
    fn key(&self, offset: usize, key_bytes: u16, variable: &[u8]) -> Checked {
        self.within(offset, u64::from(key_bytes), 0, KEY_BYTES_MAX as u64)?;
        let found = variable.len() as u64;
        self.within(offset, found, u64::from(key_bytes), u64::from(key_bytes))?;
        core::str::from_utf8(variable).map(|_| ()).map_err(|e| {
            let found = variable.get(e.valid_up_to()).copied().map_or(0, u64::from);
            FormatError::range("key that is not UTF-8", self.at(offset), 0x7f, found)
        })
    }

    fn device(&self, offset: usize, device: u16) -> Checked {
        self.within(offset, u64::from(device), 0, u64::from(DEVICES_MAX) - 1)
    }

    /// Checks the location of a frame. It excludes the header page, and the trailer page of the largest segment.
    fn location(&self, offset: usize, location: &RawLocation) -> Checked {
        let (page, pages) = (u64::from(location.page.get()), u64::from(location.pages.get()));
        self.within(offset + offset_of!(RawLocation, pages), pages, 1, u64::from(TOTAL_PAGES_MAX))?;
        self.within(offset + offset_of!(RawLocation, page), page, 1, SEGMENT_PAGES_MAX - 1 - pages)?;
        self.device(offset + offset_of!(RawLocation, device), location.device.get())?;
        self.zero(offset + offset_of!(RawLocation, reserved), location.reserved.as_bytes())
    }
}

/// Checks of devices, layouts and sequences.
impl BodyChecker {
    fn member(&self, body: &b::Member) -> Checked {
        self.number(offset_of!(b::Member, epoch), body.epoch)?;
        self.device(offset_of!(b::Member, device), body.device.get())?;
        let (low, high) = (u64::from(MEMBER_ACTIVE), u64::from(MEMBER_REMOVED));
        self.within(offset_of!(b::Member, state), u64::from(body.state), low, high)?;
        self.within(offset_of!(b::Member, manifest_copies), u64::from(body.manifest_copies), 0, 2)
    }

    fn layout(&self, body: &b::LayoutDefined) -> Checked {
        self.index(offset_of!(b::LayoutDefined, layout), body.layout)?;
        self.zero(offset_of!(b::LayoutDefined, reserved), body.reserved.as_bytes())
    }

    fn sequence_create(&self, body: &b::SequenceCreate, key: &[u8]) -> Checked {
        self.number(offset_of!(b::SequenceCreate, sequence), body.sequence)?;
        self.key(offset_of!(b::SequenceCreate, key_bytes), body.key_bytes.get(), key)?;
        let copies = u64::from(body.replicas);
        self.within(offset_of!(b::SequenceCreate, replicas), copies, 0, u64::from(REPLICAS_MAX))?;
        let (known, found) = (u64::from(SUMMARIES_KNOWN), u64::from(body.summaries.get()));
        if found & !known != 0 {
            let offset = self.at(offset_of!(b::SequenceCreate, summaries));
            return Err(FormatError::unsupported("summaries", offset, known, found));
        }
        self.zero(offset_of!(b::SequenceCreate, reserved), body.reserved.as_bytes())
    }

    fn fork(&self, body: &b::Fork, key: &[u8]) -> Checked {
        self.number(offset_of!(b::Fork, sequence), body.sequence)?;
        self.tokens(offset_of!(b::Fork, tokens), body.tokens)?;
        self.key(offset_of!(b::Fork, key_bytes), body.key_bytes.get(), key)?;
        self.zero(offset_of!(b::Fork, reserved), &body.reserved)
    }

    fn sequence_commit(&self, body: &b::SequenceCommit) -> Checked {
        self.tokens(offset_of!(b::SequenceCommit, tokens), body.tokens)?;
        self.tokens(offset_of!(b::SequenceCommit, token_ids), body.token_ids)
    }

    fn adapter(&self, body: &b::AdapterDefined, name: &[u8]) -> Checked {
        let name_bytes = u64::from(body.name_bytes.get());
        self.within(offset_of!(b::AdapterDefined, name_bytes), name_bytes, 1, ADAPTER_NAME_BYTES_MAX as u64)?;
        self.within(offset_of!(b::AdapterDefined, name_bytes), name.len() as u64, name_bytes, name_bytes)?;
        self.within(offset_of!(b::AdapterDefined, bytes), body.bytes.get(), 1, ADAPTER_BYTES_MAX)?;
        self.zero(offset_of!(b::AdapterDefined, reserved), body.reserved.as_bytes())
    }

    fn counters(&self, body: &b::Counters) -> Checked {
        self.number(offset_of!(b::Counters, next_frame), body.next_frame)?;
        self.number(offset_of!(b::Counters, next_sequence), body.next_sequence)?;
        self.number(offset_of!(b::Counters, next_lsn), body.next_lsn)?;
        self.number(offset_of!(b::Counters, lifetime_bytes), body.lifetime_bytes)?;
        self.index(offset_of!(b::Counters, next_layout), body.next_layout)?;
        self.zero(offset_of!(b::Counters, reserved), body.reserved.as_bytes())
    }
}

/// Checks of frames and segments.
impl BodyChecker {
    fn frame(&self, body: &b::Frame) -> Checked {
        self.number(offset_of!(b::Frame, frame), body.frame)?;
        self.number(offset_of!(b::Frame, lsn), body.lsn)?;
        self.location(offset_of!(b::Frame, location), &body.location)?;
        let (header, front) = (u64::from(body.header_pages.get()), u64::from(body.front_pages.get()));
        let total = u64::from(body.location.pages.get());
        self.within(offset_of!(b::Frame, header_pages), header, 1, u64::from(HEADER_PAGES_MAX).min(total))?;
        self.within(offset_of!(b::Frame, front_pages), front, header, total)?;
        let flags = body.flags.get();
        if flags & !FLAG_DERIVED != 0 {
            let offset = self.at(offset_of!(b::Frame, flags));
            return Err(FormatError::unsupported("frame flags", offset, u64::from(FLAG_DERIVED), u64::from(flags)));
        }
        Ok(())
    }

    fn frame_moved(&self, body: &b::FrameMoved) -> Checked {
        self.location(offset_of!(b::FrameMoved, location), &body.location)?;
        self.zero(offset_of!(b::FrameMoved, reserved), body.reserved.as_bytes())
    }

    fn replica(&self, body: &b::Replica) -> Checked {
        self.number(offset_of!(b::Replica, generation), body.generation)?;
        self.location(offset_of!(b::Replica, location), &body.location)?;
        self.zero(offset_of!(b::Replica, reserved), body.reserved.as_bytes())
    }

    fn segment_open(&self, body: &b::SegmentOpen) -> Checked {
        self.number(offset_of!(b::SegmentOpen, generation), body.generation)?;
        self.index(offset_of!(b::SegmentOpen, segment), body.segment)?;
        let pages = u64::from(body.pages.get());
        self.within(offset_of!(b::SegmentOpen, pages), pages, SEGMENT_PAGES_MIN, SEGMENT_PAGES_MAX)?;
        self.device(offset_of!(b::SegmentOpen, device), body.device.get())?;
        let (low, high) = (u64::from(KIND_LOG), u64::from(KIND_POOL));
        self.within(offset_of!(b::SegmentOpen, kind), u64::from(body.kind), low, high)?;
        self.zero(offset_of!(b::SegmentOpen, reserved), &body.reserved)
    }

    fn segment_seal(&self, body: &b::SegmentSeal) -> Checked {
        let used = u64::from(body.used_pages.get());
        self.within(offset_of!(b::SegmentSeal, used_pages), used, 1, SEGMENT_PAGES_MAX - 1)?;
        self.device(offset_of!(b::SegmentSeal, device), body.device.get())?;
        self.zero(offset_of!(b::SegmentSeal, reserved), &body.reserved)
    }

    fn segment_free(&self, body: &b::SegmentFree) -> Checked {
        self.number(offset_of!(b::SegmentFree, generation), body.generation)?;
        self.index(offset_of!(b::SegmentFree, segment), body.segment)?;
        self.device(offset_of!(b::SegmentFree, device), body.device.get())?;
        self.within(offset_of!(b::SegmentFree, removed), u64::from(body.removed), 0, 1)?;
        self.zero(offset_of!(b::SegmentFree, reserved), &[body.reserved])
    }

    fn pool_allocation(&self, body: &b::PoolAllocation) -> Checked {
        self.location(offset_of!(b::PoolAllocation, location), &body.location)?;
        self.within(offset_of!(b::PoolAllocation, allocated), u64::from(body.allocated), 0, 1)?;
        self.zero(offset_of!(b::PoolAllocation, reserved), &body.reserved)
    }
}
