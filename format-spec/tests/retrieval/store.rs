//! The golden store of `golden/v0.2/store-retrieval` in literals.

use crate::golden_store::{
    DEVICE_ID, GENERATION, GoldenBatch, GoldenFrame, MANIFEST_NONCE, Parts, Records, SEGMENT_PAGES, frame_record,
    manifest_file, member, segment_open, segment_page, slot,
};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity, crc64};
use stratakv_format::frame::{self, Descriptor};
use stratakv_format::ids::SequenceId;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, FLAG_CHECKPOINT, Kind};
use stratakv_format::superblock::{STATE_CLOSED, Slot};
use stratakv_format::{DType, DeviceIndex, Location, PAGE_BYTES, SegmentId, segment};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Sequence 1 holds the adapter, sequence 2 tokens.
const ADAPTER: u64 = 1;
pub(crate) const TOKENS: u64 = 2;

/// Groups of four; two layers of two KV heads of 8, one without KV between them.
pub(crate) fn layout() -> Layout {
    let layer = |kv_heads, key_dim, value_dim| LayerGeometry {
        kv_heads,
        key_dim,
        value_dim,
        window: None,
        rope: None,
        codecs: RAW_PLANES,
    };
    Layout {
        dtype: DType::F16,
        group_tokens: 4,
        padded_planes: false,
        fingerprint: *b"fingerprint of the golden model.",
        layers: vec![layer(2, 8, 8), layer(0, 0, 0), layer(2, 8, 8)],
    }
}

fn numbers(words: &[u32], floats: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    words.chain(floats.into_iter().flat_map(f32::to_le_bytes)).collect()
}

/// Layer 0: low rank, `[16, 2]`.
fn low_rank() -> Vec<u8> {
    numbers(&[1, 16, 2], (0..32).map(|i| (i % 5) as f32 * 0.5 - 1.0))
}

/// Layer 2: codes of three dimensions in two bytes.
fn codes() -> Vec<u8> {
    let mut bytes = numbers(&[2, 16, 3, 2], [0.25]);
    bytes.extend(numbers(&[], (0..16).map(|i| i as f32 * 0.125)));
    bytes.extend(numbers(&[], (0..48).map(|i| (i % 7) as f32 * 0.25 - 0.5)));
    bytes.extend(numbers(&[], (0..48).map(|i| (i % 3) as f32)));
    bytes.extend(numbers(&[2], [-1.0, 1.0]));
    bytes.extend(numbers(&[4], [-1.5, -0.5, 0.5, 1.5]));
    bytes.extend(numbers(&[2], [0.0, 3.0]));
    bytes.extend(numbers(&[2, 0, 1, 1, 2], []));
    bytes
}

pub(crate) fn adapter_record() -> m::AdapterDefined {
    let whole = [low_rank(), codes()].concat();
    m::AdapterDefined {
        sequence: U64::new(ADAPTER),
        checksum: U64::new(crc64(&whole)),
        bytes: U64::new(whole.len() as u64),
        version: U32::new(3),
        name_bytes: U16::new(6),
        reserved: U16::new(0),
    }
}

/// An extent of one plane each: descriptor but for its place and checksums, and its bytes.
pub(crate) struct Extent {
    pub(crate) descriptor: Descriptor,
    pub(crate) planes: Vec<(u64, u32, u16, usize, Vec<u8>)>,
    pub(crate) bytes: u64,
}

pub(crate) fn descriptor(kind: u16, layer: u16, first: u64, tokens: u32, pieces: u32) -> Descriptor {
    Descriptor {
        kind: U16::new(kind),
        layer: U16::new(layer),
        codec: U16::new(0),
        summary: U16::new(0),
        first_token: U64::new(first),
        tokens: U32::new(tokens),
        pieces: U32::new(pieces),
        offset: U64::new(0),
        bytes: U64::new(0),
        checksum_first: U32::new(0),
        checksum_count: U32::new(0),
        element: 0,
        cipher: 0,
        key: U16::new(0),
        record_bytes: U32::new(0),
    }
}

fn adapter_piece(layer: u16, first: u64, bytes: &[u8]) -> Extent {
    let tokens = bytes.len() as u32;
    let descriptor = descriptor(frame::KIND_ADAPTER, layer, first, tokens, 1);
    Extent { descriptor, planes: vec![(first, tokens, 0, 0, bytes.to_vec())], bytes: bytes.len() as u64 }
}

/// A frame of a sequence at a device and page.
pub(crate) fn laid_out(
    layout: &Layout,
    id: u64,
    sequence: u64,
    (device, page): (u16, u32),
    extents: Vec<Extent>,
) -> GoldenFrame {
    let (nonce, lsn) = (0x7265_7472_6965_7600 + id, 200 + id);
    let checksum = PayloadChecksum::Crc64Nvme;
    let (mut descriptors, mut checksums, mut planes) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = PAGE_BYTES;
    let mut front = None;
    for (index, extent) in extents.into_iter().enumerate() {
        let Extent { mut descriptor, planes: own, bytes } = extent;
        let groups = descriptor.kind.get() == frame::KIND_GROUPS;
        at = at.next_multiple_of(if groups { PAGE_BYTES } else { 8 });
        if groups {
            front.get_or_insert(at);
        }
        descriptor.offset = U64::new(at as u64);
        descriptor.bytes = U64::new(bytes);
        descriptor.checksum_first = U32::new(checksums.len() as u32);
        descriptor.checksum_count = U32::new(own.len() as u32);
        for (first, tokens, plane, offset, data) in own {
            let (kind, layer) = (descriptor.kind.get(), descriptor.layer.get());
            let identity = PlaneIdentity::new(nonce, SequenceId(sequence), kind, layer, first, tokens, plane);
            checksums.push(checksum.compute(&identity, &data));
            planes.push((index, identity, at + offset, data));
        }
        descriptors.push(descriptor);
        at += bytes as usize;
    }
    let total = at.next_multiple_of(PAGE_BYTES);
    let (pages, front_pages) = ((total / PAGE_BYTES) as u32, (front.unwrap_or(total) / PAGE_BYTES) as u32);
    let location = Location { device: DeviceIndex(device), segment: SegmentId(1), page, pages };
    let (key, summaries): (&[u8], _) = (if sequence == ADAPTER { b"" } else { b"golden" }, 0);
    let parts =
        Parts { id, lsn, nonce, sequence, key, summaries, location, front_pages, descriptors, checksums, planes };
    parts.frame(layout)
}

/// Elements of all keys of a group: their mean is themselves.
fn key(group: usize) -> f32 {
    [1.0, -0.5][group]
}

fn f16(x: f32) -> [u8; 2] {
    half::f16::from_f32(x).to_le_bytes()
}

/// `[16]` of ones times a matrix `[16, columns]`, times `factor`, less `offset` times the same of its rows.
fn times(matrix: &[u8], columns: usize, element: impl Fn(usize) -> f32) -> Vec<f32> {
    let at = |i: usize| f32::from_le_bytes(matrix[i * 4..i * 4 + 4].try_into().expect("four bytes"));
    (0..columns).map(|j| (0..16).map(|i| element(i) * at(i * columns + j)).sum()).collect()
}

/// Layer 0: two numbers per token.
fn low_rank_record(group: usize) -> Vec<u8> {
    let token: Vec<u8> = times(&low_rank()[12..], 2, |_| key(group)).into_iter().flat_map(f16).collect();
    token.repeat(4)
}

/// Layer 2: two bytes per token, of 1 and 2, and of 1 bits.
fn codes_record(group: usize) -> Vec<u8> {
    let bytes = codes();
    let y = times(&bytes[20 + 64..], 3, |i| key(group) - i as f32 * 0.125);
    let nearest = |levels: &[f32], y: f32| levels.windows(2).take_while(|w| y > (w[0] + w[1]) / 2.0).count() as u8;
    let [first, second, third] =
        [nearest(&[-1.0, 1.0], y[0]), nearest(&[-1.5, -0.5, 0.5, 1.5], y[1]), nearest(&[0.0, 3.0], y[2])];
    [first | second << 1, third].repeat(4)
}

/// Mean and lowest cosine: every key is the mean.
fn landmark_record(group: usize) -> Vec<u8> {
    let mut record: Vec<u8> = (0..16).flat_map(|_| f16(key(group))).collect();
    record.extend(1.0_f32.to_le_bytes());
    record
}

/// A byte of signs per head and token, then the lengths.
fn signs_record(group: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut x = [key(group); 8];
    for x in &mut x {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *x = if state >> 40 & 1 == 1 { -*x } else { *x };
    }
    // Element i of the transform: the sum over j of x[j], negated where i and j share an odd number of bits.
    let sum = |i: usize| -> f32 {
        x.iter().enumerate().map(|(j, x)| if (i & j).count_ones() % 2 == 1 { -x } else { *x }).sum()
    };
    let bits = (0..8).fold(0, |bits, i| bits | u8::from(sum(i) > 0.0) << i);
    let mut record = vec![bits; 8];
    (0..8).for_each(|_| record.extend(f16((8.0 * key(group) * key(group)).sqrt())));
    record
}

/// Summaries of two groups of a layer.
fn summary(kind: u16, layer: u16, parameter: u32, record: fn(usize) -> Vec<u8>) -> Extent {
    let has_adapter = frame::has_adapter(kind);
    let header = frame::SummaryHeader {
        version: U32::new(frame::SUMMARY_VERSION),
        parameter: U32::new(parameter),
        adapter: U64::new(if has_adapter { ADAPTER } else { 0 }),
        adapter_checksum: if has_adapter { adapter_record().checksum } else { U64::new(0) },
        reserved: U64::new(0),
    };
    let mut descriptor = descriptor(frame::KIND_SUMMARY, layer, 0, 8, 2);
    descriptor.summary = U16::new(kind);
    descriptor.record_bytes = U32::new(record(0).len() as u32);
    let bytes = [header.as_bytes(), &record(0), &record(1)].concat();
    Extent { descriptor, bytes: bytes.len() as u64, planes: vec![(0, 8, 0, 0, bytes)] }
}

/// Tokens of a layer by themselves.
pub(crate) fn tail(layer: u16, first: u64, tokens: u32) -> Extent {
    let elements = 16 * tokens as usize;
    let plane = |start: f32| -> Vec<u8> { (0..elements).flat_map(|i| f16(start + i as f32 / 32.0)).collect() };
    let (keys, values) = (plane(0.5), plane(-2.0));
    let bytes = (keys.len() + values.len()) as u64;
    let planes = vec![(first, tokens, 0, 0, keys.clone()), (first, tokens, 1, keys.len(), values)];
    Extent { descriptor: descriptor(frame::KIND_TAIL, layer, first, tokens, 1), planes, bytes }
}

/// Two groups of a layer.
pub(crate) fn groups(layer: u16) -> Extent {
    let layout = layout();
    let block = layout.block(&layout.layers[usize::from(layer)]);
    let mut planes = Vec::new();
    for group in 0..2 {
        let values = (0..64).flat_map(|i| f16(i as f32 / 16.0 + group as f32));
        let keys: Vec<u8> = (0..64).flat_map(|_| f16(key(group))).collect();
        for (plane, data) in [keys, values.collect()].into_iter().enumerate() {
            planes.push((group as u64 * 4, 4, plane as u16, block.block_offset(group) + block.plane(plane).0, data));
        }
    }
    Extent { descriptor: descriptor(frame::KIND_GROUPS, layer, 0, 8, 2), planes, bytes: block.extent_bytes(2) as u64 }
}

/// The adapter in two frames, the codes cut between them; two groups of two layers with their summaries.
pub(crate) fn frames() -> Vec<GoldenFrame> {
    let codes = codes();
    let tokens = vec![
        summary(frame::SUMMARY_LOW_RANK, 0, 2, low_rank_record),
        summary(frame::SUMMARY_LANDMARKS, 0, 0, landmark_record),
        summary(frame::SUMMARY_SIGNS, 0, 8, signs_record),
        summary(frame::SUMMARY_CODES, 2, 2, codes_record),
        summary(frame::SUMMARY_LANDMARKS, 2, 0, landmark_record),
        summary(frame::SUMMARY_SIGNS, 2, 8, signs_record),
        groups(0),
        groups(2),
    ];
    vec![
        laid_out(
            &layout(),
            1,
            ADAPTER,
            (0, 1),
            vec![adapter_piece(0, 0, &low_rank()), adapter_piece(2, 0, &codes[..100])],
        ),
        laid_out(&layout(), 2, ADAPTER, (0, 3), vec![adapter_piece(2, 100, &codes[100..])]),
        laid_out(&layout(), 3, TOKENS, (0, 5), tokens),
    ]
}

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

pub(crate) fn commit(sequence: u64, tokens: u64) -> m::SequenceCommit {
    m::SequenceCommit {
        sequence: U64::new(sequence),
        tokens: U64::new(tokens),
        state_frame: U64::new(0),
        token_ids: U64::new(0),
        committed_unix_ms: U64::new(1_700_000_060_500),
    }
}

/// A checkpoint's records up to those of sequences.
pub(crate) fn store_records(layout: &Layout, frames: &[GoldenFrame]) -> Records {
    let mut records = Records::default();
    let mut encoded_layout = Vec::new();
    layout.encode(&mut encoded_layout);
    let counters = m::Counters {
        next_frame: U64::new(10),
        next_sequence: U64::new(3),
        next_lsn: U64::new(300),
        lifetime_bytes: U64::new(123_456_789),
        next_layout: U32::new(2),
        reserved: U32::new(0),
    };
    records.put(Kind::Member, &member(), &[]);
    records.put(Kind::Counters, &counters, &[]);
    records.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &encoded_layout);
    records.put(Kind::SegmentOpen, &segment_open(), &[]);
    for frame in frames {
        let origin = U64::new(frame.planes.first().map_or(TOKENS, |(_, identity, ..)| identity.sequence.get()));
        let record = m::Frame { origin, ..frame_record(frame) };
        records.put(Kind::Frame, &record, &[]);
    }
    records
}

/// A reference to a frame.
pub(crate) fn refer(records: &mut Records, sequence: u64, frame: &GoldenFrame) {
    let (sequence, frame) = (U64::new(sequence), U64::new(frame.frame));
    records.put(Kind::FrameRef, &m::FrameRef { sequence, frame, token_end: U64::new(u64::MAX) }, &[]);
}

/// One checkpoint, all there is.
fn checkpoint() -> Records {
    let frames = frames();
    let mut records = store_records(&layout(), &frames);
    records.put(Kind::SequenceCreate, &create(ADAPTER, b""), &[]);
    records.put(Kind::Adapter, &adapter_record(), b"golden");
    frames[..2].iter().for_each(|frame| refer(&mut records, ADAPTER, frame));
    records.put(Kind::SequenceCommit, &commit(ADAPTER, 0), &[]);
    records.put(Kind::SequenceCreate, &create(TOKENS, b"golden"), b"golden");
    refer(&mut records, TOKENS, &frames[2]);
    records.put(Kind::SequenceCommit, &commit(TOKENS, 8), &[]);
    records
}

/// Every file of the store: path in it, bytes.
pub(crate) fn files() -> Vec<(String, Vec<u8>)> {
    files_of(frames(), checkpoint())
}

/// Every file of a store whose manifest is one checkpoint of these records.
pub(crate) fn files_of(frames: Vec<GoldenFrame>, mut records: Records) -> Vec<(String, Vec<u8>)> {
    let end = m::CheckpointEnd { records: U64::new(u64::from(records.count)) };
    records.put(Kind::CheckpointEnd, &end, &[]);
    let Records { bytes, count } = records;
    let batch = [GoldenBatch { flags: FLAG_CHECKPOINT, synced_through: 40, records: bytes, count }];
    let slot = |index| {
        // The last batch is the checkpoint.
        Slot { synced_through: U64::new([40, 41][index]), ..slot(index, PayloadChecksum::Crc64Nvme) }
    };
    assert_eq!(
        (slot(1).state, slot(1).device_id, slot(1).manifest_nonce.get()),
        (STATE_CLOSED, DEVICE_ID, MANIFEST_NONCE)
    );
    let mut segment = segment_page(segment::POSITION_HEADER).encode().to_vec();
    for frame in frames {
        assert_eq!(frame.place.location.offset(), segment.len() as u64);
        segment.extend(frame.bytes);
    }
    segment.resize((SEGMENT_PAGES as usize - 1) * PAGE_BYTES, 0);
    segment.extend(segment_page(segment::POSITION_TRAILER).encode());
    let mut files = vec![("superblock".to_owned(), [slot(0).encode(), slot(1).encode()].concat())];
    files.extend((0..2).map(|copy| (m::file_name(GENERATION, copy), manifest_file(copy, &batch))));
    files.push((segment::file_name(SegmentId(1)), segment));
    files
}
