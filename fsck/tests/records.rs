//! Manifest records that contradict the records before them. Each is found at its batch, and hides no later finding.

mod common;

use common::{Image, NONCE, Records, commit, create, layout};
use kvfsck::{Code, EXIT_CLEAN, EXIT_DAMAGE, EXIT_UNSUPPORTED, Finding, Report, Severity};
use std::fs;
use stratakv_format::checksum::crc_with_hole;
use stratakv_format::features::{INCOMPAT_CODECS, INCOMPAT_POOLS, INCOMPAT_REPLICAS};
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, FLAG_CHECKPOINT, FLAG_DERIVED, Kind, encode_record};
use stratakv_format::segment::{KIND_LOG, KIND_POOL};
use stratakv_format::superblock::STATE_OPEN;
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, PlaneCodec, SegmentId};

const MANIFEST: &str = "manifest/0000000000000001-0";

/// A record that must be refused: the words of its finding, and the records of the last batch.
type Case = (&'static str, fn(&mut Records));

/// Returns the standard store of `devices` devices with these features and one more batch.
fn image(devices: u16, incompat: u64, records: impl FnOnce(&mut Records)) -> Image {
    let mut image = Image::standard(devices, STATE_OPEN);
    let mut more = Records::default();
    records(&mut more);
    image.batches.push(more);
    image.features = image.features.with(incompat);
    image.write(STATE_OPEN);
    image
}

/// Asserts that the last batch has the finding, and that the check went on.
fn assert_found(image: &Image, code: Code, words: &str) {
    let report = image.check();
    let offset = *image.batch_offsets.last().unwrap() as u64;
    let is_it = |f: &Finding| f.code == code && f.message.contains(words);
    let found = report.findings.iter().find(|f| is_it(f)).unwrap_or_else(|| panic!("{words}: {}", report.to_text()));
    assert_eq!((found.severity, found.file.as_deref()), (Severity::Damage, Some(MANIFEST)), "{words}");
    assert_eq!((found.device, found.offset), (Some(0), Some(offset)), "{words}");
    assert!(!report.clean && report.checked.complete, "{words}: {}", report.to_text());
    assert!(report.checked.frames >= 1 && report.checked.sequences >= 1, "{words}: {}", report.to_text());
}

fn assert_all_found(devices: u16, incompat: u64, cases: &[Case]) {
    for (words, records) in cases {
        assert_found(&image(devices, incompat, records), Code::ManifestRecord, words);
    }
}

fn at(device: u16, segment: u32, page: u32, pages: u32) -> Location {
    Location { device: DeviceIndex(device), segment: SegmentId(segment), page, pages }
}

fn frame(r: &mut Records, id: u64, location: Location, flags: u32) {
    let frame = m::Frame {
        frame: id.into(),
        origin: 1.into(),
        lsn: (id + 50).into(),
        nonce: 1.into(),
        location: location.to_raw(),
        header_crc: 1.into(),
        header_pages: 1.into(),
        front_pages: 1.into(),
        flags: flags.into(),
    };
    r.push(Kind::Frame, &frame, &[]);
}

fn replica(r: &mut Records, id: u64, generation: u64, location: Location) {
    let (frame, generation, header_crc) = (id.into(), generation.into(), 1.into());
    let replica = m::Replica { frame, generation, location: location.to_raw(), header_crc, reserved: 0.into() };
    r.push(Kind::Replica, &replica, &[]);
}

fn moved(r: &mut Records, id: u64, location: Location) {
    let (frame, header_crc) = (id.into(), 1.into());
    let moved = m::FrameMoved { frame, location: location.to_raw(), header_crc, reserved: 0.into() };
    r.push(Kind::FrameMoved, &moved, &[]);
}

fn open(r: &mut Records, device: u16, segment: u32, generation: u64, kind: u8, pages: u32) {
    let open = m::SegmentOpen {
        generation: generation.into(),
        nonce: 9.into(),
        segment: segment.into(),
        pages: pages.into(),
        device: device.into(),
        kind,
        reserved: [0; 5],
    };
    r.push(Kind::SegmentOpen, &open, &[]);
}

fn free(r: &mut Records, segment: u32, generation: u64) {
    let (generation, segment, device) = (generation.into(), segment.into(), 0.into());
    r.push(Kind::SegmentFree, &m::SegmentFree { generation, segment, device, removed: 0, reserved: 0 }, &[]);
}

fn free_and_remove(r: &mut Records, segment: u32, generation: u64) {
    let (generation, segment, device) = (generation.into(), segment.into(), 0.into());
    r.push(Kind::SegmentFree, &m::SegmentFree { generation, segment, device, removed: 1, reserved: 0 }, &[]);
}

fn seal(r: &mut Records, segment: u32, used: u32) {
    let (segment, used_pages, device) = (segment.into(), used.into(), 0.into());
    r.push(Kind::SegmentSeal, &m::SegmentSeal { segment, used_pages, device, reserved: [0; 6] }, &[]);
}

fn member(r: &mut Records, device: u16, state: u8) {
    let member = m::Member {
        epoch: 1.into(),
        device_id: [device as u8 + 1; 16],
        device: device.into(),
        state,
        manifest_copies: 0,
        weight: 0.into(),
        bytes_limit: 0.into(),
    };
    r.push(Kind::Member, &member, &[]);
}

fn fork(r: &mut Records, id: u64, parent: u64) {
    let fork = m::Fork {
        sequence: id.into(),
        parent: parent.into(),
        tokens: 1.into(),
        created_unix_ms: 0.into(),
        key_bytes: 0.into(),
        reserved: [0; 6],
    };
    r.push(Kind::Fork, &fork, &[]);
}

fn adapter(r: &mut Records, id: u64, name: &[u8]) {
    let adapter = m::AdapterDefined {
        sequence: id.into(),
        checksum: 0.into(),
        bytes: 4.into(),
        version: 1.into(),
        name_bytes: (name.len() as u16).into(),
        reserved: 0.into(),
    };
    r.push(Kind::Adapter, &adapter, name);
}

fn define(r: &mut Records, id: u32, layout: &Layout, more: &[u8]) {
    let mut bytes = Vec::new();
    layout.encode(&mut bytes);
    bytes.extend_from_slice(more);
    r.push(Kind::Layout, &m::LayoutDefined { layout: id.into(), reserved: 0.into() }, &bytes);
}

#[test]
fn frames_and_segments_that_contradict_each_other_are_found() {
    let release = |r: &mut Records| {
        r.push(Kind::FrameRelease, &m::FrameRelease { sequence: 1.into(), frame: 99.into() }, &[]);
    };
    let cases: [Case; 20] = [
        ("segment 00000009 of device 0 does not exist", |r| frame(r, 9, at(0, 9, 1, 1), 0)),
        ("is outside the pages of its segment", |r| frame(r, 9, at(0, 0, 20, 4), 0)),
        ("is in a free segment", |r| {
            open(r, 0, 1, 5, KIND_LOG, 24);
            free(r, 1, 5);
            frame(r, 9, at(0, 1, 1, 1), 0);
        }),
        ("a frame has the id 0", |r| frame(r, 0, at(0, 0, 20, 1), 0)),
        ("frame 9 is derived in a store without", |r| frame(r, 9, at(0, 0, 20, 1), FLAG_DERIVED)),
        ("frame 1 already exists", |r| frame(r, 1, at(0, 0, 20, 1), 0)),
        ("sequence 1 does not refer to frame 99", release),
        ("frame 1 has a copy in a store without", |r| replica(r, 1, 1, at(0, 0, 20, 1))),
        ("frame 99 does not exist", |r| moved(r, 99, at(0, 0, 20, 1))),
        ("is moved to 1 pages", |r| moved(r, 1, at(0, 0, 20, 1))),
        ("device 5 in a store of 1 devices", |r| open(r, 5, 1, 5, KIND_LOG, 24)),
        ("has 16 pages, the segments of this store have 24", |r| open(r, 0, 1, 5, KIND_LOG, 16)),
        ("kind 2: pool, a feature that the store does not have", |r| open(r, 0, 1, 5, KIND_POOL, 24)),
        ("segment 00000000 of device 0 is already in use", |r| open(r, 0, 0, 5, KIND_LOG, 24)),
        ("goes from generation 5 to 5", |r| {
            open(r, 0, 1, 5, KIND_LOG, 24);
            free(r, 1, 5);
            open(r, 0, 1, 5, KIND_LOG, 24);
        }),
        ("is sealed although it is free", |r| {
            open(r, 0, 1, 5, KIND_LOG, 24);
            free(r, 1, 5);
            seal(r, 1, 2);
        }),
        ("of 24 pages is sealed with 24 pages in use", |r| seal(r, 0, 24)),
        ("has generation 3, but 2 is freed", |r| free(r, 0, 2)),
        ("is freed with 2 live frames", |r| free(r, 0, 3)),
        ("segment 00000001 of device 0 is freed although it was removed", |r| {
            open(r, 0, 1, 5, KIND_LOG, 24);
            free_and_remove(r, 1, 5);
            free_and_remove(r, 1, 5);
        }),
    ];
    assert_all_found(1, 0, &cases);
    // A writer frees a segment first, and removes its file later. Its id may be used again.
    let report = image(1, 0, |r| {
        open(r, 0, 1, 5, KIND_LOG, 24);
        free(r, 1, 5);
        free_and_remove(r, 1, 5);
        open(r, 0, 1, 6, KIND_LOG, 24);
        free_and_remove(r, 1, 6);
    });
    assert_eq!(report.check().exit_code, EXIT_CLEAN);
}

/// The second of three devices holds no frame, so it can be removed.
#[test]
fn first_copies_on_a_removed_device_are_found() {
    let words = "the first copy of a frame is on device 1, which was removed";
    let cases: [Case; 2] = [
        (words, |r| {
            member(r, 1, m::MEMBER_REMOVED);
            open(r, 1, 1, 5, KIND_LOG, 24);
            frame(r, 9, at(1, 1, 1, 1), 0);
        }),
        (words, |r| {
            frame(r, 9, at(0, 0, 22, 1), 0);
            member(r, 1, m::MEMBER_REMOVED);
            open(r, 1, 1, 5, KIND_LOG, 24);
            moved(r, 9, at(1, 1, 1, 1));
        }),
    ];
    assert_all_found(3, 0, &cases);
}

#[test]
fn sequences_members_and_layouts_that_contradict_each_other_are_found() {
    let cases: [Case; 19] = [
        ("a sequence has the id 0", |r| r.push(Kind::SequenceCreate, &create(0, b""), b"")),
        ("sequence 3 was deleted before", |r| r.push(Kind::SequenceCreate, &create(3, b""), b"")),
        ("sequence 1 already exists", |r| r.push(Kind::SequenceCreate, &create(1, b""), b"")),
        ("sequences 1 and 9 have the same key", |r| r.push(Kind::SequenceCreate, &create(9, b"alpha"), b"alpha")),
        ("layout 7 does not exist", |r| {
            let create = m::SequenceCreate { layout: 7.into(), ..create(9, b"") };
            r.push(Kind::SequenceCreate, &create, b"");
        }),
        ("2 copies in a store without the feature of copies", |r| {
            let create = m::SequenceCreate { replicas: 2, ..create(9, b"") };
            r.push(Kind::SequenceCreate, &create, b"");
        }),
        ("sequence 99 does not exist", |r| fork(r, 9, 99)),
        ("key that is not UTF-8", |r| r.push(Kind::SequenceCreate, &create(9, b"a\xff"), b"a\xff")),
        ("sequence 9 holds an adapter and is forked", |r| {
            r.push(Kind::SequenceCreate, &create(9, b""), b"");
            adapter(r, 9, b"name");
            fork(r, 10, 9);
        }),
        ("the name of an adapter is not UTF-8", |r| adapter(r, 1, &[0xff])),
        ("sequence 1 gets the adapter \"name\" although it is not empty", |r| adapter(r, 1, b"name")),
        ("sequences 9 and 10 hold the same adapter \"name\"", |r| {
            for id in [9, 10] {
                r.push(Kind::SequenceCreate, &create(id, b""), b"");
                adapter(r, id, b"name");
            }
        }),
        ("sequence 99 does not exist", |r| {
            r.push(Kind::SequenceTruncate, &m::SequenceTruncate { sequence: 99.into(), tokens: 1.into() }, &[]);
        }),
        ("sequence 99 does not exist", |r| {
            r.push(Kind::SequenceDelete, &m::SequenceDelete { sequence: 99.into() }, &[]);
        }),
        ("device 5 in a store of 1 devices", |r| member(r, 5, m::MEMBER_ACTIVE)),
        ("device 0 is removed although it holds frames", |r| member(r, 0, m::MEMBER_REMOVED)),
        ("of a record of", |r| define(r, 9, &layout(), &[0; 8])),
        ("names codecs in a store without the feature of codecs", |r| {
            let mut coded = layout();
            coded.layers[2].codecs = [PlaneCodec::Int8; 2];
            define(r, 9, &coded, &[]);
        }),
        ("layout 1 already exists", |r| define(r, 1, &layout(), &[])),
    ];
    assert_all_found(1, 0, &cases);
    // With the feature the same layout is accepted.
    let report = image(1, INCOMPAT_CODECS, |r| {
        let mut coded = layout();
        coded.layers[2].codecs = [PlaneCodec::Int8; 2];
        define(r, 9, &coded, &[]);
    });
    assert_eq!(report.check().exit_code, EXIT_CLEAN);
}

#[test]
fn derived_frames_and_their_segments_that_contradict_each_other_are_found() {
    fn derived(r: &mut Records) {
        open(r, 0, 1, 5, KIND_POOL, 24);
        frame(r, 9, at(0, 1, 1, 1), FLAG_DERIVED);
    }
    let cases: [Case; 4] = [
        ("is in a segment of kind 2, which holds other frames", |r| {
            open(r, 0, 1, 5, KIND_POOL, 24);
            frame(r, 9, at(0, 1, 1, 1), 0);
        }),
        ("is in a segment of kind 1, which holds other frames", |r| frame(r, 9, at(0, 0, 20, 1), FLAG_DERIVED)),
        ("frame 9 is derived and has a second copy", |r| {
            derived(r);
            replica(r, 9, 1, at(1, 0, 20, 1));
        }),
        ("frame 9 is derived and is moved", |r| {
            derived(r);
            moved(r, 9, at(0, 1, 2, 1));
        }),
    ];
    assert_all_found(2, INCOMPAT_POOLS | INCOMPAT_REPLICAS, &cases);
}

#[test]
fn copies_that_contradict_each_other_are_found() {
    fn own(r: &mut Records) {
        frame(r, 9, at(0, 0, 22, 1), 0);
        replica(r, 9, 1, at(1, 0, 22, 1));
    }
    let cases: [Case; 5] = [
        ("a copy of frame 9 is on device 0, like the first copy", |r| {
            frame(r, 9, at(0, 0, 22, 1), 0);
            replica(r, 9, 1, at(0, 0, 21, 1));
        }),
        ("frame 9 has 1 pages, its copy 2", |r| {
            frame(r, 9, at(0, 0, 22, 1), 0);
            replica(r, 9, 1, at(1, 0, 20, 2));
        }),
        ("a copy of frame 9 repeats its generation 1", |r| {
            own(r);
            replica(r, 9, 1, at(1, 0, 21, 1));
        }),
        ("frame 9 has more than 3 copies", |r| {
            own(r);
            replica(r, 9, 1, at(2, 0, 22, 1));
            replica(r, 9, 1, at(3, 0, 22, 1));
        }),
        ("frame 9 is moved to device 1, which holds another copy of it", |r| {
            own(r);
            moved(r, 9, at(1, 0, 21, 1));
        }),
    ];
    assert_all_found(4, INCOMPAT_REPLICAS, &cases);
}

#[test]
fn the_end_of_a_generation_or_checkpoint_in_a_wrong_place_is_found() {
    let superseded = |r: &mut Records, next: u64| {
        r.push(Kind::Superseded, &m::Superseded { generation: next.into(), nonce: 5.into() }, &[])
    };
    let older = image(1, 0, |r| superseded(r, 1));
    assert_found(&older, Code::ManifestRecord, "generation 1 names generation 1 as its successor");
    let early = image(1, 0, |r| {
        superseded(r, 2);
        r.push(Kind::SequenceCommit, &commit(1, 13, 13, 3), &[]);
    });
    let report = early.check();
    let has = |report: &Report, words: &str| report.findings.iter().any(|finding| finding.message.contains(words));
    assert!(has(&report, "records follow the one that ends the generation"), "{}", report.to_text());
    assert!(has(&report, "the record follows the end of the generation"), "{}", report.to_text());
    let twice = image(1, 0, |r| r.push(Kind::CheckpointEnd, &m::CheckpointEnd { records: 0.into() }, &[]));
    assert_found(&twice, Code::ManifestRecord, "the checkpoint ends twice");

    // The checkpoint itself: another number of records, and a record behind its end.
    let mut image = Image::standard(1, STATE_OPEN);
    let first = image.batches[0].clone();
    let end = image.batches[0].bytes.len() - 8;
    image.batches[0].bytes[end] ^= 1;
    image.write(STATE_OPEN);
    let report = image.check();
    assert!(has(&report, "records but names") && report.exit_code == EXIT_DAMAGE, "{}", report.to_text());
    image.batches[0] = first;
    image.batches[0].push(Kind::SequenceCreate, &create(9, b""), b"");
    image.write(STATE_OPEN);
    let report = image.check();
    assert!(has(&report, "is not the last record of its run"), "{}", report.to_text());
    assert_eq!((report.exit_code, report.checked.sequences), (EXIT_DAMAGE, 3));
}

/// Flips flags of batch `nth` in every copy, and puts its checksum right.
fn flip_flags(image: &Image, nth: usize, flags: u16) {
    for copy in 0..2 {
        let path = image.path(0, &m::file_name(common::GENERATION, copy));
        let mut bytes = fs::read(&path).unwrap();
        let end = image.batch_offsets.get(nth + 1).copied().unwrap_or(image.manifest_page_end);
        let batch = &mut bytes[image.batch_offsets[nth]..end];
        assert_eq!(batch.len(), PAGE_BYTES);
        batch[52] ^= flags as u8;
        let crc = crc_with_hole(&NONCE.to_le_bytes(), batch, 4..8);
        batch[4..8].copy_from_slice(&crc.to_le_bytes());
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn checkpoint_batches_in_a_wrong_place_are_found() {
    for (nth, words) in [(0, "does not start with a checkpoint batch"), (1, "follows the end of the checkpoint")] {
        let image = Image::standard(1, STATE_OPEN);
        flip_flags(&image, nth, FLAG_CHECKPOINT);
        let report = image.check();
        let found = report.findings.iter().find(|f| f.message.contains(words)).expect(words);
        assert_eq!(found.offset, Some(image.batch_offsets[nth] as u64), "{words}");
        assert!(report.exit_code == EXIT_DAMAGE && report.checked.complete, "{}", report.to_text());
    }
}

#[test]
fn reserved_and_unknown_records_are_unsupported_unless_they_may_be_ignored() {
    let pool = image(1, 0, |r| {
        let pool = m::PoolAllocation {
            sequence: 1.into(),
            location: at(0, 0, 20, 1).to_raw(),
            layer: 0.into(),
            kv_head: 0.into(),
            allocated: 1,
            reserved: [0; 3],
        };
        r.push(Kind::PoolAllocation, &pool, &[]);
    });
    assert_found(&pool, Code::Unsupported, "the record is reserved");
    for (flags, exit) in [(0, EXIT_UNSUPPORTED), (1, EXIT_CLEAN)] {
        let image = image(1, 0, |r| {
            encode_record(&mut r.bytes, Kind::SequenceDelete, &m::SequenceDelete { sequence: 1.into() }, &[]);
            let at = r.bytes.len() - 16;
            r.bytes[at..at + 4].copy_from_slice(&[99, 0, flags, 0]);
            r.count += 1;
        });
        let report = image.check();
        assert_eq!((report.exit_code, report.checked.sequences), (exit, 2), "{}", report.to_text());
    }
}
