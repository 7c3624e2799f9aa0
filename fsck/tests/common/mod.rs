//! Builds small store images with the encoders of the format crate alone, without the engine.
//!
//! [`Image::standard`] is the image that most tests damage. It has one segment per device and four manifest batches:
//!
//! 1. The checkpoint: members, counters, one layout, one open segment per device.
//! 2. Sequence 1 with frame 1: two groups per layer, a tail, token ids and caller state.
//! 3. Sequence 2, a fork of sequence 1, and sequence 3 with frame 2.
//! 4. The deletion of sequence 3, and frame 3 of sequence 1. Frame 2 is dead from here on.
#![allow(dead_code, unreachable_pub)]

mod frames;
mod records;

pub use frames::{Extent, FrameTokens};
pub use records::{Records, commit, create};

use frames::FrameWriter;
use kvfsck::{Code, Finding, Report};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::{PayloadChecksum, crc_with_hole};
use stratakv_format::features::Features;
use stratakv_format::frame::*;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, Kind, encode_batch};
use stratakv_format::segment::{self, KIND_LOG, SegmentPage};
use stratakv_format::superblock::{FILE, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{DType, DeviceIndex, Location, PAGE_BYTES, SegmentId};
use tempfile::TempDir;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

pub const SEGMENT_PAGES: u32 = 24;
pub const STORE: [u8; 16] = [7; 16];
pub const NONCE: u64 = 0x1234_5678_9abc_def1;
pub const GENERATION: u64 = 1;
/// The pages of a manifest file. Most of them are never written.
pub const MANIFEST_PAGES: usize = 16;
pub const CHECKSUM: PayloadChecksum = PayloadChecksum::Crc64Nvme;

/// Returns the layout of every image: three layers in groups of 4 tokens, the second without KV.
pub fn layout() -> Layout {
    let full = LayerGeometry { kv_heads: 1, key_dim: 16, value_dim: 8, window: None, rope: None, codecs: RAW_PLANES };
    let none = LayerGeometry { kv_heads: 0, key_dim: 0, value_dim: 0, window: None, rope: None, codecs: RAW_PLANES };
    // A block of layer 2 has a K plane of 4 KiB and a V plane of 512 bytes, hence two pages.
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

/// A frame of the image.
#[derive(Clone, Debug)]
pub struct PlacedFrame {
    pub id: u64,
    pub location: Location,
}

/// A store in a temporary directory. [`Image::write`] writes what the fields hold.
pub struct Image {
    pub root: TempDir,
    pub devices: u16,
    pub dirs: Vec<PathBuf>,
    /// The bytes of segment 0 of each device.
    pub segments: Vec<Vec<u8>>,
    next_page: Vec<u32>,
    pub frames: Vec<PlacedFrame>,
    pub batches: Vec<Records>,
    pub manifest_page_end: usize,
    pub batch_offsets: Vec<usize>,
    /// The features in the header pages of the manifest.
    pub features: Features,
}

/// Returns a superblock slot with this sequence number.
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

/// Returns the member record of a device.
pub fn member(device: u16, state: u8) -> m::Member {
    m::Member {
        epoch: U64::new(1),
        device_id: [device as u8 + 1; 16],
        device: U16::new(device),
        state,
        manifest_copies: 1,
        weight: U32::new(0),
        bytes_limit: U64::new(0),
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

impl Image {
    /// Returns the store that the module describes, with `state` in its superblocks.
    pub fn standard(devices: u16, state: u8) -> Self {
        let last = devices - 1;
        let mut image = Self::empty(devices);
        image.checkpoint();
        let mut a = Records::default();
        a.push(Kind::SequenceCreate, &create(1, b"alpha"), b"alpha");
        let first = FrameTokens { device: 0, sequence: 1, key: b"alpha", tokens: 0..9, state: b"caller state" };
        let first = image.frame(&first);
        a.push_frame(1, &first);
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
        let dead = FrameTokens { device: last, sequence: 3, key: b"gone", tokens: 0..6, state: b"" };
        b.push_frame(3, &image.frame(&dead));
        image.batches.push(b);
        let mut c = Records::default();
        c.push(Kind::SequenceDelete, &m::SequenceDelete { sequence: U64::new(3) }, &[]);
        let second = FrameTokens { device: last, sequence: 1, key: b"alpha", tokens: 8..13, state: b"more" };
        let second = image.frame(&second);
        c.push_frame(1, &second);
        c.push(Kind::SequenceCommit, &commit(1, 13, 13, second.frame.get()), &[]);
        image.batches.push(c);
        image.write(state);
        image
    }

    /// Returns a store with sequence 1, which holds an adapter in two frames.
    ///
    /// `layers` holds the bytes by layer. The record has `checksum`, or the right one if it is `None`.
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
        // The first frame holds the first half of each layer, the second frame the other half.
        for half in 0..2 {
            let piece = |(layer, bytes): &(u16, Vec<u8>)| {
                let (first, second) = bytes.split_at(bytes.len() / 2);
                let (first, content) = if half == 0 { (0, first) } else { (first.len() as u64, second) };
                let tokens = content.len() as u32;
                Extent { kind: KIND_ADAPTER, layer: *layer, first, tokens, content: content.to_vec() }
            };
            let pieces: Vec<Extent> = layers.iter().map(piece).filter(|piece| piece.tokens > 0).collect();
            let frame = image.write_frame(0, 1, b"", &pieces);
            records.push_frame(1, &frame);
        }
        image.batches.push(records);
        image.write(STATE_CLOSED);
        image
    }

    /// Returns a store with sequence 1, which has `committed` tokens and no token ids.
    ///
    /// Each frame holds extents of these kinds, first tokens and token counts, for both layers with KV.
    pub fn with_frames(frames: &[&[(u16, u64, u32)]], committed: u64) -> Self {
        let mut image = Self::empty(1);
        image.checkpoint();
        let mut records = Records::default();
        records.push(Kind::SequenceCreate, &create(1, b""), b"");
        for frame in frames {
            let both_layers = |&(kind, first, tokens): &(u16, u64, u32)| {
                [0, 2].map(|layer| Extent { kind, layer, first, tokens, content: Vec::new() })
            };
            let extents: Vec<Extent> = frame.iter().flat_map(both_layers).collect();
            let frame = image.write_frame(0, 1, b"", &extents);
            records.push_frame(1, &frame);
        }
        records.push(Kind::SequenceCommit, &commit(1, committed, 0, 0), &[]);
        image.batches.push(records);
        image.write(STATE_CLOSED);
        image
    }

    /// Returns a store with sequence 1, whose first 8 tokens are stored on the first device as frame 1.
    ///
    /// The second device holds one derived frame for each list of pieces. A piece has a layer and its bytes.
    pub fn with_derived(frames: &[&[(u16, Vec<u8>)]]) -> Self {
        let mut image = Self::empty(2);
        image.features = image.features.with_pools();
        for (page, position) in [(0, 0), (SEGMENT_PAGES as usize - 1, 1)] {
            let header = SegmentPage { kind: segment::KIND_POOL, ..segment_page(1, position) };
            image.segments[1][page * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&header.encode());
        }
        image.checkpoint();
        let mut records = Records::default();
        records.push(Kind::SequenceCreate, &create(1, b""), b"");
        let tokens = FrameTokens { device: 0, sequence: 1, key: b"", tokens: 0..8, state: b"" };
        records.push_frame(1, &image.frame(&tokens));
        for frame in frames {
            let piece = |(first, (layer, content)): (u64, &(u16, Vec<u8>))| {
                let (tokens, content) = (content.len() as u32, content.clone());
                Extent { kind: KIND_CLUSTER_DIRECTORY, layer: *layer, first, tokens, content }
            };
            let pieces: Vec<Extent> = (0..).zip(*frame).map(piece).collect();
            let frame = image.write_frame(1, 1, b"", &pieces);
            records.push_frame(1, &m::Frame { flags: U32::new(m::FLAG_DERIVED), ..frame });
        }
        records.push(Kind::SequenceCommit, &commit(1, 8, 8, 0), &[]);
        image.batches.push(records);
        image.write(STATE_CLOSED);
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
            features: Features::current(),
        }
    }

    fn manifest_copies(&self) -> u8 {
        if self.devices == 1 { 2 } else { 1 }
    }

    fn checkpoint(&mut self) {
        let mut r = Records::default();
        for device in 0..self.devices {
            let member = m::Member {
                epoch: U64::new(1),
                device_id: [device as u8 + 1; 16],
                device: U16::new(device),
                state: m::MEMBER_ACTIVE,
                manifest_copies: self.manifest_copies(),
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
                kind: self.segments[usize::from(device)][std::mem::offset_of!(SegmentPage, kind)],
                reserved: [0; 5],
            };
            r.push(Kind::SegmentOpen, &open, &[]);
        }
        let end = m::CheckpointEnd { records: U64::new(u64::from(r.count)) };
        r.push(Kind::CheckpointEnd, &end, &[]);
        self.batches.push(r);
    }

    /// Writes a frame with the given tokens of all layers.
    fn frame(&mut self, tokens: &FrameTokens<'_>) -> m::Frame {
        self.write_frame(tokens.device, tokens.sequence, tokens.key, &tokens.extents())
    }

    /// Writes a frame with the given extents into the segment of a device. A dead page follows it.
    fn write_frame(&mut self, device: u16, sequence: u64, key: &[u8], extents: &[Extent]) -> m::Frame {
        let layout = layout();
        let id = self.frames.len() as u64 + 1;
        let mut writer = FrameWriter::new(&layout, id, sequence, key);
        let pages = writer.lay_out(extents);
        let page = self.next_page[device as usize];
        assert!(page + pages < SEGMENT_PAGES, "the segment is too small");
        self.next_page[device as usize] = page + pages + 1;
        let location = Location { device: DeviceIndex(device), segment: SegmentId(0), page, pages };
        let own = segment_page(device, 0);
        let place = FramePlace {
            store_id: STORE,
            location,
            segment_generation: own.generation.get(),
            segment_nonce: own.nonce.get(),
        };
        let (bytes, record) = writer.finish(&place);
        let at = page as usize * PAGE_BYTES;
        self.segments[device as usize][at..at + bytes.len()].copy_from_slice(&bytes);
        self.frames.push(PlacedFrame { id, location });
        record
    }

    /// Writes a copy of a frame to another device. `change` changes its bytes before. Returns the record of the copy.
    pub fn copy_frame(&mut self, nth: usize, device: u16, change: impl FnOnce(&mut [u8])) -> m::Replica {
        let PlacedFrame { id, location: from } = self.frames[nth].clone();
        let (source, start, length) = (usize::from(from.device.0), from.offset() as usize, from.bytes() as usize);
        let mut bytes = self.segments[source][start..start + length].to_vec();
        let page = self.next_page[usize::from(device)];
        assert!(page + from.pages < SEGMENT_PAGES, "the segment is too small");
        self.next_page[usize::from(device)] = page + from.pages + 1;
        let to = Location { device: DeviceIndex(device), segment: SegmentId(0), page, pages: from.pages };
        bytes[32..48].copy_from_slice(to.to_raw().as_bytes());
        change(&mut bytes);
        let header = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize * PAGE_BYTES;
        let nonce = segment_page(device, 0).nonce.get();
        let crc = crc_with_hole(&nonce.to_le_bytes(), &bytes[..header], 4..8);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        let at = to.offset() as usize;
        self.segments[usize::from(device)][at..at + length].copy_from_slice(&bytes);
        m::Replica {
            frame: U64::new(id),
            generation: U64::new(1),
            location: to.to_raw(),
            header_crc: U32::new(crc),
            reserved: U32::new(0),
        }
    }

    /// Writes every file. A closed store knows that its last batch is durable, an open one knows that of the
    /// checkpoint.
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
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
            let synced = if state == STATE_CLOSED { last } else { 1 };
            let mut superblock = slot(device, self.devices, 2, state, synced).encode().to_vec();
            superblock.extend_from_slice(&slot(device, self.devices, 1, STATE_OPEN, 1).encode());
            fs::write(dir.join(FILE), superblock).unwrap();
            for copy in 0..self.manifest_copies() {
                let page = m::ManifestPage {
                    magic: m::MAGIC,
                    features: self.features,
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

    pub fn check(&self) -> Report {
        kvfsck::check(&self.dirs, &kvfsck::Options::default(), &()).unwrap()
    }

    pub fn path(&self, device: usize, file: &str) -> PathBuf {
        self.dirs[device].join(file)
    }

    /// Returns every live range of the standard image: device, file, offset, length.
    pub fn live(&self) -> Vec<(usize, String, usize, usize)> {
        let mut live = Vec::new();
        for device in 0..self.devices as usize {
            live.push((device, FILE.to_owned(), 0, 2 * PAGE_BYTES));
            for copy in 0..self.manifest_copies() {
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

/// Flips the bits of `mask` in one byte of a file. Returns the old byte.
pub fn flip(path: &Path, offset: usize, mask: u8) -> u8 {
    use std::os::unix::fs::FileExt;
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset as u64).unwrap();
    file.write_all_at(&[byte[0] ^ mask], offset as u64).unwrap();
    byte[0]
}

/// Returns the finding with this code and these words.
pub fn find<'a>(report: &'a Report, code: Code, words: &str) -> &'a Finding {
    let found = report.findings.iter().find(|f| f.code == code && f.message.contains(words));
    found.unwrap_or_else(|| panic!("{code}: {words}: {}", report.to_text()))
}

/// Replaces the first place where `bytes` are `from`.
pub fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let at = bytes.windows(from.len()).position(|part| part == from).expect("the bytes");
    bytes[at..at + to.len()].copy_from_slice(to);
}
