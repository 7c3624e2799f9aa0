//! Golden files: each is read completely, and the builder gives the same bytes again.
//!
//! Golden files never change. New contents get a new directory, and the ignored tests that generate golden files never
//! overwrite one. `golden/README.md` says what each file holds.

mod builder;
mod codecs;
mod copies;
mod golden_store;
mod planes;
mod pools;
mod retrieval;

use builder as b;
use golden_store as g;
use std::fs;
use std::path::{Path, PathBuf};
use stratakv_format::checksum::PayloadChecksum;
use stratakv_format::features::{Features, VERSION_MAJOR, VERSION_MINOR};
use stratakv_format::frame::FrameView;
use stratakv_format::manifest::{self as m, Batch, ManifestPage, Record};
use stratakv_format::segment::SegmentPage;
use stratakv_format::superblock::{self, Slot};
use stratakv_format::{DType, PAGE_BYTES, Unverified, ids::Location};
use zerocopy::FromBytes;

const STORES: [(&str, PayloadChecksum); 2] =
    [("store-crc32", PayloadChecksum::Crc32), ("store-crc64", PayloadChecksum::Crc64Nvme)];

fn directory() -> PathBuf {
    b::golden_directory("v0.1")
}

fn read(name: &str) -> Vec<u8> {
    fs::read(directory().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

b::golden_file_tests!(directory(), g::files());

/// Returns all files below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// The directories `v0.1` to `v0.6` number the sets, not the version of the format.
#[test]
fn golden_files_of_every_set_have_the_version_of_the_code() {
    let files = files_below(&b::golden_directory(""));
    let files: Vec<_> = files.iter().filter(|path| path.extension().is_none_or(|ext| ext != "md")).collect();
    assert_eq!(files.len(), 64);
    for path in files {
        let bytes = fs::read(path).expect("a file");
        // The file of a segment that the engine keeps in reserve has only zeros.
        if bytes.iter().all(|byte| *byte == 0) {
            continue;
        }
        let (features, _) = Features::ref_from_prefix(&bytes[8..]).expect("features");
        let version = (features.major.get(), features.minor.get());
        assert_eq!(version, (VERSION_MAJOR, VERSION_MINOR), "{}", path.display());
    }
}

#[test]
fn superblocks_hold_both_slots() {
    for (store, checksum) in STORES {
        let file = read(&format!("{store}/superblock"));
        for index in 0..2 {
            let page = &file[index * PAGE_BYTES..(index + 1) * PAGE_BYTES];
            let slot = Unverified::<Slot>::at_front(page, "slot").and_then(|s| s.verify(index)).expect("valid");
            assert_eq!(*slot, b::slot(index, checksum));
        }
        let newest = superblock::newest(&file).expect("valid");
        assert_eq!((newest.sequence.get(), newest.state, newest.checksum()), (9, superblock::STATE_CLOSED, checksum));
        assert_eq!((newest.device_index.get(), newest.synced_through.get(), newest.epoch.get()), (0, 44, 1));
    }
}

/// Reads a manifest and compares header page, batches and records with the expected ones.
fn check_manifest(file: &[u8], copy: u8, expected: &[b::GoldenBatch]) {
    let page = Unverified::<ManifestPage>::at_front(&file[..PAGE_BYTES], "page").and_then(|p| p.verify());
    assert_eq!(*page.expect("valid"), b::manifest_page(copy));
    let mut at = PAGE_BYTES;
    for (expected, sequence) in expected.iter().zip(b::FIRST_BATCH..) {
        let batch = Batch::verify(&file[at..], &b::batch_place(sequence)).expect("valid");
        let header = batch.header();
        assert_eq!((header.flags.get(), header.synced_through.get()), (expected.flags, expected.synced_through));
        assert_eq!((header.sequence.get(), header.generation.get(), header.epoch.get()), (sequence, 3, 1));
        assert_eq!((header.pages.get(), header.record_count.get()), (1, expected.records.count));
        assert_eq!(header.records_bytes.get() as usize, expected.records.bytes.len());
        let mut again = Vec::new();
        let mut count = 0;
        for record in batch.records() {
            encode_again(&mut again, &record.expect("a record"));
            count += 1;
        }
        assert_eq!((count, &again), (expected.records.count, &expected.records.bytes));
        at += PAGE_BYTES;
    }
    assert!(file[at..].iter().all(|&b| b == 0));
}

/// Encodes a record that was read.
fn encode_again(out: &mut Vec<u8>, record: &Record<'_>) {
    use m::{Kind as K, encode_record as put};
    match *record {
        Record::Member(r) => put(out, K::Member, r, &[]),
        Record::Layout(r, layout) => {
            assert_eq!(stratakv_format::layout::Layout::decode(layout).expect("a layout"), g::layout());
            put(out, K::Layout, r, layout);
        }
        Record::SequenceCreate(r, key) => put(out, K::SequenceCreate, r, key),
        Record::Fork(r, key) => put(out, K::Fork, r, key),
        Record::SequenceTruncate(r) => put(out, K::SequenceTruncate, r, &[]),
        Record::SequenceDelete(r) => put(out, K::SequenceDelete, r, &[]),
        Record::Frame(r) => put(out, K::Frame, r, &[]),
        Record::FrameMoved(r) => put(out, K::FrameMoved, r, &[]),
        Record::Replica(r) => put(out, K::Replica, r, &[]),
        Record::SegmentOpen(r) => put(out, K::SegmentOpen, r, &[]),
        Record::SegmentSeal(r) => put(out, K::SegmentSeal, r, &[]),
        Record::SegmentFree(r) => put(out, K::SegmentFree, r, &[]),
        Record::PoolAllocation(r) => put(out, K::PoolAllocation, r, &[]),
        Record::SequenceCommit(r) => put(out, K::SequenceCommit, r, &[]),
        Record::Counters(r) => put(out, K::Counters, r, &[]),
        Record::CheckpointEnd(r) => put(out, K::CheckpointEnd, r, &[]),
        Record::Superseded(r) => put(out, K::Superseded, r, &[]),
        Record::FrameRef(r) => put(out, K::FrameRef, r, &[]),
        Record::FrameRelease(r) => put(out, K::FrameRelease, r, &[]),
        Record::Adapter(r, name) => put(out, K::Adapter, r, name),
        Record::Unknown(kind) => panic!("unknown record {kind}"),
    }
}

#[test]
fn manifests_hold_every_batch_and_record() {
    for (store, checksum) in STORES {
        for copy in 0..2 {
            let file = read(&format!("{store}/manifest/0000000000000003-{copy}"));
            check_manifest(&file, copy, &g::store_batches(checksum));
        }
    }
    check_manifest(&read("every-record"), 0, &[g::every_record()]);
    let file = read("every-record");
    let batch = Batch::verify(&file[PAGE_BYTES..], &b::batch_place(41)).expect("valid");
    let kinds: Vec<u16> = batch.records().map(|r| kind_code(&r.expect("a record"))).collect();
    assert_eq!(kinds, (1..=19).collect::<Vec<u16>>());
}

fn kind_code(record: &Record<'_>) -> u16 {
    let mut bytes = Vec::new();
    encode_again(&mut bytes, record);
    u16::from_le_bytes([bytes[0], bytes[1]])
}

#[test]
fn segments_hold_every_frame_and_plane() {
    for (store, checksum) in STORES {
        let file = read(&format!("{store}/segments/00000001"));
        let trailer = file.len() - PAGE_BYTES;
        for (position, at) in [(0, 0), (1, trailer)] {
            let page = Unverified::<SegmentPage>::at_front(&file[at..at + PAGE_BYTES], "page").and_then(|p| p.verify());
            assert_eq!(*page.expect("valid"), b::segment_page(position));
        }
        let mut end = PAGE_BYTES;
        for expected in g::frames(checksum) {
            let at = expected.place.location.offset() as usize;
            let bytes = &file[at..at + expected.place.location.bytes() as usize];
            check_frame(checksum, &expected, bytes);
            end = at + bytes.len();
        }
        assert!(file[end..trailer].iter().all(|&b| b == 0));
    }
}

/// Compares the pages of a frame of sequence 1 with the expected frame.
fn check_frame(checksum: PayloadChecksum, expected: &b::GoldenFrame, bytes: &[u8]) {
    let view = FrameView::verify(bytes, &expected.place).expect("valid");
    let header = view.header();
    assert_eq!(Location::from_raw(&header.location), expected.place.location);
    assert_eq!(
        (header.frame.get(), header.lsn.get(), header.nonce.get()),
        (expected.frame, expected.lsn, expected.nonce)
    );
    assert_eq!((header.crc.get(), header.store_id), (expected.crc, b::STORE_ID));
    assert_eq!(header.segment_generation.get(), 5);
    assert_eq!((header.sequence.get(), header.parent.get(), header.parent_tokens.get()), (1, 0, 0));
    assert_eq!(header.created_unix_ms.get(), 1_700_000_060_000 + expected.frame);
    assert_eq!((header.layout.get(), header.layout_bytes.get(), header.key_bytes.get()), (1, 96, 6));
    assert_eq!((header.header_pages.get(), header.front_pages.get()), (1, expected.front_pages));
    assert_eq!((header.total_pages.get() as usize * PAGE_BYTES, header.summaries.get()), (bytes.len(), 1));
    assert_eq!(header.descriptors.get() as usize, expected.descriptors.len());
    assert_eq!(header.checksums.get() as usize, expected.checksums.len());
    assert_eq!((view.layout(), view.key()), (&g::layout(), b::KEY));
    assert_eq!(view.descriptors(), &expected.descriptors[..]);
    assert_eq!(view.layout().dtype, DType::F16);

    // Every plane has its identity and checksum, and every other byte is zero.
    let stored: Vec<u64> = view.descriptors().iter().flat_map(|d| view.checksums(d)).map(|sum| sum.get()).collect();
    assert_eq!(stored, expected.checksums);
    b::assert_planes_match(checksum, expected, bytes);
    let mut covered = vec![false; bytes.len()];
    covered[..PAGE_BYTES].fill(true);
    for plane in &expected.planes {
        covered[plane.offset..plane.offset + plane.bytes.len()].fill(true);
    }
    assert!(bytes.iter().zip(covered).all(|(&byte, covered)| covered || byte == 0));
}
