//! The store through its public API.
//!
//! - Appended tokens are read from memory, from disk, and after another open, in every dtype and layout.
//! - Truncation at any token and regrowth keep every byte right and leak no space.
//! - Bad arguments are errors that change nothing.

use half::f16;
use stratakv::attention::MAX_Q_HEADS;
use stratakv::layout::LayerSpec;
use stratakv::{
    Budget, ByteSize, CreateOptions, DType, Durability, ErrorKind, KvLayout, OpenSequence, SelectOptions,
    SelectRequest, Sequence, Store, StoreOptions, StoredSummary, TensorView, attend,
};
use stratakv_testing::rng::Rng;
use stratakv_testing::{TestStore, medium, uniform_layout};

const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn options() -> StoreOptions {
    medium().memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::mib(1))
}

/// Returns deterministic values that f16 represents exactly.
fn values(layer: usize, token: usize, plane: usize) -> Vec<f32> {
    let value = |i: usize| {
        let x = (layer * 131 + token * 31 + plane * 17 + i * 7) as u64;
        let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        (x as f32 - 128.0) / 64.0
    };
    (0..KV_HEADS * DIM).map(value).collect()
}

fn append(sequence: &mut Sequence, layer: usize, tokens: std::ops::Range<usize>) {
    let count = tokens.len();
    let keys: Vec<f32> = tokens.clone().flat_map(|t| values(layer, t, 0)).collect();
    let vals: Vec<f32> = tokens.flat_map(|t| values(layer, t, 1)).collect();
    let view = |data| TensorView::token_major(data, count, KV_HEADS, DIM);
    sequence.append(layer, view(&keys), view(&vals)).unwrap();
}

/// Computes naive attention in f64 over these positions.
fn reference(layer: usize, query: &[f32], positions: impl Iterator<Item = u64> + Clone) -> Vec<f64> {
    let q_heads = query.len() / DIM;
    let mut out = Vec::new();
    for head in 0..q_heads {
        let kv = head / (q_heads / KV_HEADS);
        let row = |t: u64, plane| values(layer, t as usize, plane)[kv * DIM..][..DIM].to_vec();
        let score = |t: u64| {
            let dot: f64 = query[head * DIM..][..DIM].iter().zip(row(t, 0)).map(|(q, k)| f64::from(q * k)).sum();
            dot / (DIM as f64).sqrt()
        };
        let best = positions.clone().map(score).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = positions.clone().map(|t| (score(t) - best).exp()).sum();
        for i in 0..DIM {
            let sum: f64 = positions.clone().map(|t| (score(t) - best).exp() * f64::from(row(t, 1)[i])).sum();
            out.push(sum / total);
        }
    }
    out
}

fn query(q_heads: usize) -> Vec<f32> {
    (0..q_heads * DIM).map(|i| ((i * 37 % 29) as f32 - 14.0) / 10.0).collect()
}

fn check(store: &Store, sequence: &Sequence, layer: usize, options: SelectOptions) {
    let query = query(4);
    let view = sequence.select(layer, SelectRequest::query(&query).options(options)).unwrap();
    let positions: Vec<u64> = view.positions().collect();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    let mut out = vec![0.0; query.len()];
    attend(&query, &view, batch.get(0).unwrap(), &mut out).unwrap();
    for (got, want) in out.iter().zip(reference(layer, &query, positions.into_iter())) {
        assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
    }
}

#[test]
fn attention_through_the_store_is_attention() {
    let store = TestStore::new(options());
    let options = CreateOptions::new().key("s").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&uniform_layout(3, KV_HEADS, DIM, 4), options).unwrap();
    for layer in 0..3 {
        append(&mut sequence, layer, 0..1003);
    }
    for token in 1003..1020 {
        for layer in 0..3 {
            append(&mut sequence, layer, token..token + 1);
            check(&store, &sequence, layer, SelectOptions::new(Budget::tokens(100)).sinks(4).recent(16));
        }
    }
    let all = sequence.select(1, SelectRequest::query(&query(4)).budget(Budget::All)).unwrap();
    assert_eq!(all.positions().collect::<Vec<_>>(), (0..1020).collect::<Vec<_>>());
    check(&store, &sequence, 1, SelectOptions::new(Budget::All));
    sequence.commit(Durability::Sync).unwrap();
    check(&store, &sequence, 2, SelectOptions::new(Budget::tokens(64)));
}

#[test]
fn a_committed_sequence_comes_back() {
    let mut store = TestStore::on_devices(2, options());
    let mut committed = 0;
    let mut ids = Vec::new();
    for round in 0..6_usize {
        store.reopen();
        let mut sequence = match round {
            0 => {
                let options = CreateOptions::new().key("s").store_summary(StoredSummary::MinMax);
                store.create_sequence(&uniform_layout(2, KV_HEADS, DIM, 8), options).unwrap()
            }
            _ => store.open_sequence("s", OpenSequence::new()).unwrap(),
        };
        assert_eq!(sequence.len(), committed as u64, "round {round}");
        assert_eq!(sequence.token_ids(), ids);
        assert_eq!(sequence.caller_state().map(<[u8]>::to_vec), (round > 0).then(|| vec![round as u8 - 1; 100]));
        if round > 0 {
            for layer in 0..2 {
                check(&store, &sequence, layer, SelectOptions::new(Budget::All));
                check(&store, &sequence, layer, SelectOptions::new(Budget::tokens(40)));
            }
        }
        for step in 0..20 {
            let count = 1 + (round * 7 + step * 3) % 11;
            for layer in 0..2 {
                append(&mut sequence, layer, committed..committed + count);
            }
            let new: Vec<u32> = (committed..committed + count).map(|t| t as u32 * 3).collect();
            sequence.append_token_ids(&new).unwrap();
            ids.extend(new);
            committed += count;
            let durability = if step == 19 { Durability::Sync } else { Durability::Lazy };
            sequence.commit_with(&[round as u8; 100], durability).unwrap();
        }
        // A commit covers only the tokens that all layers have.
        append(&mut sequence, 0, committed..committed + 13);
        sequence.commit(Durability::Sync).unwrap();
        drop(sequence);
        if round % 2 == 0 {
            store.close().unwrap();
        }
    }
}

#[test]
fn dtypes_layers_and_windows() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let store = TestStore::new(options());
        let heads = KV_HEADS as u16;
        let specs = [LayerSpec::full(heads, DIM as u16), LayerSpec::none(), LayerSpec::sliding(heads, DIM as u16, 37)];
        let layout = KvLayout::builder().layer_specs(specs).dtype(dtype).group_tokens(5).build().unwrap();
        let mut sequence =
            store.create_sequence(&layout, CreateOptions::new().key("w").store_summary(StoredSummary::MinMax)).unwrap();
        for layer in [0, 2] {
            append(&mut sequence, layer, 0..203);
        }
        sequence.commit(Durability::Sync).unwrap();
        let window = sequence.select(2, SelectRequest::query(&query(2)).budget(Budget::All)).unwrap();
        assert_eq!(window.positions().collect::<Vec<_>>(), (166..203).collect::<Vec<_>>());
        for layer in [0, 2] {
            // `values` are exact in f16 and in bf16.
            check(&store, &sequence, layer, SelectOptions::new(Budget::All));
            check(&store, &sequence, layer, SelectOptions::new(Budget::share(0.5)));
        }
        assert_eq!(
            sequence.select(1, SelectRequest::query(&query(2)).budget(Budget::All)).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
    }
}

#[test]
fn a_view_keeps_what_it_saw() {
    let store = TestStore::new(options());
    let mut sequence = store.create_sequence(&uniform_layout(1, KV_HEADS, DIM, 4), CreateOptions::new()).unwrap();
    append(&mut sequence, 0, 0..11);
    let before = sequence.select(0, SelectRequest::query(&query(2)).budget(Budget::All)).unwrap();
    append(&mut sequence, 0, 11..3000);
    sequence.commit(Durability::Sync).unwrap();
    let after = sequence.select(0, SelectRequest::query(&query(2)).budget(Budget::All)).unwrap();
    let batch = store.read(&[&before, &after]).submit().unwrap().wait().unwrap();
    for (index, (view, tokens)) in [(&before, 11), (&after, 3000)].into_iter().enumerate() {
        let mut out = vec![0.0; 2 * DIM];
        attend(&query(2), view, batch.get(index).unwrap(), &mut out).unwrap();
        for (got, want) in out.iter().zip(reference(0, &query(2), 0..tokens)) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
        }
    }
}

#[test]
fn bad_arguments_change_nothing() {
    let store = TestStore::new(options());
    let mut sequence = store
        .create_sequence(
            &uniform_layout(1, KV_HEADS, DIM, 4),
            CreateOptions::new().key("a").store_summary(StoredSummary::MinMax),
        )
        .unwrap();
    append(&mut sequence, 0, 0..10);
    let good = vec![0.5_f32; KV_HEADS * DIM];
    fn view(data: &[f32]) -> TensorView<'_> {
        TensorView::token_major(data, 1, KV_HEADS, DIM)
    }
    for bad in [f32::NAN, f32::INFINITY, 1e6] {
        let mut keys = good.clone();
        keys[3] = bad;
        assert_eq!(sequence.append(0, view(&keys), view(&good)).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(sequence.append(0, view(&good), view(&keys)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    let wrong = TensorView::token_major(&good, 1, 1, DIM);
    assert_eq!(sequence.append(0, wrong, view(&good)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(sequence.append(1, view(&good), view(&good)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(
        sequence.select(0, SelectRequest::query(&[0.0; 5]).budget(Budget::All)).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let many = vec![0.5; (MAX_Q_HEADS + KV_HEADS) * DIM];
    assert_eq!(
        sequence.select(0, SelectRequest::query(&many).budget(Budget::All)).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(
        sequence.select(0, SelectRequest::query(&query(2)).budget(Budget::tokens(0))).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let options = CreateOptions::new().key("a");
    assert_eq!(
        store.create_sequence(&uniform_layout(1, KV_HEADS, DIM, 4), options).unwrap_err().kind(),
        ErrorKind::AlreadyExists
    );
    assert_eq!(store.open_sequence("nobody", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(sequence.len(), 10);
    check(&store, &sequence, 0, SelectOptions::new(Budget::All));
    sequence.commit(Durability::Sync).unwrap();
    drop(sequence);
    let other = uniform_layout(1, KV_HEADS, DIM, 4);
    store.open_sequence("a", OpenSequence::new().layout(&other)).unwrap();
    let other =
        KvLayout::builder().layers(1).kv_heads(2).head_dim(16).group_tokens(4).fingerprint([1; 32]).build().unwrap();
    assert_eq!(
        store.open_sequence("a", OpenSequence::new().layout(&other)).unwrap_err().kind(),
        ErrorKind::LayoutMismatch
    );
}

#[test]
fn deleting_frees_segments() {
    let store = TestStore::new(options());
    let mut most = 0;
    for round in 0..8 {
        let mut sequence =
            store.create_sequence(&uniform_layout(2, KV_HEADS, DIM, 8), CreateOptions::new().key("x")).unwrap();
        for layer in 0..2 {
            append(&mut sequence, layer, 0..20_000);
        }
        sequence.commit(Durability::Sync).unwrap();
        check(&store, &sequence, 1, SelectOptions::new(Budget::All));
        sequence.delete(Durability::Sync).unwrap();
        let bytes = store.status().file_bytes;
        if round == 1 {
            most = bytes;
        }
        assert!(round < 2 || bytes <= most, "{bytes} {most}");
        assert!(store.sequences().is_empty());
    }
}

#[test]
fn f16_input_is_kept_as_it_is() {
    let store = TestStore::new(options());
    let mut sequence = store.create_sequence(&uniform_layout(1, KV_HEADS, DIM, 4), CreateOptions::new()).unwrap();
    let data: Vec<f16> = (0..8 * KV_HEADS * DIM).map(|i| f16::from_bits((i * 13 % 0x7bff) as u16)).collect();
    let keys = TensorView::head_major(&data, 8, KV_HEADS, DIM);
    sequence.append(0, keys, keys).unwrap();
    sequence.commit(Durability::Sync).unwrap();
    let view = sequence.select(0, SelectRequest::all()).unwrap();
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    for group in 0..2 {
        let (k, v) = batch.get(0).unwrap().group(group).unwrap();
        for head in 0..KV_HEADS {
            for token in 0..4 {
                for i in 0..DIM {
                    let at = ((head * 4 + token) * DIM + i) * 2;
                    let want = data[(head * 8 + group * 4 + token) * DIM + i].to_le_bytes();
                    assert_eq!((&k[at..at + 2], &v[at..at + 2]), (&want[..], &want[..]));
                }
            }
        }
    }
}

/// Appends tokens of a generation. The tests keep the generation of each token in a model.
fn append_generation(sequence: &mut Sequence, generation: usize, tokens: std::ops::Range<usize>) {
    for layer in 0..2 {
        let count = tokens.len();
        let row = |t: usize, plane| values(layer + generation * 10, t, plane);
        let keys: Vec<f32> = tokens.clone().flat_map(|t| row(t, 0)).collect();
        let vals: Vec<f32> = tokens.clone().flat_map(|t| row(t, 1)).collect();
        let view = |data| TensorView::token_major(data, count, KV_HEADS, DIM);
        sequence.append(layer, view(&keys), view(&vals)).unwrap();
    }
    sequence.append_token_ids(&tokens.map(|t| (t * 100 + generation) as u32).collect::<Vec<_>>()).unwrap();
}

/// Checks that every stored byte is that of the token's generation in the model.
fn check_generations(store: &Store, sequence: &Sequence, model: &[usize]) {
    assert_eq!(sequence.len(), model.len() as u64);
    let ids: Vec<u32> = model.iter().enumerate().map(|(t, g)| (t * 100 + g) as u32).collect();
    assert_eq!(sequence.token_ids(), ids);
    if model.is_empty() {
        return;
    }
    for layer in 0..2 {
        let query = query(2);
        let view = sequence.select(layer, SelectRequest::all()).unwrap();
        let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
        let group = sequence.layout().group_tokens();
        for (nth, at) in view.groups().enumerate() {
            let (k, v) = batch.get(0).unwrap().group(nth).unwrap();
            for token in 0..group {
                let t = at as usize * group + token;
                for (plane, bytes) in [(0, &k), (1, &v)] {
                    let want = values(layer + model[t] * 10, t, plane);
                    for head in 0..KV_HEADS {
                        for i in 0..DIM {
                            let at = ((head * group + token) * DIM + i) * 2;
                            let got = f16::from_le_bytes([bytes[at], bytes[at + 1]]);
                            assert_eq!(got.to_f32(), want[head * DIM + i], "layer {layer} token {t}");
                        }
                    }
                }
            }
        }
        // The tail has no blocks to compare, so attention over the whole layer covers it.
        let mut out = vec![0.0; query.len()];
        attend(&query, &view, batch.get(0).unwrap(), &mut out).unwrap();
        for (got, want) in out.iter().zip(reference_of(&query, model, layer)) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
        }
        // Summaries must belong to the current keys. With half of the tokens selected, the softmax mass bounds the
        // error.
        let half = sequence
            .select(layer, SelectRequest::query(&query).budget(Budget::tokens(model.len().div_ceil(2))))
            .unwrap();
        assert!(half.tokens() <= model.len().div_ceil(2).max(group));
    }
}

fn reference_of(query: &[f32], model: &[usize], layer: usize) -> Vec<f64> {
    let q_heads = query.len() / DIM;
    let mut out = Vec::new();
    for head in 0..q_heads {
        let kv = head / (q_heads / KV_HEADS);
        let row = |t: usize, plane| values(layer + model[t] * 10, t, plane)[kv * DIM..][..DIM].to_vec();
        let scores: Vec<f64> = (0..model.len())
            .map(|t| {
                let dot: f64 = query[head * DIM..][..DIM].iter().zip(row(t, 0)).map(|(q, k)| f64::from(q * k)).sum();
                dot / (DIM as f64).sqrt()
            })
            .collect();
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - best).exp()).sum();
        for i in 0..DIM {
            let sum: f64 = scores.iter().enumerate().map(|(t, s)| (s - best).exp() * f64::from(row(t, 1)[i])).sum();
            out.push(sum / total);
        }
    }
    out
}

/// Truncates to `keep` tokens. A selection taken before still attends to the tokens that are cut off.
fn truncate_under_a_selection(store: &Store, sequence: &mut Sequence, model: &mut Vec<usize>, keep: usize) {
    let before = (!model.is_empty()).then(|| (sequence.select(1, SelectRequest::all()).unwrap(), model.clone()));
    sequence.truncate(keep as u64).unwrap();
    model.truncate(keep);
    assert!(sequence.truncate(keep as u64 + 1).is_err());
    let Some((view, old)) = before else { return };
    let batch = store.read(&[&view]).submit().unwrap().wait().unwrap();
    let (query, mut out) = (query(2), vec![0.0; 2 * DIM]);
    attend(&query, &view, batch.get(0).unwrap(), &mut out).unwrap();
    for (got, want) in out.iter().zip(reference_of(&query, &old, 1)) {
        assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
    }
}

#[test]
fn truncating_to_any_token_and_growing_again() {
    for seed in 0..6_u64 {
        let mut rng = Rng(seed);
        let mut random = move |below: usize| rng.below(below);
        let mut store = TestStore::new(options());
        let mut sequence = store
            .create_sequence(
                &uniform_layout(2, KV_HEADS, DIM, 4),
                CreateOptions::new().key("t").store_summary(StoredSummary::MinMax),
            )
            .unwrap();
        let (mut model, mut committed) = (Vec::new(), Vec::new());
        for generation in 1..60 {
            match random(10) {
                0..=3 => {
                    let count = [1, 2, 3, 5, 40, 300][random(6)];
                    append_generation(&mut sequence, generation, model.len()..model.len() + count);
                    model.resize(model.len() + count, generation);
                }
                4..=6 => {
                    let keep = match random(3) {
                        0 => random(model.len() + 1),
                        _ => model.len() - random(model.len().min(9) + 1),
                    };
                    truncate_under_a_selection(&store, &mut sequence, &mut model, keep);
                }
                7 => {
                    sequence.commit(Durability::Lazy).unwrap();
                    committed.clone_from(&model);
                }
                8 => {
                    sequence.commit_with(&[generation as u8], Durability::Sync).unwrap();
                    committed.clone_from(&model);
                }
                _ if generation > 10 => {
                    // The drop discards everything uncommitted, truncations included.
                    let stored = store.sequences().iter().any(|s| s.key == "t") || !committed.is_empty();
                    drop(sequence);
                    if random(2) == 0 {
                        store.close().unwrap();
                        store.reopen();
                    }
                    model.clone_from(&committed);
                    sequence = match store.open_sequence("t", OpenSequence::new()) {
                        Ok(sequence) => sequence,
                        Err(e) => {
                            assert!(!stored && e.kind() == ErrorKind::NotFound, "{e}");
                            store
                                .create_sequence(
                                    &uniform_layout(2, KV_HEADS, DIM, 4),
                                    CreateOptions::new().key("t").store_summary(StoredSummary::MinMax),
                                )
                                .unwrap()
                        }
                    };
                }
                _ => {}
            }
            check_generations(&store, &sequence, &model);
        }
    }
}

#[test]
fn truncate_and_regrow_leaks_nothing() {
    let store = TestStore::new(options());
    let mut sequence = store
        .create_sequence(
            &uniform_layout(2, KV_HEADS, DIM, 4),
            CreateOptions::new().key("t").store_summary(StoredSummary::MinMax),
        )
        .unwrap();
    append_generation(&mut sequence, 1, 0..101);
    sequence.commit(Durability::Sync).unwrap();
    let mut most = 0;
    for round in 0..1000 {
        append_generation(&mut sequence, 2, 101..131);
        sequence.commit_with(&[1; 200], Durability::Lazy).unwrap();
        sequence.truncate(101).unwrap();
        sequence.commit_with(&[2; 200], if round % 50 == 49 { Durability::Sync } else { Durability::Lazy }).unwrap();
        if round % 50 == 49 {
            let status = store.status();
            most = if round == 99 { status.live_bytes } else { most };
            assert!(
                round <= 99 || status.live_bytes <= most,
                "round {round}: {} live, {most} before",
                status.live_bytes
            );
        }
    }
    let mut model = vec![1; 101];
    check_generations(&store, &sequence, &model);
    append_generation(&mut sequence, 3, 101..140);
    model.resize(140, 3);
    check_generations(&store, &sequence, &model);
}

#[test]
fn space_that_a_view_held_comes_back() {
    // Two generations of two manifest copies of 4 MiB each, the superblock, two segments, and one in reserve.
    let capacity = (16 << 20) + 8192 + (3 << 20);
    let store = TestStore::new(options().capacity(ByteSize(capacity)));
    let fill = |key: &str, tokens| {
        let mut sequence =
            store.create_sequence(&uniform_layout(1, KV_HEADS, DIM, 8), CreateOptions::new().key(key)).unwrap();
        let rows = |plane| (0..tokens).flat_map(|t| values(0, t, plane)).collect::<Vec<f32>>();
        let (keys, vals) = (rows(0), rows(1));
        let view = |data| TensorView::token_major(data, tokens, KV_HEADS, DIM);
        sequence.append(0, view(&keys), view(&vals)).and_then(|()| sequence.commit(Durability::Sync)).map(|()| sequence)
    };
    let first = fill("first", 14_000).unwrap();
    let view = first.select(0, SelectRequest::all()).unwrap();
    first.delete(Durability::Sync).unwrap();
    assert_eq!(fill("second", 14_000).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(store.read(&[&view]).submit().unwrap().wait().unwrap().get(0).is_ok());
    drop(view);
    let second = fill("third", 14_000).unwrap();
    check(&store, &second, 0, SelectOptions::new(Budget::All));
    assert!(store.status().file_bytes <= capacity);
}

#[test]
fn a_sequence_is_deleted_without_a_handle() {
    let store = TestStore::new(options());
    let mut sequence =
        store.create_sequence(&uniform_layout(1, KV_HEADS, DIM, 8), CreateOptions::new().key("x")).unwrap();
    append(&mut sequence, 0, 0..100);
    sequence.commit(Durability::Sync).unwrap();
    let id = sequence.id();
    assert_eq!(store.delete_sequence_id(id, Durability::Sync).unwrap_err().kind(), ErrorKind::InUse);
    drop(sequence);
    store.delete_sequence_id(id, Durability::Sync).unwrap();
    assert_eq!(store.delete_sequence_id(id, Durability::Sync).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.open_sequence("x", OpenSequence::new()).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store.sequences().is_empty());
}
