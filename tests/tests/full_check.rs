//! `kvfsck check --full` against summaries whose checksums are right and whose values are wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::retrieval::{ShadowKv, SignBits};
use stratakv::{CreateOptions, DType, Durability, KvLayout, StoredSummary, TensorView};
use stratakv_format::checksum::PlaneIdentity;
use stratakv_format::frame::{
    Descriptor, FrameHeader, FramePlace, FrameView, KIND_SUMMARY, SUMMARY_LANDMARKS, SUMMARY_MIN_MAX, SUMMARY_SIGNS,
    SummaryHeader,
};
use stratakv_format::segment::SegmentPage;
use stratakv_format::{Location, PAGE_BYTES, SequenceId};
use stratakv_tests::damage::{Image, seal};
use stratakv_tests::disk::{device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::noise;
use zerocopy::FromBytes;

const HEADS: usize = 2;
const DIM: usize = 24;

/// A store, by its dtype, codec, devices and copies.
type Case = (DType, PlaneCodec, usize, u8);

const CASES: [Case; 6] = [
    (DType::F32, PlaneCodec::Raw, 1, 1),
    (DType::F16, PlaneCodec::Raw, 2, 2),
    (DType::Bf16, PlaneCodec::Raw, 3, 1),
    (DType::Bf16, PlaneCodec::Int8, 2, 1),
    (DType::F16, PlaneCodec::Int4, 1, 1),
    (DType::F32, PlaneCodec::Int8, 2, 2),
];

/// Writes a store whose groups all have min/max summaries, landmarks and signs. Returns its files.
fn written(root: &Path, (dtype, codec, devices, copies): Case) -> Image {
    let dirs = device_dirs(root, devices);
    let store = small_options(&dirs).create(true).open().expect("a store");
    let spec = LayerSpec::full(HEADS as u16, DIM as u16).codecs(codec, codec);
    let layout = KvLayout::builder().layer_specs([spec; 2]).group_tokens(8).dtype(dtype).build().expect("a layout");
    let options = CreateOptions::new().key("a").store_summary(StoredSummary::MinMax).copies(copies);
    let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
    sequence.attach_stored(Arc::new(ShadowKv::default())).expect("attached");
    sequence.attach_stored(Arc::new(SignBits)).expect("attached");
    for (part, tokens) in [37, 60, 41].into_iter().enumerate() {
        for layer in 0..2 {
            let rows = noise(part * 2 + layer, tokens * HEADS * DIM);
            let view = TensorView::token_major(&rows, tokens, HEADS, DIM);
            sequence.append(layer, view, view).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
    }
    drop(sequence);
    store.close().expect("closed");
    let names = |dir: &Path, part: &str| -> Vec<String> {
        let entries = fs::read_dir(dir.join(part)).expect("a directory").map(|entry| entry.expect("an entry"));
        entries.map(|entry| format!("{part}/{}", entry.file_name().to_string_lossy())).collect()
    };
    let mut files = Vec::new();
    for (device, dir) in dirs.iter().enumerate() {
        let names = [vec!["superblock".to_owned()], names(dir, "manifest"), names(dir, "segments")].concat();
        files.extend(names.into_iter().map(|name| (device, name.clone(), fs::read(dir.join(name)).expect("a file"))));
    }
    Image { files, devices }
}

/// A change of a value: the device, the name and offset of the record, its layer, and the first token of its group.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    device: u16,
    file: String,
    offset: u64,
    layer: u16,
    first: u64,
}

/// Changes a bit of the last group's record of the first section of a kind, in one copy of its frame. `at` is a byte of
/// the record, counted from its end if it is negative. Every checksum over the record is computed again.
fn change_record(image: &mut Image, kind: u16, at: isize) -> Change {
    let slot = image.files.iter().find(|(_, name, _)| name == "superblock").expect("a superblock");
    let slot = stratakv_format::superblock::newest(&slot.2).expect("a slot");
    let (store_id, checksum) = (slot.store_id, slot.checksum());
    for (device, name, bytes) in image.files.iter_mut().filter(|(_, name, _)| name.starts_with("segments/")) {
        let (header, _) = SegmentPage::read_from_prefix(bytes).expect("a segment header");
        for page in 1..bytes.len() / PAGE_BYTES {
            let frame = &mut bytes[page * PAGE_BYTES..];
            let Ok((raw, _)) = FrameHeader::read_from_prefix(frame) else { continue };
            let place = FramePlace {
                store_id,
                location: Location::from_raw(&raw.location),
                segment_generation: header.generation.get(),
                segment_nonce: header.nonce.get(),
            };
            let Ok(view) = FrameView::verify(frame, &place) else { continue };
            let is_own = |d: &&Descriptor| d.kind.get() == KIND_SUMMARY && d.summary.get() == kind;
            let Some(descriptor) = view.descriptors().iter().find(is_own).copied() else { continue };
            let (first, tokens, layer) =
                (descriptor.first_token.get(), descriptor.tokens.get(), descriptor.layer.get());
            let sequence = SequenceId(raw.sequence.get());
            let identity = PlaneIdentity::new(raw.nonce.get(), sequence, KIND_SUMMARY, layer, first, tokens);
            let start = descriptor.offset.get() as usize;
            let extent = start..start + descriptor.bytes.get() as usize;
            let head = if kind == SUMMARY_MIN_MAX { 0 } else { size_of::<SummaryHeader>() };
            let record = (extent.len() - head) / descriptor.pieces.get() as usize;
            let last = extent.end - record;
            let sum_at = view.checksums(&descriptor).as_ptr().addr() - frame.as_ptr().addr();
            let value = if at < 0 { extent.end - at.unsigned_abs() } else { last + at.unsigned_abs() };
            frame[value] ^= 0x40;
            let sum = checksum.compute(&identity, &frame[extent]);
            frame[sum_at..sum_at + 8].copy_from_slice(&sum.to_le_bytes());
            let (device, file, offset) = (*device as u16, name.clone(), (page * PAGE_BYTES + last) as u64);
            let first = first + u64::from(tokens) - u64::from(tokens / descriptor.pieces.get());
            seal(image);
            return Change { device, file, offset, layer, first };
        }
    }
    panic!("no frame has a section of kind {kind}");
}

fn report(dirs: &[PathBuf], full: bool) -> kvfsck::Report {
    kvfsck::check(dirs, &kvfsck::Options { full, ..kvfsck::Options::default() }, &()).expect("a report")
}

#[test]
fn a_full_check_finds_and_locates_a_changed_value_of_each_kind_of_summary() {
    for case in CASES {
        let root = fast_scratch();
        let image = written(&root.path().join("written"), case);
        let whole = report(&image.write(&root.path().join("whole")).expect("directories"), true);
        // Two layers with three records per group, in each copy. The writer keeps the last groups in a tail.
        let each = 6 * u64::from(case.3);
        assert!(whole.clean && whole.checked.summaries >= 12 * each, "{case:?}: {}", whole.to_text());
        assert!(whole.checked.summaries.is_multiple_of(each), "{case:?}: {}", whole.to_text());
        for kind in [SUMMARY_MIN_MAX, SUMMARY_LANDMARKS, SUMMARY_SIGNS] {
            for (nth, at) in [0, -2].into_iter().enumerate() {
                let mut image = image.clone();
                let change = change_record(&mut image, kind, at);
                let dirs = image.write(&root.path().join(format!("{kind}-{nth}"))).expect("directories");
                let quick = report(&dirs, false);
                // Another copy of the frame has another checksum of the record.
                let differing = usize::from(case.3 > 1);
                let are_copies = quick.findings.iter().all(|f| f.code == kvfsck::Code::FrameHeader);
                assert!(are_copies && quick.findings.len() == differing, "{case:?}, {kind}: {}", quick.to_text());
                assert_eq!(quick.checked.summaries, 0, "{case:?}, {kind}: {}", quick.to_text());
                let full = report(&dirs, true);
                assert_eq!(full.findings.len(), 1 + differing, "{case:?}, {kind}, {at}: {}", full.to_text());
                let is_summary = |f: &&kvfsck::Finding| f.code == kvfsck::Code::Summary;
                let found = full.findings.iter().find(is_summary).expect("a finding of a summary");
                let located = Change {
                    device: found.device.expect("a device"),
                    file: found.file.as_deref().expect("a file").to_owned(),
                    offset: found.offset.expect("an offset"),
                    layer: found.layer.expect("a layer"),
                    first: found.tokens.expect("tokens")[0],
                };
                assert_eq!(located, change, "{case:?}, {kind}, {at}");
            }
        }
    }
}
