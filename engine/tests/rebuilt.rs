//! Low-rank keys in memory, with values read from the devices.
//!
//! - With enough rank, attention equals full attention. Reads have half the bytes.
//! - New tokens are exact until the next reconstruction. Truncation keeps what is left.
//! - Outliers are kept whole and are not read.
//! - Layouts, ranks and memory limits that do not suit are refused without a change.

use half::f16;
use std::sync::Arc;
use stratakv::layout::{LayerSpec, Rope, RopeScaling};
use stratakv::options::CacheOptions;
use stratakv::retrieval::{HeadAggregation, ReconstructOptions, ShadowKv};
use stratakv::{
    AttendOptions, Budget, ByteSize, CreateOptions, Durability, ErrorKind, KvLayout, OpenSequence, PlaneSet,
    SelectOptions, SelectRequest, Selection, Sequence, Store, TensorView, attend,
};
use stratakv_testing::rng::noise;
use stratakv_testing::{TestStore, medium};

const HEADS: usize = 2;
const DIM: usize = 64;
const WIDTH: usize = HEADS * DIM;
const GROUP: usize = 8;
/// A plane of f16.
const PLANE: u64 = (WIDTH * GROUP * 2) as u64;
/// The rank of the keys before rotation.
const TRUE_RANK: usize = 12;

/// Returns rotations of both pairings, one of which rotates only a part of each key.
fn ropes() -> [Rope; 2] {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 128.0 };
    [Rope::new(DIM as u16, 10_000.0), Rope::new(40, 500_000.0).interleaved().starting_at(8).scaled(llama3)]
}

fn layout() -> KvLayout {
    let layers = ropes().map(|rope| LayerSpec::full(HEADS as u16, DIM as u16).rope(rope));
    // Planes of 2 KiB are half a page, which devices with small sectors read alone.
    KvLayout::builder().layer_specs(layers).group_tokens(GROUP as u16).separate_planes(true).build().unwrap()
}

/// Rotates a key as models do, by the definition.
fn turned(rope: &Rope, position: usize, key: &mut [f32]) {
    let half = rope.dims() / 2;
    for pair in 0..half {
        let f = rope.theta().powf(-2.0 * pair as f64 / rope.dims() as f64);
        let f = match rope.scaling() {
            RopeScaling::Llama3 { factor, low, high, original } => {
                let wavelength = std::f64::consts::TAU / f;
                let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - smooth) * f / factor + smooth * f
            }
            _ => f,
        };
        let (sin, cos) = (position as f64 * f).sin_cos();
        let (a, b) = match rope.pairing() {
            stratakv::layout::RopePairing::Halves => (pair, pair + half),
            stratakv::layout::RopePairing::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let (a, b) = (rope.first() + a, rope.first() + b);
        let (x, y) = (f64::from(key[a]), f64::from(key[b]));
        key[a] = (x * cos - y * sin) as f32;
        key[b] = (y * cos + x * sin) as f32;
    }
}

/// Returns the keys of a token, of rank [`TRUE_RANK`] before rotation. Some tokens are outliers.
fn key(layer: usize, token: usize) -> Vec<f32> {
    let basis = noise(layer, TRUE_RANK * WIDTH);
    let own = noise(1000 + layer * 100_000 + token, TRUE_RANK);
    let mut key = vec![0.0; WIDTH];
    for (x, row) in own.iter().zip(basis.chunks_exact(WIDTH)) {
        key.iter_mut().zip(row).for_each(|(k, b)| *k += x * b);
    }
    key.chunks_exact_mut(DIM).for_each(|head| turned(&ropes()[layer], token, head));
    key
}

fn append(sequence: &mut Sequence, tokens: std::ops::Range<usize>) {
    for layer in 0..2 {
        let keys: Vec<f32> = tokens.clone().flat_map(|t| key(layer, t)).collect();
        let values: Vec<f32> = tokens.clone().flat_map(|t| noise(700_000 + layer * 100_000 + t, WIDTH)).collect();
        let view = |data| TensorView::token_major(data, tokens.len(), HEADS, DIM);
        sequence.append(layer, view(&keys), view(&values)).unwrap();
    }
}

fn query(seed: usize) -> Vec<f32> {
    noise(5000 + seed, 2 * WIDTH).into_iter().map(|x| 2.0 * x).collect()
}

fn attended(store: &Store, view: &Selection, query: &[f32]) -> Vec<f32> {
    let batch = store.read(&[view]).submit().unwrap().wait().unwrap();
    let mut out = vec![0.0; query.len()];
    attend(query, view, batch.get(0).unwrap(), &mut out).unwrap();
    // Attention over parts as they arrive gives the same bits.
    let mut streamed = vec![0.0; query.len()];
    let mut ticket = store.read(&[view]).submit().unwrap();
    ticket.attend(0, query, view, &AttendOptions::default(), &mut streamed).unwrap();
    assert_eq!(out, streamed);
    out
}

fn differs(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Selects a whole layer with reconstructed keys. Also returns the error of its attention against the stored keys.
fn error_of_all(store: &Store, sequence: &Sequence, layer: usize) -> (Selection, f32) {
    let query = query(layer);
    let full = attended(store, &sequence.select(layer, SelectRequest::all()).unwrap(), &query);
    let select = SelectOptions::new(Budget::All).planes(PlaneSet::ReconstructedKeys);
    let view = sequence.select(layer, SelectRequest::query(&query).options(select)).unwrap();
    let out = attended(store, &view, &query);
    (view, differs(&full, &out))
}

fn committed(store: &Store, tokens: usize) -> Sequence {
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key("a")).unwrap();
    append(&mut sequence, 0..tokens);
    sequence.commit(Durability::Sync).unwrap();
    sequence
}

#[test]
fn a_rank_that_is_not_low_is_full_attention() {
    let store = TestStore::new(medium());
    let mut sequence = committed(&store, 515);
    // Both ranks lose nothing, the full width and the true rank. The true rank also shows that the rotation is right.
    for (rank, bound) in [(WIDTH, 1e-3), (TRUE_RANK, 1e-3)] {
        sequence.reconstruct_keys(&ReconstructOptions::default().rank(rank).outlier_share(0.0)).unwrap();
        for layer in 0..2 {
            let (view, error) = error_of_all(&store, &sequence, layer);
            assert_eq!(view.tokens(), 515);
            assert!(error < bound, "rank {rank}, layer {layer}: {error}");
        }
    }
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(3).outlier_share(0.0)).unwrap();
    let (_, error) = error_of_all(&store, &sequence, 0);
    assert!(error > 1e-2, "three numbers per token are not enough: {error}");
}

#[test]
fn values_are_read_and_nothing_of_outliers() {
    let store = TestStore::new(medium());
    let mut sequence = committed(&store, 800);
    let method = sequence.attach(Arc::new(ShadowKv::default())).unwrap();
    let before = store.status().memory.used_bytes;
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(TRUE_RANK).outlier_share(0.03)).unwrap();
    // Each layer keeps its rows, its basis and three outlier blocks.
    let kept = 2 * (800 * TRUE_RANK * 2 + TRUE_RANK * WIDTH * 4) as u64;
    assert!(sequence.rebuilt_bytes() >= kept + 2 * 3 * 2 * PLANE);
    assert_eq!(store.status().memory.used_bytes - before, sequence.rebuilt_bytes() as usize);
    for layer in 0..2 {
        let query = query(layer);
        let select = SelectOptions::new(Budget::tokens(200)).aggregation(HeadAggregation::Softmax);
        let whole = sequence.select(layer, SelectRequest::query(&query).options(select).selector(method)).unwrap();
        let view = sequence
            .select(
                layer,
                SelectRequest::query(&query).options(select.planes(PlaneSet::ReconstructedKeys)).selector(method),
            )
            .unwrap();
        assert!(whole.groups().eq(view.groups()));
        let [whole_bytes, bytes] = [&whole, &view].map(|view| {
            let ticket = store.read(&[view]).submit().unwrap();
            let bytes = ticket.selected_bytes();
            ticket.wait().map(|_| bytes).unwrap()
        });
        assert_eq!(whole_bytes, 2 * PLANE * 25 + 25 * (4096 - PLANE), "padding between the planes included");
        // Outliers of the selection are not read, because they are kept in memory.
        let outliers = 25 - bytes / PLANE;
        assert!(bytes.is_multiple_of(PLANE) && (1..=3).contains(&outliers), "{bytes} bytes");
        let counted = || store.status().devices.iter().map(|d| d.counters.read_bytes).sum::<u64>();
        let at = counted();
        let ticket = store.read(&[&view]).submit().unwrap();
        let asked = ticket.device_bytes();
        drop(ticket.wait().unwrap());
        assert_eq!((counted() - at, asked.is_multiple_of(512)), (asked, true));
        assert!(asked == bytes || asked == bytes / PLANE * 4096, "{asked}");
        assert!(differs(&attended(&store, &whole, &query), &attended(&store, &view, &query)) < 1e-3);
    }
    sequence.forget_keys();
    assert_eq!((store.status().memory.used_bytes, sequence.rebuilt_bytes()), (before, 0));
}

#[test]
fn new_tokens_are_exact_until_the_next_rebuild() {
    let store = TestStore::new(medium());
    let mut sequence = committed(&store, 400);
    // Rank 3 is too low, so reconstructed keys differ visibly from exact ones.
    let low = ReconstructOptions::default().rank(3).outlier_share(0.0).exact_tokens(64);
    sequence.reconstruct_keys(&low).unwrap();
    append(&mut sequence, 400..560);
    sequence.commit(Durability::Sync).unwrap();
    let exact = |sequence: &Sequence, groups: &[u64]| {
        let rebuilt = sequence.select(0, SelectRequest::groups(groups).planes(PlaneSet::ReconstructedKeys)).unwrap();
        let whole = sequence.select(0, SelectRequest::groups(groups)).unwrap();
        let bytes = store.read(&[&rebuilt]).submit().unwrap().selected_bytes();
        (differs(&attended(&store, &rebuilt, &query(0)), &attended(&store, &whole, &query(0))), bytes)
    };
    let (block, (old, bytes)) = (PLANE + 4096, exact(&sequence, &[10, 11, 30]));
    assert!(old > 1e-3 && bytes == 3 * PLANE, "{old}");
    assert_eq!(exact(&sequence, &[50, 55, 57]), (0.0, 3 * PLANE), "kept exact");
    assert_eq!(exact(&sequence, &[58, 60, 69]), (0.0, 3 * block), "no room for them: read with the values");
    assert!(exact(&sequence, &[11, 51, 61]).0 > 1e-4);
    // The first truncation is inside the new tokens, the second inside the reconstructed ones. The sequence grows after
    // each.
    for cut in [420, 203] {
        sequence.truncate(cut as u64).unwrap();
        append(&mut sequence, cut..600);
        sequence.commit(Durability::Sync).unwrap();
        let first = cut.min(400) as u64 / 8;
        assert_eq!(exact(&sequence, &[first, first + 7]), (0.0, 2 * PLANE));
        assert_eq!(exact(&sequence, &[first + 8, 70]), (0.0, 2 * block));
        let (error, bytes) = exact(&sequence, &[first - 2, first - 1]);
        assert!(error > 1e-4 && bytes == 2 * PLANE);
    }
    sequence.reconstruct_keys(&low.rank(TRUE_RANK)).unwrap();
    let (error, bytes) = exact(&sequence, &[10, 60, 73]);
    assert!(error < 1e-3 && bytes == 3 * PLANE, "{error}");
}

#[test]
fn a_view_outlives_what_it_was_made_from() {
    let store = TestStore::new(medium());
    let mut sequence = committed(&store, 300);
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(TRUE_RANK)).unwrap();
    let select = SelectOptions::new(Budget::All).planes(PlaneSet::ReconstructedKeys);
    let view = sequence.select(0, SelectRequest::query(&query(0)).options(select)).unwrap();
    let out = attended(&store, &view, &query(0));
    let held = store.status().memory.used_bytes;
    sequence.truncate(17).unwrap();
    sequence.reconstruct_keys(&ReconstructOptions::default().rank(2)).unwrap();
    append(&mut sequence, 17..40);
    assert_eq!(attended(&store, &view, &query(0)), out);
    drop(view);
    assert!(store.status().memory.used_bytes < held, "the memory is freed with the selection");
}

#[test]
fn keys_are_reconstructed_again_after_an_open() {
    let mut store = TestStore::new(medium());
    let select = SelectOptions::new(Budget::All).planes(PlaneSet::ReconstructedKeys);
    let rebuild = ReconstructOptions::default().rank(TRUE_RANK);
    let mut seen = Vec::new();
    for opened in 0..2 {
        if opened == 1 {
            store.reopen_with(store.options().cache(CacheOptions::new(ByteSize::mib(4))));
        }
        let mut sequence =
            if opened == 0 { committed(&store, 333) } else { store.open_sequence("a", OpenSequence::new()).unwrap() };
        let refused = sequence.select(1, SelectRequest::query(&query(1)).options(select)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert!(refused.to_string().contains("reconstruct_keys"), "{refused}");
        sequence.reconstruct_keys(&rebuild).unwrap();
        // The first read is from the device, the second from resident blocks.
        for _ in 0..2 {
            let view = sequence.select(1, SelectRequest::query(&query(1)).options(select)).unwrap();
            seen.push(attended(&store, &view, &query(1)));
        }
        let mut fork = sequence.fork().unwrap();
        assert!(fork.select(1, SelectRequest::query(&query(1)).options(select)).is_err(), "forks start without");
        fork.reconstruct_keys(&rebuild).unwrap();
        seen.push(attended(
            &store,
            &fork.select(1, SelectRequest::query(&query(1)).options(select)).unwrap(),
            &query(1),
        ));
        drop((fork, sequence));
        store.close().unwrap();
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "the same keys, the same bits");
}

#[test]
fn layouts_and_ranks_that_do_not_suit_are_refused() {
    let store = TestStore::new(medium());
    let plain = KvLayout::builder().layers(2).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let refused = |layout: KvLayout, options: &ReconstructOptions| {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
        let error = sequence.reconstruct_keys(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let default = ReconstructOptions::default();
    let text = refused(plain.clone().build().unwrap(), &default);
    assert!(text.contains("the rotation of its keys") && text.contains("layer 0"), "{text}");
    let [rope, _] = ropes();
    let mla = plain.clone().rope(rope).value_dim(0).build().unwrap();
    assert!(refused(mla, &default).contains("no V plane"));
    let good = plain.clone().rope(rope).build().unwrap();
    for rank in [0, WIDTH + 1] {
        assert!(refused(good.clone(), &default.rank(rank)).contains("1 to 128"));
    }
    for wrong in [Rope::new(66, 1e4), Rope::new(7, 1e4), Rope::new(64, 1e4).starting_at(2), Rope::new(64, 1.0)] {
        assert_eq!(plain.clone().rope(wrong).build().unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    // A layout with another rotation is another layout.
    let mut sequence = store.create_sequence(&good, CreateOptions::new().key("b")).unwrap();
    sequence.reconstruct_keys(&default).unwrap();
    append(&mut sequence, 0..20);
    sequence.commit(Durability::Sync).unwrap();
    drop(sequence);
    let other = plain.rope(Rope::new(DIM as u16, 20_000.0)).build().unwrap();
    assert_eq!(
        store.open_sequence("b", OpenSequence::new().layout(&other)).unwrap_err().kind(),
        ErrorKind::LayoutMismatch
    );
    assert_eq!(store.open_sequence("b", OpenSequence::new().layout(&good)).unwrap().len(), 20);
}

#[test]
fn missing_memory_is_an_error_and_changes_nothing() {
    let store = TestStore::new(medium().memory_limit(ByteSize::mib(8)).frame_bytes(ByteSize::kib(128)));
    let wide = KvLayout::builder().layers(1).kv_heads(8).head_dim(128).group_tokens(8).rope(Rope::new(128, 1e4));
    let mut sequence = store.create_sequence(&wide.build().unwrap(), CreateOptions::new()).unwrap();
    let rows: Vec<f32> = noise(3, 256 * 1024).into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
    let view = TensorView::token_major(&rows, 256, 8, 128);
    sequence.append(0, view, view).unwrap();
    let before = store.status().memory.used_bytes;
    // Three matrices of 1024 x 1024 alone have 12 MiB.
    let error = sequence.reconstruct_keys(&ReconstructOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    assert_eq!(store.status().memory.used_bytes, before);
}

#[test]
fn exact_keys_leave_the_account_with_the_others() {
    let store = TestStore::new(medium());
    let mut sequence = committed(&store, 400);
    let used = || {
        let memory = store.status().memory;
        let summaries = memory.categories.iter().find(|of| of.category == stratakv::metrics::Category::Summaries);
        summaries.map(|of| of.used_bytes).unwrap()
    };
    let before = used();
    sequence.reconstruct_keys(&ReconstructOptions::default()).unwrap();
    append(&mut sequence, 400..800);
    assert!(used() > before + 400 * WIDTH * 2);
    sequence.forget_keys();
    assert_eq!((used(), sequence.rebuilt_bytes()), (before, 0));
}

#[test]
fn keys_beyond_what_a_basis_can_hold_are_refused() {
    let store = TestStore::new(medium());
    let layout = KvLayout::builder().layers(1).kv_heads(HEADS as u16).head_dim(DIM as u16).group_tokens(GROUP as u16);
    let layout = layout.dtype(stratakv::DType::F32).rope(Rope::new(DIM as u16, 10_000.0)).build().unwrap();
    for (magnitude, good) in [(1e10, true), (1e18, false), (1e19, false), (1e30, false), (3e38, false)] {
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
        let rows: Vec<f32> = (0..20 * GROUP * WIDTH).map(|i| ((i * 7919) % 101) as f32 / 101.0 * magnitude).collect();
        let values = vec![0.5; rows.len()];
        let view = |rows| TensorView::token_major(rows, 20 * GROUP, HEADS, DIM);
        sequence.append(0, view(&rows), view(&values)).unwrap();
        let rebuilt = sequence.reconstruct_keys(&ReconstructOptions::default());
        match good {
            true => rebuilt.unwrap(),
            false => {
                assert_eq!(rebuilt.unwrap_err().kind(), ErrorKind::InvalidArgument, "{magnitude}");
                assert_eq!(sequence.rebuilt_bytes(), 0);
            }
        }
    }
}
