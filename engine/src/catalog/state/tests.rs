//! Tests of the derived tables of the catalog against a search through all frames.

use super::*;
use crate::catalog::meta::SegmentState;
use crate::catalog::{free_record, open_record, ref_record, release_record, seal_record};
use proptest::prelude::*;
use stratakv_format::ids::RawLocation;
use stratakv_format::{Location, SegmentId};
use zerocopy::little_endian::{U32, U64};

fn at(segment: u32, page: u32) -> RawLocation {
    Location { device: DeviceIndex(0), segment: SegmentId(segment), page, pages: 1 }.to_raw()
}

fn empty_sequence() -> SequenceMeta {
    SequenceMeta {
        key: String::new(),
        layout: LayoutId(1),
        summaries: 0,
        created_unix_ms: 0,
        ttl_ms: 0,
        copies: 0,
        evictable: 0,
        parent: None,
        tokens: 0,
        token_ids: 0,
        state_frame: None,
        committed_unix_ms: 0,
        used_unix_ms: 0,
        adapter: None,
        refs: Vec::new(),
    }
}

/// Checks the derived tables against a search through all frames.
fn check(catalog: &Catalog) {
    let sealed = |meta: &SegmentMeta| meta.state == SegmentState::Sealed && meta.live_pages == 0;
    let idle: BTreeSet<SegmentKey> =
        catalog.segments.iter().filter(|(_, meta)| sealed(meta)).map(|(key, _)| *key).collect();
    assert_eq!(catalog.idle, idle);
    for key in catalog.segments.keys() {
        let here = |frame: &FrameMeta| frame.locations().any(|at| (at.device, at.segment) == *key);
        let all: BTreeSet<FrameId> =
            catalog.frames.iter().filter(|(_, frame)| here(frame)).map(|(id, _)| *id).collect();
        assert_eq!(catalog.frames_in(*key).into_keys().collect::<BTreeSet<_>>(), all, "{key:?}");
    }
    let placed: usize = catalog.placed.values().map(Vec::len).sum();
    assert!(placed <= catalog.segments.len() * 64, "at most one frame per page");
}

#[test]
fn counters_below_the_ids_in_use_leave_the_numbers_as_they_are() {
    let record = |next: u64| m::Counters {
        next_frame: U64::new(next),
        next_sequence: U64::new(next),
        next_lsn: U64::new(next),
        lifetime_bytes: U64::new(next),
        next_layout: U32::new(next as u32),
        reserved: U32::new(0),
    };
    let mut catalog = Catalog::default();
    for (given, expected) in [(9, 9), (5, 9), (12, 12), (0, 12)] {
        catalog.apply(&Record::Counters(&record(given))).unwrap();
        let c = catalog.counters;
        let found = [c.frame, c.sequence, c.lsn, c.lifetime_bytes, u64::from(c.layout)];
        assert_eq!(found, [expected; 5]);
    }
}

proptest! {
    #[test]
    fn the_catalog_tracks_idle_segments_and_the_frames_of_each_segment(
        steps in prop::collection::vec((0..6_u8, 0..4_u32, 0..40_u64), 1..200),
    ) {
        let mut catalog = Catalog::default();
        let mut next = [1_u32; 4];
        let mut generations = [0_u64; 4];
        let mut frames = 0_u64;
        let sequence = SequenceId(1);
        catalog.insert_sequence(sequence, &[], empty_sequence()).unwrap();
        for (what, segment, which) in steps {
            let key = (DeviceIndex(0), SegmentId(segment));
            let meta = catalog.segments.get(&key).cloned();
            let open = meta.as_ref().is_some_and(|meta| meta.state == SegmentState::Open);
            match what {
                0 if meta.as_ref().is_none_or(|meta| meta.state == SegmentState::Free) => {
                    generations[segment as usize] += 1;
                    let generation = generations[segment as usize];
                    let (pages, state) = (64, SegmentState::Open);
                    let new = SegmentMeta {
                        generation, nonce: 1, pages, kind: 1, state, used_pages: 1, live_pages: 0, last_lsn: 0,
                    };
                    catalog.apply(&Record::SegmentOpen(&open_record(key, &new))).unwrap();
                    next[segment as usize] = 1;
                }
                1 if open && next[segment as usize] < 60 => {
                    frames += 1;
                    let meta = FrameMeta {
                        origin: sequence, lsn: frames, nonce: 1,
                        location: Location::from_raw(&at(segment, next[segment as usize])),
                        header_crc: 0, header_pages: 1, front_pages: 1, derived: false, refs: 0,
                        other_copies: Vec::new(),
                    };
                    next[segment as usize] += 1;
                    catalog.apply(&Record::Frame(&meta.record(FrameId(frames)))).unwrap();
                    catalog.apply(&Record::FrameRef(&ref_record(sequence, FrameId(frames), 1))).unwrap();
                }
                2 if open => catalog.apply(&Record::SegmentSeal(&seal_record(key, 1))).unwrap(),
                3 if catalog.frames.contains_key(&FrameId(which)) => {
                    catalog.apply(&Record::FrameRelease(&release_record(sequence, FrameId(which)))).unwrap();
                }
                4 if open && next[segment as usize] < 60 && catalog.frames.contains_key(&FrameId(which)) => {
                    let location = at(segment, next[segment as usize]);
                    next[segment as usize] += 1;
                    let moved = m::FrameMoved {
                        frame: U64::new(which), location, header_crc: U32::new(0), reserved: U32::new(0),
                    };
                    catalog.apply(&Record::FrameMoved(&moved)).unwrap();
                }
                5 if catalog.idle.contains(&key) => {
                    let generation = meta.map_or(0, |meta| meta.generation);
                    catalog.apply(&Record::SegmentFree(&free_record(key, generation, which % 2 == 0))).unwrap();
                }
                _ => {}
            }
            check(&catalog);
        }
    }
}

/// A store of one frame of 2 pages, in the first of two segments of device 0. Segment 2 is free.
fn small() -> Catalog {
    let mut catalog = Catalog::default();
    let mut apply = |record: Record<'_>| catalog.apply(&record).expect("a record that fits");
    let open = |segment: u32| {
        let meta = SegmentMeta {
            generation: 3,
            nonce: 1,
            pages: 64,
            kind: 1,
            state: SegmentState::Open,
            used_pages: 1,
            live_pages: 0,
            last_lsn: 0,
        };
        open_record((DeviceIndex(0), SegmentId(segment)), &meta)
    };
    (0..3).for_each(|segment| apply(Record::SegmentOpen(&open(segment))));
    apply(Record::SegmentFree(&free_record((DeviceIndex(0), SegmentId(2)), 3, false)));
    apply(Record::Frame(&frame_of_two_pages(1, 0, 1)));
    catalog
}

fn pages_at(device: u16, page: u32, pages: u32) -> RawLocation {
    Location { device: DeviceIndex(device), segment: SegmentId(0), page, pages }.to_raw()
}

fn frame_of_two_pages(id: u64, device: u16, page: u32) -> m::Frame {
    let meta = FrameMeta {
        origin: SequenceId(1),
        lsn: id,
        nonce: 1,
        location: Location::from_raw(&pages_at(device, page, 2)),
        header_crc: 0,
        header_pages: 1,
        front_pages: 1,
        derived: false,
        refs: 0,
        other_copies: Vec::new(),
    };
    meta.record(FrameId(id))
}

#[test]
fn references_count_as_entries() {
    let mut catalog = small();
    let sequence = SequenceId(1);
    catalog.insert_sequence(sequence, &[], empty_sequence()).expect("a sequence");
    catalog.apply(&Record::FrameRef(&ref_record(sequence, FrameId(1), 1))).expect("a reference");
    for id in 2..=16 {
        catalog.apply(&Record::Frame(&frame_of_two_pages(id, 0, 2 * id as u32))).expect("a frame");
        catalog.apply(&Record::FrameRef(&ref_record(sequence, FrameId(id), 1))).expect("a reference");
    }
    let (before, memory) = (catalog.entries(), catalog.memory_bytes());
    for id in 2..=9 {
        let fork = m::Fork {
            sequence: U64::new(id),
            parent: U64::new(1),
            tokens: U64::new(1),
            created_unix_ms: U64::new(0),
            key_bytes: zerocopy::little_endian::U16::new(0),
            reserved: [0; 6],
        };
        catalog.apply(&Record::Fork(&fork, &[])).expect("a fork");
    }
    // 8 sequences with 16 references each.
    assert_eq!(catalog.entries() - before, 8 + 8 * 16 / 8);
    assert!(catalog.memory_bytes() - memory >= 8 * 16 * 16);
}

/// The state after a contradicting record is not used, so only the error counts.
#[test]
fn records_that_contradict_the_state_are_refused() {
    let key = |segment: u32| (DeviceIndex(0), SegmentId(segment));
    let moved = |location: RawLocation| m::FrameMoved {
        frame: U64::new(1),
        location,
        header_crc: U32::new(0),
        reserved: U32::new(0),
    };
    small().apply(&Record::FrameMoved(&moved(pages_at(0, 5, 2)))).expect("a move");
    small().apply(&Record::SegmentSeal(&seal_record(key(0), 3))).expect("a seal");
    small().apply(&Record::SegmentFree(&free_record(key(1), 3, true))).expect("a free segment");
    let refused = |record: Record<'_>, part: &str| {
        let text = small().apply(&record).expect_err(part);
        assert!(text.contains(part), "{text}");
    };
    refused(Record::FrameMoved(&moved(pages_at(0, 5, 3))), "of 2 pages is moved to 3 pages");
    refused(Record::SegmentSeal(&seal_record(key(2), 3)), "sealed although it is free");
    refused(Record::SegmentSeal(&seal_record(key(0), 0)), "sealed with 0 pages");
    refused(Record::SegmentSeal(&seal_record(key(0), 64)), "sealed with 64 pages");
    refused(Record::SegmentFree(&free_record(key(1), 4, false)), "has generation 3, but 4 is freed");
    refused(Record::SegmentFree(&free_record(key(0), 3, false)), "freed with live frames");
}

#[test]
fn a_removed_device_takes_no_first_copy() {
    let mut catalog = small();
    let member = m::Member {
        epoch: U64::new(2),
        device_id: [1; 16],
        device: zerocopy::little_endian::U16::new(1),
        state: m::MEMBER_REMOVED,
        manifest_copies: 0,
        weight: U32::new(0),
        bytes_limit: U64::new(0),
    };
    catalog.apply(&Record::Member(&member)).expect("a member");
    let opened = catalog.segments[&(DeviceIndex(0), SegmentId(0))].clone();
    catalog.apply(&Record::SegmentOpen(&open_record((DeviceIndex(1), SegmentId(0)), &opened))).expect("a segment");
    let moved = m::FrameMoved {
        frame: U64::new(1),
        location: pages_at(1, 1, 2),
        header_crc: U32::new(0),
        reserved: U32::new(0),
    };
    let frame = frame_of_two_pages(2, 1, 1);
    for record in [Record::Frame(&frame), Record::FrameMoved(&moved)] {
        let text = catalog.apply(&record).expect_err("a first copy");
        assert!(text.contains("device 1, which was removed"), "{text}");
    }
}
