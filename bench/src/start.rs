//! `kvbench start`: how long a large store takes to open. The store is made here, byte by byte with the format's own types: as many
//! sequences as asked for, each of two frames with whole headers, in segment files that are sparse. Keys and values are zero and
//! lie in holes; most of a frame is padding, which is zero too. The manifest is one checkpoint, as a clean close leaves it.

use crate::cli::StartArgs;
use crate::open::drop_caches;
use crate::report::{median, percentile, print, rounded};
use crate::work::{HEAD_DIM, KV_HEADS, TOKEN_LAYER_BYTES, check_interrupt, open_store, work_directory};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, DType, DeviceIndex, SequenceId};
use stratakv_format::features::Features;
use stratakv_format::frame::{CODEC_RAW, Descriptor, FramePlace, HeaderBuilder, KIND_GROUPS};
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{self as m, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, Kind, RECORDS_BYTES_MAX};
use stratakv_format::segment::{self, KIND_LOG, POSITION_HEADER, POSITION_TRAILER, SegmentPage};
use stratakv_format::superblock::{self, STATE_CLOSED, Slot};
use stratakv_format::{FrameId, LayoutId, Location, PAGE_BYTES, PayloadChecksum, PlaneIdentity, SegmentId};
use zerocopy::little_endian::{U16, U32, U64};

const SEGMENT_PAGES: u32 = 16_384;
const FRAMES_EACH: u64 = 2;
const GROUP: u16 = 8;
const STORE_ID: [u8; 16] = [0x5b; 16];
const DEVICE_ID: [u8; 16] = [0x5c; 16];
const NONCE: u64 = 0x5eed;
const CREATED_S: u64 = 1_700_000_000;
/// Zeros behind the checkpoint, as the engine leaves room for batches.
const ROOM_BYTES: u64 = 4 << 20;

/// Times in milliseconds.
#[derive(Debug, Serialize)]
struct StartResult {
    sequences: u64,
    frames: u64,
    segments: u64,
    segment_bytes: u64,
    /// Of all segment files together.
    stored_bytes: u64,
    /// What the files take on disk.
    disk_bytes: u64,
    manifest_bytes: u64,
    cold: &'static str,
    rounds: u32,
    open_ms: f64,
    open_worst_ms: f64,
    /// Opening after a crash: the superblock says that a writer had it open, and a new generation is written first.
    crashed_ms: f64,
    crashed_worst_ms: f64,
    /// Memory that the store holds when it is open.
    memory_bytes: usize,
    /// A sequence of two frames, the first one opened.
    sequence_ms: f64,
}

pub(crate) fn run(args: &StartArgs) -> Result<()> {
    let frames = args.sequences * FRAMES_EACH;
    // Headers, their places in the files, and the manifest: twice two copies.
    let dir = work_directory(&args.common.device, frames * 12_000 + args.sequences * 4000 + (256 << 20))?;
    let path = dir.path().join("store");
    eprintln!("kvbench: {}: making {} sequences, {}", path.display(), args.sequences, args.stored);
    let made = Made::new(args, &path)?;
    let disk_bytes = disk_bytes(&path)?;
    let (mut opens, mut crashed, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
    let (mut cold, mut memory_bytes) = ("", 0);
    for round in 0..args.common.rounds {
        eprintln!("kvbench: round {} of {}", round + 1, args.common.rounds);
        for (state, times) in [(STATE_CLOSED, &mut opens), (superblock::STATE_OPEN, &mut crashed)] {
            check_interrupt()?;
            made.name(&path, state)?;
            cold = drop_caches(&path)?;
            let start = Instant::now();
            let store = open_store(&args.common, &path, ByteSize::mib(512))?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            let status = store.status();
            ensure!(status.sequences as u64 == args.sequences, "{} sequences came back", status.sequences);
            memory_bytes = status.memory.used_bytes;
            let id = 1 + fastrand::Rng::with_seed(u64::from(round)).u64(..args.sequences);
            let start = Instant::now();
            let mut sequence = store.open_sequence_id(SequenceId(id))?;
            sequences.push(start.elapsed().as_secs_f64() * 1e3);
            let view = sequence.reader()?.select_all(0)?;
            store.read_now(&[&view])?.get(0)?;
            drop(sequence);
            store.close()?;
        }
    }
    let result = StartResult {
        sequences: args.sequences,
        frames,
        segments: made.segments,
        segment_bytes: u64::from(SEGMENT_PAGES) * PAGE_BYTES as u64,
        stored_bytes: made.segments * u64::from(SEGMENT_PAGES) * PAGE_BYTES as u64,
        disk_bytes,
        manifest_bytes: made.manifest.len() as u64,
        cold,
        rounds: args.common.rounds,
        open_ms: rounded(median(&opens)),
        open_worst_ms: rounded(percentile(&opens, 1.0)),
        crashed_ms: rounded(median(&crashed)),
        crashed_worst_ms: rounded(percentile(&crashed, 1.0)),
        memory_bytes,
        sequence_ms: rounded(median(&sequences)),
    };
    print(args.common.json, &format!("start {}", ByteSize(result.stored_bytes)), &result)
}

/// A store as it lies on disk.
struct Made {
    segments: u64,
    /// The bytes of its only generation, but for the header page.
    manifest: Vec<u8>,
    last_batch: u64,
}

impl Made {
    fn new(args: &StartArgs, path: &Path) -> Result<Self> {
        for name in ["", m::DIRECTORY, segment::DIRECTORY] {
            std::fs::DirBuilder::new().mode(0o700).create(path.join(name))?;
        }
        let frames = args.sequences * FRAMES_EACH;
        let usable = SEGMENT_PAGES - 2;
        let wanted = (args.stored.0 / PAGE_BYTES as u64 / frames).clamp(16, u64::from(usable)) as u32;
        let per_segment = u64::from(usable / wanted);
        let segments = frames.div_ceil(per_segment);
        let layer = LayerGeometry {
            kv_heads: KV_HEADS as u16,
            key_dim: HEAD_DIM as u16,
            value_dim: HEAD_DIM as u16,
            window: None,
            rope: None,
            codecs: RAW_PLANES,
        };
        let layout = Layout {
            dtype: DType::F16,
            group_tokens: GROUP,
            padded_planes: false,
            fingerprint: [0; 32],
            layers: vec![layer],
        };
        let mut records = Checkpoint::default();
        let mut encoded = Vec::new();
        layout.encode(&mut encoded);
        let member = m::Member {
            epoch: U64::new(1),
            device_id: DEVICE_ID,
            device: U16::new(0),
            state: m::MEMBER_ACTIVE,
            manifest_copies: 2,
            weight: U32::new(0),
            bytes_limit: U64::new(0),
        };
        records.push(Kind::Member, &member, &[]);
        records.push(Kind::Layout, &m::LayoutDefined { layout: U32::new(1), reserved: U32::new(0) }, &encoded);
        let mut placed = Vec::new();
        for number in 0..segments {
            check_interrupt()?;
            let of_segment = (number * per_segment..frames.min((number + 1) * per_segment)).map(|n| n + 1);
            let used = make_segment(path, number as u32, wanted, of_segment, &layout, &mut placed)?;
            let open = m::SegmentOpen {
                generation: U64::new(1),
                nonce: U64::new(NONCE + number),
                segment: U32::new(number as u32),
                pages: U32::new(SEGMENT_PAGES),
                device: U16::new(0),
                kind: KIND_LOG,
                reserved: [0; 5],
            };
            records.push(Kind::SegmentOpen, &open, &[]);
            let seal = m::SegmentSeal {
                segment: U32::new(number as u32),
                used_pages: U32::new(used),
                device: U16::new(0),
                reserved: [0; 6],
            };
            records.push(Kind::SegmentSeal, &seal, &[]);
        }
        placed.iter().for_each(|frame| records.push(Kind::Frame, frame, &[]));
        for sequence in 1..=args.sequences {
            records.sequence(sequence);
        }
        let end = m::CheckpointEnd { records: U64::new(records.ends.len() as u64) };
        records.push(Kind::CheckpointEnd, &end, &[]);
        let (manifest, last_batch) = records.batches()?;
        Ok(Self { segments, manifest, last_batch })
    }

    /// Writes the manifest and the superblock in `state`, in place of whatever an opening left.
    fn name(&self, path: &Path, state: u8) -> Result<()> {
        let directory = path.join(m::DIRECTORY);
        for entry in std::fs::read_dir(&directory)? {
            std::fs::remove_file(entry?.path())?;
        }
        for copy in 0..2 {
            let page = ManifestPage { copy, ..manifest_page() };
            let file = create(&path.join(m::file_name(1, copy)))?;
            file.write_all_at(&page.encode(), 0)?;
            file.write_all_at(&self.manifest, PAGE_BYTES as u64)?;
            file.write_all_at(&vec![0; ROOM_BYTES as usize], (PAGE_BYTES + self.manifest.len()) as u64)?;
            file.sync_all()?;
        }
        let file = create(&path.join(superblock::FILE))?;
        for sequence in 0..2 {
            let slot = Slot {
                magic: superblock::MAGIC,
                features: Features::current(),
                sequence: U64::new(sequence),
                store_id: STORE_ID,
                device_id: DEVICE_ID,
                epoch: U64::new(1),
                manifest_generation: U64::new(1),
                manifest_nonce: U64::new(NONCE),
                synced_through: U64::new(self.last_batch),
                created_unix_s: U64::new(CREATED_S),
                segment_bytes: U64::new(u64::from(SEGMENT_PAGES) * PAGE_BYTES as u64),
                device_index: U16::new(0),
                device_count: U16::new(1),
                payload_checksum: PayloadChecksum::Crc64Nvme as u8,
                state,
                manifest_copies: 2,
                reserved: 0,
            };
            file.write_all_at(&slot.encode(), sequence * PAGE_BYTES as u64)?;
        }
        Ok(file.sync_all()?)
    }
}

use m::ManifestPage;

fn manifest_page() -> ManifestPage {
    ManifestPage {
        magic: m::MAGIC,
        features: Features::current(),
        store_id: STORE_ID,
        generation: U64::new(1),
        nonce: U64::new(NONCE),
        previous_generation: U64::new(0),
        first_batch: U64::new(1),
        created_unix_s: U64::new(CREATED_S),
        device: U16::new(0),
        copy: 0,
        reserved: [0; 5],
    }
}

/// Records of a checkpoint, with the end of each.
#[derive(Default)]
struct Checkpoint {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Checkpoint {
    fn push(&mut self, kind: Kind, body: &(impl zerocopy::IntoBytes + zerocopy::Immutable), tail: &[u8]) {
        m::encode_record(&mut self.bytes, kind, body, tail);
        self.ends.push(self.bytes.len());
    }

    fn sequence(&mut self, sequence: u64) {
        let key = format!("session-{sequence}");
        let create = m::SequenceCreate {
            sequence: U64::new(sequence),
            parent: U64::new(0),
            parent_tokens: U64::new(0),
            created_unix_ms: U64::new(CREATED_S * 1000),
            ttl_ms: U64::new(0),
            layout: U32::new(1),
            summaries: U32::new(0),
            replicas: 1,
            evictable: 0,
            key_bytes: U16::new(key.len() as u16),
            reserved: U32::new(0),
        };
        self.push(Kind::SequenceCreate, &create, key.as_bytes());
        for nth in 0..FRAMES_EACH {
            let frame = (sequence - 1) * FRAMES_EACH + nth + 1;
            let reference =
                m::FrameRef { sequence: U64::new(sequence), frame: U64::new(frame), token_end: U64::new(u64::MAX) };
            self.push(Kind::FrameRef, &reference, &[]);
        }
        let commit = m::SequenceCommit {
            sequence: U64::new(sequence),
            tokens: U64::new(FRAMES_EACH * u64::from(GROUP)),
            state_frame: U64::new(0),
            token_ids: U64::new(0),
            committed_unix_ms: U64::new(CREATED_S * 1000),
        };
        self.push(Kind::SequenceCommit, &commit, &[]);
    }

    /// All of them in batches that take effect together, and the number of the last one.
    fn batches(&self) -> Result<(Vec<u8>, u64)> {
        let (mut out, mut number, mut first, mut start) = (Vec::new(), 0, 0, 0);
        while first < self.ends.len() {
            let fits = self.ends[first..].partition_point(|end| end - start <= RECORDS_BYTES_MAX);
            let end = self.ends[first + fits - 1];
            let more = if first + fits < self.ends.len() { FLAG_MORE } else { 0 };
            number += 1;
            let place = BatchPlace { generation: 1, nonce: NONCE, sequence: number };
            let records = &self.bytes[start..end];
            out.extend(m::encode_batch(&place, number - 1, 1, FLAG_CHECKPOINT | more, records, fits as u32)?);
            (first, start) = (first + fits, end);
        }
        Ok((out, number))
    }
}

/// A sparse segment with these frames back to back, each of `pages`; gives the pages used, and adds their records.
fn make_segment(
    path: &Path,
    number: u32,
    pages: u32,
    frames: impl Iterator<Item = u64>,
    layout: &Layout,
    placed: &mut Vec<m::Frame>,
) -> Result<u32> {
    let file = create(&path.join(segment::file_name(SegmentId(number))))?;
    file.set_len(u64::from(SEGMENT_PAGES) * PAGE_BYTES as u64)?;
    for (position, page) in [(POSITION_HEADER, 0), (POSITION_TRAILER, SEGMENT_PAGES - 1)] {
        let own = SegmentPage {
            magic: segment::MAGIC,
            features: Features::current(),
            store_id: STORE_ID,
            generation: U64::new(1),
            nonce: U64::new(NONCE + u64::from(number)),
            created_unix_s: U64::new(CREATED_S),
            segment: U32::new(number),
            pages: U32::new(SEGMENT_PAGES),
            device: U16::new(0),
            kind: KIND_LOG,
            position,
            reserved: [0; 4],
        };
        file.write_all_at(&own.encode(), u64::from(page) * PAGE_BYTES as u64)?;
    }
    let zeros = vec![0; TOKEN_LAYER_BYTES as usize * usize::from(GROUP) / 2];
    let mut page = 1;
    for id in frames {
        let sequence = SequenceId((id - 1) / FRAMES_EACH + 1);
        let first_token = (id - 1) % FRAMES_EACH * u64::from(GROUP);
        let location = Location { device: DeviceIndex(0), segment: SegmentId(number), page, pages };
        let nonce = NONCE ^ (id << 20);
        let checksums = [0, 1].map(|plane| {
            let identity =
                PlaneIdentity::new(nonce, sequence, KIND_GROUPS, 0, first_token, u32::from(GROUP)).with_plane(plane);
            PayloadChecksum::Crc64Nvme.compute(&identity, &zeros)
        });
        let descriptor = Descriptor {
            kind: U16::new(KIND_GROUPS),
            layer: U16::new(0),
            codec: U16::new(CODEC_RAW),
            summary: U16::new(0),
            first_token: U64::new(first_token),
            tokens: U32::new(u32::from(GROUP)),
            pieces: U32::new(1),
            offset: U64::new(PAGE_BYTES as u64),
            bytes: U64::new(2 * zeros.len() as u64),
            checksum_first: U32::new(0),
            checksum_count: U32::new(2),
            element: 0,
            cipher: 0,
            key: U16::new(0),
            record_bytes: U32::new(0),
        };
        let key = format!("session-{sequence}");
        let header = HeaderBuilder {
            frame: FrameId(id),
            lsn: id,
            nonce,
            sequence,
            parent: None,
            created_unix_ms: CREATED_S * 1000,
            layout_id: LayoutId(1),
            layout,
            key: key.as_bytes(),
            summaries: 0,
            descriptors: &[descriptor],
            checksums: &checksums,
            front_pages: 1,
        };
        let place = FramePlace {
            store_id: STORE_ID,
            location,
            segment_generation: 1,
            segment_nonce: NONCE + u64::from(number),
        };
        let mut bytes = [0; PAGE_BYTES];
        let crc = header.write(&place, &mut bytes).context("a frame header")?;
        file.write_all_at(&bytes, location.offset())?;
        placed.push(m::Frame {
            frame: U64::new(id),
            origin: U64::new(sequence.0),
            lsn: U64::new(id),
            nonce: U64::new(nonce),
            location: location.to_raw(),
            header_crc: U32::new(crc),
            header_pages: U32::new(1),
            front_pages: U32::new(1),
            reserved: U32::new(0),
        });
        page += pages;
    }
    Ok(page)
}

fn create(path: &Path) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.with_context(|| format!("make {}", path.display()))
}

/// What the files below a directory take on disk.
fn disk_bytes(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += if meta.is_dir() { disk_bytes(&entry.path())? } else { meta.blocks() * 512 };
    }
    Ok(sum)
}
