//! Streamed summaries of selectors: the memory that they take, the bytes that a selection reads, and how the engine
//! handles damaged records.

use std::path::PathBuf;
use std::sync::Arc;
use stratakv::pipeline::Pipeline;
use stratakv::retrieval::{Selector, SelectorId, ShadowKv, SignBits};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, OpenSequence, SelectRequest, Sequence, Store,
    StoreOptions, StoredSummary, SummaryResidency, TensorView,
};
use stratakv_testing::{read_bytes, summary_bytes, uniform_layout};
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::disk::{device_dirs, each_flipped_byte, fast_scratch, small_options};
use stratakv_tests::rng::noise;

const LAYERS: usize = 6;
const TOKENS: usize = 8192;
const HEADS: usize = 4;
const DIM: usize = 64;
const GROUP: usize = 8;
/// The bytes of a token: sign bits and a length per head.
const SIGN_BYTES: usize = HEADS * (DIM / 8 + 2);

fn roomy(dirs: &[PathBuf]) -> StoreOptions {
    let options = small_options(dirs).memory_limit(ByteSize::mib(64)).segment_bytes(ByteSize::mib(32));
    options.frame_bytes(ByteSize::mib(1))
}

/// Writes a prompt in parts with stored sign bits. Returns the largest number of summary bytes in memory.
fn prefill(store: &Store, summaries: SummaryResidency) -> (Sequence, u64) {
    let options = CreateOptions::new().key("a").summary_residency(summaries);
    let mut sequence = store.create_sequence(&uniform_layout(LAYERS, HEADS, DIM, GROUP), options).expect("a sequence");
    let signs = sequence.attach_stored(Arc::new(SignBits)).expect("attached");
    let (mut held, piece) = (0, 256);
    for at in 0..TOKENS / piece {
        for layer in 0..LAYERS {
            let keys = noise(at * LAYERS + layer + 1, piece * HEADS * DIM);
            let view = || TensorView::token_major(&keys, piece, HEADS, DIM);
            sequence.append(layer, view(), view()).expect("appended");
        }
        held = held.max(sequence.selector_bytes(signs).expect("its own"));
    }
    sequence.commit(Durability::Sync).expect("committed");
    (sequence, held)
}

#[test]
fn a_prompt_is_written_and_chosen_from_in_little_memory() {
    let root = fast_scratch();
    let whole = (LAYERS * TOKENS * SIGN_BYTES) as u64;
    let query = noise(77, 2 * HEADS * DIM);
    let chosen = |sequence: &mut Sequence| -> Vec<Vec<u64>> {
        let signs = sequence.attach(Arc::new(SignBits)).expect("attached");
        let one = |layer| {
            sequence
                .select(layer, SelectRequest::query(&query).budget(Budget::tokens(400)).selector(signs))
                .expect("selected")
        };
        (0..LAYERS).map(|layer| one(layer).groups().collect()).collect()
    };
    let dirs = device_dirs(root.path(), 1);
    let store = roomy(&dirs).create(true).open().expect("a store");
    let (mut sequence, held) = prefill(&store, SummaryResidency::Streamed);
    assert!(held < whole / 2, "{held} bytes kept of {whole}");
    let streamed = chosen(&mut sequence);
    drop(sequence);
    // After another open, no summary is in memory, and attaching reads nothing.
    let open = |summaries| {
        let open = store.open_sequence("a", OpenSequence::new().summary_residency(summaries));
        open.expect("a sequence")
    };
    let mut sequence = open(SummaryResidency::Streamed);
    let (read, opened) = (read_bytes(&store), summary_bytes(&store));
    let signs = sequence.attach(Arc::new(SignBits)).expect("attached");
    assert_eq!(sequence.selector_bytes(signs).expect("its own"), 0);
    assert_eq!((read_bytes(&store), summary_bytes(&store)), (read, opened));
    let select = |layer| {
        sequence
            .select(layer, SelectRequest::query(&query).budget(Budget::tokens(400)).selector(signs))
            .expect("selected")
    };
    for (layer, expected) in streamed.iter().enumerate() {
        let before = read_bytes(&store);
        assert_eq!(select(layer).groups().collect::<Vec<_>>(), *expected);
        let (read, records) = ((read_bytes(&store) - before) as usize, TOKENS * SIGN_BYTES);
        // Reads cover whole pages of each frame.
        assert!((records..=records * 2).contains(&read), "{read} bytes read for {records}");
        assert_eq!(summary_bytes(&store), opened, "the selection frees its records");
    }
    // Records that are read ahead serve the selections by the predicted and by the true query.
    let mut pipeline = Pipeline::new(&store, Budget::tokens(64));
    pipeline.stream(2, &[&sequence]).expect("read ahead");
    assert!(pipeline.report().record_bytes as usize >= TOKENS * SIGN_BYTES);
    let again: Vec<u64> = select(2).groups().collect();
    let before = read_bytes(&store);
    assert_eq!(select(2).groups().collect::<Vec<_>>(), again);
    assert_eq!(read_bytes(&store), before);
    drop((pipeline, sequence));
    let mut resident = open(SummaryResidency::Resident);
    assert_eq!(chosen(&mut resident), streamed);
}

/// Summaries of groups without stored records stay in memory. Records that are stored later do not.
#[test]
fn summaries_in_memory_are_those_that_no_device_stores() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = roomy(&dirs).create(true).open().expect("a store");
    let options = CreateOptions::new().key("a").summary_residency(SummaryResidency::Streamed);
    let mut sequence = store.create_sequence(&uniform_layout(LAYERS, HEADS, DIM, GROUP), options).expect("a sequence");
    let append = |sequence: &mut Sequence, tokens: usize| {
        for layer in 0..LAYERS {
            let keys = noise(tokens, tokens * HEADS * DIM);
            let view = || TensorView::token_major(&keys, tokens, HEADS, DIM);
            sequence.append(layer, view(), view()).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
    };
    append(&mut sequence, 4096);
    // These groups are stored without records and are not written again.
    let signs = sequence.attach_stored(Arc::new(SignBits)).expect("attached");
    let of_a_prompt = sequence.selector_bytes(signs).expect("its own");
    assert!(of_a_prompt >= (LAYERS * 4096 * SIGN_BYTES) as u64);
    append(&mut sequence, 2048);
    assert!(sequence.selector_bytes(signs).expect("its own") > of_a_prompt, "after a gap all summaries are kept");
    // After a truncation, all groups that follow have records.
    sequence.truncate(0).expect("cut");
    append(&mut sequence, 2048);
    assert!(sequence.selector_bytes(signs).expect("its own") < of_a_prompt / 16, "nothing is kept after a commit");
    // After a detach, no record is read ahead.
    let query = noise(5, 2 * HEADS * DIM);
    sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(64)).selector(signs)).expect("selected");
    let ahead = |sequence: &Sequence| {
        let mut pipeline = Pipeline::new(&store, Budget::tokens(64));
        pipeline.stream(1, &[sequence]).expect("read ahead");
        pipeline.report().record_bytes
    };
    assert!(ahead(&sequence) as usize >= 2048 * SIGN_BYTES);
    sequence.detach(signs).expect("its own");
    assert_eq!(ahead(&sequence), 0);
}

#[test]
fn damaged_records_come_from_another_copy_or_from_the_keys() {
    let mut windowed = LayerShape::full(1, 16);
    windowed.window = Some(50);
    let layers = vec![LayerShape::full(2, 24), LayerShape::full(1, 48), windowed];
    let small = SequenceShape { layers, dtype: DType::F16, group: 4 };
    for copies in [1, 2] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), copies);
        let store = small_options(&dirs).create(true).open().expect("a store");
        let options = CreateOptions::new().key("a").copies(copies as u8);
        let mut sequence = store.create_sequence(&small.layout().expect("a layout"), options).expect("a sequence");
        let methods = || -> Vec<Arc<dyn Selector>> { vec![Arc::new(SignBits), Arc::new(ShadowKv::default())] };
        for selector in methods() {
            sequence.attach_stored(selector).expect("attached");
        }
        let seeds: Vec<u64> = (0..300).collect();
        for layer in 0..3 {
            small.append(&mut sequence, layer, &seeds, Order::TokenMajor).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
        let chosen = |sequence: &mut Sequence| -> stratakv::Result<Vec<Vec<u64>>> {
            let mut chosen = Vec::new();
            for selector in methods() {
                let selector = sequence.attach(selector)?;
                for layer in 0..3 {
                    let view = sequence.select(
                        layer,
                        SelectRequest::query(&small.query(layer, 3)).budget(Budget::tokens(40)).selector(selector),
                    )?;
                    chosen.push(view.groups().collect());
                }
            }
            Ok(chosen)
        };
        let expected = chosen(&mut sequence).expect("selected");
        drop(sequence);
        store.close().expect("closed");
        let (mut tried, mut hit, mut lost) = (0, 0, 0);
        each_flipped_byte(root.path(), &dirs, |at, copied| {
            let store = small_options(copied).open().expect("a store");
            let open = store.open_sequence("a", OpenSequence::new().summary_residency(SummaryResidency::Streamed));
            tried += 1;
            match open.and_then(|mut sequence| chosen(&mut sequence)) {
                Ok(found) => assert_eq!(found, expected, "byte {at}"),
                Err(e) => {
                    assert!(copies == 1 && e.kind() == ErrorKind::Corruption, "{e}");
                    lost += 1;
                }
            }
            let counters: Vec<_> = store.status().devices.iter().map(|d| d.counters).collect();
            hit += usize::from(counters.iter().any(|c| c.checksum_failures > 0));
        });
        assert!(tried > 20 && hit > 2 && lost < hit, "{hit} of {tried}, {lost} lost");
    }
}

/// A sequence that stores bounds and is chosen from by another method keeps that method's summaries alone.
#[test]
fn bounds_alone_are_streamed() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let store = roomy(&dirs).create(true).open().expect("a store");
    let (query, layout) = (noise(77, 2 * HEADS * DIM), uniform_layout(LAYERS, HEADS, DIM, GROUP));
    let written = |key: &str, summaries| {
        let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax).summary_residency(summaries);
        let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
        sequence.attach_stored(Arc::new(SignBits)).expect("attached");
        for layer in 0..LAYERS {
            let keys = noise(layer + 1, 2048 * HEADS * DIM);
            let view = || TensorView::token_major(&keys, 2048, HEADS, DIM);
            sequence.append(layer, view(), view()).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
        sequence
    };
    let chosen = |sequence: &Sequence, signs: Option<SelectorId>| -> Vec<Vec<u64>> {
        let request = SelectRequest::query(&query).budget(Budget::tokens(400));
        let request = || signs.map_or(request, |signs| request.selector(signs));
        (0..LAYERS).map(|layer| sequence.select(layer, request()).expect("selected").groups().collect()).collect()
    };
    drop((written("a", SummaryResidency::Resident), written("b", SummaryResidency::BoundsStreamed)));
    let open = |key: &str, summaries| {
        let mut sequence =
            store.open_sequence(key, OpenSequence::new().summary_residency(summaries)).expect("a sequence");
        let signs = sequence.attach_stored(Arc::new(SignBits)).expect("attached");
        (sequence, signs)
    };
    let (resident, signs) = open("a", SummaryResidency::Resident);
    let (mut streamed, own) = open("b", SummaryResidency::BoundsStreamed);
    assert_eq!(streamed.summary_residency(), SummaryResidency::BoundsStreamed);
    assert!(resident.summary_bytes() > 0);
    assert_eq!(streamed.summary_bytes(), 0);
    let bytes = resident.selector_bytes(signs).expect("its own");
    assert_eq!(streamed.selector_bytes(own).expect("its own"), bytes, "the signs are in memory");
    let before = read_bytes(&store);
    assert_eq!(chosen(&streamed, Some(own)), chosen(&resident, Some(signs)));
    assert_eq!(read_bytes(&store), before, "choices by signs read nothing");
    assert_eq!(chosen(&streamed, None), chosen(&resident, None));
    assert!(read_bytes(&store) > before, "choices by bounds read them");
    // Forks inherit it, and readers choose in the same way.
    let request = SelectRequest::query(&query).budget(Budget::tokens(400));
    let reader = streamed.reader().expect("a reader");
    let of_reader = reader.select(0, request).expect("selected");
    assert_eq!(of_reader.groups().collect::<Vec<_>>(), chosen(&streamed, None)[0]);
    assert_eq!(streamed.fork().expect("a fork").summary_residency(), SummaryResidency::BoundsStreamed);
}
