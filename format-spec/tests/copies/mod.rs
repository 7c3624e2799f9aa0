//! The golden store `v0.2/store-copies`: two devices with two copies of every frame.
//!
//! One copy was made a second time, so that its first location is dead.

use crate::builder::{
    self as b, GoldenBatch, GoldenFile, GoldenFrame, RecordList, TOKEN_SEQUENCE, batch, commit, create, lay_out,
};
use crate::retrieval::store;
use std::fs;
use std::path::PathBuf;
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::features::Features;
use stratakv_format::frame::FrameView;
use stratakv_format::manifest::{self as m, Batch, FLAG_CHECKPOINT, Kind, ManifestPage, Record};
use stratakv_format::superblock::Slot;
use stratakv_format::{PAGE_BYTES, SegmentId, segment};
use zerocopy::little_endian::{U16, U32, U64};

const DEVICES: u16 = 2;

fn directory() -> PathBuf {
    b::golden_directory("v0.2/store-copies")
}

fn device_directory(device: u16) -> PathBuf {
    directory().join(format!("device-{device}"))
}

fn features() -> Features {
    Features::current().with_copies()
}

fn device_id(device: u16) -> [u8; 16] {
    let mut id = b::DEVICE_ID;
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
        ..b::slot(index, PayloadChecksum::Crc64Nvme)
    }
}

/// The copies of the frames of the store.
struct Copies {
    /// Frame 3, two groups of two layers: the first copy.
    groups: GoldenFrame,
    /// Frame 3: the second copy, which is dead because `groups_again` replaces it.
    groups_dead: GoldenFrame,
    /// Frame 3: the second copy, made again.
    groups_again: GoldenFrame,
    /// Frame 4, two more tokens: the first copy.
    tail: GoldenFrame,
    /// Frame 4: the second copy.
    tail_copy: GoldenFrame,
}

impl Copies {
    fn new() -> Self {
        let frame = |id, place, extents| lay_out(&store::layout(), id, TOKEN_SEQUENCE, place, extents);
        let groups = |device, page| frame(3, (device, page), vec![store::groups(0), store::groups(2)]);
        let tail = |device, page| frame(4, (device, page), vec![store::tail(0, 8, 2), store::tail(2, 8, 2)]);
        Self {
            groups: groups(0, 1),
            groups_dead: groups(1, 1),
            groups_again: groups(1, 6),
            tail: tail(1, 4),
            tail_copy: tail(0, 4),
        }
    }

    fn all(&self) -> [&GoldenFrame; 5] {
        [&self.groups, &self.groups_dead, &self.tail, &self.tail_copy, &self.groups_again]
    }
}

/// Returns the Replica record of a copy.
fn copy_record(frame: &GoldenFrame, generation: u64) -> m::Replica {
    m::Replica {
        frame: U64::new(frame.frame),
        generation: U64::new(generation),
        location: frame.place.location.to_raw(),
        header_crc: U32::new(frame.crc),
        reserved: U32::new(0),
    }
}

/// Puts the records of the checkpoint: both devices and their segments, frame 3 with its copy, and the sequence.
fn put_checkpoint(out: &mut RecordList, copies: &Copies) {
    for device in 0..DEVICES {
        let own =
            m::Member { device_id: device_id(device), device: U16::new(device), manifest_copies: 1, ..b::member() };
        out.put(Kind::Member, &own, &[]);
    }
    let counters = m::Counters { next_frame: U64::new(4), next_lsn: U64::new(204), ..b::counters() };
    out.put(Kind::Counters, &counters, &[]);
    out.put_layout(&store::layout());
    for device in 0..DEVICES {
        let nonce = U64::new(b::segment_nonce(device));
        out.put(Kind::SegmentOpen, &m::SegmentOpen { nonce, device: U16::new(device), ..b::segment_open() }, &[]);
    }
    out.put(Kind::Frame, &b::frame_record(&copies.groups, TOKEN_SEQUENCE), &[]);
    out.put(Kind::Replica, &copy_record(&copies.groups_dead, 1), &[]);
    out.put(Kind::SequenceCreate, &m::SequenceCreate { replicas: 2, ..create(TOKEN_SEQUENCE, b::KEY) }, b::KEY);
    out.put_reference(TOKEN_SEQUENCE, &copies.groups);
    out.put(Kind::SequenceCommit, &commit(TOKEN_SEQUENCE, 8), &[]);
    out.put_checkpoint_end();
}

/// Returns the batches of the manifest: a checkpoint, a commit of frame 4, and the second copy of frame 3 made again.
fn batches() -> Vec<GoldenBatch> {
    let copies = Copies::new();
    vec![
        batch(FLAG_CHECKPOINT, 40, |out| put_checkpoint(out, &copies)),
        batch(0, 41, |out| {
            out.put(Kind::Frame, &b::frame_record(&copies.tail, TOKEN_SEQUENCE), &[]);
            out.put(Kind::Replica, &copy_record(&copies.tail_copy, 1), &[]);
            out.put_reference(TOKEN_SEQUENCE, &copies.tail);
            out.put(Kind::SequenceCommit, &commit(TOKEN_SEQUENCE, 10), &[]);
        }),
        batch(0, 42, |out| out.put(Kind::Replica, &copy_record(&copies.groups_again, 2), &[])),
    ]
}

fn files() -> Vec<GoldenFile> {
    let copies = Copies::new();
    let device_files = |device: u16| {
        let page = ManifestPage { features: features(), device: U16::new(device), ..b::manifest_page(0) };
        [
            ("superblock".to_owned(), [slot(device, 0).encode(), slot(device, 1).encode()].concat()),
            (m::file_name(b::GENERATION, 0), b::manifest_file(&page, &batches())),
            (segment::file_name(SegmentId(1)), b::segment_file(device, copies.all())),
        ]
        .map(|(name, bytes)| (format!("device-{device}/{name}"), bytes))
    };
    (0..DEVICES).flat_map(device_files).collect()
}

b::golden_file_tests!(directory(), files());

#[test]
fn the_manifest_names_every_copy() {
    let copies = Copies::new();
    for device in 0..DEVICES {
        let file = fs::read(device_directory(device).join("manifest/0000000000000003-0")).expect("a manifest");
        let (mut found, mut at) = (Vec::new(), PAGE_BYTES);
        for sequence in b::FIRST_BATCH..b::FIRST_BATCH + 3 {
            let batch = Batch::verify(&file[at..], &b::batch_place(sequence)).expect("valid");
            for record in batch.records() {
                if let Record::Replica(copy) = record.expect("a record") {
                    found.push(*copy);
                }
            }
            at += batch.header().pages.get() as usize * PAGE_BYTES;
        }
        let expected = [(&copies.groups_dead, 1), (&copies.tail_copy, 1), (&copies.groups_again, 2)];
        assert_eq!(found, expected.map(|(frame, generation)| copy_record(frame, generation)));
    }
}

/// All copies of a frame have its nonce, and therefore the same checksums.
#[test]
fn copies_differ_only_in_their_header() {
    let Copies { groups, groups_dead, groups_again, tail, tail_copy } = &Copies::new();
    for (one, other) in [(groups, groups_dead), (groups, groups_again), (tail, tail_copy)] {
        assert_eq!((&one.checksums, &one.descriptors), (&other.checksums, &other.descriptors));
        assert_eq!(one.bytes[PAGE_BYTES..], other.bytes[PAGE_BYTES..]);
        assert_ne!(one.crc, other.crc);
        let bytes = b::read_segment_frame(&device_directory(other.place.location.device.0), other);
        let view = FrameView::verify(&bytes, &other.place).expect("valid");
        assert_eq!((view.header().crc.get(), view.descriptors()), (other.crc, &other.descriptors[..]));
    }
}
