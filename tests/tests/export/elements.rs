//! Elements and summaries at the limits of the format mean the same to both readers.

use crate::files::{assemble, export, kvfsck_says, open, pieces, refused};
use std::path::Path;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, decode, encode};
use stratakv::export::ImportOptions;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::{
    CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Sequence, Store, StoredSummary, TensorView,
};
use stratakv_format::PAGE_BYTES;
use stratakv_format::codec::ENCODED_ELEMENT_MAX;
use stratakv_format::export::{PIECE_GROUPS, PIECE_SUMMARY, PIECE_TAIL};
use stratakv_tests::disk::{assert_clean, device_dirs, fast_scratch};

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
