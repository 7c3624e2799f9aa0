//! Caches of methods that choose clusters: every policy gives the bits of a sequence without a cache, and hits.

use std::sync::Arc;
use stratakv::options::{CacheOptions, CachePolicy};
use stratakv::retrieval::{HeadAggregation, MethodSpec, Selector, SelectorId};
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, SelectOptions, SelectRequest, Selection,
    Sequence, Store, TensorView, attend,
};

const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 64;
const GROUP: usize = 8;
/// The tokens of the prompt. Its blocks of 8 KiB take 4.7 MiB in both layers, which the cache does not hold.
const TOKENS: usize = 2400;
const CACHE: ByteSize = ByteSize::mib(4);

/// Returns `[tokens, KV_HEADS, DIM]` elements around one of 64 centres, as the tokens from `first` on have them.
fn rows(first: usize, tokens: usize, seed: u64) -> Vec<f32> {
    let hash =
        |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let unit = |i: u64| (hash(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let element = |token: u64, at: u64| unit((hash(token) >> 58) * 1000 + at) * 2.0 + unit(token * 500 + at) * 0.5;
    let width = (KV_HEADS * DIM) as u64;
    (first as u64..(first + tokens) as u64).flat_map(|token| (0..width).map(move |at| element(token, at))).collect()
}

/// Returns the query of a step. Neighbouring steps look for the same tokens.
fn query(step: usize) -> Vec<f32> {
    rows(100 + step / 4 % 3, Q_HEADS / KV_HEADS, 1)
}

fn append(sequence: &mut Sequence, tokens: usize) {
    let first = sequence.len() as usize;
    for layer in 0..2 {
        let (keys, values) = (rows(first, tokens, 1), rows(first, tokens, 78));
        let view = |rows| TensorView::token_major(rows, tokens, KV_HEADS, DIM);
        sequence.append(layer, view(&keys), view(&values)).unwrap();
    }
}

struct Cached {
    store: Store,
    sequences: Vec<(Sequence, SelectorId)>,
    _dir: tempfile::TempDir,
}

/// Returns a store with one sequence per policy and one without a cache. All have the same tokens and clusters.
fn stored(method: &str) -> Cached {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).memory_limit(ByteSize::mib(512)).open().unwrap();
    let layout = KvLayout::builder().layers(2).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(GROUP as u16).dtype(DType::F32).build().unwrap();
    let spec: MethodSpec = method.parse().unwrap();
    let selector: Arc<dyn Selector> = spec.selector(None).unwrap();
    let mut prompt = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    append(&mut prompt, TOKENS);
    prompt.commit(Durability::Sync).unwrap();
    let policies = std::iter::once(None).chain(CachePolicy::ALL.map(Some));
    let mut sequences = Vec::new();
    for policy in policies {
        let mut sequence = prompt.fork().unwrap();
        sequence.set_cache(policy.map(|policy| CacheOptions::new(CACHE).policy(policy))).unwrap();
        let id = sequence.attach(Arc::clone(&selector)).unwrap();
        if method.starts_with("swarm") {
            let queries: Vec<Vec<f32>> = (0..48).map(query).collect();
            let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
            (0..2).for_each(|layer| sequence.profile(id, layer, &queries, None).unwrap());
        }
        sequences.push((sequence, id));
    }
    Cached { store, sequences, _dir: dir }
}

impl Cached {
    /// Decodes a step with one of the sequences. Returns the bits of attention in both layers.
    fn decode(&mut self, which: usize, step: usize) -> Vec<u32> {
        let (sequence, id) = &mut self.sequences[which];
        let mut bits = Vec::new();
        append(sequence, 1);
        for layer in 0..2 {
            let query = query(step + layer);
            let options = SelectOptions::new(Budget::tokens(160)).aggregation(HeadAggregation::Softmax).recent(16);
            let selection: Selection =
                sequence.select(layer, SelectRequest::query(&query).options(options).selector(*id)).unwrap();
            let mut out = vec![0.0; Q_HEADS * DIM];
            let batch = self.store.read(&[&selection]).wait().unwrap();
            attend(&query, &selection, batch.get(0).unwrap(), &mut out).unwrap();
            bits.extend(out.into_iter().map(f32::to_bits));
        }
        bits
    }
}

#[test]
fn every_policy_hits_and_changes_no_bit() {
    for method in ["dynakv:16", "swarm:8"] {
        let mut cached = stored(method);
        for step in 0..24 {
            let expected = cached.decode(0, step);
            for which in 1..cached.sequences.len() {
                assert_eq!(cached.decode(which, step), expected, "{method}, step {step}, {which}");
            }
        }
        assert!(cached.sequences[0].0.cache_status().is_none());
        for ((sequence, _), policy) in cached.sequences[1..].iter().zip(CachePolicy::ALL) {
            let status = sequence.cache_status().unwrap();
            assert!(status.resident_bytes <= status.capacity_bytes, "{method}, {policy}: {status:?}");
            assert_eq!(status.misses, status.admitted + status.refused, "{method}, {policy}");
            assert!(status.hits > 0 && status.saved_bytes > 0, "{method}, {policy}: {status:?}");
            let ranks_clusters = !matches!(policy, CachePolicy::Fifo | CachePolicy::Lru | CachePolicy::S3Fifo);
            assert_eq!(status.clusters > 0, ranks_clusters, "{method}, {policy}: {status:?}");
            assert_eq!(status.resident_clusters > 0, ranks_clusters, "{method}, {policy}: {status:?}");
            assert!(status.resident_clusters < status.clusters.max(1), "{method}, {policy}: {status:?}");
        }
    }
}

#[test]
fn parameters_out_of_range_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::options().device(dir.path()).open().unwrap();
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build().unwrap();
    let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
    let wrong = CachePolicy::ClusterAligned { kept_steps: 1, reserved_percent: 101 };
    let error = sequence.set_cache(Some(CacheOptions::new(CACHE).policy(wrong))).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("101"), "{error}");
    assert!(sequence.cache_status().is_none());
}
