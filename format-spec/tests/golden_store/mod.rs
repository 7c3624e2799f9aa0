//! The golden store in literals: what its files say, and how they are written. Used by the golden and the fuzz-seed tests.

use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::features::Features;
use stratakv_format::frame::{self, Descriptor, FramePlace, HeaderBuilder};
use stratakv_format::ids::{FrameId, LayoutId, SequenceId};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, Kind, ManifestPage, encode_record};
use stratakv_format::segment::{self, SegmentPage};
use stratakv_format::superblock::{self, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{DType, DeviceIndex, Location, PAGE_BYTES, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

pub(crate) const STORE_ID: [u8; 16] = *b"golden-store-id!";
pub(crate) const DEVICE_ID: [u8; 16] = *b"golden-device-0!";
pub(crate) const MANIFEST_NONCE: u64 = 0x6d61_6e69_6665_7374;
pub(crate) const SEGMENT_NONCE: u64 = 0x7365_676d_656e_7431;
pub(crate) const SEGMENT_GENERATION: u64 = 5;
pub(crate) const SEGMENT_PAGES: u32 = 16;
pub(crate) const GENERATION: u64 = 3;
pub(crate) const FIRST_BATCH: u64 = 41;
pub(crate) const KEY: &[u8] = b"golden";
pub(crate) const STATE: &[u8] = b"sampler state, opaque";

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
        payload_checksum: checksum.code(),
        state: [STATE_OPEN, STATE_CLOSED][index],
        manifest_copies: 2,
        reserved: 0,
    }
}

pub(crate) trait Code {
    fn code(self) -> u8;
}

impl Code for PayloadChecksum {
    fn code(self) -> u8 {
        match self {
            Self::Crc32 => 1,
            Self::Crc64Nvme => 2,
        }
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

/// Blocks of 1024 bytes (4 a page), no KV, blocks of exactly a page in a sliding layer, blocks of 768 bytes without V.
pub(crate) fn layout() -> Layout {
    let layer = |kv_heads, key_dim, value_dim, window| LayerGeometry {
        kv_heads,
        key_dim,
        value_dim,
        window,
        rope: None,
        codecs: RAW_PLANES,
    };
    Layout {
        dtype: DType::F16,
        group_tokens: 4,
        padded_planes: false,
        fingerprint: *b"fingerprint of the golden model.",
        layers: vec![
            layer(1, 64, 64, None),
            layer(0, 0, 0, None),
            layer(2, 128, 128, Some(1024)),
            layer(1, 96, 0, None),
        ],
    }
}

/// Bits of the f16 at one place: between 1 and 2, where the order of bits is the order of values.
fn element(layer: usize, plane: usize, token: usize, head: usize, dim: usize) -> u16 {
    0x3c00 | ((layer * 211 + plane * 97 + token * 7 + head * 31 + dim * 3) % 1024) as u16
}

fn plane(layer: usize, plane: usize, first_token: usize, tokens: usize) -> Vec<u8> {
    let geometry = layout().layers[layer];
    let dim_max = usize::from([geometry.key_dim, geometry.value_dim][plane]);
    let mut bytes = Vec::new();
    for head in 0..usize::from(geometry.kv_heads) {
        for token in first_token..first_token + tokens {
            for dim in 0..dim_max {
                bytes.extend(element(layer, plane, token, head, dim).to_le_bytes());
            }
        }
    }
    bytes
}

fn summary(layer: usize, first_group: usize, groups: usize) -> Vec<u8> {
    let geometry = layout().layers[layer];
    let mut bytes = Vec::new();
    for group in first_group..first_group + groups {
        for largest in [false, true] {
            for head in 0..usize::from(geometry.kv_heads) {
                for dim in 0..usize::from(geometry.key_dim) {
                    let over = (group * 4..group * 4 + 4).map(|token| element(layer, 0, token, head, dim));
                    let bits = if largest { over.max() } else { over.min() };
                    bytes.extend(bits.unwrap_or_default().to_le_bytes());
                }
            }
        }
    }
    bytes
}

/// One frame: its header in literals, its planes (descriptor index, offset, bytes), its pages.
pub(crate) struct GoldenFrame {
    pub(crate) place: FramePlace,
    pub(crate) frame: u64,
    pub(crate) lsn: u64,
    pub(crate) nonce: u64,
    pub(crate) header_pages: u32,
    pub(crate) front_pages: u32,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) checksums: Vec<u64>,
    pub(crate) planes: Vec<(usize, PlaneIdentity, usize, Vec<u8>)>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) crc: u32,
}

/// Kind, layer, first token, tokens, pieces, offset, bytes, checksums of a descriptor.
type DescriptorRow = (u16, u16, u64, u32, u32, u64, u64, u32);

const FRAME_1: [DescriptorRow; 7] = [
    (2, 0, 0, 8, 2, 4096, 512, 1),
    (2, 2, 0, 8, 2, 4608, 2048, 1),
    (2, 3, 0, 8, 2, 6656, 768, 1),
    (4, 0, 0, 8, 1, 7424, 32, 1),
    (1, 0, 0, 8, 2, 8192, 4096, 4),
    (1, 2, 0, 8, 2, 12288, 8192, 4),
    (1, 3, 0, 8, 2, 20480, 4096, 2),
];
const FRAME_2: [DescriptorRow; 5] = [
    (4, 0, 8, 2, 1, 4096, 8, 1),
    (5, 0, 10, 21, 1, 4104, 21, 1),
    (3, 0, 8, 2, 1, 4128, 512, 2),
    (3, 2, 8, 2, 1, 4640, 2048, 2),
    (3, 3, 8, 2, 1, 6688, 384, 1),
];

fn golden_frame(checksum: PayloadChecksum, id: u64) -> GoldenFrame {
    let (page, pages, front_pages, rows): (u32, u32, u32, &[_]) =
        if id == 1 { (1, 6, 2, &FRAME_1) } else { (7, 2, 2, &FRAME_2) };
    let (lsn, nonce) = (100 + id, 0x6672_616d_6530_3030 + id);
    let layout = layout();
    let (mut descriptors, mut checksums, mut planes) = (Vec::new(), Vec::new(), Vec::new());
    for (index, &(kind, layer, first_token, tokens, pieces, offset, bytes, checksum_count)) in rows.iter().enumerate() {
        let is_summary = kind == frame::KIND_SUMMARY;
        descriptors.push(Descriptor {
            kind: U16::new(kind),
            layer: U16::new(layer),
            codec: U16::new(0),
            summary: U16::new(u16::from(is_summary)),
            first_token: U64::new(first_token),
            tokens: U32::new(tokens),
            pieces: U32::new(pieces),
            offset: U64::new(offset),
            bytes: U64::new(bytes),
            checksum_first: U32::new(checksums.len() as u32),
            checksum_count: U32::new(checksum_count),
            element: if is_summary { 2 } else { 0 },
            cipher: 0,
            key: U16::new(0),
            record_bytes: U32::new(0),
        });
        let (at, l, first) = (offset as usize, usize::from(layer), first_token as usize);
        let mut add = |number: u16, first: u64, tokens: u32, at: usize, data: Vec<u8>| {
            let identity = PlaneIdentity::new(nonce, SequenceId(1), kind, layer, first, tokens, number);
            checksums.push(checksum.compute(&identity, &data));
            planes.push((index, identity, at, data));
        };
        match kind {
            frame::KIND_GROUPS => {
                let block = layout.block(&layout.layers[l]);
                for piece in 0..2 {
                    for number in 0..layout.layers[l].planes() {
                        let token = first + piece * 4;
                        let at = at + block.block_offset(piece) + block.plane(number).0;
                        add(number as u16, token as u64, 4, at, plane(l, number, token, 4));
                    }
                }
            }
            frame::KIND_SUMMARY => add(0, first_token, tokens, at, summary(l, 0, 2)),
            frame::KIND_TAIL => {
                let keys = plane(l, 0, first, 2);
                let value_at = at + keys.len();
                add(0, first_token, tokens, at, keys);
                if layout.layers[l].planes() == 2 {
                    add(1, first_token, tokens, value_at, plane(l, 1, first, 2));
                }
            }
            frame::KIND_TOKEN_IDS => {
                let ids = (first..first + tokens as usize).flat_map(|token| (1000 + token as u32).to_le_bytes());
                add(0, first_token, tokens, at, ids.collect());
            }
            _ => add(0, first_token, tokens, at, STATE.to_vec()),
        }
    }
    let location = Location { device: DeviceIndex(0), segment: SegmentId(1), page, pages };
    let (sequence, key, summaries) = (1, KEY, 1);
    let parts =
        Parts { id, lsn, nonce, sequence, key, summaries, location, front_pages, descriptors, checksums, planes };
    parts.frame(&layout)
}

/// What a frame is made of.
pub(crate) struct Parts<'a> {
    pub(crate) id: u64,
    pub(crate) lsn: u64,
    pub(crate) nonce: u64,
    pub(crate) sequence: u64,
    pub(crate) key: &'a [u8],
    pub(crate) summaries: u32,
    pub(crate) location: Location,
    pub(crate) front_pages: u32,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) checksums: Vec<u64>,
    pub(crate) planes: Vec<(usize, PlaneIdentity, usize, Vec<u8>)>,
}

impl Parts<'_> {
    /// The frame, with a header of one page.
    pub(crate) fn frame(self, layout: &Layout) -> GoldenFrame {
        let place = FramePlace {
            store_id: STORE_ID,
            location: self.location,
            segment_generation: SEGMENT_GENERATION,
            segment_nonce: segment_nonce(self.location.device.0),
        };
        let mut bytes = vec![0; self.location.bytes() as usize];
        for (_, _, at, data) in &self.planes {
            bytes[*at..at + data.len()].copy_from_slice(data);
        }
        let header = HeaderBuilder {
            frame: FrameId(self.id),
            lsn: self.lsn,
            nonce: self.nonce,
            sequence: SequenceId(self.sequence),
            parent: None,
            created_unix_ms: 1_700_000_060_000 + self.id,
            layout_id: LayoutId(1),
            layout,
            key: self.key,
            summaries: self.summaries,
            descriptors: &self.descriptors,
            checksums: &self.checksums,
            front_pages: self.front_pages,
        };
        assert_eq!(header.bytes(), PAGE_BYTES);
        let crc = header.write(&place, &mut bytes[..PAGE_BYTES]).expect("a header");
        let Self { id: frame, lsn, nonce, front_pages, descriptors, checksums, planes, .. } = self;
        let header_pages = 1;
        GoldenFrame { place, frame, lsn, nonce, header_pages, front_pages, descriptors, checksums, planes, bytes, crc }
    }
}

/// Of the one segment of a device.
pub(crate) fn segment_nonce(device: u16) -> u64 {
    SEGMENT_NONCE + u64::from(device)
}

pub(crate) fn frames(checksum: PayloadChecksum) -> [GoldenFrame; 2] {
    [golden_frame(checksum, 1), golden_frame(checksum, 2)]
}

/// A batch in literals: flags, `synced_through`, the records encoded and their number.
pub(crate) struct GoldenBatch {
    pub(crate) flags: u16,
    pub(crate) synced_through: u64,
    pub(crate) records: Vec<u8>,
    pub(crate) count: u32,
}

pub(crate) fn batch(flags: u16, synced_through: u64, write: impl FnOnce(&mut Records)) -> GoldenBatch {
    let mut records = Records::default();
    write(&mut records);
    GoldenBatch { flags, synced_through, records: records.bytes, count: records.count }
}

/// Records with their number.
#[derive(Default)]
pub(crate) struct Records {
    pub(crate) bytes: Vec<u8>,
    pub(crate) count: u32,
}

impl Records {
    pub(crate) fn put(&mut self, kind: Kind, body: &(impl zerocopy::IntoBytes + zerocopy::Immutable), tail: &[u8]) {
        encode_record(&mut self.bytes, kind, body, tail);
        self.count += 1;
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

pub(crate) fn frame_record(frame: &GoldenFrame) -> m::Frame {
    m::Frame {
        frame: U64::new(frame.frame),
        origin: U64::new(1),
        lsn: U64::new(frame.lsn),
        nonce: U64::new(frame.nonce),
        location: frame.place.location.to_raw(),
        header_crc: U32::new(frame.crc),
        header_pages: U32::new(frame.header_pages),
        front_pages: U32::new(frame.front_pages),
        reserved: U32::new(0),
    }
}

pub(crate) fn sequence_create() -> m::SequenceCreate {
    m::SequenceCreate {
        sequence: U64::new(1),
        parent: U64::new(0),
        parent_tokens: U64::new(0),
        created_unix_ms: U64::new(1_700_000_055_000),
        ttl_ms: U64::new(0),
        layout: U32::new(1),
        summaries: U32::new(1),
        replicas: 1,
        evictable: 0,
        key_bytes: U16::new(6),
        reserved: U32::new(0),
    }
}

pub(crate) fn fork() -> m::Fork {
    m::Fork {
        sequence: U64::new(2),
        parent: U64::new(1),
        tokens: U64::new(6),
        created_unix_ms: U64::new(1_700_000_070_000),
        key_bytes: U16::new(11),
        reserved: [0; 6],
    }
}

pub(crate) fn frame_ref(frame: u64) -> m::FrameRef {
    m::FrameRef { sequence: U64::new(1), frame: U64::new(frame), token_end: U64::new([8, 10][frame as usize - 1]) }
}

pub(crate) fn commit(tokens: u64, state_frame: u64) -> m::SequenceCommit {
    m::SequenceCommit {
        sequence: U64::new(1),
        tokens: U64::new(tokens),
        state_frame: U64::new(state_frame),
        token_ids: U64::new(tokens),
        committed_unix_ms: U64::new(1_700_000_060_500),
    }
}

pub(crate) fn encoded_layout() -> Vec<u8> {
    let mut bytes = Vec::new();
    layout().encode(&mut bytes);
    bytes
}

/// A checkpoint of two batches, a commit, a fork.
pub(crate) fn store_batches(checksum: PayloadChecksum) -> Vec<GoldenBatch> {
    let [first, second] = frames(checksum);
    vec![
        batch(FLAG_CHECKPOINT | FLAG_MORE, 40, |r| {
            r.put(Kind::Member, &member(), &[]);
            r.put(Kind::Counters, &counters(), &[]);
            r.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &encoded_layout());
            r.put(Kind::SegmentOpen, &segment_open(), &[]);
        }),
        batch(FLAG_CHECKPOINT, 40, |r| {
            r.put(Kind::Frame, &frame_record(&first), &[]);
            r.put(Kind::SequenceCreate, &sequence_create(), KEY);
            r.put(Kind::FrameRef, &frame_ref(1), &[]);
            r.put(Kind::SequenceCommit, &commit(8, 0), &[]);
            r.put(Kind::CheckpointEnd, &m::CheckpointEnd { records: U64::new(8) }, &[]);
        }),
        batch(0, 42, |r| {
            r.put(Kind::Frame, &frame_record(&second), &[]);
            r.put(Kind::FrameRef, &frame_ref(2), &[]);
            r.put(Kind::SequenceCommit, &commit(10, 2), &[]);
        }),
        batch(0, 43, |r| r.put(Kind::Fork, &fork(), b"golden-fork")),
    ]
}

/// Every record kind once, in the order of their codes, with a value of its own in every field.
pub(crate) fn every_record() -> GoldenBatch {
    let location = |page| Location { device: DeviceIndex(3), segment: SegmentId(9), page, pages: 7 }.to_raw();
    batch(0, 40, |r| {
        r.put(Kind::Member, &m::Member { state: m::MEMBER_DRAINING, weight: U32::new(77), ..member() }, &[]);
        r.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(4), reserved: U32::new(0) }, &encoded_layout());
        let create = m::SequenceCreate {
            parent: U64::new(11),
            parent_tokens: U64::new(12),
            ttl_ms: U64::new(13),
            evictable: 14,
            ..sequence_create()
        };
        r.put(Kind::SequenceCreate, &create, KEY);
        r.put(Kind::Fork, &fork(), b"golden-fork");
        r.put(Kind::SequenceTruncate, &m::SequenceTruncate { sequence: U64::new(15), tokens: U64::new(16) }, &[]);
        r.put(Kind::SequenceDelete, &m::SequenceDelete { sequence: U64::new(17) }, &[]);
        let frame = m::Frame {
            frame: U64::new(18),
            origin: U64::new(19),
            lsn: U64::new(20),
            nonce: U64::new(21),
            location: location(22),
            header_crc: U32::new(23),
            header_pages: U32::new(2),
            front_pages: U32::new(3),
            reserved: U32::new(0),
        };
        r.put(Kind::Frame, &frame, &[]);
        let (header_crc, reserved) = (U32::new(24), U32::new(0));
        let moved = m::FrameMoved { frame: U64::new(25), location: location(26), header_crc, reserved };
        r.put(Kind::FrameMoved, &moved, &[]);
        let generation = U64::new(27);
        let replica = m::Replica { frame: U64::new(28), generation, location: location(29), header_crc, reserved };
        r.put(Kind::Replica, &replica, &[]);
        r.put(Kind::SegmentOpen, &segment_open(), &[]);
        let (segment, device) = (U32::new(30), U16::new(31));
        let seal = m::SegmentSeal { segment, used_pages: U32::new(32), device, reserved: [0; 6] };
        r.put(Kind::SegmentSeal, &seal, &[]);
        r.put(Kind::SegmentFree, &m::SegmentFree { generation, segment, device, removed: 1, reserved: 0 }, &[]);
        let pool = m::PoolAllocation {
            sequence: U64::new(33),
            location: location(34),
            layer: U16::new(35),
            kv_head: U16::new(36),
            allocated: 1,
            reserved: [0; 3],
        };
        r.put(Kind::PoolAllocation, &pool, &[]);
        r.put(Kind::SequenceCommit, &commit(37, 38), &[]);
        r.put(Kind::Counters, &counters(), &[]);
        r.put(Kind::CheckpointEnd, &m::CheckpointEnd { records: U64::new(39) }, &[]);
        r.put(Kind::Superseded, &m::Superseded { generation: U64::new(4), nonce: U64::new(40) }, &[]);
        r.put(Kind::FrameRef, &frame_ref(2), &[]);
        r.put(Kind::FrameRelease, &m::FrameRelease { sequence: U64::new(41), frame: U64::new(42) }, &[]);
    })
}

pub(crate) fn batch_place(sequence: u64) -> BatchPlace {
    BatchPlace { generation: GENERATION, nonce: MANIFEST_NONCE, sequence }
}

pub(crate) fn manifest_file(copy: u8, batches: &[GoldenBatch]) -> Vec<u8> {
    let mut bytes = manifest_page(copy).encode().to_vec();
    for (batch, sequence) in batches.iter().zip(FIRST_BATCH..) {
        let (synced, records) = (batch.synced_through, &batch.records);
        let encoded = m::encode_batch(&batch_place(sequence), synced, 1, batch.flags, records, batch.count);
        bytes.extend(encoded.expect("a batch"));
    }
    bytes.resize(bytes.len() + 2 * PAGE_BYTES, 0);
    bytes
}

fn segment_file(checksum: PayloadChecksum) -> Vec<u8> {
    let mut bytes = segment_page(segment::POSITION_HEADER).encode().to_vec();
    for frame in frames(checksum) {
        assert_eq!(frame.place.location.offset(), bytes.len() as u64);
        bytes.extend(frame.bytes);
    }
    bytes.resize((SEGMENT_PAGES as usize - 1) * PAGE_BYTES, 0);
    bytes.extend(segment_page(segment::POSITION_TRAILER).encode());
    bytes
}

/// Every golden file: path inside `golden/v0.1`, bytes.
pub(crate) fn files() -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for (directory, checksum) in [("store-crc32", PayloadChecksum::Crc32), ("store-crc64", PayloadChecksum::Crc64Nvme)]
    {
        let superblock = [slot(0, checksum).encode(), slot(1, checksum).encode()].concat();
        files.push((format!("{directory}/superblock"), superblock));
        for copy in 0..2 {
            let name = format!("{directory}/{}", m::file_name(GENERATION, copy));
            files.push((name, manifest_file(copy, &store_batches(checksum))));
        }
        files.push((format!("{directory}/{}", segment::file_name(SegmentId(1))), segment_file(checksum)));
    }
    files.push(("every-record".into(), manifest_file(0, &[every_record()])));
    files
}
