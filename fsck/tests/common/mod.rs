//! Builds small store images with the format crate's encoders alone.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::{PayloadChecksum, PlaneIdentity};
use stratakv_format::features::Features;
use stratakv_format::frame::*;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, Kind, encode_batch, encode_record};
use stratakv_format::segment::{self, KIND_LOG, SegmentPage};
use stratakv_format::superblock::{FILE, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{DType, DeviceIndex, FrameId, LayoutId, Location, PAGE_BYTES, SegmentId, SequenceId};
use tempfile::TempDir;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

pub const SEGMENT_PAGES: u32 = 24;
pub const STORE: [u8; 16] = [7; 16];
pub const NONCE: u64 = 0x1234_5678_9abc_def1;
pub const GENERATION: u64 = 1;
/// Pages of a manifest file, most of them never written.
pub const MANIFEST_PAGES: usize = 16;
pub const CHECKSUM: PayloadChecksum = PayloadChecksum::Crc64Nvme;

pub fn layout() -> Layout {
    let full = LayerGeometry { kv_heads: 1, key_dim: 16, value_dim: 8, window: None, rope: None, codecs: RAW_PLANES };
    let none = LayerGeometry { kv_heads: 0, key_dim: 0, value_dim: 0, window: None, rope: None, codecs: RAW_PLANES };
    // Block of layer 2: K plane of 4 KiB, V plane of 512 bytes, two pages.
    let wide =
        LayerGeometry { kv_heads: 2, key_dim: 128, value_dim: 16, window: Some(8), rope: None, codecs: RAW_PLANES };
    Layout {
        dtype: DType::F32,
        group_tokens: 4,
        padded_planes: false,
        fingerprint: [9; 32],
        layers: vec![full, none, wide],
    }
}

/// A record that goes into a batch.
#[derive(Default, Clone)]
pub struct Records {
    pub bytes: Vec<u8>,
    pub count: u32,
}

impl Records {
    pub fn push(&mut self, kind: Kind, body: &(impl IntoBytes + zerocopy::Immutable), tail: &[u8]) {
        encode_record(&mut self.bytes, kind, body, tail);
        self.count += 1;
    }
}

/// A frame's place and length in the image.
#[derive(Clone, Debug)]
pub struct Placed {
    pub id: u64,
    pub location: Location,
}

pub struct Image {
    pub root: TempDir,
    pub devices: u16,
    pub dirs: Vec<PathBuf>,
    /// Per device: bytes of segment 0.
    pub segments: Vec<Vec<u8>>,
    next_page: Vec<u32>,
    pub frames: Vec<Placed>,
    pub batches: Vec<Records>,
    pub manifest_page_end: usize,
    pub batch_offsets: Vec<usize>,
}

pub fn slot(device: u16, devices: u16, sequence: u64, state: u8, synced: u64) -> Slot {
    Slot {
        magic: stratakv_format::superblock::MAGIC,
        features: Features::current(),
        sequence: U64::new(sequence),
        store_id: STORE,
        device_id: [device as u8 + 1; 16],
        epoch: U64::new(1),
        manifest_generation: U64::new(GENERATION),
        manifest_nonce: U64::new(NONCE),
        synced_through: U64::new(synced),
        created_unix_s: U64::new(1),
        segment_bytes: U64::new(u64::from(SEGMENT_PAGES) * PAGE_BYTES as u64),
        device_index: U16::new(device),
        device_count: U16::new(devices),
        payload_checksum: CHECKSUM as u8,
        state,
        manifest_copies: if devices == 1 { 2 } else { 1 },
        reserved: 0,
    }
}

fn segment_page(device: u16, position: u8) -> SegmentPage {
    SegmentPage {
        magic: segment::MAGIC,
        features: Features::current(),
        store_id: STORE,
        generation: U64::new(3),
        nonce: U64::new(0xabc0 + u64::from(device)),
        created_unix_s: U64::new(1),
        segment: U32::new(0),
        pages: U32::new(SEGMENT_PAGES),
        device: U16::new(device),
        kind: KIND_LOG,
        position,
        reserved: [0; 4],
    }
}

/// One extent to write: descriptor fields that matter.
struct Extent {
    kind: u16,
    layer: u16,
    first: u64,
    tokens: u32,
    /// Its bytes, where they matter.
    content: Vec<u8>,
}

impl Image {
    /// A store: sequence 1 (groups, summary, tail, token ids, state), sequence 2 forked from it, sequence 3 deleted.
    pub fn standard(devices: u16, state: u8) -> Self {
        let mut image = Self::empty(devices);
        image.checkpoint();
        let mut a = Records::default();
        a.push(Kind::SequenceCreate, &create(1, b"alpha"), b"alpha");
        let first = image.frame(0, 1, b"alpha", 9, 0, b"caller state");
        a.push(Kind::Frame, &first, &[]);
        a.push(
            Kind::FrameRef,
            &m::FrameRef { sequence: U64::new(1), frame: first.frame, token_end: U64::new(u64::MAX) },
            &[],
        );
        a.push(Kind::SequenceCommit, &commit(1, 9, 9, first.frame.get()), &[]);
        image.batches.push(a);
        let mut b = Records::default();
        let fork = m::Fork {
            sequence: U64::new(2),
            parent: U64::new(1),
            tokens: U64::new(5),
            created_unix_ms: U64::new(0),
            key_bytes: U16::new(0),
            reserved: [0; 6],
        };
        b.push(Kind::Fork, &fork, &[]);
        b.push(Kind::SequenceCreate, &create(3, b"gone"), b"gone");
        let dead = image.frame(devices - 1, 3, b"gone", 6, 0, b"");
        b.push(Kind::Frame, &dead, &[]);
        b.push(
            Kind::FrameRef,
            &m::FrameRef { sequence: U64::new(3), frame: dead.frame, token_end: U64::new(u64::MAX) },
            &[],
        );
        image.batches.push(b);
        let mut c = Records::default();
        c.push(Kind::SequenceDelete, &m::SequenceDelete { sequence: U64::new(3) }, &[]);
        let second = image.frame(devices - 1, 1, b"alpha", 13, 8, b"more");
        c.push(Kind::Frame, &second, &[]);
        c.push(
            Kind::FrameRef,
            &m::FrameRef { sequence: U64::new(1), frame: second.frame, token_end: U64::new(u64::MAX) },
            &[],
        );
        c.push(Kind::SequenceCommit, &commit(1, 13, 13, second.frame.get()), &[]);
        image.batches.push(c);
        image.write(state);
        image
    }

    fn empty(devices: u16) -> Self {
        let root = tempfile::tempdir().unwrap();
        let dirs: Vec<_> = (0..devices).map(|device| root.path().join(format!("d{device}"))).collect();
        let segments = (0..devices)
            .map(|device| {
                let mut bytes = vec![0; SEGMENT_PAGES as usize * PAGE_BYTES];
                bytes[..PAGE_BYTES].copy_from_slice(&segment_page(device, 0).encode());
                let last = bytes.len() - PAGE_BYTES;
                bytes[last..].copy_from_slice(&segment_page(device, 1).encode());
                bytes
            })
            .collect();
        Self {
            root,
            devices,
            dirs,
            segments,
            next_page: vec![1; devices as usize],
            frames: Vec::new(),
            batches: Vec::new(),
            manifest_page_end: 0,
            batch_offsets: Vec::new(),
        }
    }

    fn checkpoint(&mut self) {
        let mut r = Records::default();
        for device in 0..self.devices {
            let member = m::Member {
                epoch: U64::new(1),
                device_id: [device as u8 + 1; 16],
                device: U16::new(device),
                state: m::MEMBER_ACTIVE,
                manifest_copies: if self.devices == 1 { 2 } else { 1 },
                weight: U32::new(0),
                bytes_limit: U64::new(0),
            };
            r.push(Kind::Member, &member, &[]);
        }
        let counters = m::Counters {
            next_frame: U64::new(1),
            next_sequence: U64::new(1),
            next_lsn: U64::new(1),
            lifetime_bytes: U64::new(0),
            next_layout: U32::new(2),
            reserved: U32::new(0),
        };
        r.push(Kind::Counters, &counters, &[]);
        let mut bytes = Vec::new();
        layout().encode(&mut bytes);
        r.push(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &bytes);
        for device in 0..self.devices {
            let page = segment_page(device, 0);
            let open = m::SegmentOpen {
                generation: page.generation,
                nonce: page.nonce,
                segment: page.segment,
                pages: page.pages,
                device: page.device,
                kind: KIND_LOG,
                reserved: [0; 5],
            };
            r.push(Kind::SegmentOpen, &open, &[]);
        }
        let end = m::CheckpointEnd { records: U64::new(u64::from(r.count)) };
        r.push(Kind::CheckpointEnd, &end, &[]);
        self.batches.push(r);
    }

    /// Writes a frame with tokens `first..end` of all layers: whole groups, the rest as a tail.
    pub fn frame(&mut self, device: u16, sequence: u64, key: &[u8], end: u64, first: u64, state: &[u8]) -> m::Frame {
        let groups_end = first + (end - first) / 4 * 4;
        let mut extents = Vec::new();
        let layers = [0_u16, 2];
        let grouped = |kind| {
            let extent =
                move |layer| Extent { kind, layer, first, tokens: (groups_end - first) as u32, content: Vec::new() };
            layers.into_iter().filter(move |_| groups_end > first).map(extent)
        };
        extents.extend(grouped(KIND_SUMMARY));
        for layer in layers.into_iter().filter(|_| end > groups_end) {
            let (first, tokens) = (groups_end, (end - groups_end) as u32);
            extents.push(Extent { kind: KIND_TAIL, layer, first, tokens, content: Vec::new() });
        }
        let tokens = (end - first) as u32;
        extents.push(Extent { kind: KIND_TOKEN_IDS, layer: 0, first, tokens, content: Vec::new() });
        if !state.is_empty() {
            let tokens = state.len() as u32;
            extents.push(Extent { kind: KIND_CALLER_STATE, layer: 0, first: end, tokens, content: Vec::new() });
        }
        extents.extend(grouped(KIND_GROUPS));
        self.lay(device, sequence, key, &extents)
    }

    /// A store with sequence 1, which holds an adapter in two frames: of each layer, by its number, these bytes. The record has
    /// `checksum` of them, where it is given.
    pub fn with_adapter(layers: &[(u16, Vec<u8>)], checksum: Option<u64>) -> Self {
        let mut image = Self::empty(1);
        image.checkpoint();
        let all: Vec<u8> = layers.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
        let mut records = Records::default();
        records.push(Kind::SequenceCreate, &create(1, b""), b"");
        let adapter = m::AdapterDefined {
            sequence: U64::new(1),
            checksum: U64::new(checksum.unwrap_or_else(|| stratakv_format::checksum::crc64(&all))),
            bytes: U64::new(all.len() as u64),
            version: U32::new(1),
            name_bytes: U16::new(4),
            reserved: U16::new(0),
        };
        records.push(Kind::Adapter, &adapter, b"name");
        // Each layer's first half in one frame, its second half in the other.
        for half in 0..2 {
            let piece = |(layer, bytes): &(u16, Vec<u8>)| {
                let (first, second) = bytes.split_at(bytes.len() / 2);
                let (first, content) = if half == 0 { (0, first) } else { (first.len() as u64, second) };
                let tokens = content.len() as u32;
                Extent { kind: KIND_ADAPTER, layer: *layer, first, tokens, content: content.to_vec() }
            };
            let pieces: Vec<Extent> = layers.iter().map(piece).filter(|piece| piece.tokens > 0).collect();
            let frame = image.lay(0, 1, b"", &pieces);
            records.push(Kind::Frame, &frame, &[]);
            let (sequence, token_end) = (U64::new(1), U64::new(u64::MAX));
            records.push(Kind::FrameRef, &m::FrameRef { sequence, frame: frame.frame, token_end }, &[]);
        }
        image.batches.push(records);
        image.write(STATE_CLOSED);
        image
    }

    /// A store with sequence 1, whose frames hold, of both layers with KV, extents of these kinds, first tokens and numbers of
    /// tokens; `committed` tokens of it are, without ids.
    pub fn with_frames(frames: &[&[(u16, u64, u32)]], committed: u64) -> Self {
        let mut image = Self::empty(1);
        image.checkpoint();
        let mut records = Records::default();
        records.push(Kind::SequenceCreate, &create(1, b""), b"");
        for frame in frames {
            let of = |&(kind, first, tokens): &(u16, u64, u32)| {
                [0, 2].map(|layer| Extent { kind, layer, first, tokens, content: Vec::new() })
            };
            let extents: Vec<Extent> = frame.iter().flat_map(of).collect();
            let frame = image.lay(0, 1, b"", &extents);
            records.push(Kind::Frame, &frame, &[]);
            let (sequence, token_end) = (U64::new(1), U64::new(u64::MAX));
            records.push(Kind::FrameRef, &m::FrameRef { sequence, frame: frame.frame, token_end }, &[]);
        }
        records.push(Kind::SequenceCommit, &commit(1, committed, 0, 0), &[]);
        image.batches.push(records);
        image.write(STATE_CLOSED);
        image
    }

    fn lay(&mut self, device: u16, sequence: u64, key: &[u8], extents: &[Extent]) -> m::Frame {
        let layout = layout();
        let id = self.frames.len() as u64 + 1;
        let nonce = 0x55aa_0000 + id;
        let planes_of = |e: &Extent| match e.kind {
            KIND_GROUPS => e.tokens as usize / 4 * 2,
            KIND_TAIL => 2,
            _ => 1,
        };
        let checksums_count = extents.iter().map(planes_of).sum();
        let header = header_bytes(&layout, key.len(), extents.len(), checksums_count);
        let mut payload: Vec<u8> = vec![0; header];
        let (mut descriptors, mut checksums, mut front) = (Vec::new(), Vec::new(), header);
        let mut seed = id as u8;
        let mut fill = |bytes: &mut [u8]| {
            for byte in bytes {
                seed = seed.wrapping_mul(31).wrapping_add(7);
                *byte = seed;
            }
        };
        for e in extents {
            let align = if e.kind == KIND_GROUPS { PAGE_BYTES } else { 8 };
            payload.resize(payload.len().next_multiple_of(align), 0);
            let start = payload.len();
            let geometry = &layout.layers[e.layer as usize];
            let identity = |first: u64, tokens: u32, plane: u16| {
                PlaneIdentity::new(nonce, SequenceId(sequence), e.kind, e.layer, first, tokens, plane)
            };
            let first_checksum = checksums.len() as u32;
            let pieces = if matches!(e.kind, KIND_GROUPS | KIND_SUMMARY) { e.tokens / 4 } else { 1 };
            match e.kind {
                KIND_GROUPS => {
                    let block = layout.block(geometry);
                    payload.resize(start + block.extent_bytes(pieces as usize), 0);
                    for piece in 0..pieces {
                        for plane in 0..2 {
                            let (offset, bytes) = block.plane(plane);
                            let at = start + block.block_offset(piece as usize) + offset;
                            fill(&mut payload[at..at + bytes]);
                            let identity = identity(e.first + u64::from(piece) * 4, 4, plane as u16);
                            checksums.push(CHECKSUM.compute(&identity, &payload[at..at + bytes]));
                        }
                    }
                }
                KIND_TAIL => {
                    let (k, v) = tail_plane_bytes(geometry, layout.dtype, e.tokens as usize);
                    payload.resize(start + k + v, 0);
                    fill(&mut payload[start..]);
                    checksums.push(CHECKSUM.compute(&identity(e.first, e.tokens, 0), &payload[start..start + k]));
                    checksums.push(CHECKSUM.compute(&identity(e.first, e.tokens, 1), &payload[start + k..]));
                }
                _ => {
                    let bytes = match e.kind {
                        KIND_SUMMARY => pieces as usize * summary_record_bytes(geometry, DType::F16),
                        KIND_TOKEN_IDS => e.tokens as usize * 4,
                        _ => e.tokens as usize,
                    };
                    payload.resize(start + bytes, 0);
                    fill(&mut payload[start..]);
                    if !e.content.is_empty() {
                        payload[start..].copy_from_slice(&e.content);
                    }
                    checksums.push(CHECKSUM.compute(&identity(e.first, e.tokens, 0), &payload[start..]));
                }
            }
            if e.kind != KIND_GROUPS {
                front = payload.len().next_multiple_of(PAGE_BYTES);
            }
            let summary = e.kind == KIND_SUMMARY;
            descriptors.push(Descriptor {
                kind: U16::new(e.kind),
                layer: U16::new(e.layer),
                codec: U16::new(CODEC_RAW),
                summary: U16::new(if summary { SUMMARY_MIN_MAX } else { 0 }),
                first_token: U64::new(e.first),
                tokens: U32::new(e.tokens),
                pieces: U32::new(pieces),
                offset: U64::new(start as u64),
                bytes: U64::new((payload.len() - start) as u64),
                checksum_first: U32::new(first_checksum),
                checksum_count: U32::new(checksums.len() as u32 - first_checksum),
                element: if summary { DType::F16.code() } else { 0 },
                cipher: 0,
                key: U16::new(0),
                record_bytes: U32::new(0),
            });
        }
        payload.resize(payload.len().next_multiple_of(PAGE_BYTES), 0);
        let page = self.next_page[device as usize];
        let location = Location {
            device: DeviceIndex(device),
            segment: SegmentId(0),
            page,
            pages: (payload.len() / PAGE_BYTES) as u32,
        };
        assert!(page + location.pages < SEGMENT_PAGES, "the segment is too small");
        // A dead page between frames.
        self.next_page[device as usize] = page + location.pages + 1;
        let own = segment_page(device, 0);
        let place = FramePlace {
            store_id: STORE,
            location,
            segment_generation: own.generation.get(),
            segment_nonce: own.nonce.get(),
        };
        let builder = HeaderBuilder {
            frame: FrameId(id),
            lsn: id,
            nonce,
            sequence: SequenceId(sequence),
            parent: None,
            created_unix_ms: 0,
            layout_id: LayoutId(1),
            layout: &layout,
            key,
            summaries: 1,
            descriptors: &descriptors,
            checksums: &checksums,
            front_pages: (front / PAGE_BYTES) as u32,
        };
        let crc = builder.write(&place, &mut payload).unwrap();
        let at = page as usize * PAGE_BYTES;
        self.segments[device as usize][at..at + payload.len()].copy_from_slice(&payload);
        self.frames.push(Placed { id, location });
        m::Frame {
            frame: U64::new(id),
            origin: U64::new(sequence),
            lsn: U64::new(id),
            nonce: U64::new(nonce),
            location: location.to_raw(),
            header_crc: U32::new(crc),
            header_pages: U32::new((header / PAGE_BYTES) as u32),
            front_pages: U32::new((front / PAGE_BYTES) as u32),
            reserved: U32::new(0),
        }
    }

    /// Writes everything to disk. Closed: the last batch is known durable; open: only the checkpoint.
    pub fn write(&mut self, state: u8) {
        let last = self.batches.len() as u64;
        let mut manifest = vec![0; PAGE_BYTES];
        self.batch_offsets.clear();
        for (index, records) in self.batches.iter().enumerate() {
            self.batch_offsets.push(manifest.len());
            let sequence = index as u64 + 1;
            let place = BatchPlace { generation: GENERATION, nonce: NONCE, sequence };
            let flags = if index == 0 { FLAG_CHECKPOINT } else { 0 };
            let bytes = encode_batch(&place, index as u64, 1, flags, &records.bytes, records.count).unwrap();
            manifest.extend_from_slice(&bytes);
        }
        self.manifest_page_end = manifest.len();
        manifest.resize(MANIFEST_PAGES * PAGE_BYTES, 0);
        for device in 0..self.devices {
            let dir = &self.dirs[device as usize];
            fs::create_dir_all(dir.join("manifest")).unwrap();
            fs::create_dir_all(dir.join("segments")).unwrap();
            let synced = if state == STATE_CLOSED { last } else { 1 };
            let mut superblock = slot(device, self.devices, 2, state, synced).encode().to_vec();
            superblock.extend_from_slice(&slot(device, self.devices, 1, STATE_OPEN, 1).encode());
            fs::write(dir.join(FILE), superblock).unwrap();
            for copy in 0..if self.devices == 1 { 2 } else { 1 } {
                let page = m::ManifestPage {
                    magic: m::MAGIC,
                    features: Features::current(),
                    store_id: STORE,
                    generation: U64::new(GENERATION),
                    nonce: U64::new(NONCE),
                    previous_generation: U64::new(0),
                    first_batch: U64::new(1),
                    created_unix_s: U64::new(1),
                    device: U16::new(device),
                    copy,
                    reserved: [0; 5],
                };
                manifest[..PAGE_BYTES].copy_from_slice(&page.encode());
                fs::write(dir.join(m::file_name(GENERATION, copy)), &manifest).unwrap();
            }
            fs::write(dir.join(segment::file_name(SegmentId(0))), &self.segments[device as usize]).unwrap();
        }
    }

    pub fn check(&self) -> kvfsck::Report {
        kvfsck::check(&self.dirs, &kvfsck::Options::default(), &()).unwrap()
    }

    pub fn path(&self, device: usize, file: &str) -> PathBuf {
        self.dirs[device].join(file)
    }

    /// Every live range: device, file, offset, length.
    pub fn live(&self) -> Vec<(usize, String, usize, usize)> {
        let mut live = Vec::new();
        for device in 0..self.devices as usize {
            live.push((device, FILE.to_owned(), 0, 2 * PAGE_BYTES));
            for copy in 0..if self.devices == 1 { 2 } else { 1 } {
                live.push((device, m::file_name(GENERATION, copy), 0, self.manifest_page_end));
            }
            let file = segment::file_name(SegmentId(0));
            live.push((device, file.clone(), 0, PAGE_BYTES));
            live.push((device, file.clone(), (SEGMENT_PAGES as usize - 1) * PAGE_BYTES, PAGE_BYTES));
            for frame in self.frames.iter().filter(|f| f.id != 2 && f.location.device.0 as usize == device) {
                live.push((device, file.clone(), frame.location.offset() as usize, frame.location.bytes() as usize));
            }
        }
        live
    }
}

pub fn create(id: u64, key: &[u8]) -> m::SequenceCreate {
    m::SequenceCreate {
        sequence: U64::new(id),
        created_unix_ms: U64::new(0),
        ttl_ms: U64::new(0),
        layout: U32::new(1),
        summaries: U32::new(1),
        replicas: 1,
        evictable: 0,
        key_bytes: U16::new(key.len() as u16),
        reserved: U32::new(0),
        parent: U64::new(0),
        parent_tokens: U64::new(0),
    }
}

pub fn commit(id: u64, tokens: u64, token_ids: u64, state: u64) -> m::SequenceCommit {
    m::SequenceCommit {
        sequence: U64::new(id),
        tokens: U64::new(tokens),
        state_frame: U64::new(state),
        token_ids: U64::new(token_ids),
        committed_unix_ms: U64::new(0),
    }
}

/// Changes one byte of a file in place; gives the old one.
pub fn flip(path: &Path, offset: usize, mask: u8) -> u8 {
    use std::os::unix::fs::FileExt;
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset as u64).unwrap();
    file.write_all_at(&[byte[0] ^ mask], offset as u64).unwrap();
    byte[0]
}
