//! What there is, as the records that say so.

use super::{FrameMeta, ReplicaMeta, SegmentKey, SegmentMeta, SequenceMeta};
use crate::index::records::RecordBuffer;
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::{FrameId, Location, SequenceId};
use zerocopy::little_endian::{U16, U32, U64};

impl FrameMeta {
    /// Copies there are, the first included.
    pub(crate) fn copies(&self) -> usize {
        1 + self.replicas.len()
    }

    /// Where its copies are, the first in front.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        std::iter::once(self.location).chain(self.replicas.iter().map(|replica| replica.location))
    }

    /// The records that make it known, with its copies.
    pub(crate) fn announce(&self, id: FrameId, out: &mut RecordBuffer) {
        out.push(Kind::Frame, &self.record(id), &[]);
        for replica in &self.replicas {
            out.push(Kind::Replica, &replica.record(id), &[]);
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
            reserved: U32::new(0),
        }
    }
}

impl ReplicaMeta {
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

impl SequenceMeta {
    pub(crate) fn create_record(&self, id: SequenceId) -> m::SequenceCreate {
        m::SequenceCreate {
            sequence: U64::new(id.0),
            parent: U64::new(self.parent.map_or(0, |(id, _)| id.0)),
            parent_tokens: U64::new(self.parent.map_or(0, |(_, tokens)| tokens)),
            created_unix_ms: U64::new(self.created_unix_ms),
            ttl_ms: U64::new(self.ttl_ms),
            layout: U32::new(self.layout.0),
            summaries: U32::new(self.summaries),
            replicas: self.replicas,
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
