//! Sequences with plane codecs.
//!
//! - After any history, a group equals its tokens encoded and decoded by the public coder.
//! - Tokens of the tail are exact until a group includes them. A truncation keeps decoded values.
//! - Blocks have the size and the error bound that the layout documents.
//! - Invalid ranges under valid checksums are damage with a place.

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, VALUE_RANGE_CHANNELS, decode, encode, error_bound};
use stratakv::export::ImportOptions;
use stratakv::layout::{LayerSpec, PlaneCodec};
use stratakv::options::CacheOptions;
use stratakv::retrieval::{LeoAm, Quest, ReconstructOptions, Selector, ShadowKv};
use stratakv::{
    ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, PlaneSet, SelectRequest, Sequence,
    Store, StoredSummary, TensorView, attend,
};
use stratakv_tests::count_from_env;
use stratakv_tests::damage::{Image, seal};
use stratakv_tests::disk::{assert_clean, check, device_dirs, fast_scratch, files, small_options};
use stratakv_tests::rng::mix;

const RAW: [PlaneCodec; 2] = [PlaneCodec::Raw; 2];

/// The heads, key dim, value dim, window and codecs of a layer.
#[derive(Clone, Copy, Debug)]
struct Layer {
    heads: usize,
    key_dim: usize,
    value_dim: usize,
    window: Option<u32>,
    codecs: [PlaneCodec; 2],
}

#[derive(Clone, Debug)]
struct Shape {
    layers: Vec<Layer>,
    dtype: DType,
    group: usize,
    separate: bool,
}

impl Shape {
    fn layout(&self) -> KvLayout {
        let spec = |layer: &Layer| {
            let (heads, dim) = (layer.heads as u16, layer.key_dim as u16);
            let spec = match (heads, layer.window) {
                (0, _) => return LayerSpec::none(),
                (_, None) => LayerSpec::full(heads, dim),
                (_, Some(window)) => LayerSpec::sliding(heads, dim, window),
            };
            spec.value_dim(layer.value_dim as u16).codecs(layer.codecs[0], layer.codecs[1])
        };
        let builder = KvLayout::builder().layer_specs(self.layers.iter().map(spec)).dtype(self.dtype);
        builder.group_tokens(self.group as u16).separate_planes(self.separate).build().expect("a layout")
    }

    fn plane(&self, layer: usize, plane: usize) -> PlaneShape {
        let own = &self.layers[layer];
        PlaneShape {
            kind: [PlaneKind::Keys, PlaneKind::Values][plane],
            heads: own.heads,
            tokens: self.group,
            dims: [own.key_dim, own.value_dim][plane],
            dtype: self.dtype,
        }
    }

    fn kv_layers(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|layer| self.layers[*layer].heads > 0).collect()
    }
}

fn shapes() -> Vec<Shape> {
    use PlaneCodec::{Int4, Int8, Raw};
    let layer = |heads, key_dim, value_dim, codecs| Layer { heads, key_dim, value_dim, window: None, codecs };
    let none = Layer { heads: 0, key_dim: 0, value_dim: 0, window: None, codecs: RAW };
    let shape = |layers: Vec<Layer>, dtype, group| Shape { layers, dtype, group, separate: false };
    vec![
        shape(vec![layer(2, 16, 16, [Int8, Int8]), layer(1, 40, 40, RAW)], DType::F16, 8),
        shape(vec![layer(2, 33, 70, [Int4, Int4]), none, layer(1, 24, 24, [Raw, Int8])], DType::Bf16, 8),
        // Blocks of several pages, V planes on pages of their own, a window, and a layer with keys only.
        Shape {
            separate: true,
            ..shape(
                vec![
                    Layer { window: Some(37), ..layer(4, 64, 64, [Int4, Raw]) },
                    layer(1, 96, 0, [Int8, Raw]),
                    layer(8, 128, 128, [Int8, Int4]),
                ],
                DType::F32,
                16,
            )
        },
        // Keys of four tokens stay raw, because int8 does not make them shorter than f16.
        shape(vec![layer(2, 64, 64, [Int8, Int8])], DType::F16, 4),
    ]
}

/// Returns an element of a token. Channels have different magnitudes.
fn element(seed: u64, layer: usize, plane: usize, i: usize) -> f32 {
    let x = mix(seed ^ mix((layer as u64) << 40 | (plane as u64) << 32 | i as u64));
    let size = [0.01, 1.0, 1.0, 30.0][i % 4];
    ((x >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * size + if i % 7 == 3 { 2.0 * size } else { 0.0 }
}

fn bytes_of(x: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

fn number(bytes: &[u8], dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        DType::F16 => f16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f64(),
    }
}

/// The content that a reader sees: the rows of keys and values `[heads, dim]` by layer and token.
#[derive(Clone, Debug)]
struct Model {
    shape: Shape,
    rows: Vec<Vec<[Vec<u8>; 2]>>,
}

impl Model {
    fn new(shape: &Shape) -> Self {
        Self { shape: shape.clone(), rows: vec![Vec::new(); shape.layers.len()] }
    }

    fn len(&self) -> usize {
        self.rows[self.shape.kv_layers()[0]].len()
    }

    fn truncate(&mut self, tokens: usize) {
        self.rows.iter_mut().for_each(|rows| rows.truncate(tokens));
    }

    /// Returns the current plane of a group.
    fn block(&self, layer: usize, group: usize, plane: usize) -> Vec<u8> {
        let own = &self.shape.layers[layer];
        let row = [own.key_dim, own.value_dim][plane] * self.shape.dtype.bytes();
        let rows = &self.rows[layer][group * self.shape.group..][..self.shape.group];
        (0..own.heads).flat_map(|head| rows.iter().flat_map(move |r| r[plane][head * row..][..row].to_vec())).collect()
    }

    /// Appends a token to each layer. Rounds the groups that it fills with the public coder.
    fn push(&mut self, seed: u64) {
        for layer in self.shape.kv_layers() {
            let own = self.shape.layers[layer];
            let row = |plane: usize| -> Vec<u8> {
                let count = own.heads * [own.key_dim, own.value_dim][plane];
                (0..count).flat_map(|i| bytes_of(element(seed, layer, plane, i), self.shape.dtype)).collect()
            };
            let row = [row(0), row(1)];
            self.rows[layer].push(row);
            if self.rows[layer].len().is_multiple_of(self.shape.group) {
                let group = self.rows[layer].len() / self.shape.group - 1;
                (0..2).for_each(|plane| self.round(layer, group, plane));
            }
        }
    }

    fn round(&mut self, layer: usize, group: usize, plane: usize) {
        let codec = match self.shape.layers[layer].codecs[plane] {
            PlaneCodec::Raw => return,
            PlaneCodec::Int8 => Codec::Int8,
            PlaneCodec::Int4 => Codec::Int4,
        };
        let shape = self.shape.plane(layer, plane);
        let plain = self.block(layer, group, plane);
        let (mut stored, mut back) = (Vec::new(), vec![0; plain.len()]);
        // The coder returns raw if the codec would save less than 5 %.
        let used = encode(codec, &shape, &plain, &mut stored).expect("a plane");
        decode(used, &shape, &stored, &mut back).expect("a plane");
        let row = shape.dims * self.shape.dtype.bytes();
        for (at, bytes) in back.chunks_exact(row).enumerate() {
            let (head, token) = (at / self.shape.group, group * self.shape.group + at % self.shape.group);
            self.rows[layer][token][plane][head * row..][..row].copy_from_slice(bytes);
        }
    }

    /// Compares everything that can be read of a sequence with the model.
    fn check(&self, store: &Store, sequence: &Sequence) {
        assert_eq!(sequence.len() as usize, self.len());
        for layer in self.shape.kv_layers().into_iter().filter(|_| self.len() > 0) {
            let own = self.shape.layers[layer];
            let view = sequence.select(layer, SelectRequest::all()).expect("a view");
            let batch = store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).expect("read");
            let blocks = batch.get(0).expect("blocks");
            for (nth, group) in view.groups().enumerate() {
                let (keys, values) = blocks.group(nth).expect("a group");
                assert!(keys == self.block(layer, group as usize, 0), "keys of layer {layer}, group {group}");
                assert!(values == self.block(layer, group as usize, 1), "values of layer {layer}, group {group}");
            }
            let query: Vec<f32> = (0..2 * own.heads * own.key_dim).map(|i| element(7, 9, 2, i) / 20.0).collect();
            let dim = if own.value_dim == 0 { own.key_dim } else { own.value_dim };
            let mut out = vec![0.0; 2 * own.heads * dim];
            attend(&query, &view, blocks, &mut out).expect("attention");
            let positions: Vec<usize> = view.positions().map(|at| at as usize).collect();
            for (head, out) in out.chunks_exact(dim).enumerate() {
                let query = &query[head * own.key_dim..][..own.key_dim];
                self.check_attention(layer, head / 2, query, &positions, out);
            }
            if own.value_dim > 0 {
                let values = view.groups().collect::<Vec<_>>();
                let alone = sequence
                    .select(layer, SelectRequest::groups(&values).planes(PlaneSet::ValuesOnly))
                    .expect("a view");
                let batch = store.read(&[&alone]).submit().and_then(|ticket| ticket.wait()).expect("read");
                for (nth, group) in values.iter().enumerate() {
                    let (keys, values) = batch.get(0).and_then(|blocks| blocks.group(nth)).expect("a group");
                    assert!(keys.is_empty() && values == self.block(layer, *group as usize, 1));
                }
            }
        }
    }

    fn check_attention(&self, layer: usize, head: usize, query: &[f32], positions: &[usize], out: &[f32]) {
        let own = self.shape.layers[layer];
        let row = |token: usize, plane: usize, dim: usize| {
            let size = self.shape.dtype.bytes();
            let row = &self.rows[layer][token][plane][head * dim * size..][..dim * size];
            row.chunks_exact(size).map(|bytes| number(bytes, self.shape.dtype)).collect::<Vec<f64>>()
        };
        let scale = 1.0 / (own.key_dim as f64).sqrt();
        let dot = |key: Vec<f64>| key.iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum::<f64>() * scale;
        let scores: Vec<f64> = positions.iter().map(|token| dot(row(*token, 0, own.key_dim))).collect();
        let most = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut want = vec![0.0; out.len()];
        for (token, weight) in positions.iter().zip(weights) {
            let value = if own.value_dim == 0 { row(*token, 0, own.key_dim) } else { row(*token, 1, own.value_dim) };
            want.iter_mut().zip(value).for_each(|(want, x)| *want += weight / total * x);
        }
        for (want, found) in want.iter().zip(out) {
            assert!((want - f64::from(*found)).abs() < 2e-3 * (1.0 + want.abs()), "layer {layer}: {found}, not {want}");
        }
    }
}

/// Appends tokens of these seeds to all layers, in one or two calls.
fn append(sequence: &mut Sequence, shape: &Shape, seeds: &[u64]) {
    for layer in shape.kv_layers() {
        let own = shape.layers[layer];
        for seeds in [&seeds[..seeds.len() / 3], &seeds[seeds.len() / 3..]] {
            let rows = |plane: usize, dim: usize| -> Vec<f32> {
                seeds.iter().flat_map(|seed| (0..own.heads * dim).map(|i| element(*seed, layer, plane, i))).collect()
            };
            let (keys, values) = (rows(0, own.key_dim), rows(1, own.value_dim));
            let keys = TensorView::token_major(&keys, seeds.len(), own.heads, own.key_dim);
            let values = match own.value_dim {
                0 => TensorView::empty(seeds.len()),
                dim => TensorView::token_major(&values, seeds.len(), own.heads, dim),
            };
            sequence.append(layer, keys, values).expect("appended");
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Truncate(f64),
    Commit,
    Fork,
    Reopen,
    Export,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop_oneof![1..4_usize, 1..90_usize].prop_map(Step::Append),
        2 => (0.0..1.0_f64).prop_map(Step::Truncate),
        3 => Just(Step::Commit),
        1 => Just(Step::Fork),
        2 => Just(Step::Reopen),
        1 => Just(Step::Export),
        1 => Just(Step::Compact),
    ]
}

fn open(dirs: &[PathBuf], cache: bool) -> Store {
    let options = small_options(dirs).segment_bytes(ByteSize::mib(1));
    let options = if cache { options.cache(CacheOptions::new(ByteSize::mib(2))) } else { options };
    options.open().expect("a store")
}

fn features(dirs: &[PathBuf]) -> Vec<u64> {
    let slot = |dir: &PathBuf| {
        let bytes = std::fs::read(dir.join("superblock")).expect("a superblock");
        stratakv_format::superblock::newest(&bytes).expect("a slot").features.incompat.get()
    };
    dirs.iter().map(slot).collect()
}

fn history(shape: &Shape, copies: u8, cache: bool, steps: &[Step]) {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), usize::from(copies));
    let mut store = open(&dirs, cache);
    let layout = shape.layout();
    let create = || CreateOptions::new().store_summary(StoredSummary::MinMax).copies(copies);
    let mut key = "first".to_owned();
    let mut sequence = store.create_sequence(&layout, create().key(&*key)).expect("created");
    let mut live = Model::new(shape);
    let mut durable: Option<(String, Model)> = None;
    let mut next = 0_u64;
    for (at, step) in steps.iter().chain([&Step::Commit, &Step::Reopen]).enumerate() {
        match step {
            Step::Append(tokens) => {
                let seeds: Vec<u64> = (next..next + *tokens as u64).collect();
                next += *tokens as u64;
                append(&mut sequence, shape, &seeds);
                seeds.iter().for_each(|seed| live.push(*seed));
            }
            Step::Truncate(share) => {
                let tokens = (live.len() as f64 * share) as usize;
                sequence.truncate(tokens as u64).expect("cut");
                live.truncate(tokens);
            }
            Step::Commit => {
                sequence.commit(Durability::Sync).expect("committed");
                durable = Some((key.clone(), live.clone()));
            }
            Step::Fork => {
                key = format!("{at}");
                sequence = sequence.fork_as(&key).expect("a fork");
            }
            Step::Reopen => {
                drop(sequence);
                store.close().expect("closed");
                assert_clean(&dirs, "between");
                store = open(&dirs, cache);
                let (kept, model) = durable.clone().unwrap_or_else(|| ("none".into(), Model::new(shape)));
                sequence = match store.open_sequence(&kept, OpenSequence::new().layout(&layout)) {
                    Ok(sequence) => sequence,
                    Err(e) => {
                        assert!(durable.is_none() && e.kind() == ErrorKind::NotFound, "{e}");
                        store.create_sequence(&layout, create().key("none")).expect("created")
                    }
                };
                (key, live) = (kept, model);
            }
            Step::Export => {
                let mut file = Vec::new();
                sequence.export(&mut file).expect("an export");
                let path = std::path::Path::new("session.skv");
                let report = kvfsck::check_reader(&file[..], file.len() as u64, path, &kvfsck::Options::default(), &());
                assert!(report.clean, "{}", report.to_text());
                key = format!("{at}");
                let options = ImportOptions::new().key(&*key).copies(copies);
                sequence = store.import(&file[..], &layout, options).expect("an import");
                durable = Some((key.clone(), live.clone()));
            }
            Step::Compact => {
                store.clean().expect("cleaned");
            }
        }
        live.check(&store, &sequence);
    }
    drop(sequence);
    store.close().expect("closed");
    assert_clean(&dirs, "at the end");
    let due = if shape.layers.iter().any(|layer| layer.codecs != RAW) { 5 } else { 1 };
    assert!(features(&dirs).iter().all(|found| found & 5 == due), "{:?}", features(&dirs));
}

#[test]
fn groups_are_what_the_coder_makes_of_them() {
    let strategy = (0..shapes().len(), 1..=2_u8, any::<bool>(), proptest::collection::vec(step(), 1..14));
    let config = Config {
        cases: count_from_env("STRATAKV_CODEC_CASES", 48) as u32,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&strategy, |(shape, copies, cache, steps)| {
            history(&shapes()[shape], copies, cache, &steps);
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
}

/// Writes and closes a store with one committed sequence `a` of `tokens` tokens.
fn stored(shape: &Shape, tokens: u64) -> (tempfile::TempDir, Vec<PathBuf>, Model) {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let options = CreateOptions::new().key("a").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&shape.layout(), options).expect("created");
    let mut model = Model::new(shape);
    let seeds: Vec<u64> = (0..tokens).collect();
    append(&mut sequence, shape, &seeds);
    seeds.iter().for_each(|seed| model.push(*seed));
    sequence.commit(Durability::Sync).expect("committed");
    drop(sequence);
    store.close().expect("closed");
    (scratch, dirs, model)
}

/// Blocks are as small as the layout says, and no element exceeds the documented error.
#[test]
fn blocks_are_smaller_and_elements_within_their_bound() {
    for (codec, bits, most) in [(PlaneCodec::Int8, 8, 0.66), (PlaneCodec::Int4, 4, 0.41)] {
        let layer = Layer { heads: 2, key_dim: 128, value_dim: 128, window: None, codecs: [codec; 2] };
        let shape = Shape { layers: vec![layer; 2], dtype: DType::F16, group: 8, separate: false };
        let (_scratch, dirs, model) = stored(&shape, 515);
        let store = open(&dirs, false);
        let sequence = store.open_sequence("a", OpenSequence::new()).expect("there");
        let layout = sequence.layout().clone();
        let share = layout.stored_token_bytes() / layout.token_bytes() as f64;
        assert!(share < most && share > most - 0.02, "{share}");
        let view = sequence.select(0, SelectRequest::all()).expect("a view");
        let ticket = store.read(&[&view]).submit().expect("a read");
        let useful = layout.stored_token_bytes() / 2.0 * 512.0;
        assert!((ticket.selected_bytes() as f64 - useful).abs() < 1.0, "{} {useful}", ticket.selected_bytes());
        drop(ticket);
        for plane in 0..2 {
            for group in 0..64 {
                let found = model.block(0, group, plane);
                let exact: Vec<f32> = (0..2 * 8 * 128)
                    .map(|at| {
                        let (head, token, i) = (at / (8 * 128), at / 128 % 8, at % 128);
                        let x = element((group * 8 + token) as u64, 0, plane, head * 128 + i);
                        f16::from_f32(x).to_f32()
                    })
                    .collect();
                for (at, bytes) in found.chunks_exact(2).enumerate() {
                    let (head, token, i) = (at / (8 * 128), at / 128 % 8, at % 128);
                    let peers: Vec<f32> = match plane {
                        0 => (0..8).map(|token| exact[(head * 8 + token) * 128 + i]).collect(),
                        _ => exact[(head * 8 + token) * 128 + i / VALUE_RANGE_CHANNELS * VALUE_RANGE_CHANNELS..]
                            [..VALUE_RANGE_CHANNELS]
                            .to_vec(),
                    };
                    let (low, high) = peers.iter().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
                    let bound = error_bound(bits, DType::F16, high - low, low.abs().max(high.abs()));
                    let off = (number(bytes, DType::F16) as f32 - exact[at]).abs();
                    assert!(off <= bound, "{off} over {bound}");
                }
            }
        }
        drop((view, sequence));
        store.close().expect("closed");
    }
}

/// Bounds hold for the decoded keys that attention reads, not for the appended ones.
#[test]
fn bounds_hold_for_decoded_keys() {
    for shape in shapes() {
        let (_scratch, dirs, model) = stored(&shape, 215);
        let store = open(&dirs, true);
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("there");
        // One selector uses the min/max records of the sequence, the other its keys.
        let selectors: [Arc<dyn Selector>; 2] = [Arc::new(Quest), Arc::new(LeoAm::default())];
        for selector in selectors {
            let id = sequence.attach(selector).expect("attached");
            for layer in shape.kv_layers() {
                let own = shape.layers[layer];
                let (width, element) = (own.heads * own.key_dim, shape.dtype.bytes());
                let records = &sequence.selector_summaries(id, layer).expect("summaries")[0];
                for group in 0..215 / shape.group {
                    let mut record = Vec::new();
                    records.encode(group..group + 1, &mut record);
                    let kind = if shape.dtype == DType::F16 { DType::F16 } else { DType::Bf16 };
                    let bound = |at: usize| number(&record[2 * at..2 * at + 2], kind);
                    let plane = model.block(layer, group, 0);
                    for seed in 0..6 {
                        for head in 0..own.heads {
                            let query: Vec<f64> =
                                (0..own.key_dim).map(|i| f64::from(self::element(seed, 3, 1, i))).collect();
                            let (mut lower, mut upper) = (0.0, 0.0);
                            for (i, q) in query.iter().enumerate() {
                                let (low, high) =
                                    (bound(head * own.key_dim + i) * q, bound(width + head * own.key_dim + i) * q);
                                (lower, upper) = (lower + low.min(high), upper + low.max(high));
                            }
                            for token in 0..shape.group {
                                let row = &plane[(head * shape.group + token) * own.key_dim * element..];
                                let key = row[..own.key_dim * element].chunks_exact(element);
                                let score: f64 = key.zip(&query).map(|(k, q)| number(k, shape.dtype) * q).sum();
                                let slack = 1e-9 * (1.0 + lower.abs().max(upper.abs()));
                                assert!(lower - slack <= score && score <= upper + slack, "{shape:?}");
                            }
                        }
                    }
                }
            }
        }
        drop(sequence);
        store.close().expect("closed");
    }
}

/// Low-rank keys are computed from decoded keys, values are decoded alone, and outliers are whole blocks.
#[test]
fn encoded_values_are_read_alone_with_reconstructed_keys() {
    use stratakv::layout::Rope;
    use stratakv::{Budget, SelectOptions};
    let layer = LayerSpec::full(2, 64).codecs(PlaneCodec::Int8, PlaneCodec::Int8).rope(Rope::new(64, 10_000.0));
    let layout = KvLayout::builder().layer_specs([layer]).group_tokens(8).build().expect("a layout");
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).expect("created");
    let tensor: Vec<f32> = (0..400 * 128).map(|i| element(i as u64 / 128, 0, 0, 1 + i % 128 * 28)).collect();
    let view = TensorView::token_major(&tensor, 400, 2, 64);
    sequence.append(0, view, view).expect("appended");
    sequence.commit(Durability::Sync).expect("committed");
    // Full rank reproduces the stored keys, except for a rounding to f16.
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(128).outlier_share(0.1)).expect("rebuilt");
    let selector = sequence.attach(Arc::new(ShadowKv::default())).expect("attached");
    let query: Vec<f32> = (0..4 * 64).map(|i| element(5, 1, 1, 1 + 28 * i)).collect();
    let whole = sequence.select(0, SelectRequest::all()).expect("a view");
    let options = SelectOptions::new(Budget::All).planes(PlaneSet::ReconstructedKeys);
    let rebuilt = sequence.select(0, SelectRequest::query(&query).options(options).selector(selector)).expect("a view");
    let batch = store.read(&[&whole, &rebuilt]).submit().and_then(|ticket| ticket.wait()).expect("read");
    let [mut all, mut out] = [vec![0.0; 256], vec![0.0; 256]];
    attend(&query, &whole, batch.get(0).expect("blocks"), &mut all).expect("attention");
    attend(&query, &rebuilt, batch.get(1).expect("blocks"), &mut out).expect("attention");
    for (all, out) in all.iter().zip(&out) {
        assert!((all - out).abs() < 2e-2 * (1.0 + all.abs()), "{all} {out}");
    }
}

#[test]
fn impossible_codecs_are_refused_by_name() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 1);
    let store = open(&dirs, false);
    let layout = |codec, dtype| {
        let builder = KvLayout::builder().layers(4).kv_heads(1).head_dim(64).dtype(dtype).codec(codec);
        builder.group_tokens(8).codec_share(0.5).build().expect("a layout")
    };
    let (plain, int8) = (layout(PlaneCodec::Raw, DType::F32), layout(PlaneCodec::Int8, DType::F32));
    // A share of 0.5 encodes every second layer.
    let coded: Vec<bool> = (0..4).map(|at| int8.codecs(at).expect("a layer") == [PlaneCodec::Int8; 2]).collect();
    assert_eq!(coded, [false, true, false, true]);
    let share = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).codec_share(1.5).build().unwrap_err();
    assert_eq!((share.kind(), share.to_string().contains("codec")), (ErrorKind::InvalidArgument, true), "{share}");

    let mut sequence = store.create_sequence(&int8, CreateOptions::new().key("a")).expect("created");
    let mut rows = vec![0.5_f32; 3 * 64];
    rows[70] = 1e38;
    let view = TensorView::token_major(&rows, 3, 1, 64);
    sequence.append(0, view, view).expect("a layer without a codec takes it");
    let refused = sequence.append(1, view, view).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    assert!(refused.to_string().contains("token 1") && refused.to_string().contains("codec"), "{refused}");
    assert_eq!(sequence.layer_len(1).expect("a layer"), 0);
    drop(sequence);

    let mut sequence = store.create_sequence(&int8, CreateOptions::new().key("a")).expect("created");
    let rows = vec![0.5_f32; 20 * 64];
    for layer in 0..4 {
        let view = TensorView::token_major(&rows, 20, 1, 64);
        sequence.append(layer, view, view).expect("appended");
    }
    sequence.commit(Durability::Sync).expect("committed");
    let mut file = Vec::new();
    sequence.export(&mut file).expect("exported");
    drop(sequence);
    let mismatch = store.open_sequence("a", OpenSequence::new().layout(&plain)).unwrap_err();
    assert_eq!(
        (mismatch.kind(), mismatch.to_string().contains("codec")),
        (ErrorKind::LayoutMismatch, true),
        "{mismatch}"
    );
    let mismatch = store.import(&file[..], &plain, ImportOptions::new().key("b")).unwrap_err();
    assert_eq!(
        (mismatch.kind(), mismatch.to_string().contains("codec")),
        (ErrorKind::LayoutMismatch, true),
        "{mismatch}"
    );
}

/// The feature bit is set with the first layout that needs it and stays set. Other stores do not have it.
#[test]
fn the_feature_is_named_from_the_first_codec_on() {
    let scratch = fast_scratch();
    let dirs = device_dirs(scratch.path(), 2);
    let store = open(&dirs, false);
    let layout = |codec| KvLayout::builder().layers(1).kv_heads(1).head_dim(64).codec(codec).build().expect("a layout");
    let rows = vec![0.25_f32; 30 * 64];
    let view = TensorView::token_major(&rows, 30, 1, 64);
    let commit = |key: &str, codec| {
        let mut sequence = store.create_sequence(&layout(codec), CreateOptions::new().key(key)).expect("created");
        sequence.append(0, view, view).expect("appended");
        sequence.commit(Durability::Sync).expect("committed");
    };
    commit("a", PlaneCodec::Raw);
    assert_eq!(features(&dirs), [1, 1]);
    commit("b", PlaneCodec::Int4);
    assert_eq!(features(&dirs), [5, 5]);
    assert!(
        store.open_sequence("b", OpenSequence::new()).and_then(|sequence| sequence.delete(Durability::Sync)).is_ok()
    );
    store.close().expect("closed");
    assert_clean(&dirs, "after codecs");
    let store = open(&dirs, false);
    assert_eq!(features(&dirs), [5, 5]);
    store.close().expect("closed");
    // Both readers report such a layout as damage if the bit is missing.
    let mut image = image_of(&dirs);
    for (_, name, bytes) in &mut image.files {
        if name.starts_with("manifest/") {
            bytes[8 + 24] &= !4;
        }
    }
    seal(&mut image);
    let root = fast_scratch();
    let dirs = image.write(root.path()).expect("written");
    let error = small_options(&dirs).open().map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Corruption && error.to_string().contains("codecs"), "{error}");
    let report = check(&dirs);
    assert!(report.to_text().contains("without the feature of codecs"), "{}", report.to_text());
}

fn image_of(dirs: &[PathBuf]) -> Image {
    let mut image = Image { devices: dirs.len(), ..Image::base(1) };
    image.files.clear();
    for (device, dir) in dirs.iter().enumerate() {
        for file in files(dir) {
            let bytes = std::fs::read(dir.join(&file)).expect("a file");
            image.files.push((device, file.to_string_lossy().into_owned(), bytes));
        }
    }
    image
}

/// Both readers report ranges that are not finite, under valid checksums, as damage with a place.
#[test]
fn ranges_that_are_not_finite_are_damage_with_a_place() {
    use stratakv_format::checksum::PlaneIdentity;
    use stratakv_format::frame::{FrameHeader, KIND_GROUPS};
    use zerocopy::FromBytes;
    let layer = Layer { heads: 2, key_dim: 64, value_dim: 64, window: None, codecs: [PlaneCodec::Int8; 2] };
    let shape = Shape { layers: vec![layer], dtype: DType::F16, group: 8, separate: false };
    let (_scratch, dirs, model) = stored(&shape, 64);
    // Block 3 is a K plane of 2 * (4 * 64 + 8 * 64) bytes, then V.
    for (plane, bits) in [(0_usize, f16::INFINITY), (1, f16::NAN)] {
        let codec = [Codec::Int8; 2][plane];
        let (mut wanted, geometry) = (Vec::new(), shape.plane(0, plane));
        let exact: Vec<u8> = (0..2 * 8 * 64)
            .flat_map(|at| {
                let (head, token, i) = (at / 512, at / 64 % 8, at % 64);
                bytes_of(element(24 + token as u64, 0, plane, head * 64 + i), DType::F16)
            })
            .collect();
        assert_eq!(encode(codec, &geometry, &exact, &mut wanted).expect("a plane"), codec);
        let mut image = image_of(&dirs);
        let (mut found, mut place) = (0, 0);
        for (_, name, bytes) in &mut image.files {
            if !name.starts_with("segments/") {
                continue;
            }
            let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) else { continue };
            (found, place) = (found + 1, at);
            // The header of the frame that contains the block.
            let header = (0..at / 4096).rev().map(|page| page * 4096).find(|at| bytes[*at..].starts_with(b"SKFR"));
            let header_at = header.expect("a header");
            let header = *FrameHeader::ref_from_prefix(&bytes[header_at..]).expect("a header").0;
            let identity = |plane: &[u8], nth: u16| {
                let sequence = stratakv::SequenceId(header.sequence.get());
                let identity = PlaneIdentity::new(header.nonce.get(), sequence, KIND_GROUPS, 0, 24, 8).with_plane(nth);
                stratakv_format::PayloadChecksum::Crc64Nvme.compute(&identity, plane).to_le_bytes()
            };
            let before = identity(&wanted, plane as u16);
            bytes[at + 2..at + 4].copy_from_slice(&bits.to_le_bytes());
            let after = identity(&bytes[at..at + wanted.len()], plane as u16);
            let pages = header.header_pages.get() as usize * 4096;
            let table = &mut bytes[header_at..header_at + pages];
            let sum = table.windows(8).position(|window| window == before).expect("its checksum");
            table[sum..sum + 8].copy_from_slice(&after);
        }
        assert_eq!(found, 1);
        seal(&mut image);
        let root = fast_scratch();
        let broken = image.write(root.path()).expect("written");
        let report = check(&broken);
        let codes: Vec<&str> = report.findings.iter().map(|finding| finding.code.as_str()).collect();
        assert_eq!(codes, ["payload-codec"], "{}", report.to_text());
        assert!(report.to_text().contains(&format!("{}", place + 2)), "{}", report.to_text());

        let store = open(&broken, plane == 0);
        let mut sequence = store.open_sequence("a", OpenSequence::new()).expect("nothing of its groups is read");
        let view = sequence.select(0, SelectRequest::all()).expect("a view");
        let failed =
            store.read(&[&view]).submit().and_then(|ticket| ticket.wait()).and_then(|batch| batch.get(0).map(|_| ()));
        let error = failed.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
        let corruption = error.corruption().expect("a place");
        assert_eq!((corruption.code, corruption.offset), ("payload-codec", place as u64 + 2));
        // Reads that the sequence makes for itself.
        let cut = sequence.truncate(27).unwrap_err();
        assert!(cut.kind() == ErrorKind::Corruption && cut.corruption().is_some(), "{cut}");
        assert_eq!(sequence.export(&mut Vec::new()).unwrap_err().kind(), ErrorKind::Corruption);
        // Other groups can be read.
        let good = sequence.select(0, SelectRequest::groups(&[1, 2, 4, 5])).expect("a view");
        let batch = store.read(&[&good]).submit().and_then(|ticket| ticket.wait()).expect("read");
        for (nth, group) in [1, 2, 4, 5].into_iter().enumerate() {
            assert!(batch.get(0).and_then(|b| b.group(nth)).expect("a group").0 == model.block(0, group, 0));
        }
        drop((view, good, batch, sequence));
        store.close().expect("closed");
    }
}

/// Every checksum of the file is valid, but a range is not finite.
#[test]
fn exports_with_ranges_that_are_not_finite_are_refused() {
    use stratakv_format::export::{PIECE_GROUPS, PieceHeader};
    use stratakv_format::{PAGE_BYTES, Unverified};
    use zerocopy::IntoBytes;
    let layer = Layer { heads: 1, key_dim: 64, value_dim: 64, window: None, codecs: [PlaneCodec::Int4; 2] };
    let shape = Shape { layers: vec![layer], dtype: DType::Bf16, group: 8, separate: false };
    let (_scratch, dirs, _) = stored(&shape, 50);
    let store = open(&dirs, false);
    let mut file = Vec::new();
    store
        .open_sequence("a", OpenSequence::new())
        .and_then(|mut sequence| sequence.export(&mut file))
        .expect("an export");
    let nonce = u64::from_le_bytes(file[64..72].try_into().expect("8 bytes"));
    let (mut at, mut index) = (PAGE_BYTES, 0);
    while at < file.len() {
        let header = Unverified::<PieceHeader>::at_front(&file[at..], "piece").expect("a header");
        let header = *header.verify(index, nonce).expect("a valid header");
        let body = at + size_of::<PieceHeader>();
        if header.kind.get() == PIECE_GROUPS {
            // The step of a range of the second group's values.
            let block = 64 * 4 + 8 * 32 + 16 * 4 + 8 * 32;
            file[body + block + 64 * 4 + 8 * 32 + 16 * 2..][..2].copy_from_slice(&bf16::NEG_INFINITY.to_le_bytes());
            let bytes = &file[body..body + header.bytes.get() as usize];
            let sealed = PieceHeader::new(&header.piece(), index, nonce, bytes);
            file[at..body].copy_from_slice(sealed.as_bytes());
        }
        at = body + header.padded_bytes();
        index += 1;
    }
    let path = Path::new("session.skv");
    let report = kvfsck::check_reader(&file[..], file.len() as u64, path, &kvfsck::Options::default(), &());
    assert!(!report.clean && report.to_text().contains("not a finite number"), "{}", report.to_text());
    let refused = store.import(&file[..], &shape.layout(), ImportOptions::new().key("b")).unwrap_err();
    assert!(refused.kind() == ErrorKind::Corruption && refused.to_string().contains("finite"), "{refused}");
    assert!(store.open_sequence("b", OpenSequence::new()).is_err());
}
