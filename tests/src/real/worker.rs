//! The work that crash tests interrupt: sequences grow, are committed and deleted on a store with small segments.

use super::ledger::WorkerReport;
use crate::content::{LayerShape, Order, SequenceShape};
use crate::disk::small_options;
use crate::rng::{Rng, mix};
use std::path::PathBuf;
use std::time::Duration;
use stratakv::{CreateOptions, DType, Durability, OpenSequence, Result, Sequence, Store, StoredSummary};

const LIVE_MAX: usize = 4;
/// A sequence with more tokens than this is deleted when it is next chosen.
const TOKENS_MAX: usize = 1500;

/// The settings of a worker.
#[derive(Clone, Debug)]
pub struct Job {
    /// The device directories.
    pub dirs: Vec<PathBuf>,
    /// The seed of everything the worker does.
    pub seed: u64,
    /// The first name for new sequences.
    pub next: u64,
}

pub(super) fn shape() -> SequenceShape {
    let window = LayerShape { window: Some(50), ..LayerShape::full(1, 24) };
    SequenceShape { layers: vec![LayerShape::full(2, 32), window], dtype: DType::F16, group: 6 }
}

fn seeds(name: u64, tokens: std::ops::Range<usize>) -> Vec<u64> {
    tokens.map(|t| mix(mix(name) ^ t as u64)).collect()
}

pub(super) fn open(dirs: &[PathBuf]) -> Result<Store> {
    small_options(dirs).lazy_delay(Duration::from_millis(7)).open()
}

pub(super) fn key(name: u64) -> String {
    format!("n{name}")
}

pub(super) fn name(key: &str) -> Option<u64> {
    key.strip_prefix('n').and_then(|name| name.parse().ok())
}

/// Checks that length, token ids and state agree and that every byte is what was appended. Returns the length.
pub(super) fn verify(store: &Store, sequence: &Sequence, name: u64) -> usize {
    let tokens = sequence.len() as usize;
    assert!(sequence.token_ids().iter().copied().eq((0..tokens as u32).map(|t| t ^ name as u32)), "{name}: token ids");
    let state = sequence.caller_state().expect("every commit carries a state");
    assert_eq!(state, tokens.to_le_bytes(), "{name}: the state of another commit");
    shape().check_all(store, sequence, |_| seeds(name, 0..tokens));
    tokens
}

/// Works until `stop` returns true. Reports before and after every operation that is to be durable.
///
/// # Errors
/// An operation of the store fails.
pub fn work(job: &Job, mut stop: impl FnMut() -> bool, mut report: impl FnMut(WorkerReport)) -> Result<()> {
    let store = open(&job.dirs)?;
    let mut rng = Rng(job.seed);
    let mut next = job.next;
    let mut live: Vec<(u64, Sequence)> = Vec::new();
    for info in store.sequences() {
        if let Some(name) = name(&info.key) {
            live.push((name, store.open_sequence(&info.key, OpenSequence::new())?));
        }
    }
    report(WorkerReport::Ready);
    let shape = shape();
    let layout = shape.layout()?;
    while !stop() {
        if live.is_empty() || (live.len() < LIVE_MAX && rng.below(12) == 0) {
            let options = CreateOptions::new().key(key(next)).store_summary(StoredSummary::MinMax);
            live.push((next, store.create_sequence(&layout, options)?));
            next += 1;
        }
        let at = rng.below(live.len());
        let long = live[at].1.len() as usize > TOKENS_MAX;
        if long || live.len() > 1 && rng.below(15) == 0 {
            let (name, sequence) = live.swap_remove(at);
            report(WorkerReport::Deleting(name));
            let level = [Durability::Sync, Durability::Lazy][rng.below(2)];
            sequence.delete(level)?;
            if level == Durability::Sync {
                report(WorkerReport::Deleted(name));
            }
            continue;
        }
        let (name, sequence) = &mut live[at];
        for step in 0..1 + rng.below(3) {
            let from = sequence.len() as usize;
            let count = if rng.below(4) == 0 { 30 + rng.below(300) } else { 1 + rng.below(8) };
            for layer in shape.kv_layers() {
                shape.append(sequence, layer, &seeds(*name, from..from + count), Order::nth(step + layer))?;
            }
            let ids: Vec<u32> = (from..from + count).map(|t| t as u32 ^ *name as u32).collect();
            sequence.append_token_ids(&ids)?;
        }
        let tokens = sequence.len() as usize;
        let level = [Durability::Sync, Durability::Sync, Durability::Lazy, Durability::None][rng.below(4)];
        report(WorkerReport::Committing(*name, tokens));
        sequence.commit_with(&tokens.to_le_bytes(), level)?;
        if level == Durability::Sync {
            report(WorkerReport::Committed(*name, tokens));
        }
    }
    Ok(())
}
