//! Frames of commits that failed, and reads with little memory.

use super::caller_state::PreviousState;
use super::handle::Sequence;
use crate::io::buffer::SLAB_BYTES;
use crate::layout::{KvLayout, TensorView};
use crate::options::{ByteSize, CreateOptions, Durability, StoreOptions};
use crate::read::{BlockReader, SegmentRange};
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
