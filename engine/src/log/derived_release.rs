//! Releases of derived frames, decided by the commit that records them.
//!
//! A derived frame may be released at any time, by the sequence that refers to it or by maintenance. Neither knows what
//! the other did, so the commit leader looks up which references exist.

use crate::catalog::{Catalog, RecordBuffer, release_record, without_stale};
use crate::io::planted;
use std::collections::BTreeSet;
use stratakv_format::manifest::Kind;
use stratakv_format::{FrameId, SequenceId};

/// References to derived frames that a commit releases, as far as they exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DerivedRelease {
    /// The sequence was cut: releases its references to tokens beyond this one, and what is no use without them
    /// ([`without_stale`]).
    Cut(SequenceId, u64),
    /// Releases one reference.
    Reference(SequenceId, FrameId),
}

impl DerivedRelease {
    /// Appends the records of this release. `released` holds the references that the batch releases already.
    pub(super) fn push(
        self,
        catalog: &Catalog,
        released: &mut BTreeSet<(SequenceId, FrameId)>,
        out: &mut RecordBuffer,
    ) {
        let (Self::Cut(sequence, _) | Self::Reference(sequence, _)) = self;
        let left = match self {
            Self::Cut(_, tokens) if !planted!(StaleClustersKept) => {
                without_stale(catalog.derived_refs(sequence).collect(), |own| own.end > tokens)
            }
            Self::Cut(..) => return,
            Self::Reference(..) => Vec::new(),
        };
        let is_meant = |frame: &FrameId| match self {
            Self::Cut(..) => left.iter().all(|own| own.frame != *frame),
            Self::Reference(_, only) => *frame == only,
        };
        for frame in catalog.derived_of(sequence).map(|(frame, _)| frame).filter(is_meant) {
            if released.insert((sequence, frame)) {
                out.push(Kind::FrameRelease, &release_record(sequence, frame), &[]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::manifest::{self as m, FLAG_DERIVED, Record};
    use stratakv_format::segment::{KIND_LOG, KIND_POOL};
    use stratakv_format::{DeviceIndex, LayoutId, Location, SegmentId};
    use zerocopy::little_endian::{U16, U32, U64};

    fn open(segment: u32, kind: u8) -> m::SegmentOpen {
        m::SegmentOpen {
            generation: U64::new(1),
            nonce: U64::new(1),
            segment: U32::new(segment),
            pages: U32::new(64),
            device: U16::new(0),
            kind,
            reserved: [0; 5],
        }
    }

    fn frame(id: u64, segment: u32, flags: u32) -> m::Frame {
        let location =
            Location { device: DeviceIndex(0), segment: SegmentId(segment), page: id as u32 * 2, pages: 2 }.to_raw();
        m::Frame {
            frame: U64::new(id),
            origin: U64::new(1),
            lsn: U64::new(id),
            nonce: U64::new(1),
            location,
            header_crc: U32::new(0),
            header_pages: U32::new(1),
            front_pages: U32::new(1),
            flags: U32::new(flags),
        }
    }

    /// Returns a catalog with sequence 1, frame 1 of tokens, and the derived frames 2 and 3 up to tokens 8 and 16.
    fn catalog() -> Catalog {
        let mut catalog = Catalog::default();
        let layout = crate::layout::KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build().unwrap();
        catalog.layouts.insert(LayoutId(1), layout);
        catalog.apply(&Record::SegmentOpen(&open(1, KIND_LOG))).unwrap();
        catalog.apply(&Record::SegmentOpen(&open(2, KIND_POOL))).unwrap();
        let create = m::SequenceCreate {
            sequence: U64::new(1),
            parent: U64::new(0),
            parent_tokens: U64::new(0),
            created_unix_ms: U64::new(0),
            ttl_ms: U64::new(0),
            layout: U32::new(1),
            summaries: U32::new(0),
            replicas: 1,
            evictable: 0,
            key_bytes: U16::new(0),
            reserved: U32::new(0),
        };
        catalog.apply(&Record::SequenceCreate(&create, &[])).unwrap();
        for (id, segment, flags, end) in [(1, 1, 0, u64::MAX), (2, 2, FLAG_DERIVED, 8), (3, 2, FLAG_DERIVED, 16)] {
            catalog.apply(&Record::Frame(&frame(id, segment, flags))).unwrap();
            let (sequence, frame) = (U64::new(1), U64::new(id));
            catalog.apply(&Record::FrameRef(&m::FrameRef { sequence, frame, token_end: U64::new(end) })).unwrap();
        }
        catalog
    }

    #[test]
    fn a_release_is_recorded_once_and_only_for_references_that_exist() {
        let mut catalog = catalog();
        let (own, none) = (SequenceId(1), SequenceId(9));
        let count = |releases: &[DerivedRelease]| {
            let (mut released, mut records) = (BTreeSet::new(), RecordBuffer::default());
            releases.iter().for_each(|release| release.push(&catalog, &mut released, &mut records));
            (released.into_iter().map(|(_, frame)| frame.0).collect::<Vec<_>>(), records.count())
        };
        assert_eq!(count(&[DerivedRelease::Cut(own, 16)]), (vec![], 0));
        assert_eq!(count(&[DerivedRelease::Cut(own, 15)]), (vec![2, 3], 2));
        assert_eq!(count(&[DerivedRelease::Cut(own, 0), DerivedRelease::Cut(own, 8)]), (vec![2, 3], 2));
        assert_eq!(count(&[DerivedRelease::Reference(own, FrameId(2)), DerivedRelease::Cut(own, 0)]), (vec![2, 3], 2));
        // A frame of tokens, a frame and a sequence that do not exist.
        assert_eq!(count(&[DerivedRelease::Reference(own, FrameId(1))]), (vec![], 0));
        assert_eq!(count(&[DerivedRelease::Reference(own, FrameId(7))]), (vec![], 0));
        assert_eq!(count(&[DerivedRelease::Cut(none, 0)]), (vec![], 0));
        let (mut released, mut records) = (BTreeSet::new(), RecordBuffer::default());
        DerivedRelease::Cut(own, 0).push(&catalog, &mut released, &mut records);
        records.apply(&mut catalog).unwrap();
        assert_eq!((catalog.frames.len(), catalog.derived_of(own).count()), (1, 0));
    }

    #[test]
    fn derived_frames_have_segments_of_their_own_and_one_copy() {
        let mut catalog = catalog();
        let text = |applied: std::result::Result<(), String>| applied.expect_err("a contradiction");
        assert!(text(catalog.apply(&Record::Frame(&frame(4, 1, FLAG_DERIVED)))).contains("kind 1"));
        assert!(text(catalog.apply(&Record::Frame(&frame(4, 2, 0)))).contains("kind 2"));
        let location = Location { device: DeviceIndex(1), segment: SegmentId(2), page: 9, pages: 2 }.to_raw();
        let (header_crc, reserved, generation) = (U32::new(0), U32::new(0), U64::new(1));
        let copy = m::Replica { frame: U64::new(2), generation, location, header_crc, reserved };
        assert!(text(catalog.apply(&Record::Replica(&copy))).contains("second copy"));
        let moved = m::FrameMoved { frame: U64::new(2), location, header_crc, reserved };
        assert!(text(catalog.apply(&Record::FrameMoved(&moved))).contains("is moved"));
        let features = catalog.checkpoint().features();
        assert_eq!(features, stratakv_format::features::INCOMPAT_POOLS);
    }
}
