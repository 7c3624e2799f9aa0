//! What is left of attempts that failed, and reads where memory is short.

use super::Sequence;
use super::blocks::read_each;
use crate::io::buffer::slab::SLAB_BYTES;
use crate::layout::{KvLayout, TensorView};
use crate::options::{ByteSize, CreateOptions, Durability, StoreOptions};
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

/// Writes a state, as a commit does that fails behind it.
fn write_state(sequence: &mut Sequence, state: &[u8]) {
    (sequence.state, sequence.state_dirty) = (Some(state.to_vec()), true);
    let drafts = sequence.commit_drafts(sequence.len(), 0, false).unwrap();
    sequence.write_drafts(drafts, true).unwrap();
    let last = sequence.frames.last().unwrap();
    assert!(last.holds_state && last.first_token.is_none());
}

#[test]
fn states_of_attempts_that_failed_are_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new().key("s")).unwrap();
    append(&mut sequence, 3);
    sequence.commit_with(b"first", Durability::Sync).unwrap();
    let frames = || store.sequences()[0].frames;
    assert_eq!(frames(), 1);
    // Each tried again writes its own.
    write_state(&mut sequence, b"second");
    write_state(&mut sequence, b"second");
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!((frames(), sequence.held.len()), (2, 2));
    // One that was refused is not there at all.
    write_state(&mut sequence, b"refused");
    (sequence.state, sequence.state_dirty) = (Some(b"second".to_vec()), false);
    sequence.refuse_state();
    assert!(sequence.frames.is_empty());
    append(&mut sequence, 2);
    sequence.commit(Durability::Sync).unwrap();
    assert_eq!(frames(), 3);
    drop(sequence);
    store.close().unwrap();
    let store = options(dir.path()).open().unwrap();
    let sequence = store.open_sequence("s").unwrap();
    assert_eq!((sequence.len(), sequence.state()), (5, Some(&b"second"[..])));
}

#[test]
fn a_read_waits_for_no_memory_that_it_holds_itself() {
    let dir = tempfile::tempdir().unwrap();
    let store = options(dir.path()).open().unwrap();
    let mut sequence = store.create_sequence(&layout(), CreateOptions::new()).unwrap();
    append(&mut sequence, 800);
    sequence.commit(Durability::Sync).unwrap();
    let devices = Arc::clone(&sequence.store.devices);
    let segment = Arc::clone(&sequence.held[0].slot.now().segment);
    // One slab is left for it.
    let mut held: Vec<_> = std::iter::from_fn(|| devices.arena.lease(SLAB_BYTES).ok()).collect();
    held.pop();
    let bytes = 64 << 10;
    let pieces = vec![(segment.as_ref(), 0, bytes); 5 * SLAB_BYTES / (2 * bytes)];
    let read: Vec<Vec<u8>> = read_each(&devices, &pieces).unwrap().into_iter().map(Result::unwrap).collect();
    assert_eq!(read.len(), pieces.len());
    assert!(read.iter().all(|piece| piece.len() == bytes && *piece == read[0]));
}
