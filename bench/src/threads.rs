//! `kvbench scale --shard-threads`: what it costs to serve four devices with fewer threads. The same store is opened with one number
//! after the other, again in every round, so that all of them meet the same load of the machine.

use crate::cli::ScaleArgs;
use crate::report::{median, percentile, print, ratio, rounded};
use crate::scale::{KEY, Place, Test, Turn, first_copies, options, remove, turn};
use anyhow::Result;
use serde::Serialize;
use std::path::PathBuf;
use stratakv::{BalancePolicy, StoreOptions};

const DEVICES: u32 = 4;
/// Of a turn, before it: rings, files and slabs are registered, and limits let a little through at first.
const WARM_UP: f64 = 0.35;

#[derive(Debug, Serialize)]
struct ThreadsResult {
    test: &'static str,
    devices: u32,
    threads: u32,
    /// Bytes per second that the devices together are limited to.
    limit_gb_per_s: Option<f64>,
    gb_per_s: f64,
    /// Beside a thread for each device, in this run.
    ratio: Option<f64>,
    /// Of all threads of the process, checksums included.
    cpu_s_per_gb: f64,
    ratio_cpu: Option<f64>,
    system_calls_per_gb: f64,
    /// Batches, from submission until they were waited for.
    p50_us: f64,
    p99_us: f64,
}

pub(crate) fn measure(args: &ScaleArgs, place: &mut Place) -> Result<()> {
    let test = Test { devices: (0..DEVICES).collect(), copies: 1, skew: false };
    let (store, sequence, paths) = test.store(args, place, BalancePolicy::EarliestFinish)?;
    drop(sequence);
    store.close()?;
    for limit in [None, Some(args.bps.0)] {
        for device in &test.devices {
            place.devices.limit(*device as usize, limit, None)?;
        }
        compare(args, &test, &paths, limit)?;
    }
    remove(&paths)
}

fn compare(args: &ScaleArgs, test: &Test, paths: &[PathBuf], limit: Option<u64>) -> Result<()> {
    let mut counts = vec![DEVICES];
    counts.extend(args.shard_threads.iter().filter(|threads| **threads != DEVICES));
    let mut turns: Vec<Vec<Turn>> = counts.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (threads, own) in counts.iter().zip(&mut turns) {
            own.push(one(args, test, paths, *threads)?);
        }
    }
    let of = |at: usize, value: fn(&Turn) -> f64| median(&turns[at].iter().map(value).collect::<Vec<_>>());
    for (at, threads) in counts.iter().enumerate() {
        let latencies: Vec<f64> = turns[at].iter().flat_map(|turn| turn.latencies_us.iter().copied()).collect();
        let (rate, cpu) = (of(at, |turn| turn.gb_per_s), of(at, |turn| turn.cpu_s_per_gb));
        let result = ThreadsResult {
            test: "threads",
            devices: DEVICES,
            threads: *threads,
            limit_gb_per_s: limit.map(|limit| rounded(f64::from(DEVICES) * limit as f64 / 1e9)),
            gb_per_s: rounded(rate),
            ratio: ratio(rate, of(0, |turn| turn.gb_per_s)),
            cpu_s_per_gb: rounded(cpu),
            ratio_cpu: ratio(cpu, of(0, |turn| turn.cpu_s_per_gb)),
            system_calls_per_gb: rounded(of(at, |turn| turn.calls_per_gb)),
            p50_us: rounded(median(&latencies)),
            p99_us: rounded(percentile(&latencies, 0.99)),
        };
        print(args.json, &format!("scale: {DEVICES} devices, {threads} threads"), &result)?;
    }
    Ok(())
}

/// A turn on the store as it is, opened with so many threads.
fn one(args: &ScaleArgs, test: &Test, paths: &[PathBuf], threads: u32) -> Result<Turn> {
    let options = options(args, BalancePolicy::EarliestFinish).shard_threads(threads as usize);
    let store = paths.iter().fold(options, StoreOptions::device).open()?;
    let sequence = store.open_sequence(KEY)?;
    let groups = first_copies(&store, &sequence)?;
    turn(args, &store, &sequence, test, &groups, args.seconds * WARM_UP)?;
    let measured = turn(args, &store, &sequence, test, &groups, args.seconds)?;
    drop(sequence);
    store.close()?;
    Ok(measured)
}
