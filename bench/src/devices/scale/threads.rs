//! `kvbench scale --shard-threads` measures the cost of serving four devices with fewer threads.
//!
//! The same store is opened with each number of threads in rotation, so that noise of the machine affects all of them.

use crate::devices::limits::DeviceLimits;
use crate::devices::scale::args::ScaleArgs;
use crate::devices::scale::rig::{KEY, ScaleCase, ScaleRig, remove, store_options};
use crate::devices::scale::turn::{ScaleTurn, WARM_UP, first_copies, turn};
use crate::support::report::{median, percentile, print, ratio, rounded};
use anyhow::Result;
use serde::Serialize;
use std::path::PathBuf;
use stratakv::options::BalancePolicy;
use stratakv::{OpenSequence, StoreOptions};

/// Devices that the store is on.
const DEVICES: u32 = 4;

/// Medians of one number of threads.
#[derive(Debug, Serialize)]
struct ThreadsResult {
    test: &'static str,
    devices: u32,
    threads: u32,
    /// The sum of the devices' limits.
    limit_gb_per_s: Option<f64>,
    gb_per_s: f64,
    /// The rate over that of one thread per device, in the same run.
    ratio: Option<f64>,
    /// User and system time of all threads of the process, checksums included.
    cpu_s_per_gb: f64,
    /// The CPU over that of one thread per device, in the same run.
    ratio_cpu: Option<f64>,
    system_calls_per_gb: f64,
    /// Latency of batches, from submission until they were complete.
    p50_us: f64,
    p99_us: f64,
}

/// Measures every number of threads, first without limits, then with them, and prints the results.
///
/// # Errors
/// The store cannot be made or read, or the run was interrupted.
pub(super) fn measure(args: &ScaleArgs, rig: &mut ScaleRig) -> Result<()> {
    let case = ScaleCase { devices: (0..DEVICES).collect(), copies: 1, skew: false };
    let paths = rig.fill(args, &case, BalancePolicy::EarliestFinish)?.close()?;
    for limit in [None, Some(args.bps.0)] {
        let limits = limit.map_or(DeviceLimits::NONE, DeviceLimits::read_bps);
        for device in &case.devices {
            rig.devices.limit(*device as usize, &limits)?;
        }
        compare(args, &case, &paths, limit)?;
    }
    remove(&paths)
}

fn compare(args: &ScaleArgs, case: &ScaleCase, paths: &[PathBuf], limit: Option<u64>) -> Result<()> {
    let mut counts = vec![DEVICES];
    counts.extend(args.shard_threads.iter().filter(|threads| **threads != DEVICES));
    let mut turns: Vec<Vec<ScaleTurn>> = counts.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (threads, own) in counts.iter().zip(&mut turns) {
            own.push(turn_with(args, case, paths, *threads)?);
        }
    }
    let first = ScaleTurn::median(&turns[0]);
    for (threads, own) in counts.iter().zip(&turns) {
        let latencies: Vec<f64> = own.iter().flat_map(|turn| turn.latencies_us.iter().copied()).collect();
        let own = ScaleTurn::median(own);
        let result = ThreadsResult {
            test: "threads",
            devices: DEVICES,
            threads: *threads,
            limit_gb_per_s: limit.map(|limit| rounded(f64::from(DEVICES) * limit as f64 / 1e9)),
            gb_per_s: rounded(own.gb_per_s),
            ratio: ratio(own.gb_per_s, first.gb_per_s),
            cpu_s_per_gb: rounded(own.cpu_s_per_gb),
            ratio_cpu: ratio(own.cpu_s_per_gb, first.cpu_s_per_gb),
            system_calls_per_gb: rounded(own.calls_per_gb),
            p50_us: rounded(median(&latencies)),
            p99_us: rounded(percentile(&latencies, 0.99)),
        };
        print(args.json, &format!("scale: {DEVICES} devices, {threads} threads"), &result)?;
    }
    Ok(())
}

/// Opens the store with this number of threads, warms up, and measures one turn.
fn turn_with(args: &ScaleArgs, case: &ScaleCase, paths: &[PathBuf], threads: u32) -> Result<ScaleTurn> {
    let options = store_options(args, BalancePolicy::EarliestFinish).shard_threads(threads as usize);
    let store = paths.iter().fold(options, StoreOptions::device).open()?;
    let sequence = store.open_sequence(KEY, OpenSequence::new())?;
    let groups = first_copies(&store, &sequence)?;
    turn(args, &store, &sequence, case, &groups, args.seconds * WARM_UP)?;
    let measured = turn(args, &store, &sequence, case, &groups, args.seconds)?;
    drop(sequence);
    store.close()?;
    Ok(measured)
}
