//! Frames of commits that failed. Reads, selections and attachments with little memory.

use super::caller_state::PreviousState;
use super::handle::Sequence;
use crate::io::buffer::SLAB_BYTES;
use crate::layout::{KvLayout, TensorView};
use crate::metrics::{Category, Reservation};
use crate::options::{Budget, ByteSize, ComputeThreads, CreateOptions, Durability, NewThreads, StoreOptions};
use crate::plan::{SelectOptions, SelectRequest};
use crate::read::{BlockReader, SegmentRange};
use crate::retrieval::{HeadAggregation, MethodSpec};
use crate::sequence::OpenSequence;
use std::path::Path;
use std::sync::Arc;

const DIM: usize = 32;

fn options(dir: &Path) -> StoreOptions {
    let options = StoreOptions::default().device(dir).memory_limit(ByteSize::mib(16));
    options.segment_bytes(ByteSize::kib(256)).frame_bytes(ByteSize::kib(64))
}

fn layout() -> KvLayout {
    KvLayout::builder().layers(1).kv_heads(1).head_dim(DIM as u16).group_tokens(8).build().unwrap()
}

fn append(sequence: &mut Sequence, tokens: usize) {
    let rows = vec![1.0_f32; tokens * DIM];
    let view = TensorView::token_major(&rows, tokens, 1, DIM);
    sequence.append(0, view, view).unwrap();
}

/// Writes the frames of a commit with a new state, as a commit does that fails after it.
fn write_state(sequence: &mut Sequence, state: &[u8]) -> PreviousState {
    let before = sequence.caller_state.replace(state);
    let drafts = sequence.commit_drafts(sequence.len(), 0, false).unwrap();
    sequence.write_drafts(drafts, true).unwrap();
    let last = sequence.frames.unnamed().last().unwrap();
    assert!(last.holds_state && last.first_token.is_none());
    before
}

#[test]
fn frames_with_a_state_of_a_failed_commit_are_released() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key("s")).unwrap();
    append(&mut sequence, 3);
    sequence.commit_with(b"first", Durability::Sync).unwrap();
    let frames = || store.sequences()[0].frames;
    assert_eq!(frames(), 1);
    // Each attempt writes its own frame.
    write_state(&mut sequence, b"second");
    write_state(&mut sequence, b"second");
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!((frames(), sequence.frames.named().len()), (2, 2));
    // The frame of a refused state is dropped.
    let before = write_state(&mut sequence, b"refused");
    sequence.caller_state.restore(before);
    sequence.frames.refuse_state();
    assert!(sequence.frames.unnamed().is_empty());
    append(&mut sequence, 2);
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!(frames(), 3);
    drop(sequence);
    store.close().unwrap();
    let store = options(dir.path()).open().unwrap();
    let sequence = store.open_sequence("s", OpenSequence::new()).unwrap();
    assert_eq!((sequence.len(), sequence.caller_state()), (5, Some(&b"second"[..])));
}

#[test]
fn a_read_does_not_wait_for_memory_that_it_holds_itself() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new()).unwrap();
    append(&mut sequence, 800);
    sequence.commit(Durability::Sync).unwrap();
    let devices = Arc::clone(&sequence.store.devices);
    let segment = Arc::clone(&sequence.frames.named()[0].slot.now().segment);
    // One slab is left for the read.
    let mut held: Vec<_> = std::iter::from_fn(|| devices.arena.lease(SLAB_BYTES).ok()).collect();
    held.pop();
    let bytes = 64 << 10;
    let pieces = vec![SegmentRange { segment: &segment, offset: 0, bytes }; 5 * SLAB_BYTES / (2 * bytes)];
    let read = BlockReader::demand(&devices).read_all(&pieces).unwrap();
    assert_eq!(read.len(), pieces.len());
    assert!(read.iter().all(|piece| piece.len() == bytes && *piece == read[0]));
}

#[test]
fn frames_of_which_a_cut_leaves_nothing_are_released() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new()).unwrap();
    for _ in 0..2 {
        append(&mut sequence, 16);
        sequence.commit(Durability::Sync).unwrap();
    }
    let ends = |sequence: &Sequence| sequence.frames.named().iter().map(|frame| frame.token_end).collect::<Vec<_>>();
    assert_eq!(ends(&sequence).len(), 2);
    // The cut falls into the first group of the second frame, of which the frame then holds nothing.
    sequence.truncate(19).unwrap();
    assert_eq!(ends(&sequence), [16]);
    assert_eq!((sequence.commits.released(), sequence.commits.is_cut()), (1, true));
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!((sequence.frames.named().len(), sequence.commits.released(), sequence.len()), (2, 0, 19));
}

#[test]
fn frames_of_a_fork_are_announced_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new()).unwrap();
    append(&mut sequence, 16);
    sequence.commit(Durability::Sync).unwrap();
    let mut fork = sequence.fork().unwrap();
    assert_eq!((fork.frames.to_announce(), fork.frames.named().len()), (1, 1));
    fork.commit(Durability::Sync).unwrap();
    assert_eq!((fork.frames.to_announce(), fork.frames.named().len()), (0, 1));
    assert_eq!(fork.len(), 16);
}

/// Takes all memory of a store but `left` bytes.
fn leave(sequence: &Sequence, left: usize) -> Reservation {
    let budget = &sequence.store.devices.budget;
    budget.try_reserve(budget.limit() - budget.used() - left, Category::Summaries).unwrap()
}

/// A host that may not compute.
struct Forbidden;

impl ComputeThreads for Forbidden {
    fn threads(&self) -> usize {
        usize::MAX
    }

    fn run(&self, _parts: usize, _part: &(dyn Fn() + Sync)) {
        panic!("there is no memory for the threads");
    }
}

#[test]
fn a_selection_without_memory_for_threads_takes_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).memory_limit(ByteSize::mib(32)).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new()).unwrap();
    append(&mut sequence, 16_000);
    let signs = "signs".parse::<MethodSpec>().unwrap().selector(None).unwrap();
    let id = sequence.attach(signs).unwrap();
    let options = SelectOptions::new(Budget::tokens(800)).aggregation(HeadAggregation::Softmax);
    let request = || SelectRequest::query(&[1.0; 8 * DIM]).options(options).selector(id);
    let select = || sequence.select(0, request()).unwrap().groups().collect::<Vec<u64>>();
    let alone = select();
    // The scores of 2000 groups take 8 * 8 * 4 + 96 bytes each. Each thread would take 130 KiB more.
    let _held = leave(&sequence, 2000 * 352 + (100 << 10));
    store.set_compute_threads(Some(Arc::new(Forbidden)));
    assert_eq!(select(), alone);
}

#[test]
fn an_attachment_on_threads_needs_no_more_memory_than_on_one() {
    const LAYERS: usize = 6;
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).memory_limit(ByteSize::mib(64)).open().unwrap();
    let layout = KvLayout::builder().layers(LAYERS as u16).kv_heads(2).head_dim(DIM as u16).group_tokens(8);
    let mut sequence = store.create_sequence(&layout.build().unwrap(), CreateOptions::new()).unwrap();
    let mut random = fastrand::Rng::with_seed(4);
    let mut append = |sequence: &mut Sequence, tokens: usize| {
        for layer in 0..LAYERS {
            let rows: Vec<f32> = (0..tokens * 2 * DIM).map(|_| random.f32() - 0.5).collect();
            let view = TensorView::token_major(&rows, tokens, 2, DIM);
            sequence.append(layer, view, view).unwrap();
        }
        sequence.commit(Durability::Sync).unwrap();
    };
    let method = || "dynakv:8".parse::<MethodSpec>().unwrap().selector(None).unwrap();
    append(&mut sequence, 4000);
    let id = sequence.attach(method()).unwrap();
    sequence.store_clusters(id).unwrap();
    sequence.detach(id).unwrap();
    // The state of the clusters does not know these tokens.
    append(&mut sequence, 400);

    let devices = Arc::clone(&sequence.store.devices);
    let budget = &devices.budget;
    // Memory that can never be had frees all buffers that no read uses. Rings may give them back later.
    let free_buffers = || {
        assert!(devices.reserve(budget.limit() + 1, Category::Summaries).is_none());
        while budget.usage().categories[Category::Arena as usize].used_bytes > devices.arena.usage().slabs * SLAB_BYTES
        {
            std::thread::yield_now();
        }
    };
    let lists = |sequence: &Sequence, id| -> Vec<String> {
        let of = |layer| format!("{:?}", sequence.selector_summaries(id, layer).unwrap()[0].cluster_lists());
        (0..LAYERS).map(of).collect()
    };
    let (alone, need) = {
        let mut fork = sequence.fork().unwrap();
        free_buffers();
        let (held, before) = (leave(&fork, budget.limit() - budget.peak()), budget.peak());
        let id = fork.attach(method()).unwrap();
        drop(held);
        (lists(&fork, id), budget.peak() - before)
    };
    let restored = store.health().restored_layers;
    assert!(restored >= LAYERS as u64 && need > 0, "{restored} layers, {need} bytes");

    let mut fork = sequence.fork().unwrap();
    free_buffers();
    let _held = leave(&fork, need + (64 << 10));
    store.set_compute_threads(Some(Arc::new(NewThreads { threads: LAYERS, calls: LAYERS })));
    let id = fork.attach(method()).unwrap();
    assert_eq!(lists(&fork, id), alone);
    assert_eq!(store.health().restored_layers, restored + LAYERS as u64);
}
