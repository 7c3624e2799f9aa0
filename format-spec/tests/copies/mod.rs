//! The golden store of two devices, with two copies of every frame, of which one was made anew. It is read completely and written
//! again byte for byte.

use crate::golden_store::{self as g, GoldenFrame};
use crate::retrieval::store::{self as r, TOKENS};
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::features::Features;
use stratakv_format::frame::FrameView;
use stratakv_format::manifest::{self as m, Batch, FLAG_CHECKPOINT, Kind, ManifestPage, Record};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::superblock::Slot;
use stratakv_format::{PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

const DEVICES: u16 = 2;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/v0.2/store-copies")
}

fn features() -> Features {
    Features::current().with_replicas()
}

fn device_id(device: u16) -> [u8; 16] {
    let mut id = g::DEVICE_ID;
    id[14] += device as u8;
    id
}

fn slot(device: u16, index: usize) -> Slot {
    Slot {
        features: features(),
        device_id: device_id(device),
        device_index: U16::new(device),
        device_count: U16::new(DEVICES),
        manifest_copies: 1,
        synced_through: U64::new([41, 43][index]),
        ..g::slot(index, PayloadChecksum::Crc64Nvme)
    }
}

/// Frame 3, two groups of two layers, and frame 4, two tokens more: each at its first place and its others, in the order of their
/// records. The first copy of frame 3 beside its first place is dead: it was made anew.
fn frames() -> [GoldenFrame; 5] {
    let groups = |device, page| r::laid_out(&r::layout(), 3, TOKENS, (device, page), vec![r::groups(0), r::groups(2)]);
    let tail =
        |device, page| r::laid_out(&r::layout(), 4, TOKENS, (device, page), vec![r::tail(0, 8, 2), r::tail(2, 8, 2)]);
    [groups(0, 1), groups(1, 1), tail(1, 4), tail(0, 4), groups(1, 6)]
}

fn replica(frame: &GoldenFrame, generation: u64) -> m::Replica {
    m::Replica {
        frame: U64::new(frame.frame),
        generation: U64::new(generation),
        location: frame.place.location.to_raw(),
        header_crc: U32::new(frame.crc),
        reserved: U32::new(0),
    }
}

fn refer(frame: &GoldenFrame) -> m::FrameRef {
    m::FrameRef { sequence: U64::new(TOKENS), frame: U64::new(frame.frame), token_end: U64::new(u64::MAX) }
}

fn record(frame: &GoldenFrame) -> m::Frame {
    m::Frame { origin: U64::new(TOKENS), ..g::frame_record(frame) }
}

/// A checkpoint, a commit, and a copy that was made anew.
fn batches() -> Vec<g::GoldenBatch> {
    let [first, second, tail, tail_copy, anew] = frames();
    let mut layout = Vec::new();
    r::layout().encode(&mut layout);
    let checkpoint = |out: &mut g::Records| {
        for device in 0..DEVICES {
            let own =
                m::Member { device_id: device_id(device), device: U16::new(device), manifest_copies: 1, ..g::member() };
            out.put(Kind::Member, &own, &[]);
        }
        let counters = m::Counters { next_frame: U64::new(4), next_lsn: U64::new(204), ..g::counters() };
        out.put(Kind::Counters, &counters, &[]);
        out.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &layout);
        for device in 0..DEVICES {
            let nonce = U64::new(g::segment_nonce(device));
            out.put(Kind::SegmentOpen, &m::SegmentOpen { nonce, device: U16::new(device), ..g::segment_open() }, &[]);
        }
        out.put(Kind::Frame, &record(&first), &[]);
        out.put(Kind::Replica, &replica(&second, 1), &[]);
        out.put(Kind::SequenceCreate, &m::SequenceCreate { replicas: 2, ..r::create(TOKENS, b"golden") }, b"golden");
        out.put(Kind::FrameRef, &refer(&first), &[]);
        out.put(Kind::SequenceCommit, &r::commit(TOKENS, 8), &[]);
        let end = m::CheckpointEnd { records: U64::new(u64::from(out.count)) };
        out.put(Kind::CheckpointEnd, &end, &[]);
    };
    vec![
        g::batch(FLAG_CHECKPOINT, 40, checkpoint),
        g::batch(0, 41, |out| {
            out.put(Kind::Frame, &record(&tail), &[]);
            out.put(Kind::Replica, &replica(&tail_copy, 1), &[]);
            out.put(Kind::FrameRef, &refer(&tail), &[]);
            out.put(Kind::SequenceCommit, &r::commit(TOKENS, 10), &[]);
        }),
        g::batch(0, 42, |out| out.put(Kind::Replica, &replica(&anew, 2), &[])),
    ]
}

fn segment_file(device: u16) -> Vec<u8> {
    let page = |position| {
        let nonce = U64::new(g::segment_nonce(device));
        SegmentPage { nonce, device: U16::new(device), ..g::segment_page(position) }.encode()
    };
    let mut bytes = page(segment::POSITION_HEADER).to_vec();
    bytes.resize(g::SEGMENT_PAGES as usize * PAGE_BYTES, 0);
    for frame in frames().into_iter().filter(|frame| frame.place.location.device.0 == device) {
        let at = frame.place.location.offset() as usize;
        bytes[at..at + frame.bytes.len()].copy_from_slice(&frame.bytes);
    }
    let end = bytes.len() - PAGE_BYTES;
    bytes[end..].copy_from_slice(&page(segment::POSITION_TRAILER));
    bytes
}

/// Every file of the store: path in it, bytes.
fn files() -> Vec<(String, Vec<u8>)> {
    let device = |device: u16| {
        let mut manifest = g::manifest_file(0, &batches());
        let page = ManifestPage { features: features(), device: U16::new(device), ..g::manifest_page(0) };
        manifest[..PAGE_BYTES].copy_from_slice(&page.encode());
        [
            ("superblock".to_owned(), [slot(device, 0).encode(), slot(device, 1).encode()].concat()),
            (m::file_name(g::GENERATION, 0), manifest),
            (segment::file_name(SegmentId(1)), segment_file(device)),
        ]
        .map(|(name, bytes)| (format!("device-{device}/{name}"), bytes))
    };
    (0..DEVICES).flat_map(device).collect()
}

#[test]
#[ignore = "writes the golden files of the version in the making"]
fn generate() {
    for (name, bytes) in files() {
        let path = directory().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
        fs::write(path, bytes).expect("written");
    }
}

#[test]
fn written_again_byte_for_byte() {
    for (name, bytes) in files() {
        let golden = fs::read(directory().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let differs = golden.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!((differs, golden.len()), (None, bytes.len()), "{name} differs");
    }
}

#[test]
fn the_manifest_names_the_copies() {
    for device in 0..DEVICES {
        let file =
            fs::read(directory().join(format!("device-{device}/manifest/0000000000000003-0"))).expect("a manifest");
        let (mut found, mut at) = (Vec::new(), PAGE_BYTES);
        for sequence in g::FIRST_BATCH..g::FIRST_BATCH + 3 {
            let batch = Batch::verify(&file[at..], &g::batch_place(sequence)).expect("valid");
            for record in batch.records() {
                if let Record::Replica(copy) = record.expect("a record") {
                    found.push(*copy);
                }
            }
            at += batch.header().pages.get() as usize * PAGE_BYTES;
        }
        let [_, second, _, tail_copy, anew] = frames();
        assert_eq!(found, [replica(&second, 1), replica(&tail_copy, 1), replica(&anew, 2)]);
    }
}

/// Copies have the same nonce, and so the same checksums, wherever they lie.
#[test]
fn copies_hold_the_same() {
    let [first, second, tail, tail_copy, anew] = frames();
    for (one, other) in [(&first, &second), (&first, &anew), (&tail, &tail_copy)] {
        assert_eq!((&one.checksums, &one.descriptors), (&other.checksums, &other.descriptors));
        assert_eq!(one.bytes[PAGE_BYTES..], other.bytes[PAGE_BYTES..]);
        assert_ne!(one.crc, other.crc);
        let device = other.place.location.device;
        let file = fs::read(directory().join(format!("device-{device}/segments/00000001"))).expect("a segment");
        let at = other.place.location.offset() as usize;
        let view = FrameView::verify(&file[at..at + other.bytes.len()], &other.place).expect("valid");
        assert_eq!((view.header().crc.get(), view.descriptors()), (other.crc, &other.descriptors[..]));
    }
}
