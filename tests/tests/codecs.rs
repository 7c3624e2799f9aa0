//! Sequences under codecs: what comes back is what the public coder makes of what was appended, group by group, whatever became of
//! the sequence meanwhile; tokens that fill no group come back as they are.

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::path::PathBuf;
use std::sync::Arc;
use stratakv::codec::{Codec, PlaneKind, PlaneShape, decode, encode, error_bound};
use stratakv::retrieval::{KeySummary, Quest};
use stratakv::{
    ByteSize, CacheOptions, DType, Durability, ErrorKind, ImportOptions, KvLayout, LayerSpec, PlaneCodec, Planes,
    Sequence, SequenceOptions, Store, Summary, TensorView, attend,
};
use stratakv_tests::count_from_env;
use stratakv_tests::disk::{assert_clean, check, device_dirs, fast_scratch, small_options};
use stratakv_tests::rng::mix;

const RAW: [PlaneCodec; 2] = [PlaneCodec::Raw; 2];

/// Heads, key dim, value dim, window and codecs of a layer.
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
        // Blocks of more than a page, values on pages of their own, a window, keys alone.
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
        // Keys of four tokens are as long under int8 as in f16: they stay raw.
        shape(vec![layer(2, 64, 64, [Int8, Int8])], DType::F16, 4),
    ]
}

/// Elements of a token: channels of different size.
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

/// What a reader sees: by layer and token the rows of keys and values `[heads, dim]`.
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

    /// The plane of a group as it is.
    fn block(&self, layer: usize, group: usize, plane: usize) -> Vec<u8> {
        let own = &self.shape.layers[layer];
        let row = [own.key_dim, own.value_dim][plane] * self.shape.dtype.bytes();
        let rows = &self.rows[layer][group * self.shape.group..][..self.shape.group];
        (0..own.heads).flat_map(|head| rows.iter().flat_map(move |r| r[plane][head * row..][..row].to_vec())).collect()
    }

    /// A token of each layer; groups that it fills are rounded by the public coder.
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
        // It says raw where it would not save 5 %.
        let used = encode(codec, &shape, &plain, &mut stored).expect("a plane");
        decode(used, &shape, &stored, &mut back).expect("a plane");
        let row = shape.dims * self.shape.dtype.bytes();
        for (at, bytes) in back.chunks_exact(row).enumerate() {
            let (head, token) = (at / self.shape.group, group * self.shape.group + at % self.shape.group);
            self.rows[layer][token][plane][head * row..][..row].copy_from_slice(bytes);
        }
    }

    /// Everything that a sequence gives, against this.
    fn check(&self, store: &Store, sequence: &Sequence) {
        assert_eq!(sequence.len() as usize, self.len());
        for layer in self.shape.kv_layers().into_iter().filter(|_| self.len() > 0) {
            let own = self.shape.layers[layer];
            let view = sequence.select_all(layer).expect("a view");
            let batch = store.read(&[&view]).and_then(|ticket| ticket.wait()).expect("read");
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
                let alone = sequence.select_planes(layer, &values, Planes::Values).expect("a view");
                let batch = store.read(&[&alone]).and_then(|ticket| ticket.wait()).expect("read");
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

/// Appends tokens of these seeds to all layers, in one call or in two.
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
    let create = || SequenceOptions::new().summary(Summary::MinMax).replicas(copies);
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
                sequence = match store.open_sequence_as(&kept, &layout) {
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
                let report =
                    kvfsck::check_reader(&file[..], file.len() as u64, path, &kvfsck::Options::default(), &());
                assert!(report.clean, "{}", report.to_text());
                key = format!("{at}");
                let options = ImportOptions::new().key(&*key).replicas(copies);
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
fn what_comes_back_is_what_the_coder_makes_of_it() {
    let strategy = (0..shapes().len(), 1..=2_u8, any::<bool>(), proptest::collection::vec(step(), 1..14));
    let config = Config { cases: count_from_env("STRATAKV_CODEC_CASES", 48) as u32, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&strategy, |(shape, copies, cache, steps)| {
            history(&shapes()[shape], copies, cache, &steps);
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
}
