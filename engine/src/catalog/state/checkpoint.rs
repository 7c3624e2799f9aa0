//! Checkpoints: the state as records, in the order in which [`Catalog::apply`] accepts them again.
//!
//! Order: members, counters, layouts, segments, frames by LSN with their copies, sequences with their references.

use super::Catalog;
use crate::catalog::meta::{
    CopyMeta, Counters, FrameMeta, SegmentMeta, SegmentState, SequenceMeta, free_record, open_record, ref_record,
    seal_record,
};
use crate::catalog::records::RecordBuffer;
use stratakv_format::FrameId;
use stratakv_format::manifest::{self as m, Kind};
use stratakv_format::segment::KIND_POOL;
use zerocopy::little_endian::{U32, U64};

impl Catalog {
    /// Returns the counters as a record.
    pub(crate) fn counters_record(counters: &Counters) -> m::Counters {
        m::Counters {
            next_frame: U64::new(counters.frame),
            next_sequence: U64::new(counters.sequence),
            next_lsn: U64::new(counters.lsn),
            lifetime_bytes: U64::new(counters.lifetime_bytes),
            next_layout: U32::new(counters.layout),
            reserved: U32::new(0),
        }
    }

    /// Returns the whole state as records.
    pub(crate) fn checkpoint(&self) -> RecordBuffer {
        let mut out = RecordBuffer::default();
        for member in self.members.values() {
            out.push(Kind::Member, member, &[]);
        }
        out.push(Kind::Counters, &Self::counters_record(&self.counters), &[]);
        for (id, layout) in &self.layouts {
            out.push_layout(*id, layout);
        }
        for (key, segment) in &self.segments {
            out.push(Kind::SegmentOpen, &open_record(*key, segment), &[]);
            if segment.kind == KIND_POOL {
                out.require_pools();
            }
            match segment.state {
                SegmentState::Open => {}
                SegmentState::Sealed => out.push(Kind::SegmentSeal, &seal_record(*key, segment.used_pages), &[]),
                SegmentState::Free => {
                    out.push(Kind::SegmentFree, &free_record(*key, segment.generation, false), &[]);
                }
            }
        }
        let mut frames: Vec<_> = self.frames.iter().collect();
        frames.sort_unstable_by_key(|(_, frame)| frame.lsn);
        for (id, frame) in frames {
            frame.announce(*id, &mut out);
        }
        for (id, sequence) in &self.sequences {
            out.push(Kind::SequenceCreate, &sequence.create_record(*id), sequence.key.as_bytes());
            if let Some(adapter) = &sequence.adapter {
                out.push(Kind::Adapter, &adapter.record(*id), adapter.name.as_bytes());
            }
            for (frame, token_end) in &sequence.refs {
                out.push(Kind::FrameRef, &ref_record(*id, *frame, *token_end), &[]);
            }
            out.push(Kind::SequenceCommit, &sequence.commit_record(*id), &[]);
        }
        let end = m::CheckpointEnd { records: U64::new(out.count() as u64) };
        out.push(Kind::CheckpointEnd, &end, &[]);
        out
    }

    /// Returns an upper bound of the bytes of [`Self::checkpoint`]. With `has_copies`, frames may have copies.
    pub(crate) fn checkpoint_bytes(&self, has_copies: bool) -> u64 {
        let record = |body: usize| (size_of::<m::RecordHeader>() + body).next_multiple_of(8) as u64;
        let layouts = self.layouts.values().map(|layout| record(8 + layout.raw().encoded_bytes())).sum::<u64>();
        let copies = if has_copies { self.members.len() as u64 } else { 0 };
        let frame = record(size_of::<m::Frame>()) + copies * record(size_of::<m::Replica>());
        let sequence = record(size_of::<m::SequenceCreate>()) + 8 + record(size_of::<m::SequenceCommit>());
        let segment = record(size_of::<m::SegmentOpen>()) + record(size_of::<m::SegmentSeal>());
        layouts
            + record(size_of::<m::Member>()) * self.members.len() as u64
            + record(size_of::<m::Counters>())
            + self.segments.len() as u64 * segment
            + self.frames.len() as u64 * frame
            + self.refs * record(size_of::<m::FrameRef>())
            + self.sequences.len() as u64 * sequence
            + self.key_bytes
            + self.adapter_bytes
            + record(size_of::<m::CheckpointEnd>())
    }

    /// Returns the number of entries of the tables. References and the bytes of names are small, so that 8 and 128 of
    /// them count as one.
    pub(crate) fn entries(&self) -> usize {
        let small = self.refs / 8 + (self.key_bytes + self.adapter_bytes) / 128;
        self.frames.len() + self.sequences.len() + self.segments.len() + small as usize
    }

    /// Returns the approximate memory of the tables, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let refs: usize = self.sequences.values().map(|s| s.refs.capacity() * 16 + s.key.len() * 2).sum();
        self.sequences.len() * (size_of::<SequenceMeta>() + 64)
            + refs
            + self.frames.values().map(|f| f.other_copies.capacity() * size_of::<CopyMeta>()).sum::<usize>()
            + self.frames.len() * (size_of::<FrameMeta>() + 32)
            + self.placed.values().map(|placed| placed.capacity() * size_of::<FrameId>() + 48).sum::<usize>()
            + self.adapters.keys().map(|(_, name, _)| 2 * name.len() + 96).sum::<usize>()
            + self.segments.len() * (size_of::<SegmentMeta>() + 32)
    }
}
