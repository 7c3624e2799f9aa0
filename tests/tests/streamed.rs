//! Streamed summaries.
//!
//! - After any history, selections equal the selections by resident summaries.
//! - A selection reads the records of one layer and frees them. Reads ahead are used once.
//! - Damaged records are read from another copy or computed from the keys.
//! - A pipeline over streamed records decodes the same bits.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::path::PathBuf;
use std::sync::Arc;
use stratakv::export::ImportOptions;
use stratakv::pipeline::{DecodeModel, Pipeline};
use stratakv::retrieval::{
    Adapter, HeadAggregation, KvSwap, LayerAdapter, LeoAm, LowRankAdapter, Quest, Selector, SelectorId, ShadowKv,
    SignBits,
};
use stratakv::{
    AttendOptions, Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence,
    SelectOptions, SelectRequest, Selection, Sequence, Store, StoredSummary, SummaryResidency, TensorView, attend,
};
use stratakv_testing::read_bytes;
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, device_dirs, each_flipped_byte, fast_scratch, small_options};
use stratakv_tests::rng::noise;

fn shape(dtype: DType) -> SequenceShape {
    let mut windowed = LayerShape::full(1, 16);
    windowed.window = Some(50);
    SequenceShape { layers: vec![LayerShape::full(2, 24), LayerShape::full(1, 48), windowed], dtype, group: 4 }
}

/// Returns the selectors, the ones by bounds first.
fn selectors() -> Vec<Arc<dyn Selector>> {
    let layer = |width: usize| LowRankAdapter::new(width, 4, noise(width, width * 4)).map(LayerAdapter::from);
    let layers = [48, 48, 16].map(layer).into_iter().collect::<Result<_, _>>().expect("matrices");
    let adapter = Arc::new(Adapter::new("low", 1, layers).expect("an adapter"));
    vec![
        Arc::new(Quest),
        Arc::new(LeoAm::default()),
        Arc::new(ShadowKv::default()),
        Arc::new(SignBits),
        Arc::new(KvSwap::new(adapter)),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Append { tokens: usize },
    Commit,
    Truncate { part: usize },
    Fork,
    Clean,
    Reopen,
    Ahead { layer: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => prop_oneof![1_usize..12, 30_usize..300].prop_map(|tokens| Op::Append { tokens }),
        4 => Just(Op::Commit),
        2 => (0_usize..101).prop_map(|part| Op::Truncate { part }),
        1 => Just(Op::Fork),
        1 => Just(Op::Clean),
        2 => Just(Op::Reopen),
        2 => (0_usize..3).prop_map(|layer| Op::Ahead { layer }),
    ]
}

/// A sequence in a store of its own.
struct World {
    store: Option<Store>,
    dirs: Vec<PathBuf>,
    sequence: Option<Sequence>,
    selectors: Vec<SelectorId>,
    summaries: SummaryResidency,
    /// True if records of selectors are stored with the groups.
    stored: bool,
    shape: SequenceShape,
    pipeline: Option<Pipeline>,
    next: u64,
}

impl World {
    fn new(
        root: &std::path::Path,
        (devices, copies): (usize, u8),
        summaries: (SummaryResidency, bool),
        shape: SequenceShape,
    ) -> Self {
        let (summaries, stored) = summaries;
        let dirs = device_dirs(root, devices);
        let store = small_options(&dirs).create(true).open().expect("a store");
        let options = CreateOptions::new()
            .key("a")
            .copies(copies)
            .store_summary(StoredSummary::MinMax)
            .summary_residency(summaries);
        let sequence = Some(store.create_sequence(&shape.layout().expect("a layout"), options).expect("a sequence"));
        let pipeline = Some(Pipeline::new(&store, Budget::All));
        let (store, selectors) = (Some(store), Vec::new());
        let mut world = Self { store, dirs, sequence, selectors, summaries, stored, shape, pipeline, next: 1 };
        world.attach();
        world
    }

    fn attach(&mut self) {
        let stored = self.stored;
        let attach = |selector| match stored {
            true => self.sequence().attach_stored(selector),
            false => self.sequence().attach(selector),
        };
        self.selectors = selectors().into_iter().map(attach).collect::<Result<_, _>>().expect("attached");
    }

    fn sequence(&mut self) -> &mut Sequence {
        self.sequence.as_mut().expect("open")
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Append { tokens } => {
                let seeds: Vec<u64> = (self.next..self.next + *tokens as u64).collect();
                self.next += *tokens as u64;
                let shape = self.shape.clone();
                for layer in 0..shape.layers.len() {
                    shape.append(self.sequence(), layer, &seeds, Order::TokenMajor).expect("appended");
                }
            }
            Op::Commit => self.sequence().commit(Durability::Sync).expect("committed"),
            Op::Truncate { part } => {
                let kept = self.sequence().len() * *part as u64 / 100;
                self.sequence().truncate(kept).expect("cut");
            }
            Op::Fork => {
                let key = format!("fork-{}", self.next);
                self.next += 1;
                self.sequence = Some(self.sequence().fork_as(&key).expect("a fork"));
                assert_eq!(self.sequence().summary_residency(), self.summaries);
                self.attach();
                self.apply(&Op::Commit);
            }
            Op::Clean => drop(self.store.as_ref().expect("open").clean().expect("cleaned")),
            Op::Reopen => {
                self.apply(&Op::Commit);
                let key = self.sequence().key().to_owned();
                (self.sequence, self.pipeline) = (None, None);
                self.store.take().expect("open").close().expect("closed");
                let store = small_options(&self.dirs).open().expect("a store");
                let options = OpenSequence::new().summary_residency(self.summaries);
                self.sequence = Some(store.open_sequence(&key, options).expect("a sequence"));
                self.pipeline = Some(Pipeline::new(&store, Budget::All));
                self.store = Some(store);
                self.attach();
            }
            Op::Ahead { layer } => {
                let (pipeline, sequence) = (self.pipeline.as_mut(), self.sequence.as_ref());
                pipeline.expect("open").stream(*layer, &[sequence.expect("open")]).expect("read ahead");
            }
        }
    }

    /// Returns the groups that each kind of selection selects, by layer.
    fn chosen(&mut self, seed: u64) -> Vec<Vec<u64>> {
        let groups = |view: Selection| view.groups().collect::<Vec<_>>();
        let (shape, selectors) = (self.shape.clone(), self.selectors.clone());
        let mut reader = self.sequence().reader().expect("a reader");
        let of_reader = reader.attach(self::selectors().remove(3)).expect("attached");
        let sequence = self.sequence.as_ref().expect("open");
        let mut chosen = Vec::new();
        if sequence.is_empty() {
            return chosen;
        }
        for layer in 0..shape.layers.len() {
            let query = shape.query(layer, seed);
            for share in [0.1, 0.5] {
                let budget = SelectOptions::new(Budget::share(share));
                chosen.push(groups(
                    sequence.select(layer, SelectRequest::query(&query).options(budget)).expect("selected"),
                ));
                assert_eq!(
                    chosen.last(),
                    Some(&groups(
                        reader.select(layer, SelectRequest::query(&query).options(budget)).expect("selected")
                    ))
                );
                for selector in &selectors {
                    for form in [HeadAggregation::Sum, HeadAggregation::Softmax, HeadAggregation::GroupSoftmax] {
                        let options = budget.aggregation(form).recent(3);
                        let view =
                            sequence.select(layer, SelectRequest::query(&query).options(options).selector(*selector));
                        chosen.push(groups(view.expect("selected")));
                    }
                }
                let own = sequence
                    .select(layer, SelectRequest::query(&query).options(budget).selector(selectors[3]))
                    .map(groups)
                    .expect("selected");
                assert_eq!(
                    reader
                        .select(layer, SelectRequest::query(&query).options(budget).selector(of_reader))
                        .map(groups)
                        .expect("selected"),
                    own
                );
            }
        }
        chosen
    }
}

#[test]
fn selections_are_those_of_records_in_memory() {
    let mut runner = TestRunner::new(Config::with_cases(count_from_env("STRATAKV_TEST_STREAMED", 32) as u32));
    let dtype = prop_oneof![Just(DType::F16), Just(DType::Bf16), Just(DType::F32)];
    let strategy = (prop::collection::vec(op(), 1..24), (1_usize..4, 1_u8..3), dtype, any::<bool>());
    let outcome = runner.run(&strategy, |(ops, (devices, copies), dtype, stored)| {
        let (first, second) = (fast_scratch(), fast_scratch());
        let copies = copies.min(devices as u8);
        let mut streamed =
            World::new(first.path(), (devices, copies), (SummaryResidency::Streamed, stored), shape(dtype));
        let mut resident = World::new(second.path(), (1, 1), (SummaryResidency::Resident, stored), shape(dtype));
        for (at, op) in ops.iter().chain([&Op::Reopen]).enumerate() {
            streamed.apply(op);
            resident.apply(op);
            prop_assert_eq!(streamed.chosen(at as u64), resident.chosen(at as u64), "after {:?}", op);
            prop_assert_eq!(streamed.sequence().summary_bytes(), 0);
        }
        for at in 0..2 {
            let selector = streamed.selectors[at];
            prop_assert_eq!(streamed.sequence().selector_bytes(selector).expect("its own"), 0);
        }
        // The stored records also serve an open with resident summaries.
        let dirs = streamed.dirs.clone();
        streamed.summaries = SummaryResidency::Resident;
        streamed.apply(&Op::Reopen);
        prop_assert_eq!(streamed.chosen(77), resident.chosen(77));
        drop(streamed);
        assert_clean(&dirs, "in the end");
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

const TOKENS: usize = 4096;
const HEADS: usize = 4;
const DIM: usize = 64;

fn wide(layers: usize, group: usize) -> KvLayout {
    let layout = KvLayout::builder().layers(layers as u16).kv_heads(HEADS as u16).head_dim(DIM as u16);
    layout.dtype(DType::F16).group_tokens(group as u16).build().expect("a layout")
}

/// Writes and closes a store with a committed sequence of [`TOKENS`] tokens.
fn written(dirs: &[PathBuf], layout: &KvLayout, options: CreateOptions) {
    let store = roomy(dirs).create(true).open().expect("a store");
    let mut sequence = store.create_sequence(layout, options.key("a")).expect("a sequence");
    for layer in 0..layout.layers() {
        let (keys, values) = (noise(layer, TOKENS * HEADS * DIM), noise(99, TOKENS * HEADS * DIM));
        let view = |numbers| TensorView::token_major(numbers, TOKENS, HEADS, DIM);
        sequence.append(layer, view(&keys), view(&values)).expect("appended");
    }
    sequence.commit(Durability::Sync).expect("committed");
    drop(sequence);
    store.close().expect("closed");
}

fn roomy(dirs: &[PathBuf]) -> stratakv::StoreOptions {
    let options = small_options(dirs).memory_limit(ByteSize::mib(64)).segment_bytes(ByteSize::mib(32));
    options.frame_bytes(ByteSize::mib(2))
}

fn streamed(store: &Store) -> Sequence {
    store.open_sequence("a", OpenSequence::new().summary_residency(SummaryResidency::Streamed)).expect("a sequence")
}

/// LeoAM's transfer: the selected share of a layer's keys and values, plus two keys for each n' keys and values.
#[test]
fn a_step_transfers_its_share_and_the_records() {
    for group in [32, 64] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 2);
        let layout = wide(2, group);
        written(&dirs, &layout, CreateOptions::new().store_summary(StoredSummary::MinMax));
        let store = roomy(&dirs).open().expect("a store");
        let before = read_bytes(&store);
        let mut sequence = streamed(&store);
        // The open read only headers.
        let (kv, read) = ((TOKENS * HEADS * DIM * 2 * 2) as u64, read_bytes(&store) - before);
        assert!(read <= 2 * kv / group as u64 / 4, "{read} bytes at opening");
        let leoam = sequence.attach(Arc::new(LeoAm::default())).expect("attached");
        let query = noise(5, 2 * HEADS * DIM);
        let before = read_bytes(&store);
        let chosen = TOKENS / 10 / group * group;
        let budget = Budget::tokens(chosen);
        for layer in 0..2 {
            let view =
                sequence.select(layer, SelectRequest::query(&query).options(budget).selector(leoam)).expect("selected");
            assert_eq!(view.groups().count() * group, chosen);
            let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            batch.get(0).expect("blocks");
        }
        let moved = (read_bytes(&store) - before) as f64 / (2 * kv) as f64;
        let expected = chosen as f64 / TOKENS as f64 + 1.0 / group as f64;
        assert!((moved / expected - 1.0).abs() <= 0.05, "{moved} of keys and values, {expected} expected");
    }
}

#[test]
fn memory_is_that_of_one_layer_at_a_time() {
    const LAYERS: usize = 12;
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = wide(LAYERS, 8);
    written(&dirs, &layout, CreateOptions::new().store_summary(StoredSummary::MinMax));
    let layer = (TOKENS * HEADS * DIM * 2 * 2 / 8) as u64;
    let query = noise(5, 2 * HEADS * DIM);
    let summaries = |store: &Store| {
        let memory = store.status().memory;
        memory.categories.iter().find(|c| c.category == stratakv::metrics::Category::Summaries).map(|c| c.used_bytes)
    };
    let store = roomy(&dirs).open().expect("a store");
    let resident = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
    assert!(resident.summary_bytes() >= layer * LAYERS as u64);
    assert!(summaries(&store).expect("a category") as u64 >= layer * LAYERS as u64);
    let wanted: Vec<Vec<u64>> = (0..LAYERS)
        .map(|layer| {
            resident
                .select(layer, SelectRequest::query(&query).budget(Budget::tokens(400)))
                .expect("selected")
                .groups()
                .collect()
        })
        .collect();
    drop(resident);
    store.close().expect("closed");
    // The limit is less than the records of all layers take.
    let limit = ByteSize(6 << 20);
    assert!(limit.0 / 2 < layer * LAYERS as u64);
    let store = roomy(&dirs).memory_limit(limit).open().expect("a store");
    assert_eq!(store.open_sequence("a", OpenSequence::new()).expect_err("too much").kind(), ErrorKind::MemoryLimit);
    let mut sequence = streamed(&store);
    let opened = summaries(&store).expect("a category");
    let leoam = sequence.attach(Arc::new(LeoAm::default())).expect("attached");
    for (layer, wanted) in wanted.iter().enumerate() {
        let view = sequence.select(layer, SelectRequest::query(&query).budget(Budget::tokens(400))).expect("selected");
        assert_eq!(view.groups().collect::<Vec<_>>(), *wanted);
        sequence
            .select(layer, SelectRequest::query(&query).budget(Budget::tokens(400)).selector(leoam))
            .expect("selected");
        assert_eq!(summaries(&store).expect("a category"), opened, "the selection frees its records");
    }
    assert!(store.status().memory.peak_bytes as u64 <= limit.0);
}

#[test]
fn reads_ahead_are_used_once_and_freed() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = wide(3, 8);
    written(&dirs, &layout, CreateOptions::new().store_summary(StoredSummary::MinMax));
    let store = roomy(&dirs).open().expect("a store");
    let sequence = streamed(&store);
    let query = noise(5, 2 * HEADS * DIM);
    let select = |layer: usize| {
        sequence.select(layer, SelectRequest::query(&query).budget(Budget::tokens(64))).expect("selected")
    };
    let alone = |layer: usize| {
        let before = read_bytes(&store);
        select(layer);
        read_bytes(&store) - before
    };
    let records = alone(0);
    assert!(records >= (TOKENS * HEADS * DIM * 2 * 2 / 8) as u64);
    let mut pipeline = Pipeline::new(&store, Budget::tokens(64));
    pipeline.stream(1, &[&sequence]).expect("read ahead");
    pipeline.stream(1, &[&sequence]).expect("once");
    assert_eq!(pipeline.report().record_bytes, records);
    select(1);
    // The first selection is that of the predicted query, the second that of the true one.
    assert_eq!(alone(1), 0);
    pipeline.read(1, &[select(1)]).expect("read");
    let mut out = vec![0.0; 2 * HEADS * DIM];
    pipeline.attend(1, &[&query], &AttendOptions::default(), &mut [&mut out]).expect("attended");
    let mut direct = vec![0.0; 2 * HEADS * DIM];
    let view = select(1);
    let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
    attend(&query, &view, batch.get(0).expect("blocks"), &mut direct).expect("attended");
    assert_eq!(out, direct);
    assert_eq!(alone(1), records, "freed when the layer was read");
    // The pipeline is dropped while its read is in flight.
    let mut other = Pipeline::new(&store, Budget::tokens(64));
    other.stream(2, &[&sequence]).expect("read ahead");
    drop(other);
    assert_eq!(select(2).groups().count(), 8);
}

/// With groups of one token, a layer's records in a frame are as long as its keys and values, and longer than a buffer.
#[test]
fn records_longer_than_a_buffer_are_read_as_well() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let open = |limit| {
        let options = small_options(&dirs).memory_limit(ByteSize::mib(limit)).segment_bytes(ByteSize::mib(32));
        options.frame_bytes(ByteSize::mib(4)).create(true).open().expect("a store")
    };
    let store = open(128);
    let options = CreateOptions::new().key("a").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&wide(1, 1), options).expect("a sequence");
    let rows = noise(7, 2 * TOKENS * HEADS * DIM);
    let view = TensorView::token_major(&rows, 2 * TOKENS, HEADS, DIM);
    sequence.append(0, view, view).expect("appended");
    sequence.commit(Durability::Sync).expect("committed");
    let query = noise(5, 2 * HEADS * DIM);
    let chosen = |sequence: &Sequence| -> Vec<u64> {
        sequence
            .select(0, SelectRequest::query(&query).budget(Budget::tokens(100)))
            .expect("selected")
            .groups()
            .collect()
    };
    let expected = chosen(&sequence);
    drop(sequence);
    let before = read_bytes(&store);
    let sequence = streamed(&store);
    assert_eq!(chosen(&sequence), expected);
    assert!(read_bytes(&store) - before >= (2 * TOKENS * HEADS * DIM * 2 * 2) as u64, "records are read");
    drop(sequence);
    store.close().expect("closed");
}

/// The import compares the records with the keys.
#[test]
fn a_sequence_with_streamed_records_is_exported_and_imported() {
    let (root, other) = (fast_scratch(), fast_scratch());
    let dirs = device_dirs(root.path(), 2);
    let layout = wide(2, 8);
    written(&dirs, &layout, CreateOptions::new().store_summary(StoredSummary::MinMax));
    let store = roomy(&dirs).open().expect("a store");
    let mut sequence = streamed(&store);
    // The sequence also has groups in memory, and a tail.
    let rows = noise(3, 27 * HEADS * DIM);
    for layer in 0..2 {
        let view = TensorView::token_major(&rows, 27, HEADS, DIM);
        sequence.append(layer, view, view).expect("appended");
    }
    let mut file = Vec::new();
    sequence.export(&mut file).expect("exported");
    let target = roomy(&device_dirs(other.path(), 1)).create(true).open().expect("a store");
    let imported = target.import(&file[..], &layout, ImportOptions::new()).expect("imported");
    assert!(imported.summary_bytes() > 0);
    let query = noise(5, 2 * HEADS * DIM);
    let chosen = |sequence: &Sequence| -> Vec<u64> {
        sequence
            .select(1, SelectRequest::query(&query).budget(Budget::tokens(100)))
            .expect("selected")
            .groups()
            .collect()
    };
    assert_eq!(chosen(&imported), chosen(&sequence));
}

/// A model that keeps its hidden state, one row per sequence, and predicts the next layer's query from it.
struct Model {
    hidden: Vec<Vec<f32>>,
    leoam: Vec<Option<SelectorId>>,
}

impl DecodeModel for Model {
    fn project(&mut self, layer: usize, sequences: &mut [&mut Sequence]) -> stratakv::Result<Vec<Vec<f32>>> {
        for (sequence, hidden) in sequences.iter_mut().zip(&self.hidden) {
            let token = TensorView::token_major(hidden, 1, HEADS, DIM);
            sequence.append(layer, token, token)?;
        }
        let turned = |row: &Vec<f32>| row.iter().map(|x| x + 0.01 * layer as f32).collect();
        Ok(self.hidden.iter().map(turned).collect())
    }

    fn predict(&mut self, _next: usize) -> Option<Vec<Vec<f32>>> {
        Some(self.hidden.clone())
    }

    fn finish(&mut self, _layer: usize, attended: &[Vec<f32>]) -> stratakv::Result<()> {
        for (hidden, attended) in self.hidden.iter_mut().zip(attended) {
            hidden.iter_mut().zip(attended).for_each(|(h, a)| *h = 0.9 * *h + 0.1 * a);
        }
        Ok(())
    }

    fn select(&self, sequence: &Sequence, layer: usize, request: SelectRequest<'_>) -> stratakv::Result<Selection> {
        let leoam = self.leoam[usize::from(sequence.key() == "1")];
        sequence.select(layer, leoam.map_or(request, |leoam| request.selector(leoam)))
    }
}

/// Decodes two sequences through a pipeline. Returns the last hidden states and the bytes of records read ahead.
fn decoded(dirs: &[PathBuf], limit: ByteSize, summaries: SummaryResidency, with_leoam: bool) -> (Vec<Vec<f32>>, u64) {
    let store = roomy(dirs).memory_limit(limit).open().expect("a store");
    let open =
        |key: &str| store.open_sequence(key, OpenSequence::new().summary_residency(summaries)).expect("a sequence");
    let (mut one, mut two) = (open("0"), open("1"));
    let attach =
        |sequence: &mut Sequence| with_leoam.then(|| sequence.attach(Arc::new(LeoAm::default())).expect("attached"));
    let leoam = vec![attach(&mut one), attach(&mut two)];
    let mut model = Model { hidden: vec![noise(1, HEADS * DIM), noise(2, HEADS * DIM)], leoam };
    let mut pipeline = Pipeline::new(&store, Budget::tokens(200));
    for step in 0..12 {
        pipeline.decode(&mut [&mut one, &mut two], &mut model).expect("a step");
        if step == 6 {
            one.commit(Durability::Lazy).expect("committed");
        }
    }
    assert!(store.status().memory.peak_bytes as u64 <= limit.0);
    // The next run must start with the same tokens.
    one.truncate(1024).and_then(|()| one.commit(Durability::Sync)).expect("cut back");
    (model.hidden, pipeline.report().record_bytes)
}

#[test]
fn a_pipeline_over_streamed_records_decodes_the_same() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 2);
    let layout = wide(4, 8);
    let store = roomy(&dirs).create(true).open().expect("a store");
    for key in ["0", "1"] {
        let options = CreateOptions::new().key(key).store_summary(StoredSummary::MinMax);
        let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
        for layer in 0..4 {
            let rows = noise(layer, 1024 * HEADS * DIM);
            let view = TensorView::token_major(&rows, 1024, HEADS, DIM);
            sequence.append(layer, view, view).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
    }
    store.close().expect("closed");
    for with_leoam in [false, true] {
        let roomy = ByteSize::mib(64);
        let (expected, none) = decoded(&dirs, roomy, SummaryResidency::Resident, with_leoam);
        assert_eq!(none, 0);
        let (found, ahead) = decoded(&dirs, roomy, SummaryResidency::Streamed, with_leoam);
        assert!(found == expected && ahead > 0, "{ahead} bytes ahead");
        // With little memory, reads ahead are dropped, and no read waits for buffers that its own pipeline holds.
        let (found, _) = decoded(&dirs, ByteSize::mib(7), SummaryResidency::Streamed, with_leoam);
        assert!(found == expected, "in little memory");
    }
}

/// Damages one byte after another over all segments.
#[test]
fn damaged_records_come_from_another_copy_or_from_the_keys() {
    for copies in [1, 2] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), copies);
        let small = shape(DType::F16);
        let store = small_options(&dirs).create(true).open().expect("a store");
        let options = CreateOptions::new().key("a").store_summary(StoredSummary::MinMax).copies(copies as u8);
        let mut sequence = store.create_sequence(&small.layout().expect("a layout"), options).expect("a sequence");
        let seeds: Vec<u64> = (0..300).collect();
        for layer in 0..3 {
            small.append(&mut sequence, layer, &seeds, Order::TokenMajor).expect("appended");
        }
        sequence.commit(Durability::Sync).expect("committed");
        let chosen = |sequence: &Sequence| -> stratakv::Result<Vec<Vec<u64>>> {
            let one =
                |layer| sequence.select(layer, SelectRequest::query(&small.query(layer, 3)).budget(Budget::tokens(40)));
            (0..3).map(|layer| Ok(one(layer)?.groups().collect())).collect()
        };
        let expected = chosen(&sequence).expect("selected");
        drop(sequence);
        store.close().expect("closed");
        let (mut tried, mut hit) = (0, 0);
        each_flipped_byte(root.path(), &dirs, |at, copied| {
            let store = small_options(copied).open().expect("a store");
            let open = |summaries| store.open_sequence("a", OpenSequence::new().summary_residency(summaries));
            tried += 1;
            let in_memory = open(SummaryResidency::Resident).map(drop);
            match open(SummaryResidency::Streamed) {
                Ok(sequence) => assert_eq!(chosen(&sequence).expect("selected"), expected, "byte {at}"),
                Err(e) => assert!(copies == 1 && e.kind() == ErrorKind::Corruption, "{e}"),
            }
            // An open with resident summaries refuses damaged records. Streamed records are computed from the keys.
            let counters: Vec<_> = store.status().devices.iter().map(|d| d.counters).collect();
            let seen = counters.iter().any(|c| c.checksum_failures > 0);
            hit += usize::from(seen);
            if copies == 1 && seen {
                assert_eq!(in_memory.expect_err("damaged records").kind(), ErrorKind::Corruption);
            }
        });
        assert!(tried > 20 && hit > 3, "{hit} of {tried}");
    }
}

/// Header and records of some of these sequences end at the end of a page. The state then begins where the front ends.
#[test]
fn an_empty_caller_state_behind_unread_records_opens() {
    const KEYS: usize = 4;
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).dtype(DType::F16).group_tokens(4);
    let layout = layout.build().expect("a layout");
    // A record has at least 128 bytes, and up to 20 of them fill a page. The length of the key fits the rest.
    let lengths = || (1..=20_usize).flat_map(|groups| (KEYS..KEYS + 256).step_by(8).map(move |key| (groups, key)));
    let key = |(groups, length): (usize, usize)| format!("{groups:0length$}");
    let store = roomy(&dirs).create(true).open().expect("a store");
    for (groups, length) in lengths() {
        let options = CreateOptions::new().key(key((groups, length))).store_summary(StoredSummary::MinMax);
        let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
        let rows = noise(groups, groups * 4 * DIM);
        let view = TensorView::token_major(&rows, groups * 4, 1, DIM);
        sequence.append(0, view, view).expect("appended");
        sequence.commit_with(b"", Durability::Sync).expect("committed");
    }
    store.close().expect("closed");
    let store = roomy(&dirs).open().expect("a store");
    for (groups, length) in lengths() {
        for summaries in [SummaryResidency::Streamed, SummaryResidency::Resident] {
            let options = OpenSequence::new().summary_residency(summaries);
            let sequence = store.open_sequence(key((groups, length)).as_str(), options).expect("a sequence");
            assert_eq!((sequence.len(), sequence.caller_state()), (groups as u64 * 4, Some(&b""[..])), "{summaries:?}");
        }
    }
    store.close().expect("closed");
    assert_clean(&dirs, "with empty states");
}

#[test]
fn sequences_without_records_are_refused() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let small = shape(DType::F16);
    let store = small_options(&dirs).create(true).open().expect("a store");
    let options = CreateOptions::new().key("none").summary_residency(SummaryResidency::Streamed);
    let mut sequence = store.create_sequence(&small.layout().expect("a layout"), options).expect("a sequence");
    let refused = |e: stratakv::Error| assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    refused(sequence.attach(Arc::new(LeoAm::default())).expect_err("no records"));
    small.append(&mut sequence, 0, &(0..40).collect::<Vec<_>>(), Order::TokenMajor).expect("appended");
    let query = small.query(0, 1);
    refused(
        sequence.select(0, SelectRequest::query(&query).budget(Budget::tokens(8))).map(drop).expect_err("no records"),
    );
    assert_eq!(
        sequence.select(0, SelectRequest::query(&query).budget(Budget::All)).expect("selected").groups().count(),
        10
    );
    Pipeline::new(&store, Budget::All).stream(0, &[&sequence]).expect("nothing to read");

    let options = CreateOptions::new()
        .key("empty")
        .store_summary(StoredSummary::MinMax)
        .summary_residency(SummaryResidency::Streamed);
    let mut empty = store.create_sequence(&small.layout().expect("a layout"), options).expect("a sequence");
    let leoam = empty.attach(Arc::new(LeoAm::default())).expect("attached");
    refused(
        empty
            .select(0, SelectRequest::query(&query).budget(Budget::tokens(8)).selector(leoam))
            .map(drop)
            .expect_err("no tokens"),
    );
    Pipeline::new(&store, Budget::All).stream(0, &[&empty]).expect("nothing to read");
    empty.commit(Durability::Sync).expect("committed");
    drop(empty);
    let open = |key| store.open_sequence(key, OpenSequence::new().summary_residency(SummaryResidency::Streamed));
    assert!(open("empty").expect("a sequence").is_empty());
    assert_eq!(open("nobody").expect_err("no such key").kind(), ErrorKind::NotFound);
}
