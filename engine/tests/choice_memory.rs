//! A choice of entries takes at most the memory that it announced, and none that the limit does not hold.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use stratakv::retrieval::{
    Adapter, Codebook, EntryRequest, HeadAggregation, KeyGroup, KeyShape, LayerSummary, MethodSpec, QueryProfile,
    SealedKeys,
};
use stratakv::{Budget, ByteSize, CreateOptions, DType, ErrorKind, KvLayout, SelectRequest, Store, TensorView};
use stratakv_testing::rng::Rng;

/// Counts the bytes that this thread holds, and the most that it held.
struct Counting;

thread_local! {
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // A thread that ends may free memory after its counter.
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // Both copies exist while the elements move.
        count(bytes as isize);
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KV_HEADS: usize = 2;
const DIM: usize = 8;
const GROUP: usize = 8;
/// The tokens of a sequence in a store.
const TOKENS: usize = 8000;
const SHAPE: KeyShape = KeyShape { kv_heads: KV_HEADS, key_dim: DIM, group_tokens: GROUP, dtype: DType::F32 };
const METHODS: [&str; 18] = [
    "tokens",
    "balanced:8",
    "balanced:8:members",
    "dynakv:4",
    "dynakv:16:joint",
    "dynakv:8:members",
    "dynakv:8:members:heads",
    "clusterkv:8",
    "clusterkv:2:members",
    "kmeans:8",
    "kmeans:8:joint",
    "pqcache:16",
    "pqcache:300",
    "swarm:4",
    "swarm:8:window",
    "swarm:4:members",
    "infllm:16",
    "infllm:5",
];

/// Returns codes of 16 levels for each element of a key, without a transform.
fn adapter() -> Arc<Adapter> {
    let width = KV_HEADS * DIM;
    let identity: Vec<f32> = (0..width * width).map(|at| f32::from(u8::from(at % (width + 1) == 0))).collect();
    let packing = (0..width as u32 / 2).map(|byte| vec![2 * byte, 2 * byte + 1]).collect();
    let levels = vec![(0..16).map(|level| level as f32 / 2.0 - 3.75).collect(); width];
    let book = Codebook::new(vec![0.0; width], identity.clone(), identity, packing, levels, 0.0).unwrap();
    Arc::new(Adapter::new("codes", 1, vec![book.into()]).unwrap())
}

/// Returns the plane of a group whose keys are around one of nine centres.
fn plane(random: &mut Rng) -> Vec<u8> {
    let element = |random: &mut Rng, centre: f32| (centre + 0.5 * random.unit()).to_le_bytes();
    let tokens = KV_HEADS * GROUP;
    (0..tokens)
        .flat_map(|_| {
            let centre = random.below(9) as f32 - 4.0;
            (0..DIM).flat_map(|_| element(random, centre)).collect::<Vec<u8>>()
        })
        .collect()
}

/// Returns the summaries of a method that has taken in `groups` groups, and `later` groups after its profile.
fn summaries(method: &str, (groups, later): (usize, usize), random: &mut Rng) -> Vec<Box<dyn LayerSummary>> {
    let spec: MethodSpec = method.parse().unwrap();
    let selector = spec.selector(spec.adapter_name().map(|_| adapter())).unwrap();
    let planes: Vec<Vec<u8>> = (0..groups + later).map(|_| plane(random)).collect();
    let mut keys = SealedKeys::new(SHAPE, 0);
    for (index, plane) in planes[..groups].iter().enumerate() {
        keys.push(&KeyGroup::new(SHAPE, plane, index as u64).unwrap());
    }
    let queries: Vec<Vec<f32>> = (0..20).map(|_| query(2, random)).collect();
    let queries: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    let mut summaries: Vec<Box<dyn LayerSummary>> =
        selector.summaries().iter().map(|spec| spec.layer(0, SHAPE).unwrap()).collect();
    for layer in &mut summaries {
        let push = |layer: &mut Box<dyn LayerSummary>, range: std::ops::Range<usize>| {
            for index in range {
                layer.push(&KeyGroup::new(SHAPE, &planes[index], index as u64).unwrap());
            }
        };
        push(layer, 0..groups);
        layer.attached();
        for round in 0..2 {
            loop {
                let wanted = layer.advance().unwrap();
                if wanted.is_empty() {
                    break;
                }
                for group in wanted {
                    layer.supply(&KeyGroup::new(SHAPE, &planes[group as usize], group).unwrap());
                }
            }
            if round == 0 && layer.profile_bytes(queries.len()).is_some() {
                layer.profile(&QueryProfile { keys: &keys, shape: SHAPE, queries: &queries, scale: 0.4 }).unwrap();
            }
            if round == 0 {
                push(layer, groups..groups + later);
            }
        }
    }
    summaries
}

fn query(per_head: usize, random: &mut Rng) -> Vec<f32> {
    (0..per_head * KV_HEADS * DIM).map(|_| 4.0 * random.unit() - 2.0).collect()
}

#[test]
fn choices_take_at_most_the_bytes_that_they_announced() {
    let mut random = Rng(7);
    for method in METHODS {
        let spec: MethodSpec = method.parse().unwrap();
        let selector = spec.selector(spec.adapter_name().map(|_| adapter())).unwrap();
        let entries = selector.entries().unwrap();
        for (groups, later) in [(40, 0), (90, 50), (400, 3)] {
            let summaries = summaries(method, (groups, later), &mut random);
            let summaries: Vec<&dyn LayerSummary> = summaries.iter().map(|own| &**own).collect();
            let covered = entries.covered_groups(&summaries).unwrap();
            for (per_head, budget) in [(1, 3), (2, 100), (5, 4000), (9, 700)] {
                for aggregation in [HeadAggregation::Sum, HeadAggregation::Softmax, HeadAggregation::GroupSoftmax] {
                    let (query, tokens) = (query(per_head, &mut random), 5..covered * GROUP);
                    let ask = EntryRequest { query: &query, shape: SHAPE, scale: 0.4, aggregation, tokens, budget };
                    let announced = entries.choose_bytes(&summaries, &ask).unwrap();
                    HELD.set((0, 0));
                    let chosen = entries.choose(&summaries, &ask).unwrap();
                    let most = HELD.get().1 as usize;
                    assert!(most <= announced, "{method}, {groups} groups, {ask:?}: {most} of {announced}");
                    // A small budget may have room for no cluster.
                    assert!(budget < 100 || !chosen.heads[0].is_empty(), "{method}");
                }
            }
        }
    }
}

#[test]
fn a_choice_that_memory_does_not_hold_is_refused() {
    for method in ["tokens", "dynakv:2:joint", "kmeans:2:joint", "pqcache:16", "swarm:4:members", "infllm:5"] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::options().device(dir.path()).memory_limit(ByteSize::mib(24)).open().unwrap();
        let layout = KvLayout::builder().layers(1).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
        let layout = layout.group_tokens(GROUP as u16).dtype(DType::F32).build().unwrap();
        let mut sequence = store.create_sequence(&layout, CreateOptions::new()).unwrap();
        let mut random = Rng(3);
        let rows: Vec<f32> = (0..TOKENS * KV_HEADS * DIM).map(|_| random.unit()).collect();
        let view = TensorView::token_major(&rows, TOKENS, KV_HEADS, DIM);
        sequence.append(0, view, view).unwrap();
        let spec: MethodSpec = method.parse().unwrap();
        let id = sequence.attach(spec.selector(spec.adapter_name().map(|_| adapter())).unwrap()).unwrap();
        let small = query(2, &mut random);
        if method.starts_with("swarm") || method.starts_with("infllm") {
            sequence.profile(id, 0, &[&small], None).unwrap();
        }
        let chosen = |query: &[f32]| {
            let request = SelectRequest::query(query).budget(Budget::tokens(200)).selector(id);
            sequence.select(0, request).map(|found| found.entries(0).collect::<Vec<u64>>())
        };
        let before = chosen(&small).unwrap();
        // The scores of 1024 query heads take more than the limit.
        let error = chosen(&query(1024 / KV_HEADS, &mut random)).expect_err(method);
        assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{method}: {error}");
        assert_eq!(chosen(&small).unwrap(), before, "{method}: nothing changed");
    }
}
