//! Export of a sequence to a file and import into another store.
//!
//! - The imported sequence equals the exported one byte for byte, whatever the sizes of frames and segments.
//! - A damaged, foreign or interrupted file is refused and leaves nothing in the store.
//! - The engine and kvfsck agree on every file.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use stratakv::codec::{Codec, PlaneKind, PlaneShape, decode, encode};
use stratakv::export::ImportOptions;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectRequest, Sequence, Store,
    StoredSummary, TensorView,
};
use stratakv_format::codec::ENCODED_ELEMENT_MAX;
use stratakv_format::export::{
    ExportEnd, ExportPage, PIECE_END, PIECE_GROUPS, PIECE_KEY, PIECE_SUMMARY, PIECE_TAIL, Piece, PieceHeader,
};
use stratakv_format::{PAGE_BYTES, Unverified};
use stratakv_tests::content::{LayerShape, Order, SequenceShape, varied_shapes};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, copy_devices, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::{Rng, mix};
use zerocopy::IntoBytes;

fn shapes() -> Vec<SequenceShape> {
    let shape = |layers: Vec<LayerShape>, dtype, group| SequenceShape { layers, dtype, group };
    let large = [
        // A block of more than a page, and one that is not a multiple of a page.
        shape(vec![LayerShape::full(4, 80), LayerShape::full(1, 17)], DType::F16, 16),
        // A block larger than a part of a selection.
        shape(vec![LayerShape::full(16, 128)], DType::F32, 32),
    ];
    varied_shapes().into_iter().chain(large).collect()
}

fn pieces(file: &[u8]) -> Vec<(Piece, Vec<u8>)> {
    let nonce = u64::from_le_bytes(file[64..72].try_into().expect("8 bytes"));
    let (mut at, mut all) = (PAGE_BYTES, Vec::new());
    while at < file.len() {
        let header = Unverified::<PieceHeader>::at_front(&file[at..], "piece").expect("a header");
        let header = header.verify(all.len() as u64, nonce).expect("a valid header");
        at += size_of::<PieceHeader>();
        let bytes = header.check_bytes(&file[at..at + header.padded_bytes()]).expect("valid bytes");
        all.push((header.piece(), bytes.to_vec()));
        at += header.padded_bytes();
    }
    all
}

fn export(sequence: &mut Sequence) -> Vec<u8> {
    let mut file = Vec::new();
    let exported = sequence.export(&mut file).expect("an export");
    assert_eq!((exported.bytes, exported.tokens), (file.len() as u64, sequence.len()));
    file
}

fn kvfsck_says(file: &[u8]) -> kvfsck::ExportReport {
    kvfsck::check_reader(file, file.len() as u64, Path::new("session.skv"), &kvfsck::Options::default(), &())
}

fn open(dirs: &[PathBuf]) -> Store {
    small_options(dirs).segment_bytes(ByteSize::mib(1)).open().expect("a store")
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize, usize),
    Truncate(u64),
    Commit(Option<usize>),
    Ids(usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (prop_oneof![3 => 1_usize..70, 1 => 70_usize..300], 0_usize..3)
            .prop_map(|(n, order)| Step::Append(n, order)),
        3 => any::<u64>().prop_map(Step::Truncate),
        3 => proptest::option::of(0_usize..3000).prop_map(Step::Commit),
        2 => (1_usize..40).prop_map(Step::Ids),
        1 => Just(Step::Reopen),
    ]
}

/// Makes a sequence by these steps. Returns it with the seeds of its tokens.
fn history(store: &Store, shape: &SequenceShape, key: &str, summary: bool, steps: &[Step]) -> (Sequence, Vec<u64>) {
    let mut options = CreateOptions::new().key(key);
    if summary {
        options = options.store_summary(StoredSummary::MinMax);
    }
    let mut sequence = store.create_sequence(&shape.layout().unwrap(), options).unwrap();
    let (mut seeds, mut committed, mut counter) = (Vec::new(), Vec::new(), 0);
    for step in steps {
        match step {
            Step::Append(count, order) => {
                let more: Vec<u64> = (0..*count).map(|at| mix(counter + at as u64)).collect();
                counter += *count as u64;
                for layer in shape.kv_layers() {
                    shape.append(&mut sequence, layer, &more, Order::nth(*order)).unwrap();
                }
                seeds.extend(more);
            }
            Step::Truncate(at) => {
                let tokens = if seeds.is_empty() { 0 } else { at % (seeds.len() as u64 + 1) };
                sequence.truncate(tokens).unwrap();
                seeds.truncate(tokens as usize);
            }
            Step::Commit(state) => {
                match state {
                    Some(bytes) => sequence.commit_with(&vec![*bytes as u8; *bytes], Durability::Sync).unwrap(),
                    None => sequence.commit(Durability::Sync).unwrap(),
                }
                committed = seeds.clone();
            }
            Step::Ids(count) => sequence.append_token_ids(&vec![counter as u32; *count]).unwrap(),
            Step::Reopen if committed == seeds && !seeds.is_empty() => {
                sequence.commit(Durability::Sync).unwrap();
                drop(sequence);
                sequence = store.open_sequence(key, OpenSequence::new()).unwrap();
            }
            Step::Reopen => {}
        }
    }
    (sequence, seeds)
}

#[test]
fn an_imported_sequence_is_the_exported_one() {
    let cases = count_from_env("STRATAKV_TEST_EXPORTS", 64) as u32;
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let input = (0_usize..6, any::<bool>(), 1_usize..4, 1_usize..4, 0_usize..3, prop::collection::vec(step(), 1..12));
    let outcome = runner.run(&input, |(shape, summary, from, to, frames, steps)| {
        let shape = &shapes()[shape];
        let scratch = fast_scratch();
        let (a, b) = (device_dirs(&scratch.path().join("a"), from), device_dirs(&scratch.path().join("b"), to));
        let source = open(&a);
        let (mut sequence, seeds) = history(&source, shape, "session", summary, &steps);
        let file = export(&mut sequence);
        shape.check_all(&source, &sequence, |_| seeds.clone());
        let report = kvfsck_says(&file);
        prop_assert!(report.clean, "{}", report.to_text());
        prop_assert_eq!(report.export.tokens, seeds.len() as u64);

        // The target has other frame and segment sizes than the source.
        let sizes = [
            (ByteSize::kib(64), ByteSize::mib(2)),
            (ByteSize::kib(128), ByteSize::mib(1)),
            (ByteSize::mib(1), ByteSize::mib(4)),
        ];
        let options = small_options(&b).frame_bytes(sizes[frames].0).segment_bytes(sizes[frames].1);
        let store = options.clone().open().unwrap();
        let layout = shape.layout().unwrap();
        let imported = store.import(&file[..], &layout, ImportOptions::new()).unwrap();
        prop_assert_eq!(imported.committed(), seeds.len() as u64);
        drop(imported);
        store.close().unwrap();
        assert_clean(&b, "after an import");
        let store = options.open().unwrap();
        let mut imported = store.open_sequence("session", OpenSequence::new().layout(&layout)).unwrap();
        prop_assert_eq!(
            (imported.caller_state(), imported.token_ids()),
            (sequence.caller_state(), sequence.token_ids())
        );
        shape.check_all(&store, &imported, |_| seeds.clone());
        // A second export has the same blocks, tails, summaries, ids and state.
        let again = export(&mut imported);
        prop_assert_eq!(again.len(), file.len());
        prop_assert!(pieces(&again) == pieces(&file));
        // The imported sequence grows like any other.
        let more: Vec<u64> = (0..40).map(|at| mix(1 << 40 | at)).collect();
        for layer in shape.kv_layers() {
            shape.append(&mut imported, layer, &more, Order::TokenMajor).unwrap();
        }
        imported.commit(Durability::Sync).unwrap();
        let all = [seeds, more].concat();
        shape.check_all(&store, &imported, |_| all.clone());
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
}

fn small() -> (tempfile::TempDir, Store, Vec<u8>, KvLayout) {
    let shape = &shapes()[0];
    let scratch = fast_scratch();
    let store = open(&device_dirs(&scratch.path().join("from"), 1));
    let steps = [Step::Append(13, 0), Step::Ids(3), Step::Commit(Some(5)), Step::Append(1, 1)];
    let file = export(&mut history(&store, shape, "session", true, &steps).0);
    let store = open(&device_dirs(&scratch.path().join("to"), 1));
    (scratch, store, file, shape.layout().unwrap())
}

#[track_caller]
fn refused(store: &Store, file: &[u8], layout: &KvLayout) -> ErrorKind {
    let error = store.import(file, layout, ImportOptions::new()).expect_err("a damaged file");
    assert!(store.sequences().is_empty());
    assert_eq!(store.open_sequence("session", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    error.kind()
}

#[test]
fn every_flipped_byte_is_found() {
    let (_scratch, store, file, layout) = small();
    for at in 0..file.len() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (mix(at as u64) % 8);
        let kind = refused(&store, &bad, &layout);
        assert!(matches!(kind, ErrorKind::Corruption | ErrorKind::Unsupported), "byte {at}: {kind:?}");
        assert!(!kvfsck_says(&bad).clean, "byte {at}: kvfsck finds nothing");
    }
    assert!(kvfsck_says(&file).clean);
    store.import(&file[..], &layout, ImportOptions::new()).unwrap();
}

#[test]
fn a_file_of_another_length_is_refused() {
    let (_scratch, store, file, layout) = small();
    for len in (0..file.len()).step_by(7).chain(file.len() - 20..file.len()) {
        assert_eq!(refused(&store, &file[..len], &layout), ErrorKind::Corruption, "{len} bytes");
        assert!(kvfsck_says(&file[..len]).has_length_finding(), "{len} bytes");
    }
    for more in [1, 8, 4096] {
        let longer = [&file[..], &vec![0; more]].concat();
        assert_eq!(refused(&store, &longer, &layout), ErrorKind::Corruption, "{more} bytes more");
        assert!(kvfsck_says(&longer).has_length_finding(), "{more} bytes more");
    }
}

trait HasLength {
    fn has_length_finding(&self) -> bool;
}

impl HasLength for kvfsck::ExportReport {
    fn has_length_finding(&self) -> bool {
        !self.clean && self.findings.iter().any(|f| f.code == kvfsck::Code::ExportLength)
    }
}

/// Assembles pieces to a file with valid checksums.
fn assemble(page: &[u8], pieces: &[(Piece, Vec<u8>)]) -> Vec<u8> {
    let nonce = u64::from_le_bytes(page[64..72].try_into().expect("8 bytes"));
    let mut file = page.to_vec();
    for (index, (piece, bytes)) in pieces.iter().enumerate() {
        let mut bytes = bytes.clone();
        if piece.kind == PIECE_END && bytes.len() == 16 {
            let file_bytes = (file.len() + 64) as u64;
            let end = ExportEnd { pieces: (index as u64).into(), file_bytes: file_bytes.into() };
            bytes = end.as_bytes().to_vec();
        }
        let header = PieceHeader::new(piece, index as u64, nonce, &bytes);
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(&bytes);
        file.resize(file.len().next_multiple_of(8), 0);
    }
    file
}

#[test]
fn pieces_that_do_not_belong_are_refused_although_their_checksums_are_right() {
    let (_scratch, store, file, layout) = small();
    let (page, all) = (file[..PAGE_BYTES].to_vec(), pieces(&file));
    assert_eq!(assemble(&page, &all), file);
    let cases = count_from_env("STRATAKV_TEST_EXPORTS", 600) as u64;
    let mut refusals = 0;
    for seed in 0..cases {
        let mut rng = Rng(seed);
        let mut pieces = all.clone();
        for _ in 0..1 + rng.below(2) {
            let at = rng.below(pieces.len());
            match rng.below(9) {
                0 => drop(pieces.remove(at)),
                1 => pieces.insert(at, all[rng.below(all.len())].clone()),
                2 => {
                    let other = rng.below(pieces.len());
                    pieces.swap(at, other);
                }
                3 => pieces[at].0.kind = rng.below(10) as u16,
                4 => pieces[at].0.layer = rng.below(4) as u16,
                5 => pieces[at].0.first = rng.below(20) as u64,
                6 => pieces[at].0.tokens = rng.below(20) as u32,
                7 => {
                    let len = rng.below(300);
                    pieces[at].1.resize(len, rng.next_u64() as u8);
                }
                _ => {
                    let bytes = &mut pieces[at].1;
                    if !bytes.is_empty() {
                        let byte = rng.below(bytes.len());
                        bytes[byte] ^= rng.next_u64() as u8;
                    }
                }
            }
            if pieces.is_empty() {
                break;
            }
        }
        let bad = assemble(&page, &pieces);
        let imported = store.import(&bad[..], &layout, ImportOptions::new());
        let report = kvfsck_says(&bad);
        match imported {
            Ok(sequence) => {
                assert!(report.clean, "seed {seed}: the engine takes what kvfsck does not:\n{}", report.to_text());
                sequence.delete(Durability::Sync).unwrap();
            }
            Err(e) => {
                refusals += 1;
                // A file of another layout is valid, so kvfsck accepts it.
                let other = e.kind() == ErrorKind::LayoutMismatch;
                assert!(!report.clean || other, "seed {seed}: kvfsck takes what the engine does not: {e}");
                assert!(store.sequences().is_empty(), "seed {seed}");
            }
        }
    }
    assert!(refusals > cases / 2, "{refusals} of {cases}");
}

#[test]
fn an_export_that_contradicts_itself_is_refused_with_its_place() {
    let (_scratch, store, file, layout) = small();
    let (page, all) = (file[..PAGE_BYTES].to_vec(), pieces(&file));
    let refused = |bad: &[u8], code: kvfsck::Code, words: &str, offset: usize| {
        assert!(store.import(bad, &layout, ImportOptions::new()).is_err(), "{words}");
        assert!(store.sequences().is_empty(), "{words}");
        let report = kvfsck_says(bad);
        let found = report.findings.iter().find(|f| f.code == code && f.message.contains(words));
        let found = found.unwrap_or_else(|| panic!("{words}: {}", report.to_text()));
        assert_eq!(found.offset, Some(offset as u64), "{words}");
    };
    // The last piece names other numbers of pieces and bytes.
    let (nonce, last) = (u64::from_le_bytes(page[64..72].try_into().unwrap()), all.len() - 1);
    let start = file.len() - size_of::<PieceHeader>() - size_of::<ExportEnd>();
    for end in [(last as u64 + 1, file.len() as u64), (last as u64, file.len() as u64 - 8)] {
        let end = ExportEnd { pieces: end.0.into(), file_bytes: end.1.into() };
        let header = PieceHeader::new(&all[last].0, last as u64, nonce, end.as_bytes());
        let bad = [&file[..start], header.as_bytes(), end.as_bytes()].concat();
        refused(&bad, kvfsck::Code::ExportLength, "the end piece names", start);
    }
    // Bytes follow the layout in its piece.
    let mut longer = all.clone();
    longer[0].1.extend_from_slice(&[0; 8]);
    let exported = Unverified::<ExportPage>::at_front(&page, "export page").and_then(|page| page.verify());
    let mut exported = exported.expect("a page").into_inner();
    exported.layout_bytes = (exported.layout_bytes.get() + 8).into();
    let bad = assemble(&exported.encode(), &longer);
    refused(&bad, kvfsck::Code::ExportPiece, "bytes follow the layout in its piece", PAGE_BYTES);
    // Summaries of f16 keys have f16 elements.
    let mut other = all.clone();
    let nth = other.iter().position(|(piece, _)| piece.kind == PIECE_SUMMARY).expect("a summary");
    other[nth].0.element = Some(DType::Bf16);
    let start = assemble(&page, &other[..nth]).len();
    refused(&assemble(&page, &other), kvfsck::Code::ExportPiece, "the summaries have element type", start);
}

/// The channels of the layer of [`one_layer`].
const DIM: usize = 64;

/// Creates a sequence `session` of one layer with one head, groups of 8 and min/max summaries.
fn one_layer(store: &Store, dtype: DType, codecs: [PlaneCodec; 2]) -> Sequence {
    let spec = LayerSpec::full(1, DIM as u16).codecs(codecs[0], codecs[1]);
    let layout = KvLayout::builder().layer_specs([spec]).group_tokens(8).dtype(dtype).build().expect("a layout");
    let options = CreateOptions::new().key("session").store_summary(StoredSummary::MinMax);
    store.create_sequence(&layout, options).expect("a sequence")
}

/// Appends tokens whose keys and values are `element(token, channel)`, and commits them.
fn append(sequence: &mut Sequence, tokens: usize, element: impl Fn(usize, usize) -> f32) {
    let rows: Vec<f32> = (0..tokens * DIM).map(|at| element(at / DIM, at % DIM)).collect();
    let view = TensorView::token_major(&rows, tokens, 1, DIM);
    sequence.append(0, view, view).expect("appended");
    sequence.commit(Durability::Sync).expect("committed");
}

/// Exports such a sequence of 18 tokens. Two of them are in the tail.
fn exported_layer(root: &Path, dtype: DType, codecs: [PlaneCodec; 2]) -> (Vec<u8>, KvLayout) {
    let store = open(&device_dirs(root, 1));
    let mut sequence = one_layer(&store, dtype, codecs);
    append(&mut sequence, 18, |token, channel| (token * DIM + channel) as f32 * 0.01 - 3.0);
    (export(&mut sequence), sequence.layout().clone())
}

/// Returns the file with the last element of the first piece of this kind, a value, set to these bytes.
fn with_last_element(file: &[u8], kind: u16, element: &[u8]) -> Vec<u8> {
    let (page, mut all) = (&file[..PAGE_BYTES], pieces(file));
    let (_, bytes) = all.iter_mut().find(|(piece, _)| piece.kind == kind).expect("a piece");
    let at = bytes.len() - element.len();
    bytes[at..].copy_from_slice(element);
    assemble(page, &all)
}

#[test]
fn a_raw_plane_of_a_layer_with_a_codec_is_finite() {
    let scratch = fast_scratch();
    let (file, layout) = exported_layer(&scratch.path().join("from"), DType::F32, [PlaneCodec::Int8, PlaneCodec::Raw]);
    let store = open(&device_dirs(&scratch.path().join("to"), 1));
    for element in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let bad = with_last_element(&file, PIECE_GROUPS, &element.to_le_bytes());
        assert_eq!(refused(&store, &bad, &layout), ErrorKind::Corruption, "{element}");
        assert!(!kvfsck_says(&bad).clean, "{element}");
    }
    let good = with_last_element(&file, PIECE_GROUPS, &f32::MAX.to_le_bytes());
    assert!(kvfsck_says(&good).clean);
    store.import(&good[..], &layout, ImportOptions::new()).expect("a finite element");
}

#[test]
fn both_readers_agree_on_the_largest_element_of_a_tail() {
    let int8 = [PlaneCodec::Int8; 2];
    let (limit, above) = (ENCODED_ELEMENT_MAX, ENCODED_ELEMENT_MAX.next_up());
    let f32_bytes = |x: f32| x.to_le_bytes().to_vec();
    let bf16_bytes = |bits: u16| bits.to_le_bytes().to_vec();
    let cases = [
        (DType::F32, int8, vec![f32_bytes(limit), f32_bytes(-limit)], vec![f32_bytes(above), f32_bytes(-3e38)]),
        (DType::F32, [PlaneCodec::Raw; 2], vec![f32_bytes(f32::MAX)], vec![f32_bytes(f32::NAN)]),
        (DType::Bf16, int8, vec![bf16_bytes(0x7e80)], vec![bf16_bytes(0x7e81), bf16_bytes(0xff7f), bf16_bytes(0x7fc0)]),
        (DType::F16, int8, vec![bf16_bytes(0x7bff)], vec![bf16_bytes(0x7c00)]),
    ];
    for (nth, (dtype, codecs, good, bad)) in cases.into_iter().enumerate() {
        let scratch = fast_scratch();
        let (file, layout) = exported_layer(&scratch.path().join("from"), dtype, codecs);
        let store = open(&device_dirs(&scratch.path().join("to"), 1));
        for element in bad {
            let file = with_last_element(&file, PIECE_TAIL, &element);
            assert_eq!(refused(&store, &file, &layout), ErrorKind::Corruption, "case {nth}, {element:?}");
            assert!(!kvfsck_says(&file).clean, "case {nth}, {element:?}");
        }
        for element in good {
            let file = with_last_element(&file, PIECE_TAIL, &element);
            assert!(kvfsck_says(&file).clean, "case {nth}, {element:?}");
            let sequence = store.import(&file[..], &layout, ImportOptions::new()).expect("an element up to the limit");
            sequence.delete(Durability::Sync).expect("deleted");
        }
    }
}

/// Decoded elements exceed the limit by the rounding of a step. A cut makes them elements of a tail.
#[test]
fn a_group_of_the_largest_elements_can_be_cut_exported_and_filled_again() {
    let limit = ENCODED_ELEMENT_MAX;
    let element = |token: usize, _: usize| if token.is_multiple_of(2) { -limit } else { limit };
    let shape = PlaneShape { kind: PlaneKind::Keys, heads: 1, tokens: 8, dims: DIM, dtype: DType::Bf16 };
    let bits = (limit.to_bits() >> 16) as u16;
    let plane: Vec<u8> = (0..8 * DIM)
        .flat_map(|at| (bits | if (at / DIM).is_multiple_of(2) { 1 << 15 } else { 0 }).to_le_bytes())
        .collect();
    let (mut stored, mut decoded) = (Vec::new(), vec![0; plane.len()]);
    let used = encode(Codec::Int4, &shape, &plane, &mut stored).expect("encoded");
    decode(used, &shape, &stored, &mut decoded).expect("decoded");
    assert!(decoded.as_chunks::<2>().0.iter().any(|x| u16::from_le_bytes(*x) & 0x7fff > bits), "a step is not rounded");

    let scratch = fast_scratch();
    let dirs = device_dirs(&scratch.path().join("from"), 1);
    let store = open(&dirs);
    let mut sequence = one_layer(&store, DType::Bf16, [PlaneCodec::Int4; 2]);
    append(&mut sequence, 8, element);
    let other = open(&device_dirs(&scratch.path().join("to"), 1));
    for round in 0..3 {
        sequence.truncate(5).expect("cut");
        sequence.commit(Durability::Sync).expect("committed");
        let file = export(&mut sequence);
        let report = kvfsck_says(&file);
        assert!(report.clean, "round {round}: {}", report.to_text());
        let layout = sequence.layout().clone();
        let mut imported = other.import(&file[..], &layout, ImportOptions::new()).expect("an import");
        append(&mut imported, 3, element);
        imported.delete(Durability::Sync).expect("deleted");
        drop(sequence);
        sequence = store.open_sequence("session", OpenSequence::new()).expect("opened");
        append(&mut sequence, 3, element);
    }
    drop(sequence);
    store.close().expect("closed");
    assert_clean(&dirs, "after cuts");
}

/// The bounds of such keys are the last finite bf16, which are inside of the keys.
#[test]
fn summaries_of_keys_beyond_bf16_are_those_that_the_format_names() {
    let scratch = fast_scratch();
    let dirs = device_dirs(&scratch.path().join("from"), 1);
    let store = open(&dirs);
    let mut sequence = one_layer(&store, DType::F32, [PlaneCodec::Raw; 2]);
    let element = |token: usize, channel: usize| match (token % 8, channel % 4) {
        (3, 0) => 3.4e38,
        (5, 1) => f32::MIN,
        (_, 2) => 1e-44 * token as f32 - 3e-44,
        _ => (token * DIM + channel) as f32 * 0.01 - 3.0,
    };
    append(&mut sequence, 300, element);
    let file = export(&mut sequence);
    let report = kvfsck_says(&file);
    assert!(report.clean, "{}", report.to_text());
    let other = open(&device_dirs(&scratch.path().join("to"), 1));
    other.import(&file[..], sequence.layout(), ImportOptions::new()).expect("an import");
    // A summary with another rounding is refused by both readers.
    let (page, all) = (&file[..PAGE_BYTES], pieces(&file));
    let nth = all.iter().position(|(piece, _)| piece.kind == PIECE_SUMMARY).expect("a summary");
    let last = all[nth].1.len() - 2;
    let exact = u16::from_le_bytes([all[nth].1[last], all[nth].1[last + 1]]);
    let third = open(&device_dirs(&scratch.path().join("third"), 1));
    for bits in [exact + 1, exact - 1] {
        let mut changed = all.clone();
        changed[nth].1[last..].copy_from_slice(&bits.to_le_bytes());
        let bad = assemble(page, &changed);
        assert_eq!(refused(&third, &bad, sequence.layout()), ErrorKind::Corruption, "{bits:#x}");
        assert!(!kvfsck_says(&bad).clean, "{bits:#x}");
    }
    drop(sequence);
    store.close().expect("closed");
    let full = kvfsck::Options { full: true, ..kvfsck::Options::default() };
    let report = kvfsck::check(&dirs, &full, &()).expect("a report");
    assert!(report.clean && report.checked.summaries > 0, "{}", report.to_text());
}

#[test]
fn another_model_is_refused() {
    let (_scratch, store, file, _) = small();
    let layout = |dtype, fingerprint| {
        let specs = [stratakv::layout::LayerSpec::full(2, 16), stratakv::layout::LayerSpec::full(1, 8)];
        let builder = KvLayout::builder().layer_specs(specs).dtype(dtype).group_tokens(4);
        builder.fingerprint([fingerprint; 32]).build().unwrap()
    };
    for (layout, word) in [(layout(DType::F16, 1), "fingerprint"), (layout(DType::Bf16, 0), "geometry")] {
        let error = store.import(&file[..], &layout, ImportOptions::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LayoutMismatch);
        assert!(error.to_string().contains(word), "{error}");
    }
    let right = layout(DType::F16, 0);
    let first = store.import(&file[..], &right, ImportOptions::new()).unwrap();
    let taken = store.import(&file[..], &right, ImportOptions::new()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
    let second = store.import(&file[..], &right, ImportOptions::new().key("other")).unwrap();
    assert_eq!((first.key(), second.key()), ("session", "other"));
    let nameless = store.import(&file[..], &right, ImportOptions::new().key("")).unwrap();
    assert_eq!(nameless.key(), "");
    assert_eq!(store.sequences().len(), 3);
}

/// A reader that copies the devices of a store after some bytes, and fails after some more.
struct Interrupted<'a> {
    file: &'a [u8],
    at: usize,
    copy_at: usize,
    fail_at: usize,
    copy: Option<Box<dyn FnOnce() + 'a>>,
}

impl Read for Interrupted<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at >= self.copy_at
            && let Some(copy) = self.copy.take()
        {
            copy();
        }
        if self.at >= self.fail_at {
            return Err(std::io::Error::other("the line is dead"));
        }
        let count = out.len().min(self.file.len() - self.at).min(977);
        out[..count].copy_from_slice(&self.file[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[test]
fn an_import_cut_short_leaves_nothing() {
    let shape = &shapes()[4];
    let scratch = fast_scratch();
    let source = open(&device_dirs(&scratch.path().join("from"), 1));
    let steps = [Step::Append(900, 0), Step::Commit(None)];
    let (mut sequence, seeds) = history(&source, shape, "session", true, &steps);
    let file = export(&mut sequence);
    let dirs = device_dirs(&scratch.path().join("to"), 2);
    let store = open(&dirs);
    let layout = shape.layout().unwrap();
    let mut written = false;
    for round in 0..6_usize {
        let copy_at = file.len() * round / 6;
        let to = scratch.path().join(format!("copy-{round}"));
        let mut copied = Vec::new();
        let reader = Interrupted {
            file: &file,
            at: 0,
            copy_at,
            fail_at: copy_at + 3000,
            copy: Some(Box::new(|| copied = copy_devices(&dirs, &to, &mut Rng(round as u64)))),
        };
        let error = store.import(reader, &layout, ImportOptions::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(store.sequences().is_empty());
        written |= store.status().written_bytes > 0;
        assert_clean(&copied, "of a crash during an import");
        let crashed = open(&copied);
        assert!(crashed.sequences().is_empty());
        crashed.import(&file[..], &layout, ImportOptions::new()).unwrap();
    }
    assert!(written, "nothing was on its way to the devices yet");
    let imported = store.import(&file[..], &layout, ImportOptions::new()).unwrap();
    shape.check_all(&store, &imported, |_| seeds.clone());
    drop(imported);
    store.close().unwrap();
    assert_clean(&dirs, "after imports that were cut short");
}

#[test]
fn a_store_with_little_memory_moves_a_long_sequence() {
    let shape = SequenceShape { layers: vec![LayerShape::full(4, 64); 3], dtype: DType::F16, group: 8 };
    let scratch = fast_scratch();
    let tight = |name: &str| {
        let dirs = device_dirs(&scratch.path().join(name), 1);
        let options = small_options(&dirs).memory_limit(ByteSize::mib(6)).segment_bytes(ByteSize::mib(2));
        options.open().unwrap()
    };
    let (source, target) = (tight("from"), tight("to"));
    // A token has 3 KiB, so the sequence has twice the memory limit.
    let steps = [Step::Append(2000, 0), Step::Commit(None), Step::Append(2100, 1), Step::Commit(None)];
    let (mut sequence, seeds) = history(&source, &shape, "session", false, &steps);
    assert!(sequence.kv_bytes() > 12 << 20);
    let path = scratch.path().join("session.skv");
    let exported = sequence.export_file(&path).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (exported.bytes, 0o600));
    assert_eq!(sequence.export_file(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), exported.bytes, "an existing file is not overwritten");
    let report = kvfsck::check_export(&path, &kvfsck::Options::default(), &()).unwrap();
    assert!(report.clean, "{}", report.to_text());
    let imported = target.import_file(&path, &shape.layout().unwrap(), ImportOptions::new()).unwrap();
    for store in [&source, &target] {
        let memory = store.status().memory;
        assert!(memory.peak_bytes <= memory.limit_bytes);
    }
    for layer in shape.kv_layers() {
        for first in (0..seeds.len() / 8 - 64).step_by(64) {
            let view = imported
                .select(layer, SelectRequest::groups(&(first as u64..first as u64 + 64).collect::<Vec<_>>()))
                .unwrap();
            let batch = target.read(&[&view]).submit().unwrap().wait().unwrap();
            let mut seen = seeds.clone();
            seen.truncate(view.length() as usize);
            for (nth, group) in view.groups().enumerate() {
                let [keys, values] = shape.block(layer, &seen[group as usize * 8..][..8]);
                assert_eq!(batch.get(0).unwrap().group(nth).unwrap(), (keys[..].into(), values[..].into()));
            }
        }
    }
    let nothing = target.import_file(scratch.path().join("none"), imported.layout(), ImportOptions::new());
    assert_eq!(nothing.unwrap_err().kind(), ErrorKind::NotFound);
    let directory = target.import_file(scratch.path(), imported.layout(), ImportOptions::new());
    assert_eq!(directory.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// The layout of such a sequence is larger than that of any number of layers without codecs.
#[test]
fn a_sequence_of_the_most_layers_with_codecs_is_exported_and_imported() {
    const LAYERS: u16 = 1024;
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = small_options(&dirs).segment_bytes(ByteSize::mib(16)).open().expect("a store");
    let builder = KvLayout::builder().layers(LAYERS).kv_heads(1).head_dim(64).dtype(DType::F32).group_tokens(8);
    let layout = builder.codec(PlaneCodec::Int8).build().expect("a layout");
    let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("a")).expect("a sequence");
    for layer in 0..LAYERS {
        let rows: Vec<f32> = (0..9 * 64).map(|i| (mix(u64::from(layer) * 1000 + i) % 100) as f32).collect();
        let view = TensorView::token_major(&rows, 9, 1, 64);
        sequence.append(usize::from(layer), view, view).expect("an append");
    }
    sequence.commit(Durability::Sync).expect("a commit");
    let file = export(&mut sequence);
    let report = kvfsck_says(&file);
    assert!(report.clean, "{}", report.to_text());
    let mut imported = store.import(&file[..], &layout, ImportOptions::new().key("b")).expect("an import");
    assert_eq!(imported.len(), 9);
    // The files differ in ids, times and checksums only.
    let [first, second] = [pieces(&file), pieces(&export(&mut imported))];
    let data = |all: Vec<(Piece, Vec<u8>)>| all.into_iter().filter(|(piece, _)| piece.kind != PIECE_KEY);
    assert!(data(first).eq(data(second)));
}

/// The time to live and the eviction priority are imported and take effect, unless the import sets others.
#[test]
fn expiry_and_eviction_settings_are_imported() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = open(&dirs);
    let shape = shapes()[0].clone();
    let layout = shape.layout().expect("a layout");
    let hour = std::time::Duration::from_secs(3600);
    let own = CreateOptions::new().key("a").ttl(hour).evictable(3);
    let mut sequence = store.create_sequence(&layout, own).expect("a sequence");
    for layer in shape.kv_layers() {
        shape.append(&mut sequence, layer, &[1, 2, 3], Order::TokenMajor).expect("an append");
    }
    sequence.commit(Durability::Sync).expect("a commit");
    let file = export(&mut sequence);
    let soon = std::time::Duration::from_millis(300);
    let ways = [
        (ImportOptions::new().key("as it was"), (3_600_000, 3)),
        (ImportOptions::new().key("for good").ttl(None).evictable(0), (0, 0)),
        (ImportOptions::new().key("soon over").ttl(Some(soon)).evictable(9), (300, 9)),
    ];
    for (options, _) in &ways {
        drop(store.import(&file[..], &layout, options.clone()).expect("an import"));
    }
    for (key, (_, ends)) in ["as it was", "for good", "soon over"].into_iter().zip(ways) {
        let info = store.sequences().into_iter().find(|info| info.key == key).expect("listed");
        assert_eq!((info.ttl_ms, info.evictable), ends, "{key}");
        assert_eq!(info.tokens, 3);
    }
    std::thread::sleep(2 * soon);
    store.run_maintenance().expect("maintenance");
    let mut left: Vec<String> = store.sequences().into_iter().map(|info| info.key).collect();
    left.sort();
    assert_eq!(left, ["a", "as it was", "for good"]);
    assert_eq!(store.health().expirations, 1);
}
