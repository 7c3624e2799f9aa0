//! `kvbench commit` measures a durable commit of one decode step, against plain calls that write and sync the same
//! bytes and then write and sync one page.
//!
//! With `--sequences` it also measures several sequences that commit at the same time.

mod args;
mod concurrent;
mod plain;

pub(crate) use args::CommitArgs;

use crate::support::directory::{settle, work_directory};
use crate::support::model::{KvSource, layout};
use crate::support::report::{median, percentile, print, ratio, rounded};
use crate::support::store::{device_sum, driver_name, open_store};
use anyhow::Result;
use args::{GROUP, LAYERS};
use plain::PlainFiles;
use serde::Serialize;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, Sequence, Store, StoredSummary};

/// Latencies in microseconds. A commit's latency is that of the call alone, because the groups were appended before.
#[derive(Debug, Serialize)]
struct CommitResult {
    commits: u32,
    step_tokens: u32,
    /// Bytes of frames that one commit writes.
    bytes_per_commit: u64,
    #[serde(flatten)]
    latency: CommitLatency,
    /// Latency of the step's appends to all layers.
    append_p50_us: f64,
    syncs_per_commit: f64,
    driver: String,
}

/// The engine's commits, the plain calls, and the engine over the plain calls.
#[derive(Debug, Serialize)]
struct CommitLatency {
    p50_us: f64,
    p99_us: f64,
    plain_p50_us: f64,
    plain_p99_us: f64,
    ratio_p50: Option<f64>,
    ratio_p99: Option<f64>,
}

/// Samples of all commits but the first.
#[derive(Default)]
struct CommitSamples {
    commit_us: Vec<f64>,
    append_us: Vec<f64>,
    plain_us: Vec<f64>,
    bytes: Vec<f64>,
    /// Syncs of the devices during these commits.
    syncs: u64,
}

/// Runs `kvbench commit`.
pub(crate) fn run(args: &CommitArgs) -> Result<()> {
    let bytes = args.written_bytes();
    let concurrent_bytes = if args.sequences > 1 { 3 * bytes } else { 0 };
    let dir = work_directory(&args.common.device, 2 * bytes + concurrent_bytes + (512 << 20))?;
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize((1 << 30) + bytes / 4))?;
    let options = CreateOptions::new().key("commit").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
    let mut plain = PlainFiles::new(dir.path(), bytes, u64::from(args.commits))?;
    settle(dir.path())?;
    eprintln!("kvbench: {}: {} commits", dir.path().display(), args.commits);
    let samples = measure(args, &store, &mut sequence, &mut plain)?;
    let result = result(args, &samples, driver_name(&store.status()));
    drop(sequence);
    print(args.common.json, "commit", &result)?;
    if args.sequences > 1 {
        concurrent::run(&store, args, &mut plain)?;
    }
    Ok(store.close()?)
}

/// Appends and commits one step after another, each followed by plain calls that write as much.
fn measure(args: &CommitArgs, store: &Store, sequence: &mut Sequence, plain: &mut PlainFiles) -> Result<CommitSamples> {
    let mut source = KvSource::new(args.step as usize);
    let syncs = || device_sum(store, |device| device.counters.syncs);
    let mut samples = CommitSamples::default();
    let mut syncs_before = 0;
    for step in 0..=args.commits {
        if step % 50 == 0 {
            eprintln!("kvbench: commit {step} of {}", args.commits);
        }
        let start = Instant::now();
        source.append(sequence, args.step as usize)?;
        let appended = start.elapsed();
        let before = store.status().written_bytes;
        let start = Instant::now();
        sequence.commit(Durability::Sync)?;
        let committed = start.elapsed();
        let bytes = store.status().written_bytes - before;
        let plain_s = plain.step(bytes)?;
        // The first commit creates the sequence and opens files.
        if step == 0 {
            syncs_before = syncs();
            continue;
        }
        samples.commit_us.push(committed.as_secs_f64() * 1e6);
        samples.append_us.push(appended.as_secs_f64() * 1e6);
        samples.plain_us.push(plain_s * 1e6);
        samples.bytes.push(bytes as f64);
    }
    samples.syncs = syncs() - syncs_before;
    Ok(samples)
}

fn result(args: &CommitArgs, samples: &CommitSamples, driver: String) -> CommitResult {
    let (own, plain) = (&samples.commit_us, &samples.plain_us);
    CommitResult {
        commits: args.commits,
        step_tokens: args.step,
        bytes_per_commit: median(&samples.bytes) as u64,
        latency: CommitLatency {
            p50_us: rounded(median(own)),
            p99_us: rounded(percentile(own, 0.99)),
            plain_p50_us: rounded(median(plain)),
            plain_p99_us: rounded(percentile(plain, 0.99)),
            ratio_p50: ratio(median(own), median(plain)),
            ratio_p99: ratio(percentile(own, 0.99), percentile(plain, 0.99)),
        },
        append_p50_us: rounded(median(&samples.append_us)),
        syncs_per_commit: rounded(samples.syncs as f64 / f64::from(args.commits)),
        driver,
    }
}
