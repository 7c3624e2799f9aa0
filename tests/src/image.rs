//! Finds the live bytes of a closed store.
//!
//! This is a third reader beside the engine and kvfsck. It is as simple as possible and trusts what it reads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use stratakv_format::frame::{FramePlace, FrameView, KIND_GROUPS};
use stratakv_format::manifest::{self as m, Batch, BatchPlace, ManifestPage, Record};
use stratakv_format::superblock::{self, SLOTS};
use stratakv_format::{DeviceIndex, Location, PAGE_BYTES, SegmentId, Unverified, segment};

/// The part of the format that a live region belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A slot of a superblock.
    Superblock,
    /// The header page of a manifest copy.
    ManifestPage,
    /// A batch of a manifest copy.
    ManifestBatch,
    /// The first page of a segment.
    SegmentHeader,
    /// The last page of a segment.
    SegmentTrailer,
    /// The header pages of a frame.
    FrameHeader,
    /// A summary, tail, token ids or caller state of a frame.
    Metadata,
    /// An extent of groups, its padding included.
    Groups,
    /// The padding between and after the extents of a frame.
    FramePadding,
}

/// A range of live bytes of one file.
#[derive(Clone, Debug)]
pub struct Region {
    /// The device, as an index into the given directories.
    pub device: usize,
    /// The file inside the device directory.
    pub file: String,
    /// The first byte.
    pub start: usize,
    /// The length in bytes.
    pub len: usize,
    /// The part that they belong to.
    pub part: Part,
}

#[derive(Default)]
struct ManifestState {
    /// Generation, nonce and pages of each segment that is not free, by device and segment id.
    segments: BTreeMap<(u16, u32), (u64, u64, u32)>,
    frames: BTreeMap<u64, Location>,
    refs: BTreeSet<(u64, u64)>,
}

/// Returns the live regions of a closed store. `dirs` are its devices in the order of their indices.
///
/// # Panics
/// The store cannot be read. It must be undamaged.
#[must_use]
pub fn live_regions(dirs: &[PathBuf]) -> Vec<Region> {
    let mut regions = Vec::new();
    let mut place = None;
    for (device, dir) in dirs.iter().enumerate() {
        let bytes = read(dir, superblock::FILE);
        let slot = superblock::newest(&bytes).expect("a superblock");
        place = Some((slot.store_id, slot.manifest_generation.get(), slot.manifest_nonce.get()));
        let start = |slot| slot * PAGE_BYTES;
        regions.extend((0..SLOTS).map(|slot| Region {
            device,
            file: superblock::FILE.into(),
            start: start(slot),
            len: PAGE_BYTES,
            part: Part::Superblock,
        }));
    }
    let (store_id, generation, nonce) = place.expect("a device");
    let mut state = ManifestState::default();
    for (device, dir) in dirs.iter().enumerate() {
        for copy in 0..2 {
            let file = m::file_name(generation, copy);
            if dir.join(&file).exists() {
                state = ManifestState::default();
                let bytes = read(dir, &file);
                walk(&bytes, generation, nonce, &mut state, |start, len, part| {
                    regions.push(Region { device, file: file.clone(), start, len, part });
                });
            }
        }
    }
    for ((device, id), (_, _, pages)) in &state.segments {
        let file = segment::file_name(SegmentId(*id));
        let last = (*pages as usize - 1) * PAGE_BYTES;
        for (start, part) in [(0, Part::SegmentHeader), (last, Part::SegmentTrailer)] {
            regions.push(Region { device: usize::from(*device), file: file.clone(), start, len: PAGE_BYTES, part });
        }
    }
    let referred: BTreeSet<u64> = state.refs.iter().map(|(_, frame)| *frame).collect();
    for frame in referred {
        frame_regions(dirs, store_id, &state, state.frames[&frame], &mut regions);
    }
    regions
}

fn read(dir: &Path, file: &str) -> Vec<u8> {
    std::fs::read(dir.join(file)).unwrap_or_else(|e| panic!("{}/{file}: {e}", dir.display()))
}

fn walk(
    bytes: &[u8],
    generation: u64,
    nonce: u64,
    state: &mut ManifestState,
    mut found: impl FnMut(usize, usize, Part),
) {
    let header = Unverified::<ManifestPage>::at_front(&bytes[..PAGE_BYTES], "manifest").and_then(|page| page.verify());
    let mut sequence = header.expect("a manifest header").first_batch.get();
    found(0, PAGE_BYTES, Part::ManifestPage);
    let mut at = PAGE_BYTES;
    while let Ok(batch) = Batch::verify(&bytes[at..], &BatchPlace { generation, nonce, sequence }) {
        for record in batch.records() {
            state.apply(&record.expect("a record"));
        }
        let len = batch.header().pages.get() as usize * PAGE_BYTES;
        found(at, len, Part::ManifestBatch);
        at += len;
        sequence += 1;
    }
}

impl ManifestState {
    fn apply(&mut self, record: &Record<'_>) {
        match record {
            Record::SegmentOpen(open) => {
                let life = (open.generation.get(), open.nonce.get(), open.pages.get());
                self.segments.insert((open.device.get(), open.segment.get()), life);
            }
            Record::SegmentFree(free) => {
                self.segments.remove(&(free.device.get(), free.segment.get()));
            }
            Record::Frame(frame) => {
                self.frames.insert(frame.frame.get(), Location::from_raw(&frame.location));
            }
            Record::FrameMoved(moved) => {
                self.frames.insert(moved.frame.get(), Location::from_raw(&moved.location));
            }
            Record::FrameRef(r) => {
                self.refs.insert((r.sequence.get(), r.frame.get()));
            }
            Record::FrameRelease(r) => {
                self.refs.remove(&(r.sequence.get(), r.frame.get()));
            }
            Record::SequenceDelete(delete) => self.refs.retain(|(sequence, _)| *sequence != delete.sequence.get()),
            _ => {}
        }
    }
}

fn frame_regions(
    dirs: &[PathBuf],
    store_id: [u8; 16],
    state: &ManifestState,
    location: Location,
    regions: &mut Vec<Region>,
) {
    let DeviceIndex(device) = location.device;
    let file = segment::file_name(location.segment);
    let bytes = read(&dirs[usize::from(device)], &file);
    let base = location.offset() as usize;
    let bytes = &bytes[base..base + location.bytes() as usize];
    let (generation, nonce, _) = state.segments[&(device, location.segment.0)];
    let place = FramePlace { store_id, location, segment_generation: generation, segment_nonce: nonce };
    let view = FrameView::verify(bytes, &place).expect("a frame header");
    let header = FrameView::claimed_header_pages(bytes).expect("a frame header") as usize * PAGE_BYTES;
    let mut spans = vec![(0, header, Part::FrameHeader)];
    for descriptor in view.descriptors() {
        let part = if descriptor.kind.get() == KIND_GROUPS { Part::Groups } else { Part::Metadata };
        spans.push((descriptor.offset.get() as usize, descriptor.bytes.get() as usize, part));
    }
    spans.sort_unstable();
    let mut end = 0;
    let mut push = |start: usize, len: usize, part| {
        if len > 0 {
            let device = usize::from(device);
            regions.push(Region { device, file: file.clone(), start: base + start, len, part });
        }
    };
    for (start, len, part) in spans {
        push(end, start.saturating_sub(end), Part::FramePadding);
        push(start, len, part);
        end = start + len;
    }
    push(end, bytes.len() - end, Part::FramePadding);
}
