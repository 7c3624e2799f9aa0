//! The golden stores of the set `v0.1`: what their files hold, and how they are built.
//!
//! Two stores differ only in the payload checksum. A file with one record of every kind completes the set. Tests of
//! damaged and hostile bytes start from the same store.

use crate::builder::{self as b, FrameParts, GoldenBatch, GoldenFile, GoldenFrame, StoredPlane, batch, commit};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::frame::{self, Descriptor};
use stratakv_format::ids::SequenceId;
use stratakv_format::layout::{LayerGeometry, Layout};
use stratakv_format::manifest::{self as m, FLAG_CHECKPOINT, FLAG_MORE, Kind};
use stratakv_format::{DType, DeviceIndex, Location, SegmentId, segment};
use zerocopy::little_endian::{U16, U32, U64};

pub(crate) const STATE: &[u8] = b"sampler state, opaque";

/// Returns the layout of the stores.
///
/// Layer 0 has blocks of 1024 bytes, 4 per page. Layer 1 has no KV. Layer 2 is sliding and has blocks of exactly one
/// page. Layer 3 has blocks of 768 bytes without V.
pub(crate) fn layout() -> Layout {
    let sliding = LayerGeometry { window: Some(1024), ..b::layer(2, 128, 128) };
    b::layout_of(vec![b::layer(1, 64, 64), b::layer(0, 0, 0), sliding, b::layer(1, 96, 0)])
}

/// Returns the bits of one f16 element. All elements are from 1 to 2, where bits are ordered like values.
fn element(layer: usize, plane: usize, token: usize, head: usize, dim: usize) -> u16 {
    0x3c00 | ((layer * 211 + plane * 97 + token * 7 + head * 31 + dim * 3) % 1024) as u16
}

/// Returns a plane `[kv_heads, tokens, dim]`: 0 = K, 1 = V.
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

/// Returns the min/max records of groups.
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

/// A descriptor: kind, layer, first token, tokens, pieces, offset, bytes and number of checksums.
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

/// Returns frame 1 or 2.
fn golden_frame(checksum: PayloadChecksum, id: u64) -> GoldenFrame {
    let (page, pages, front_pages, rows): (u32, u32, u32, &[_]) =
        if id == 1 { (1, 6, 2, &FRAME_1) } else { (7, 2, 2, &FRAME_2) };
    let (lsn, nonce) = (100 + id, 0x6672_616d_6530_3030 + id);
    let (mut descriptors, mut checksums, mut planes) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        descriptors.push(descriptor_of(row, checksums.len() as u32));
        for (identity, offset, bytes) in planes_of(row, nonce) {
            checksums.push(checksum.compute(&identity, &bytes));
            planes.push(StoredPlane { identity, offset, bytes });
        }
    }
    let location = Location { device: DeviceIndex(0), segment: SegmentId(1), page, pages };
    let (sequence, key, summaries) = (1, b::KEY, 1);
    let parts =
        FrameParts { id, lsn, nonce, sequence, key, summaries, location, front_pages, descriptors, checksums, planes };
    parts.frame(&layout())
}

fn descriptor_of(row: &DescriptorRow, checksum_first: u32) -> Descriptor {
    let &(kind, layer, first_token, tokens, pieces, offset, bytes, checksum_count) = row;
    let is_summary = kind == frame::KIND_SUMMARY;
    Descriptor {
        summary: U16::new(u16::from(is_summary)),
        offset: U64::new(offset),
        bytes: U64::new(bytes),
        checksum_first: U32::new(checksum_first),
        checksum_count: U32::new(checksum_count),
        element: if is_summary { DType::F16.code() } else { 0 },
        ..b::descriptor(kind, layer, first_token, tokens, pieces)
    }
}

/// Returns identity, offset in the frame and bytes of each plane of an extent.
fn planes_of(row: &DescriptorRow, nonce: u64) -> Vec<(PlaneIdentity, usize, Vec<u8>)> {
    let &(kind, layer, first_token, tokens, _, offset, ..) = row;
    let (at, l, first) = (offset as usize, usize::from(layer), first_token as usize);
    let identity = |first_token: u64, tokens: u32, plane: usize| {
        PlaneIdentity::new(nonce, SequenceId(1), kind, layer, first_token, tokens).with_plane(plane as u16)
    };
    let only = |bytes: Vec<u8>| vec![(identity(first_token, tokens, 0), at, bytes)];
    let layout = layout();
    let geometry = &layout.layers[l];
    match kind {
        frame::KIND_GROUPS => {
            let block = layout.block(geometry);
            let stored = |group: usize, number: usize| {
                let token = first + group * 4;
                let at = at + block.block_offset(group) + block.plane(number).0;
                (identity(token as u64, 4, number), at, plane(l, number, token, 4))
            };
            (0..2)
                .flat_map(|group| (0..geometry.planes()).map(move |number| (group, number)))
                .map(|(group, number)| stored(group, number))
                .collect()
        }
        frame::KIND_SUMMARY => only(summary(l, 0, 2)),
        frame::KIND_TAIL => {
            let keys = plane(l, 0, first, 2);
            let value_at = at + keys.len();
            let mut planes = only(keys);
            if geometry.planes() == 2 {
                planes.push((identity(first_token, tokens, 1), value_at, plane(l, 1, first, 2)));
            }
            planes
        }
        frame::KIND_TOKEN_IDS => {
            only((first..first + tokens as usize).flat_map(|token| (1000 + token as u32).to_le_bytes()).collect())
        }
        _ => only(STATE.to_vec()),
    }
}

pub(crate) fn frames(checksum: PayloadChecksum) -> [GoldenFrame; 2] {
    [golden_frame(checksum, 1), golden_frame(checksum, 2)]
}

/// Returns the record of sequence 1, which carries min/max summaries.
fn sequence_create() -> m::SequenceCreate {
    m::SequenceCreate { summaries: U32::new(1), ..b::create(1, b::KEY) }
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

/// Returns the reference of sequence 1 to frame 1 or 2, up to the last token of the frame.
fn frame_ref(frame: u64) -> m::FrameRef {
    m::FrameRef { sequence: U64::new(1), frame: U64::new(frame), token_end: U64::new([8, 10][frame as usize - 1]) }
}

/// Returns the commit of sequence 1 with as many token ids as tokens.
fn full_commit(tokens: u64, state_frame: u64) -> m::SequenceCommit {
    m::SequenceCommit { state_frame: U64::new(state_frame), token_ids: U64::new(tokens), ..commit(1, tokens) }
}

/// Returns the batches of a store: a checkpoint of two batches, a commit and a fork.
pub(crate) fn store_batches(checksum: PayloadChecksum) -> Vec<GoldenBatch> {
    let [first, second] = frames(checksum);
    vec![
        batch(FLAG_CHECKPOINT | FLAG_MORE, 40, |r| {
            r.put(Kind::Member, &b::member(), &[]);
            r.put(Kind::Counters, &b::counters(), &[]);
            r.put_layout(&layout());
            r.put(Kind::SegmentOpen, &b::segment_open(), &[]);
        }),
        batch(FLAG_CHECKPOINT, 40, |r| {
            r.put(Kind::Frame, &b::frame_record(&first, 1), &[]);
            r.put(Kind::SequenceCreate, &sequence_create(), b::KEY);
            r.put(Kind::FrameRef, &frame_ref(1), &[]);
            r.put(Kind::SequenceCommit, &full_commit(8, 0), &[]);
            r.put(Kind::CheckpointEnd, &m::CheckpointEnd { records: U64::new(8) }, &[]);
        }),
        batch(0, 42, |r| {
            r.put(Kind::Frame, &b::frame_record(&second, 1), &[]);
            r.put(Kind::FrameRef, &frame_ref(2), &[]);
            r.put(Kind::SequenceCommit, &full_commit(10, 2), &[]);
        }),
        batch(0, 43, |r| r.put(Kind::Fork, &fork(), b"golden-fork")),
    ]
}

/// Returns a batch with one record of each kind from 1 to 19, in this order, with a distinct value in every field.
pub(crate) fn every_record() -> GoldenBatch {
    let location = |page| Location { device: DeviceIndex(3), segment: SegmentId(9), page, pages: 7 }.to_raw();
    batch(0, 40, |r| {
        r.put(Kind::Member, &m::Member { state: m::MEMBER_DRAINING, weight: U32::new(77), ..b::member() }, &[]);
        let mut encoded_layout = Vec::new();
        layout().encode(&mut encoded_layout);
        r.put(Kind::Layout, &m::LayoutDefined { layout: U32::new(4), reserved: U32::new(0) }, &encoded_layout);
        let create = m::SequenceCreate {
            parent: U64::new(11),
            parent_tokens: U64::new(12),
            ttl_ms: U64::new(13),
            evictable: 14,
            ..sequence_create()
        };
        r.put(Kind::SequenceCreate, &create, b::KEY);
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
            flags: U32::new(0),
        };
        r.put(Kind::Frame, &frame, &[]);
        let (header_crc, reserved) = (U32::new(24), U32::new(0));
        let moved = m::FrameMoved { frame: U64::new(25), location: location(26), header_crc, reserved };
        r.put(Kind::FrameMoved, &moved, &[]);
        let generation = U64::new(27);
        let replica = m::Replica { frame: U64::new(28), generation, location: location(29), header_crc, reserved };
        r.put(Kind::Replica, &replica, &[]);
        r.put(Kind::SegmentOpen, &b::segment_open(), &[]);
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
        r.put(Kind::SequenceCommit, &full_commit(37, 38), &[]);
        r.put(Kind::Counters, &b::counters(), &[]);
        r.put(Kind::CheckpointEnd, &m::CheckpointEnd { records: U64::new(39) }, &[]);
        r.put(Kind::Superseded, &m::Superseded { generation: U64::new(4), nonce: U64::new(40) }, &[]);
        r.put(Kind::FrameRef, &frame_ref(2), &[]);
        r.put(Kind::FrameRelease, &m::FrameRelease { sequence: U64::new(41), frame: U64::new(42) }, &[]);
    })
}

/// Returns the manifest file of copy `copy` with these batches.
pub(crate) fn manifest_file(copy: u8, batches: &[GoldenBatch]) -> Vec<u8> {
    b::manifest_file(&b::manifest_page(copy), batches)
}

/// Returns every file of the set `v0.1`.
pub(crate) fn files() -> Vec<GoldenFile> {
    let mut files = Vec::new();
    for (store, checksum) in [("store-crc32", PayloadChecksum::Crc32), ("store-crc64", PayloadChecksum::Crc64Nvme)] {
        let superblock = [b::slot(0, checksum).encode(), b::slot(1, checksum).encode()].concat();
        files.push((format!("{store}/superblock"), superblock));
        for copy in 0..2 {
            let name = format!("{store}/{}", m::file_name(b::GENERATION, copy));
            files.push((name, manifest_file(copy, &store_batches(checksum))));
        }
        let name = format!("{store}/{}", segment::file_name(SegmentId(1)));
        files.push((name, b::segment_file(0, &frames(checksum))));
    }
    files.push(("every-record".into(), manifest_file(0, &[every_record()])));
    files
}
