//! Stored summaries of selectors.
//!
//! - After any history of a sequence, they equal the summaries computed from its keys.
//! - If they are damaged, or belong to another adapter, the engine computes them from the keys.
//! - If keys are damaged, the engine reads them from another copy or reports the damage.

use half::f16;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::path::PathBuf;
use std::sync::Arc;
use stratakv::layout::{PlaneCodec, Rope};
use stratakv::retrieval::{
    Adapter, Codebook, KeyGroup, KeyShape, KvSwap, LayerAdapter, LeoAm, LowRankAdapter, ReconstructOptions, Selector,
    SelectorId, ShadowKv, SignBits, TransformCoded,
};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, Sequence, Store, StoreOptions,
    StoredSummary, TensorView,
};
use stratakv_testing::read_bytes;
use stratakv_tests::content::{LayerShape, Order, SequenceShape};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, check, copy_devices, device_dirs, fast_scratch, files, small_options};
use stratakv_tests::rng::{Rng, noise};

const LAYERS: usize = 2;

fn shape() -> SequenceShape {
    SequenceShape { layers: vec![LayerShape::full(2, 24), LayerShape::full(1, 48)], dtype: DType::F16, group: 4 }
}

fn low_rank(salt: usize) -> Arc<Adapter> {
    let layer = |at: usize| LowRankAdapter::new(48, 6, noise(salt + at, 48 * 6)).map(LayerAdapter::from);
    let layers = (0..LAYERS).map(layer).collect::<Result<_, _>>().expect("matrices");
    Arc::new(Adapter::new("low", 1, layers).expect("an adapter"))
}

fn codes() -> Arc<Adapter> {
    let layer = |salt: usize| {
        let packing = vec![vec![0, 1], vec![2]];
        let levels = vec![vec![-1.0, 1.0], vec![-1.0, -0.5, 0.5, 1.0], vec![0.0, 3.0]];
        let (forward, query) = (noise(salt, 144), noise(salt + 9, 144));
        Codebook::new(vec![0.1; 48], forward, query, packing, levels, 0.25).map(LayerAdapter::from)
    };
    let layers = (0..LAYERS).map(layer).collect::<Result<_, _>>().expect("codebooks");
    Arc::new(Adapter::new("codes", 1, layers).expect("an adapter"))
}

fn selectors() -> Vec<Arc<dyn Selector>> {
    vec![
        Arc::new(ShadowKv::default()),
        Arc::new(SignBits),
        Arc::new(KvSwap::new(low_rank(1))),
        Arc::new(TransformCoded::new(codes())),
        Arc::new(LeoAm::default()),
    ]
}

/// Returns the records computed from the keys of these tokens, by layer.
fn expected(selector: &dyn Selector, tokens: &[Vec<u64>]) -> Vec<Vec<u8>> {
    let shape = shape();
    let kind = selector.summaries().remove(0);
    let layer = |(index, seeds): (usize, &Vec<u64>)| {
        let spec = &shape.layers[index];
        let (kv_heads, key_dim) = (usize::from(spec.heads), usize::from(spec.key_dim));
        let keys = KeyShape { kv_heads, key_dim, group_tokens: shape.group, dtype: shape.dtype };
        let mut summary = kind.layer(index, keys).expect("a summary");
        for (group, seeds) in seeds.chunks_exact(shape.group).enumerate() {
            let [plane, _] = shape.block(index, seeds);
            summary.push(&KeyGroup::new(keys, &plane, group as u64).expect("a group"));
        }
        let mut out = Vec::new();
        summary.encode(0..summary.groups(), &mut out);
        out
    };
    tokens.iter().enumerate().map(layer).collect()
}

fn found(sequence: &Sequence, id: SelectorId) -> Vec<Vec<u8>> {
    let layer = |index| {
        let summaries = sequence.selector_summaries(id, index).expect("summaries");
        let mut out = Vec::new();
        summaries[0].encode(0..summaries[0].groups(), &mut out);
        out
    };
    (0..LAYERS).map(layer).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Append { tokens: usize },
    Commit,
    Truncate { part: usize },
    Fork,
    Attach { method: usize, stored: bool },
    Clean,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => prop_oneof![1_usize..12, 30_usize..300].prop_map(|tokens| Op::Append { tokens }),
        4 => Just(Op::Commit),
        2 => (0_usize..101).prop_map(|part| Op::Truncate { part }),
        1 => Just(Op::Fork),
        4 => (0_usize..5, any::<bool>()).prop_map(|(method, stored)| Op::Attach { method, stored }),
        1 => Just(Op::Clean),
        2 => Just(Op::Reopen),
    ]
}

struct World {
    store: Option<Store>,
    dirs: Vec<PathBuf>,
    sequence: Option<Sequence>,
    tokens: Vec<Vec<u64>>,
    attached: Vec<(usize, SelectorId)>,
    next: u64,
}

impl World {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Append { tokens } => {
                let seeds: Vec<u64> = (self.next..self.next + *tokens as u64).collect();
                self.next += *tokens as u64;
                for layer in 0..LAYERS {
                    shape().append(self.sequence(), layer, &seeds, Order::TokenMajor).expect("appended");
                    self.tokens[layer].extend(&seeds);
                }
            }
            Op::Commit => self.commit(),
            Op::Truncate { part } => {
                let kept = self.tokens[0].len() * part / 100;
                self.sequence().truncate(kept as u64).expect("cut");
                self.tokens.iter_mut().for_each(|layer| layer.truncate(kept));
            }
            Op::Fork => {
                let key = format!("fork-{}", self.next);
                self.next += 1;
                self.sequence = Some(self.sequence().fork_as(&key).expect("a fork"));
                self.attached.clear();
                self.commit();
            }
            Op::Attach { method, stored } => {
                let selector = selectors().remove(*method);
                let id = match stored {
                    true => self.sequence().attach_stored(selector),
                    false => self.sequence().attach(selector),
                };
                self.attached.push((*method, id.expect("attached")));
            }
            Op::Clean => {
                self.store.as_ref().expect("open").clean().expect("cleaned");
            }
            Op::Reopen => {
                self.commit();
                self.attached.clear();
                let key = self.sequence().key().to_owned();
                self.sequence = None;
                self.store.take().expect("open").close().expect("closed");
                let store = small_options(&self.dirs).open().expect("a store");
                self.sequence = Some(store.open_sequence(&key, OpenSequence::new()).expect("a sequence"));
                self.store = Some(store);
            }
        }
        let sequence = self.sequence.as_ref().expect("open");
        self.attached.iter().for_each(|(method, id)| {
            let selector = selectors().remove(*method);
            assert_eq!(found(sequence, *id), expected(selector.as_ref(), &self.tokens), "{}", selector.name());
        });
    }

    fn commit(&mut self) {
        self.sequence().commit(Durability::Sync).expect("committed");
    }

    fn sequence(&mut self) -> &mut Sequence {
        self.sequence.as_mut().expect("open")
    }
}

#[test]
fn what_comes_back_is_what_the_keys_give() {
    let mut runner = TestRunner::new(Config::with_cases(count_from_env("STRATAKV_TEST_SUMMARIES", 60) as u32));
    let strategy = (prop::collection::vec(op(), 1..24), any::<bool>());
    let outcome = runner.run(&strategy, |(ops, bounds)| {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 1);
        let store = small_options(&dirs).create(true).open().expect("a store");
        let layout = shape().layout().expect("a layout");
        store.put_adapter(&layout, &low_rank(1), 1).expect("stored");
        let options = CreateOptions::new().key("a");
        let options = if bounds { options.store_summary(StoredSummary::MinMax) } else { options };
        let sequence = store.create_sequence(&layout, options).expect("a sequence");
        let tokens = vec![Vec::new(); LAYERS];
        let (store, sequence) = (Some(store), Some(sequence));
        let mut world = World { store, dirs: dirs.clone(), sequence, tokens, attached: Vec::new(), next: 1 };
        ops.iter().for_each(|op| world.apply(op));
        world.apply(&Op::Reopen);
        (0..5).for_each(|method| world.apply(&Op::Attach { method, stored: false }));
        drop(world);
        assert_clean(&dirs, "in the end");
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// Writes and closes a store with a sequence whose groups all have summaries. Returns its tokens by layer.
fn written(dirs: &[PathBuf], tokens: usize) -> Vec<Vec<u64>> {
    let store = small_options(dirs).create(true).open().expect("a store");
    let layout = shape().layout().expect("a layout");
    let copies = dirs.len() as u8;
    store.put_adapter(&layout, &codes(), copies).expect("stored");
    let options = CreateOptions::new().key("a").copies(copies);
    let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
    for selector in selectors() {
        sequence.attach_stored(selector).expect("attached");
    }
    let seeds: Vec<u64> = (0..tokens as u64).collect();
    for layer in 0..LAYERS {
        shape().append(&mut sequence, layer, &seeds, Order::TokenMajor).expect("appended");
    }
    sequence.commit(Durability::Sync).expect("committed");
    drop(sequence);
    store.close().expect("closed");
    vec![seeds; LAYERS]
}

#[test]
fn keys_are_not_read_where_summaries_are_stored() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let tokens = written(&dirs, 4000);
    let kv = 4000 * 2 * LAYERS as u64 * 48 * 2;
    let read = |selector: Arc<dyn Selector>| {
        let store = small_options(&dirs).open().expect("a store");
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
        let bytes = || store.status().devices[0].counters.read_bytes;
        let before = bytes();
        let id = sequence.attach(Arc::clone(&selector)).expect("attached");
        let own = bytes() - before;
        assert_eq!(found(&sequence, id), expected(selector.as_ref(), &tokens));
        own
    };
    for selector in selectors().into_iter().take(4) {
        let name = selector.name().to_owned();
        let bytes = read(selector);
        assert!(bytes > 0 && bytes < kv / 4, "{name}: {bytes} of {kv}");
    }
    // An adapter with the same name and version but other numbers needs summaries computed from the keys.
    assert!(read(Arc::new(KvSwap::new(low_rank(77)))) >= kv);
    // The sequence has no min/max records, so bounds are computed from the keys.
    assert!(read(Arc::new(LeoAm::default())) >= kv);
}

#[test]
fn damaged_summaries_are_recomputed_and_found() {
    damage_summaries(1);
}

/// Every copy is damaged at the same place.
#[test]
fn summaries_damaged_in_every_copy_keep_no_sequence_closed() {
    damage_summaries(2);
}

fn damage_summaries(copies: usize) {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), copies);
    let tokens = written(&dirs, 300);
    let segment = files(&dirs[0]).into_iter().filter(|file| file.starts_with("segments"));
    let mut rng = Rng(3);
    let (mut tried, mut opened) = (0, 0);
    for segment in segment {
        let whole = std::fs::read(dirs[0].join(&segment)).expect("a file");
        for at in (8192..whole.len() - 4096).step_by(1231).filter(|at| whole[*at] != 0) {
            let copy = root.path().join(format!("copy-{at}"));
            let copied = copy_devices(&dirs, &copy, &mut rng);
            for dir in &copied {
                let mut bytes = std::fs::read(dir.join(&segment)).expect("a file");
                // Copies of a frame have the same offset in this store.
                assert_eq!(bytes[at], whole[at], "byte {at}");
                bytes[at] ^= 0x10;
                std::fs::write(dir.join(&segment), bytes).expect("written");
            }
            tried += 1;
            assert!(!check(&copied).clean, "byte {at}");
            let store = small_options(&copied).open().expect("a store");
            // A damaged header prevents the open, and damaged keys prevent the attach. Both are reported.
            if let Ok(mut sequence) = store.open_sequence("a", OpenSequence::new()) {
                for selector in selectors() {
                    let Ok(id) = sequence.attach(Arc::clone(&selector)) else { continue };
                    opened += 1;
                    assert_eq!(found(&sequence, id), expected(selector.as_ref(), &tokens), "byte {at}");
                }
            }
            drop(store);
            // kvfsck waits until the background has released the lock.
            let _ = check(&copied);
            std::fs::remove_dir_all(copy).expect("removed");
        }
    }
    assert!(tried > 20 && opened > 3 * tried, "{opened} of {tried}");
}

/// Adapters with the same name and version but different numbers are two adapters, even in one sequence.
#[test]
fn adapters_are_told_apart_by_their_numbers() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 1);
    let tokens = written(&dirs, 100);
    let store = small_options(&dirs).open().expect("a store");
    let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
    let own: Vec<Arc<dyn Selector>> = vec![Arc::new(KvSwap::new(low_rank(1))), Arc::new(KvSwap::new(low_rank(77)))];
    let other = Adapter::new("codes", 1, codes().layers().iter().rev().cloned().collect()).expect("an adapter");
    let coded: Vec<Arc<dyn Selector>> =
        vec![Arc::new(TransformCoded::new(codes())), Arc::new(TransformCoded::new(Arc::new(other)))];
    for pair in [own, coded] {
        let ids: Vec<SelectorId> = pair.iter().map(|one| sequence.attach(Arc::clone(one)).expect("attached")).collect();
        let now: Vec<_> = ids.iter().map(|id| found(&sequence, *id)).collect();
        assert_ne!(now[0], now[1]);
        for (one, now) in pair.iter().zip(now) {
            assert_eq!(now, expected(one.as_ref(), &tokens));
        }
    }
}

/// A record beyond the limit of the format is not written. The summary is computed from the keys at each attach.
#[test]
fn records_beyond_the_limit_of_the_format_are_left_out() {
    const GROUP: usize = 128;
    const WIDTH: usize = 64;
    // A record has 2 bytes for each rank and token of a group.
    let rank = stratakv_format::frame::SUMMARY_RECORD_BYTES_MAX as usize / (2 * GROUP) + 1;
    let shape = SequenceShape { layers: vec![LayerShape::full(1, WIDTH as u16)], dtype: DType::F16, group: GROUP };
    let adapter = |rank| {
        let layer = LowRankAdapter::new(WIDTH, rank, noise(rank, WIDTH * rank)).expect("a matrix");
        Arc::new(Adapter::new("wide", 1, vec![layer.into()]).expect("an adapter"))
    };
    for (rank, fits) in [(8, true), (rank, false)] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 1);
        let options = || small_options(&dirs).memory_limit(ByteSize::mib(128)).segment_bytes(ByteSize::mib(32));
        let options = || options().frame_bytes(ByteSize::mib(4));
        let store = options().create(true).open().expect("a store");
        let layout = shape.layout().expect("a layout");
        let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("a")).expect("a sequence");
        sequence.attach_stored(Arc::new(KvSwap::new(adapter(rank)))).expect("attached");
        let seeds: Vec<u64> = (0..2 * GROUP as u64).collect();
        shape.append(&mut sequence, 0, &seeds, Order::TokenMajor).expect("appended");
        sequence.commit(Durability::Sync).expect("committed");
        drop(sequence);
        store.close().expect("closed");
        assert_clean(&dirs, "with wide records");
        let store = options().open().expect("a store");
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
        shape.check_all(&store, &sequence, |_| seeds.clone());
        let front = store.status().devices[0].counters.read_bytes;
        let mut sequence = sequence;
        sequence.attach(Arc::new(KvSwap::new(adapter(rank)))).expect("attached");
        let keys = (2 * GROUP * WIDTH * 2) as u64;
        assert_eq!(store.status().devices[0].counters.read_bytes - front < keys, fits, "rank {rank}");
    }
}

/// KV heads, head dim and groups of layers whose K planes are read without V planes if groups are large enough.
const HEADS: usize = 2;
const DIM: usize = 64;
const GROUPS: usize = 20;

fn large_options(dirs: &[PathBuf]) -> StoreOptions {
    small_options(dirs).memory_limit(ByteSize::mib(64)).segment_bytes(ByteSize::mib(8)).frame_bytes(ByteSize::mib(1))
}

/// Writes a sequence of two equal layers. Returns the keys, the values, and the landmarks computed during the appends.
fn large(dirs: &[PathBuf], group: usize, codec: PlaneCodec) -> (Vec<f16>, Vec<f16>, Vec<Vec<u8>>) {
    let store = large_options(dirs).create(true).open().expect("a store");
    let builder = KvLayout::builder().layers(LAYERS as u16).kv_heads(HEADS as u16).head_dim(DIM as u16).codec(codec);
    let layout = builder.group_tokens(group as u16).rope(Rope::new(DIM as u16, 10_000.0)).build().expect("a layout");
    let options = CreateOptions::new().key("a").copies(dirs.len() as u8);
    let mut sequence = store.create_sequence(&layout, options).expect("a sequence");
    let landmarks = sequence.attach(Arc::new(ShadowKv::default())).expect("attached");
    let tokens = GROUPS * group;
    let [keys, values] =
        [5, 6].map(|salt| noise(salt, tokens * HEADS * DIM).into_iter().map(f16::from_f32).collect::<Vec<_>>());
    let view = |rows| TensorView::token_major(rows, tokens, HEADS, DIM);
    for layer in 0..LAYERS {
        sequence.append(layer, view(&keys), view(&values)).expect("appended");
    }
    sequence.commit(Durability::Sync).expect("committed");
    let known = found(&sequence, landmarks);
    drop(sequence);
    store.close().expect("closed");
    (keys, values, known)
}

/// Calls `what` and returns the bytes that it read from the devices.
fn bytes_read(store: &Store, what: impl FnOnce()) -> u64 {
    let before = read_bytes(store);
    what();
    read_bytes(store) - before
}

#[test]
fn values_between_large_planes_of_keys_are_left_out() {
    // Stored bytes of K planes, in whole pages if they are read alone, and of blocks.
    for (group, codec, keys, block) in [
        (32, PlaneCodec::Raw, None, 16 << 10),
        (64, PlaneCodec::Raw, Some(16 << 10), 32 << 10),
        (128, PlaneCodec::Raw, Some(32 << 10), 64 << 10),
        // Half the bytes, plus ranges: 512 of keys, and two for each run of 32 values.
        (128, PlaneCodec::Int8, Some(20 << 10), 36 << 10),
    ] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 1);
        let (.., known) = large(&dirs, group, codec);
        let store = large_options(&dirs).open().expect("a store");
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
        let groups = (LAYERS * GROUPS) as u64;
        let keys = keys.unwrap_or(block);
        let mut id = None;
        let attached =
            bytes_read(&store, || id = Some(sequence.attach(Arc::new(ShadowKv::default())).expect("attached")));
        assert_eq!(attached, groups * keys, "groups of {group}, {codec:?}");
        assert_eq!(found(&sequence, id.expect("attached")), known, "groups of {group}, {codec:?}");
        // The keys are read twice, and the values of the tenth of the groups that is kept whole.
        let options = ReconstructOptions::default().rank(4).outlier_share(0.1);
        let rebuilt = bytes_read(&store, || sequence.reconstruct_keys(&options).expect("rebuilt"));
        assert_eq!(rebuilt, 2 * groups * keys + groups / 10 * (block - keys), "groups of {group}, {codec:?}");
    }
}

/// Changes a byte of a token's row wherever the segments of a device store it. Returns the number of changes.
fn damage_rows(dir: &std::path::Path, rows: &[f16], token: usize) -> usize {
    let row: Vec<u8> = rows[token * HEADS * DIM..][..DIM].iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut changed = 0;
    for file in files(dir).into_iter().filter(|file| file.starts_with("segments")) {
        let mut bytes = std::fs::read(dir.join(&file)).expect("a file");
        let places: Vec<usize> = (0..bytes.len() - row.len()).filter(|at| bytes[*at..].starts_with(&row)).collect();
        places.iter().for_each(|at| bytes[at + 7] ^= 0x10);
        changed += places.len();
        std::fs::write(dir.join(&file), bytes).expect("written");
    }
    changed
}

#[test]
fn damaged_values_fail_nothing_that_needs_keys() {
    // Keys of small groups are read together with the values, keys of large groups alone.
    for group in [8, 64] {
        let root = fast_scratch();
        let dirs = device_dirs(root.path(), 1);
        let (keys, values, known) = large(&dirs, group, PlaneCodec::Raw);
        let attach = |sequence: &mut Sequence| sequence.attach(Arc::new(ShadowKv::default()));
        assert_eq!(damage_rows(&dirs[0], &values, 3 * group), LAYERS);
        let store = large_options(&dirs).open().expect("a store");
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
        let id = attach(&mut sequence).expect("no value is needed");
        assert_eq!(found(&sequence, id), known);
        let rebuild = |share| ReconstructOptions::default().rank(4).outlier_share(share);
        sequence.reconstruct_keys(&rebuild(0.0)).expect("no value is needed");
        let refused = sequence.reconstruct_keys(&rebuild(1.0)).expect_err("all values are needed");
        assert_eq!(refused.kind(), ErrorKind::Corruption);
        drop(sequence);
        store.close().expect("closed");
        assert_eq!(damage_rows(&dirs[0], &keys, 5 * group), LAYERS);
        let store = large_options(&dirs).open().expect("a store");
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
        let refused = attach(&mut sequence).expect_err("keys are needed");
        assert_eq!(refused.kind(), ErrorKind::Corruption);
    }
}

#[test]
fn damaged_keys_are_read_from_another_copy_alone() {
    let root = fast_scratch();
    let dirs = device_dirs(root.path(), 2);
    let (keys, values, known) = large(&dirs, 64, PlaneCodec::Raw);
    // One group's keys are damaged in the first copy, its values in both.
    for (at, dir) in dirs.iter().enumerate() {
        assert_eq!(damage_rows(dir, &values, 3 * 64), LAYERS);
        if at == 0 {
            assert_eq!(damage_rows(dir, &keys, 3 * 64), LAYERS);
        }
    }
    let store = large_options(&dirs).open().expect("a store");
    let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("a sequence");
    let id = sequence.attach(Arc::new(ShadowKv::default())).expect("another copy has the keys");
    assert_eq!(found(&sequence, id), known);
}
