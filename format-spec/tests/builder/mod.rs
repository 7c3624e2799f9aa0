//! The builder of golden stores: pages, records, batches and files with known contents.
//!
//! A golden store has one segment and one manifest generation per device. All its ids, nonces and times are constants,
//! so that the same code always builds the same bytes. Modules of tests say only what is special about their store.
//!
//! - This file builds pages, records and files.
//! - `frame` builds frames.
//! - `extents` builds layouts, and the extents of frames.
//! - `golden` compares the files with those in `golden/`.

mod extents;
mod frame;
mod golden;

pub(crate) use extents::{f16, layer, layout_of, single_plane, tail_of, two_groups};
pub(crate) use frame::{Extent, ExtentPlane, FrameParts, GoldenFrame, StoredPlane, descriptor, lay_out};
pub(crate) use golden::{
    assert_planes_match, assert_same_files, golden_directory, golden_file_tests, read_segment_frame, write_new_files,
};

use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::features::Features;
use stratakv_format::layout::Layout;
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, Kind, ManifestPage, encode_record};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::superblock::{self, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

pub(crate) const STORE_ID: [u8; 16] = *b"golden-store-id!";
pub(crate) const DEVICE_ID: [u8; 16] = *b"golden-device-0!";
pub(crate) const FINGERPRINT: [u8; 32] = *b"fingerprint of the golden model.";
pub(crate) const KEY: &[u8] = b"golden";
pub(crate) const GENERATION: u64 = 3;
pub(crate) const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
pub(crate) const FIRST_BATCH: u64 = 41;
pub(crate) const SEGMENT_GENERATION: u64 = 5;
pub(crate) const SEGMENT_NONCE: u64 = 0x7365_676d_656e_7431;
pub(crate) const SEGMENT_PAGES: u32 = 16;
/// The sequence of a store with an adapter that holds the adapter.
pub(crate) const ADAPTER_SEQUENCE: u64 = 1;
/// The sequence of a store that holds tokens.
pub(crate) const TOKEN_SEQUENCE: u64 = 2;

/// A file of a store: its path and bytes.
pub(crate) type GoldenFile = (String, Vec<u8>);

/// Returns slot 0, which is open, or slot 1, which is closed.
pub(crate) fn slot(index: usize, checksum: PayloadChecksum) -> Slot {
    Slot {
        magic: superblock::MAGIC,
        features: Features::current(),
        sequence: U64::new([8, 9][index]),
        store_id: STORE_ID,
        device_id: DEVICE_ID,
        epoch: U64::new(1),
        manifest_generation: U64::new(GENERATION),
        manifest_nonce: U64::new(MANIFEST_NONCE),
        synced_through: U64::new([42, 44][index]),
        created_unix_s: U64::new(1_700_000_000),
        segment_bytes: U64::new(65_536),
        device_index: U16::new(0),
        device_count: U16::new(1),
        payload_checksum: checksum as u8,
        state: [STATE_OPEN, STATE_CLOSED][index],
        manifest_copies: 2,
        reserved: 0,
    }
}

pub(crate) fn manifest_page(copy: u8) -> ManifestPage {
    ManifestPage {
        magic: m::MAGIC,
        features: Features::current(),
        store_id: STORE_ID,
        generation: U64::new(GENERATION),
        nonce: U64::new(MANIFEST_NONCE),
        previous_generation: U64::new(2),
        first_batch: U64::new(FIRST_BATCH),
        created_unix_s: U64::new(1_700_000_100),
        device: U16::new(0),
        copy,
        reserved: [0; 5],
    }
}

pub(crate) fn segment_page(position: u8) -> SegmentPage {
    SegmentPage {
        magic: segment::MAGIC,
        features: Features::current(),
        store_id: STORE_ID,
        generation: U64::new(SEGMENT_GENERATION),
        nonce: U64::new(SEGMENT_NONCE),
        created_unix_s: U64::new(1_700_000_050),
        segment: U32::new(1),
        pages: U32::new(SEGMENT_PAGES),
        device: U16::new(0),
        kind: segment::KIND_LOG,
        position,
        reserved: [0; 4],
    }
}

/// Returns the nonce of the segment of a device.
pub(crate) fn segment_nonce(device: u16) -> u64 {
    SEGMENT_NONCE + u64::from(device)
}

/// Encoded records and their number.
#[derive(Default)]
pub(crate) struct RecordList {
    pub(crate) bytes: Vec<u8>,
    pub(crate) count: u32,
}

impl RecordList {
    pub(crate) fn put(&mut self, kind: Kind, fixed: &(impl IntoBytes + Immutable), variable: &[u8]) {
        encode_record(&mut self.bytes, kind, fixed, variable);
        self.count += 1;
    }

    /// Puts the Layout record of layout 1.
    pub(crate) fn put_layout(&mut self, layout: &Layout) {
        let mut encoded = Vec::new();
        layout.encode(&mut encoded);
        self.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &encoded);
    }

    /// Puts a reference of a sequence to a whole frame.
    pub(crate) fn put_reference(&mut self, sequence: u64, frame: &GoldenFrame) {
        let (sequence, frame) = (U64::new(sequence), U64::new(frame.frame));
        self.put(Kind::FrameRef, &m::FrameRef { sequence, frame, token_end: U64::new(u64::MAX) }, &[]);
    }

    /// Puts the CheckpointEnd of all records so far.
    pub(crate) fn put_checkpoint_end(&mut self) {
        let end = m::CheckpointEnd { records: U64::new(u64::from(self.count)) };
        self.put(Kind::CheckpointEnd, &end, &[]);
    }
}

pub(crate) fn member() -> m::Member {
    m::Member {
        epoch: U64::new(1),
        device_id: DEVICE_ID,
        device: U16::new(0),
        state: m::MEMBER_ACTIVE,
        manifest_copies: 2,
        weight: U32::new(0),
        bytes_limit: U64::new(1 << 30),
    }
}

pub(crate) fn counters() -> m::Counters {
    m::Counters {
        next_frame: U64::new(3),
        next_sequence: U64::new(3),
        next_lsn: U64::new(103),
        lifetime_bytes: U64::new(123_456_789),
        next_layout: U32::new(2),
        reserved: U32::new(0),
    }
}

pub(crate) fn segment_open() -> m::SegmentOpen {
    m::SegmentOpen {
        generation: U64::new(SEGMENT_GENERATION),
        nonce: U64::new(SEGMENT_NONCE),
        segment: U32::new(1),
        pages: U32::new(SEGMENT_PAGES),
        device: U16::new(0),
        kind: segment::KIND_LOG,
        reserved: [0; 5],
    }
}

pub(crate) fn frame_record(frame: &GoldenFrame, origin: u64) -> m::Frame {
    m::Frame {
        frame: U64::new(frame.frame),
        origin: U64::new(origin),
        lsn: U64::new(frame.lsn),
        nonce: U64::new(frame.nonce),
        location: frame.place.location.to_raw(),
        header_crc: U32::new(frame.crc),
        header_pages: U32::new(frame.header_pages),
        front_pages: U32::new(frame.front_pages),
        flags: U32::new(0),
    }
}

/// Returns the record of a new sequence without summaries and with one copy of its frames.
pub(crate) fn create(sequence: u64, key: &[u8]) -> m::SequenceCreate {
    m::SequenceCreate {
        sequence: U64::new(sequence),
        parent: U64::new(0),
        parent_tokens: U64::new(0),
        created_unix_ms: U64::new(1_700_000_055_000),
        ttl_ms: U64::new(0),
        layout: U32::new(1),
        summaries: U32::new(0),
        replicas: 1,
        evictable: 0,
        key_bytes: U16::new(key.len() as u16),
        reserved: U32::new(0),
    }
}

/// Returns the record of a commit without token ids and caller state.
pub(crate) fn commit(sequence: u64, tokens: u64) -> m::SequenceCommit {
    m::SequenceCommit {
        sequence: U64::new(sequence),
        tokens: U64::new(tokens),
        state_frame: U64::new(0),
        token_ids: U64::new(0),
        committed_unix_ms: U64::new(1_700_000_060_500),
    }
}

/// Returns the records of a checkpoint up to the first sequence: device, counters, layout, segment and frames.
pub(crate) fn checkpoint_start(layout: &Layout, frames: &[GoldenFrame]) -> RecordList {
    let mut records = RecordList::default();
    let counters = m::Counters { next_frame: U64::new(10), next_lsn: U64::new(300), ..counters() };
    records.put(Kind::Member, &member(), &[]);
    records.put(Kind::Counters, &counters, &[]);
    records.put_layout(layout);
    records.put(Kind::SegmentOpen, &segment_open(), &[]);
    for frame in frames {
        let origin = frame.planes.first().map_or(TOKEN_SEQUENCE, |plane| plane.identity.sequence.get());
        records.put(Kind::Frame, &frame_record(frame, origin), &[]);
    }
    records
}

/// A batch: flags, `synced_through`, and its records.
pub(crate) struct GoldenBatch {
    pub(crate) flags: u16,
    pub(crate) synced_through: u64,
    pub(crate) records: RecordList,
}

pub(crate) fn batch(flags: u16, synced_through: u64, write: impl FnOnce(&mut RecordList)) -> GoldenBatch {
    let mut records = RecordList::default();
    write(&mut records);
    GoldenBatch { flags, synced_through, records }
}

pub(crate) fn batch_place(sequence: u64) -> BatchPlace {
    BatchPlace { generation: GENERATION, nonce: MANIFEST_NONCE, sequence }
}

/// Returns a manifest file: the header page, the batches, and two pages of zeros.
pub(crate) fn manifest_file(page: &ManifestPage, batches: &[GoldenBatch]) -> Vec<u8> {
    let mut bytes = page.encode().to_vec();
    for (batch, sequence) in batches.iter().zip(FIRST_BATCH..) {
        let (synced, records) = (batch.synced_through, &batch.records);
        let encoded = m::encode_batch(&batch_place(sequence), synced, 1, batch.flags, &records.bytes, records.count);
        bytes.extend(encoded.expect("a batch"));
    }
    bytes.resize(bytes.len() + 2 * PAGE_BYTES, 0);
    bytes
}

/// Returns the segment file of a device. It ignores frames on other devices.
pub(crate) fn segment_file<'a>(device: u16, frames: impl IntoIterator<Item = &'a GoldenFrame>) -> Vec<u8> {
    let page = |position| {
        let nonce = U64::new(segment_nonce(device));
        SegmentPage { nonce, device: U16::new(device), ..segment_page(position) }.encode()
    };
    let mut bytes = page(segment::POSITION_HEADER).to_vec();
    let end = (SEGMENT_PAGES as usize - 1) * PAGE_BYTES;
    bytes.resize(end, 0);
    for frame in frames.into_iter().filter(|frame| frame.place.location.device.0 == device) {
        let at = frame.place.location.offset() as usize;
        let pages = &mut bytes[at..at + frame.bytes.len()];
        assert!(pages.iter().all(|byte| *byte == 0), "frame {} overlaps another", frame.frame);
        pages.copy_from_slice(&frame.bytes);
    }
    bytes.extend(page(segment::POSITION_TRAILER));
    bytes
}

/// Returns the files of a store on one device. Its manifest is one checkpoint of `records`, and it was closed.
pub(crate) fn store_files(features: Features, frames: &[GoldenFrame], mut records: RecordList) -> Vec<GoldenFile> {
    records.put_checkpoint_end();
    let batches = [GoldenBatch { flags: FLAG_CHECKPOINT, synced_through: 40, records }];
    let slot = |index: usize| {
        let synced_through = U64::new([40, 41][index]);
        Slot { features, synced_through, ..slot(index, PayloadChecksum::Crc64Nvme) }.encode()
    };
    let mut files = vec![(superblock::FILE.to_owned(), [slot(0), slot(1)].concat())];
    for copy in 0..2 {
        let page = ManifestPage { features, ..manifest_page(copy) };
        files.push((m::file_name(GENERATION, copy), manifest_file(&page, &batches)));
    }
    files.push((segment::file_name(SegmentId(1)), segment_file(0, frames)));
    files
}

/// Returns the files of a store on one device with one frame of sequence [`TOKEN_SEQUENCE`], which has `tokens` tokens.
pub(crate) fn token_store_files(
    features: Features,
    layout: &Layout,
    frame: GoldenFrame,
    tokens: u64,
) -> Vec<GoldenFile> {
    let frames = [frame];
    let mut records = checkpoint_start(layout, &frames);
    records.put(Kind::SequenceCreate, &create(TOKEN_SEQUENCE, KEY), KEY);
    records.put_reference(TOKEN_SEQUENCE, &frames[0]);
    records.put(Kind::SequenceCommit, &commit(TOKEN_SEQUENCE, tokens), &[]);
    store_files(features, &frames, records)
}
