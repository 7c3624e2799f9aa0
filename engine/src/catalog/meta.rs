//! The catalog's entries for sequences, adapters, frames and segments, and their manifest records.
//!
//! Invariant: an entry that is written as records and applied again is equal. A checkpoint therefore rebuilds it.

use super::records::RecordBuffer;
use crate::io::planted;
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{DeviceIndex, FrameId, LayoutId, Location, SegmentId, SequenceId};
use zerocopy::little_endian::{U16, U32, U64};

/// The identity of a segment: its device and its number there.
pub(crate) type SegmentKey = (DeviceIndex, SegmentId);

/// A sequence.
#[derive(Clone, Debug)]
pub(crate) struct SequenceMeta {
    pub(crate) key: String,
    pub(crate) layout: LayoutId,
    pub(crate) summaries: u32,
    pub(crate) created_unix_ms: u64,
    pub(crate) ttl_ms: u64,
    pub(crate) copies: u8,
    pub(crate) evictable: u8,
    pub(crate) parent: Option<(SequenceId, u64)>,
    pub(crate) tokens: u64,
    pub(crate) token_ids: u64,
    pub(crate) state_frame: Option<FrameId>,
    pub(crate) committed_unix_ms: u64,
    /// The time of the last use by a handle since the store was opened, or of the last commit.
    pub(crate) used_unix_ms: u64,
    /// The adapter that the sequence holds in place of tokens.
    pub(crate) adapter: Option<AdapterMeta>,
    /// The frames in order of LSN. The sequence uses a frame's tokens below the given one.
    pub(crate) refs: Vec<(FrameId, u64)>,
}

/// An adapter. Its sequence holds nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdapterMeta {
    pub(crate) name: String,
    pub(crate) version: u32,
    /// The bytes of all layers together.
    pub(crate) bytes: u64,
    /// The CRC-64 of these bytes.
    pub(crate) checksum: u64,
}

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct FrameMeta {
    pub(crate) origin: SequenceId,
    pub(crate) lsn: u64,
    pub(crate) nonce: u64,
    pub(crate) location: Location,
    pub(crate) header_crc: u32,
    pub(crate) header_pages: u32,
    pub(crate) front_pages: u32,
    /// True if it only repeats tokens of other frames. It has one copy, never moves, and may be released at any time.
    pub(crate) derived: bool,
    /// The number of sequences that refer to the frame.
    pub(crate) refs: u32,
    /// The other copies, on other devices.
    pub(crate) other_copies: Vec<CopyMeta>,
}

/// Another copy of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyMeta {
    pub(crate) generation: u64,
    pub(crate) location: Location,
    pub(crate) header_crc: u32,
}

/// The state of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentState {
    /// The segment takes frames.
    Open,
    /// The segment takes no more frames.
    Sealed,
    /// The segment holds no live frames and may be opened again.
    Free,
}

/// A segment.
#[derive(Clone, Debug)]
pub(crate) struct SegmentMeta {
    pub(crate) generation: u64,
    pub(crate) nonce: u64,
    pub(crate) pages: u32,
    pub(crate) kind: u8,
    pub(crate) state: SegmentState,
    /// One past the last page of any committed frame.
    pub(crate) used_pages: u32,
    /// The number of pages of frames that sequences refer to.
    pub(crate) live_pages: u64,
    /// The LSN of the newest committed frame. Cleaning derives the segment's age from it.
    pub(crate) last_lsn: u64,
}

/// The next free numbers. They never decrease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counters {
    pub(crate) frame: u64,
    pub(crate) sequence: u64,
    pub(crate) lsn: u64,
    pub(crate) layout: u32,
    pub(crate) lifetime_bytes: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self { frame: 1, sequence: 1, lsn: 1, layout: 1, lifetime_bytes: 0 }
    }
}

impl FrameMeta {
    /// Returns the number of copies, the first included.
    pub(crate) fn copies(&self) -> usize {
        1 + self.other_copies.len()
    }

    /// Returns the locations of all copies, the first one first.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        std::iter::once(self.location).chain(self.other_copies.iter().map(|copy| copy.location))
    }

    /// Appends the records that define the frame and its copies.
    pub(crate) fn announce(&self, id: FrameId, out: &mut RecordBuffer) {
        out.push(Kind::Frame, &self.record(id), &[]);
        if self.derived {
            out.require_pools();
        }
        for copy in &self.other_copies {
            out.push(Kind::Replica, &copy.record(id), &[]);
        }
    }

    pub(super) fn record(&self, id: FrameId) -> m::Frame {
        m::Frame {
            frame: U64::new(id.0),
            origin: U64::new(self.origin.0),
            lsn: U64::new(self.lsn),
            nonce: U64::new(self.nonce),
            location: self.location.to_raw(),
            header_crc: U32::new(self.header_crc),
            header_pages: U32::new(self.header_pages),
            front_pages: U32::new(self.front_pages),
            flags: U32::new(if self.derived { m::FLAG_DERIVED } else { 0 }),
        }
    }
}

impl CopyMeta {
    pub(crate) fn record(&self, id: FrameId) -> m::Replica {
        m::Replica {
            frame: U64::new(id.0),
            generation: U64::new(self.generation),
            location: self.location.to_raw(),
            header_crc: U32::new(self.header_crc),
            reserved: U32::new(0),
        }
    }
}

impl AdapterMeta {
    pub(crate) fn record(&self, id: SequenceId) -> m::AdapterDefined {
        m::AdapterDefined {
            sequence: U64::new(id.0),
            checksum: U64::new(self.checksum),
            bytes: U64::new(self.bytes),
            version: U32::new(self.version),
            name_bytes: U16::new(self.name.len() as u16),
            reserved: U16::new(0),
        }
    }
}

impl SequenceMeta {
    /// Returns when the sequence expires, in milliseconds since 1970, or `None` if it has no time to live.
    pub(crate) fn ends_ms(&self) -> Option<u64> {
        let ttl = if planted!(ExpiredEarly) { self.ttl_ms / 2 } else { self.ttl_ms };
        (self.ttl_ms > 0).then(|| self.created_unix_ms.saturating_add(ttl))
    }

    pub(crate) fn create_record(&self, id: SequenceId) -> m::SequenceCreate {
        m::SequenceCreate {
            sequence: U64::new(id.0),
            parent: U64::new(self.parent.map_or(0, |(id, _)| id.0)),
            parent_tokens: U64::new(self.parent.map_or(0, |(_, tokens)| tokens)),
            created_unix_ms: U64::new(self.created_unix_ms),
            ttl_ms: U64::new(self.ttl_ms),
            layout: U32::new(self.layout.0),
            summaries: U32::new(self.summaries),
            replicas: self.copies,
            evictable: self.evictable,
            key_bytes: U16::new(self.key.len() as u16),
            reserved: U32::new(0),
        }
    }

    pub(crate) fn commit_record(&self, id: SequenceId) -> m::SequenceCommit {
        m::SequenceCommit {
            sequence: U64::new(id.0),
            tokens: U64::new(self.tokens),
            state_frame: U64::new(self.state_frame.map_or(0, |frame| frame.0)),
            token_ids: U64::new(self.token_ids),
            committed_unix_ms: U64::new(self.committed_unix_ms),
        }
    }
}

/// Returns the bytes of an adapter's record in a checkpoint.
pub(super) fn adapter_record_bytes(adapter: &AdapterMeta) -> u64 {
    (size_of::<m::RecordHeader>() + size_of::<m::AdapterDefined>() + adapter.name.len()).next_multiple_of(8) as u64
}

pub(crate) fn ref_record(sequence: SequenceId, frame: FrameId, token_end: u64) -> m::FrameRef {
    m::FrameRef { sequence: U64::new(sequence.0), frame: U64::new(frame.0), token_end: U64::new(token_end) }
}

pub(crate) fn release_record(sequence: SequenceId, frame: FrameId) -> m::FrameRelease {
    m::FrameRelease { sequence: U64::new(sequence.0), frame: U64::new(frame.0) }
}

pub(crate) fn open_record(key: SegmentKey, segment: &SegmentMeta) -> m::SegmentOpen {
    m::SegmentOpen {
        generation: U64::new(segment.generation),
        nonce: U64::new(segment.nonce),
        segment: U32::new(key.1.0),
        pages: U32::new(segment.pages),
        device: U16::new(key.0.0),
        kind: segment.kind,
        reserved: [0; 5],
    }
}

pub(crate) fn seal_record(key: SegmentKey, used_pages: u32) -> m::SegmentSeal {
    m::SegmentSeal {
        segment: U32::new(key.1.0),
        used_pages: U32::new(used_pages),
        device: U16::new(key.0.0),
        reserved: [0; 6],
    }
}

pub(crate) fn free_record(key: SegmentKey, generation: u64, removed: bool) -> m::SegmentFree {
    m::SegmentFree {
        generation: U64::new(generation),
        segment: U32::new(key.1.0),
        device: U16::new(key.0.0),
        removed: u8::from(removed),
        reserved: 0,
    }
}
