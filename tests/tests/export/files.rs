//! Sequences, their exports, and files with other pieces under valid checksums.

use proptest::prelude::*;
use std::path::{Path, PathBuf};
use stratakv::export::ImportOptions;
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Sequence, Store, StoredSummary,
};
use stratakv_format::export::{ExportEnd, PIECE_END, Piece, PieceHeader};
use stratakv_format::{PAGE_BYTES, Unverified};
use stratakv_tests::content::{LayerShape, Order, SequenceShape, varied_shapes};
use stratakv_tests::disk::{device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::mix;
use zerocopy::IntoBytes;

pub(crate) fn shapes() -> Vec<SequenceShape> {
    let shape = |layers: Vec<LayerShape>, dtype, group| SequenceShape { layers, dtype, group };
    let large = [
        // A block of more than a page, and one that is not a multiple of a page.
        shape(vec![LayerShape::full(4, 80), LayerShape::full(1, 17)], DType::F16, 16),
        // A block larger than a part of a selection.
        shape(vec![LayerShape::full(16, 128)], DType::F32, 32),
    ];
    varied_shapes().into_iter().chain(large).collect()
}

pub(crate) fn pieces(file: &[u8]) -> Vec<(Piece, Vec<u8>)> {
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

pub(crate) fn export(sequence: &mut Sequence) -> Vec<u8> {
    let mut file = Vec::new();
    let exported = sequence.export(&mut file).expect("an export");
    assert_eq!((exported.bytes, exported.tokens), (file.len() as u64, sequence.len()));
    file
}

pub(crate) fn kvfsck_says(file: &[u8]) -> kvfsck::ExportReport {
    kvfsck::check_reader(file, file.len() as u64, Path::new("session.skv"), &kvfsck::Options::default(), &())
}

pub(crate) fn open(dirs: &[PathBuf]) -> Store {
    small_options(dirs).segment_bytes(ByteSize::mib(1)).open().expect("a store")
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Append(usize, usize),
    Truncate(u64),
    Commit(Option<usize>),
    Ids(usize),
    Reopen,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
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
pub(crate) fn history(
    store: &Store,
    shape: &SequenceShape,
    key: &str,
    summary: bool,
    steps: &[Step],
) -> (Sequence, Vec<u64>) {
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

pub(crate) fn small() -> (tempfile::TempDir, Store, Vec<u8>, KvLayout) {
    let shape = &shapes()[0];
    let scratch = fast_scratch();
    let store = open(&device_dirs(&scratch.path().join("from"), 1));
    let steps = [Step::Append(13, 0), Step::Ids(3), Step::Commit(Some(5)), Step::Append(1, 1)];
    let file = export(&mut history(&store, shape, "session", true, &steps).0);
    let store = open(&device_dirs(&scratch.path().join("to"), 1));
    (scratch, store, file, shape.layout().unwrap())
}

#[track_caller]
pub(crate) fn refused(store: &Store, file: &[u8], layout: &KvLayout) -> ErrorKind {
    let error = store.import(file, layout, ImportOptions::new()).expect_err("a damaged file");
    assert!(store.sequences().is_empty());
    assert_eq!(store.open_sequence("session", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    error.kind()
}

/// Assembles pieces to a file with valid checksums.
pub(crate) fn assemble(page: &[u8], pieces: &[(Piece, Vec<u8>)]) -> Vec<u8> {
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
