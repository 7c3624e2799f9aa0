//! Appends a prompt, attends to a small part of it, and resumes the session after a restart.
//!
//! `cargo run --release -p stratakv --example quickstart`
//!
//! One token of the prompt matches the query. The engine finds its group by the min/max summaries, so that attention to
//! 128 of 4096 tokens gives nearly the output of attention to all.

use stratakv::{
    Budget, ByteSize, CreateOptions, Durability, KvLayout, OpenSequence, SelectRequest, Sequence, Store, StoredSummary,
    TensorView, attend,
};

const LAYERS: usize = 2;
const KV_HEADS: usize = 8;
const Q_HEADS: usize = 32;
const DIM: usize = 128;
const TOKENS: usize = 4096;
const NEEDLE: usize = 1500;

/// Returns `[tokens, KV_HEADS, DIM]` elements between -0.5 and 0.5.
fn random(tokens: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca6b);
    (0..(tokens * KV_HEADS * DIM) as u32).map(|i| (hash(i) >> 8) as f32 / (1 << 24) as f32 - 0.5).collect()
}

/// Attends under a budget. Returns the output `[Q_HEADS, DIM]` and the bytes of the groups read.
fn step(store: &Store, sequence: &Sequence, query: &[f32], budget: Budget) -> stratakv::Result<(Vec<f32>, u64)> {
    let mut out = vec![0.0; Q_HEADS * DIM];
    let selection = sequence.select(0, SelectRequest::query(query).options(budget))?;
    let ticket = store.read(&[&selection]).submit()?;
    let bytes = ticket.selected_bytes();
    let batch = ticket.wait()?;
    attend(query, &selection, batch.get(0)?, &mut out)?;
    Ok((out, bytes))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    let open = || Store::options().device(directory.path()).memory_limit(ByteSize::mib(64)).open();
    let store = open()?;
    let layout = KvLayout::builder().layers(LAYERS as u16).kv_heads(KV_HEADS as u16).head_dim(DIM as u16);
    let layout = layout.group_tokens(8).fingerprint([7; 32]).build()?;
    let options = CreateOptions::new().key("session-42").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout, options)?;

    // Prefill. The needle's keys point in the direction of the query, its values are 1.
    let (mut keys, mut values) = (random(TOKENS, 1), random(TOKENS, 2));
    let needle = NEEDLE * KV_HEADS * DIM..(NEEDLE + 1) * KV_HEADS * DIM;
    keys[needle.clone()].fill(16.0);
    values[needle].fill(1.0);
    for layer in 0..LAYERS {
        let keys = TensorView::token_major(&keys, TOKENS, KV_HEADS, DIM);
        let values = TensorView::token_major(&values, TOKENS, KV_HEADS, DIM);
        sequence.append(layer, keys, values)?;
    }
    sequence.commit_with(b"sampler state", Durability::Sync)?;

    let query = vec![0.1; Q_HEADS * DIM];
    let (full, all_bytes) = step(&store, &sequence, &query, Budget::All)?;
    let (sparse, bytes) = step(&store, &sequence, &query, Budget::tokens(128))?;
    let error = full.iter().zip(&sparse).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("128 of {TOKENS} tokens: {bytes} of {all_bytes} bytes read, largest difference {error:.5}");
    assert!(bytes * 16 <= all_bytes && error < 0.01);
    drop(sequence);
    store.close()?;

    let store = open()?;
    let sequence = store.open_sequence("session-42", OpenSequence::new())?;
    assert_eq!((sequence.len(), sequence.caller_state()), (TOKENS as u64, Some(&b"sampler state"[..])));
    let (resumed, _) = step(&store, &sequence, &query, Budget::tokens(128))?;
    assert_eq!(resumed, sparse);
    println!("after a restart: {} tokens, the same output bit for bit", sequence.len());
    Ok(())
}
