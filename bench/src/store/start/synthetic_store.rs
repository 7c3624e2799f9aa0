//! A large store made byte by byte with the format's own types.
//!
//! Every sequence has two frames with whole headers, in sparse segment files. Keys and values are zeros in holes, and
//! most of a frame is zero padding. The manifest is one checkpoint, as a clean close leaves it.

use crate::store::start::checkpoint::CheckpointRecords;
use crate::store::start::geometry::{
    CREATED_S, DEVICE_ID, FRAMES_PER_SEQUENCE, GROUP, NONCE, SEGMENT_BYTES, SEGMENT_PAGES, STORE_ID, create,
};
use crate::store::start::segments::{SegmentWriter, segment_nonce};
use crate::support::directory::make_private;
use crate::support::interrupt::check_interrupt;
use crate::support::model::{HEAD_DIM, KV_HEADS};
use anyhow::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;
use stratakv::{ByteSize, DType};
use stratakv_format::features::Features;
use stratakv_format::layout::{LayerGeometry, Layout, RAW_PLANES};
use stratakv_format::manifest::{
    self as format, CheckpointEnd, Kind, LayoutDefined, ManifestPage, Member, SegmentOpen, SegmentSeal,
};
use stratakv_format::segment::{self, KIND_LOG};
use stratakv_format::superblock::{self, Slot};
use stratakv_format::{PAGE_BYTES, PayloadChecksum};
use zerocopy::little_endian::{U16, U32, U64};

/// Zeros after the checkpoint, where the engine writes later batches.
const SPARE_BYTES: u64 = 4 << 20;

/// A store on disk, and the manifest that it opens with.
pub(super) struct SyntheticStore {
    pub(super) segments: u64,
    /// The bytes of the manifest's only generation, without the header page.
    pub(super) manifest: Vec<u8>,
    /// The number of the last batch of the manifest.
    last_batch: u64,
}

impl SyntheticStore {
    /// Writes the segments of a store of `sequences` sequences whose segment files take about `stored` bytes.
    ///
    /// # Errors
    /// A file cannot be written, or the run was interrupted.
    pub(super) fn new(sequences: u64, stored: ByteSize, path: &Path) -> Result<Self> {
        for name in ["", format::DIRECTORY, segment::DIRECTORY] {
            make_private(&path.join(name))?;
        }
        let frames = sequences * FRAMES_PER_SEQUENCE;
        let usable = SEGMENT_PAGES - 2;
        let pages = (stored.0 / PAGE_BYTES as u64 / frames).clamp(16, u64::from(usable)) as u32;
        let per_segment = u64::from(usable / pages);
        let segments = frames.div_ceil(per_segment);
        let layout = layout();
        let mut records = CheckpointRecords::default();
        push_member_and_layout(&mut records, &layout);
        let mut writer = SegmentWriter { path, layout: &layout, pages, records: Vec::new() };
        for number in 0..segments {
            check_interrupt()?;
            let own = number * per_segment + 1..=frames.min((number + 1) * per_segment);
            let used = writer.write(number as u32, own)?;
            push_segment(&mut records, number as u32, used);
        }
        writer.records.iter().for_each(|frame| records.push(Kind::Frame, frame, &[]));
        for sequence in 1..=sequences {
            records.push_sequence(sequence);
        }
        let end = CheckpointEnd { records: U64::new(records.count()) };
        records.push(Kind::CheckpointEnd, &end, &[]);
        let (manifest, last_batch) = records.batches()?;
        Ok(Self { segments, manifest, last_batch })
    }

    /// Returns the bytes of all segment files together, holes included.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.segments * SEGMENT_BYTES
    }

    /// Writes the manifest and a superblock in `state`, in place of what an earlier opening wrote.
    ///
    /// # Errors
    /// A file cannot be removed or written.
    pub(super) fn write_manifest(&self, path: &Path, state: u8) -> Result<()> {
        let directory = path.join(format::DIRECTORY);
        for entry in std::fs::read_dir(&directory)? {
            std::fs::remove_file(entry?.path())?;
        }
        for copy in 0..2 {
            let file = create(&path.join(format::file_name(1, copy)))?;
            file.write_all_at(&manifest_page(copy).encode(), 0)?;
            file.write_all_at(&self.manifest, PAGE_BYTES as u64)?;
            file.write_all_at(&vec![0; SPARE_BYTES as usize], (PAGE_BYTES + self.manifest.len()) as u64)?;
            file.sync_all()?;
        }
        let file = create(&path.join(superblock::FILE))?;
        for sequence in 0..2 {
            let slot = self.superblock_slot(sequence, state);
            file.write_all_at(&slot.encode(), sequence * PAGE_BYTES as u64)?;
        }
        Ok(file.sync_all()?)
    }

    fn superblock_slot(&self, sequence: u64, state: u8) -> Slot {
        Slot {
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
            segment_bytes: U64::new(SEGMENT_BYTES),
            device_index: U16::new(0),
            device_count: U16::new(1),
            payload_checksum: PayloadChecksum::Crc64Nvme as u8,
            state,
            manifest_copies: 2,
            reserved: 0,
        }
    }
}

fn layout() -> Layout {
    let layer = LayerGeometry {
        kv_heads: KV_HEADS as u16,
        key_dim: HEAD_DIM as u16,
        value_dim: HEAD_DIM as u16,
        window: None,
        rope: None,
        codecs: RAW_PLANES,
    };
    Layout { dtype: DType::F16, group_tokens: GROUP, padded_planes: false, fingerprint: [0; 32], layers: vec![layer] }
}

fn push_member_and_layout(records: &mut CheckpointRecords, layout: &Layout) {
    let member = Member {
        epoch: U64::new(1),
        device_id: DEVICE_ID,
        device: U16::new(0),
        state: format::MEMBER_ACTIVE,
        manifest_copies: 2,
        weight: U32::new(0),
        bytes_limit: U64::new(0),
    };
    records.push(Kind::Member, &member, &[]);
    let mut encoded = Vec::new();
    layout.encode(&mut encoded);
    let defined = LayoutDefined { layout: U32::new(1), reserved: U32::new(0) };
    records.push(Kind::Layout, &defined, &encoded);
}

/// Adds the records of a sealed segment.
fn push_segment(records: &mut CheckpointRecords, number: u32, used_pages: u32) {
    let open = SegmentOpen {
        generation: U64::new(1),
        nonce: U64::new(segment_nonce(number)),
        segment: U32::new(number),
        pages: U32::new(SEGMENT_PAGES),
        device: U16::new(0),
        kind: KIND_LOG,
        reserved: [0; 5],
    };
    records.push(Kind::SegmentOpen, &open, &[]);
    let seal = SegmentSeal {
        segment: U32::new(number),
        used_pages: U32::new(used_pages),
        device: U16::new(0),
        reserved: [0; 6],
    };
    records.push(Kind::SegmentSeal, &seal, &[]);
}

fn manifest_page(copy: u8) -> ManifestPage {
    ManifestPage {
        magic: format::MAGIC,
        features: Features::current(),
        store_id: STORE_ID,
        generation: U64::new(1),
        nonce: U64::new(NONCE),
        previous_generation: U64::new(0),
        first_batch: U64::new(1),
        created_unix_s: U64::new(CREATED_S),
        device: U16::new(0),
        copy,
        reserved: [0; 5],
    }
}
