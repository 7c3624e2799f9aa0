//! `kvbench cluster costs` measures what a sequence with stored clusters costs until they are used.
//!
//! 1. Two sequences get the same tokens, and one of them stores clusters.
//! 2. In each round, each sequence is opened, gets a token and a commit, is forked, loses the fork, and is closed. No
//!    method is attached.
//!
//! Times are medians over the rounds.

use super::args::count;
use super::attach::StoredRun;
use super::decode::ClusterDecodeArgs;
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, print, ratio, rounded};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::time::Instant;
use stratakv::{Durability, OpenSequence, Store};

/// The keys of the sequences without and with stored clusters.
const KEYS: [&str; 2] = ["plain", "clusters"];

/// Arguments of `kvbench cluster costs`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench cluster costs --device /nvme0 --entries 32768 --layers 4 --json
          kvbench cluster costs --device /nvme0 --methods dynakv:16:members --cost-rounds 50

Each operation has its median time without (`plain_ms`) and with stored clusters (`clusters_ms`), and the ratio of
both. A commit has one token. Of --methods, those without clusters are left out.")]
pub(crate) struct ClusterCostsArgs {
    #[command(flatten)]
    decode: ClusterDecodeArgs,
    /// Rounds. Each opens, commits, forks, deletes and closes both sequences.
    #[arg(long, default_value_t = 21, value_parser = count())]
    cost_rounds: u32,
}

/// The times of one operation.
#[derive(Debug, Serialize)]
struct CostResult {
    method: String,
    trace: String,
    tokens: usize,
    layers: usize,
    operation: &'static str,
    plain_ms: f64,
    clusters_ms: f64,
    ratio: Option<f64>,
}

/// The operations of a round, in their order.
const OPERATIONS: [&str; 5] = ["open", "commit", "fork", "delete", "close"];

/// Runs `kvbench cluster costs`.
pub(super) fn run(args: &ClusterCostsArgs) -> Result<()> {
    StoredRun::each(&args.decode, |run| {
        for (operation, [plain, clusters]) in OPERATIONS.into_iter().zip(times(run, args.cost_rounds)?) {
            let (plain_ms, clusters_ms) = (median(&plain), median(&clusters));
            let result = CostResult {
                method: run.spec.to_string(),
                trace: run.workload.name.clone(),
                tokens: run.workload.tokens,
                layers: run.workload.layers.len(),
                operation,
                plain_ms: rounded(plain_ms),
                clusters_ms: rounded(clusters_ms),
                ratio: ratio(clusters_ms, plain_ms),
            };
            print(args.decode.common.json, &format!("{}, {operation}", run.spec), &result)?;
        }
        Ok(())
    })
}

/// Returns the milliseconds of each operation and round, without and with stored clusters.
fn times(run: &StoredRun<'_>, rounds: u32) -> Result<[[Vec<f64>; 2]; 5]> {
    let (store, adapter) = (run.open()?, run.adapter()?);
    KEYS.into_iter().try_for_each(|key| run.create(&store, key, adapter.as_ref(), run.workload.tokens))?;
    let mut sequence = store.open_sequence(KEYS[1], OpenSequence::new())?;
    let id = run.attach(&mut sequence, adapter.as_ref())?;
    sequence.store_clusters(id)?;
    drop(sequence);
    let mut times: [[Vec<f64>; 2]; 5] = Default::default();
    for round in 0..rounds {
        for turn in 0..KEYS.len() {
            check_interrupt()?;
            // The order alternates.
            let side = (turn + round as usize) % KEYS.len();
            let each = round_of(run, &store, KEYS[side])?;
            times.iter_mut().zip(each).for_each(|(times, ms)| times[side].push(ms));
        }
    }
    store.close()?;
    Ok(times)
}

/// Runs the operations on a sequence. Returns the milliseconds of each.
fn round_of(run: &StoredRun<'_>, store: &Store, key: &str) -> Result<[f64; 5]> {
    let mut at = Instant::now();
    let mut lap = || std::mem::replace(&mut at, Instant::now()).elapsed().as_secs_f64() * 1e3;
    let mut sequence = store.open_sequence(key, OpenSequence::new())?;
    let open = lap();
    run.append(&mut sequence, 0, 1)?;
    sequence.commit(Durability::Sync)?;
    let commit = lap();
    let mut fork = sequence.fork_as("fork")?;
    fork.commit(Durability::Sync)?;
    let forked = lap();
    fork.delete(Durability::Sync)?;
    let delete = lap();
    sequence.close()?;
    Ok([open, commit, forked, delete, lap()])
}
