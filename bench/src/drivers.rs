//! `kvbench drivers`: the same batches of random blocks through every driver that was built in, taking turns.

use crate::cli::{Driver, DriversArgs};
use crate::read::{RateLimiter, Turn, check, fill, turn};
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{open_store, open_store_with, settle, work_directory};
use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stratakv::{ByteSize, StoreOptions};

/// One driver and one way to ask it.
#[derive(Debug, Serialize)]
struct DriverResult {
    driver: String,
    /// `read_now` (the calling thread at the device; io_uring only) or `tickets` (through the shard).
    path: &'static str,
    block: u64,
    batch: u32,
    in_flight: u32,
    gb_per_s: f64,
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    /// User and system time of all threads, checksums included.
    cpu_s_per_gb: f64,
    /// Against io_uring through tickets: medians of the ratios of each round.
    ratio_uring: Option<f64>,
    ratio_uring_cpu: Option<f64>,
    /// Why it could not run.
    skipped: Option<String>,
}

struct Side {
    driver: Driver,
    pace: RateLimiter,
    turns: Vec<Turn>,
    skipped: Option<String>,
}

pub(crate) fn run(args: &DriversArgs) -> Result<()> {
    check(&args.block, args.size, args.batch, args.seconds)?;
    for block in &args.block {
        measure(args, *block)?;
    }
    Ok(())
}

/// io_uring by tickets first, which the others are compared with, then by calls that drive it themselves, then the others.
fn sides(args: &DriversArgs) -> Vec<Side> {
    let side = |driver, tickets, in_flight| {
        let pace = RateLimiter { batch: args.batch, in_flight, tickets };
        Side { driver, pace, turns: Vec::new(), skipped: None }
    };
    let mut sides = vec![side(Driver::Uring, true, args.in_flight), side(Driver::Uring, false, 1)];
    let others = Driver::value_variants().iter().filter(|driver| !matches!(driver, Driver::Auto | Driver::Uring));
    sides.extend(others.map(|driver| side(*driver, true, args.in_flight)));
    sides
}

fn measure(args: &DriversArgs, block: ByteSize) -> Result<()> {
    let dir = work_directory(&args.common.device, args.size.0 + (256 << 20))?;
    let path = dir.path().join("store");
    let memory = ByteSize((4 * block.0 * u64::from(args.batch) * u64::from(args.in_flight)).max(256 << 20));
    eprintln!("kvbench: {}: writing {} in blocks of {block}", dir.path().display(), args.size);
    let store = open_store(&args.common, &path, memory)?;
    drop(fill(&store, block.0, args.size.0)?);
    store.close()?;
    settle(dir.path())?;
    let mut sides = sides(args);
    for round in 1..=args.common.rounds {
        eprintln!("kvbench: {block}: round {round} of {}", args.common.rounds);
        for side in &mut sides {
            if side.skipped.is_none()
                && let Err(e) = side_turn(args, &path, block, memory, side)
            {
                eprintln!("kvbench: {e:#}");
                side.skipped = Some(format!("skipped: {e:#}"));
            }
        }
    }
    for side in &sides {
        let result = result(args, block.0, side, &sides[0]);
        print(args.common.json, &format!("{} by {}", result.driver, result.path), &result)?;
    }
    Ok(())
}

/// Opens the store with the side's driver and reads for a while, after a quarter as long to warm up.
fn side_turn(args: &DriversArgs, path: &Path, block: ByteSize, memory: ByteSize, side: &mut Side) -> Result<()> {
    let options = StoreOptions::default().memory_limit(memory);
    let store = open_store_with(&args.common, Some(side.driver), path, options)?;
    let sequence = store.open_sequence("read")?;
    let length = Duration::from_secs_f64(args.seconds);
    let mut random = fastrand::Rng::with_seed(side.turns.len() as u64);
    turn(side.pace, &store, &sequence, block.0, length / 4, &mut random)?;
    side.turns.push(turn(side.pace, &store, &sequence, block.0, length, &mut random)?);
    drop(sequence);
    store.close()?;
    Ok(())
}

fn result(args: &DriversArgs, block: u64, side: &Side, first: &Side) -> DriverResult {
    let of = |value: &dyn Fn(&Turn) -> f64| median(&side.turns.iter().map(value).collect::<Vec<_>>());
    let against = |value: &dyn Fn(&Turn) -> f64| {
        let rounds = side.turns.iter().zip(&first.turns).filter_map(|(own, first)| ratio(value(own), value(first)));
        let rounds: Vec<f64> = rounds.collect();
        (!rounds.is_empty()).then(|| rounded(median(&rounds)))
    };
    let gb_per_s = of(&|turn| turn.gb_per_s);
    DriverResult {
        driver: side.driver.to_possible_value().map_or_else(String::new, |name| name.get_name().to_owned()),
        path: side.pace.path(),
        block,
        batch: args.batch,
        in_flight: side.pace.in_flight,
        gb_per_s: rounded(gb_per_s),
        iops: rounded(gb_per_s * 1e9 / block as f64),
        p50_us: rounded(of(&|turn| percentile(&turn.latencies_us, 0.5))),
        p99_us: rounded(of(&|turn| percentile(&turn.latencies_us, 0.99))),
        cpu_s_per_gb: rounded(of(&|turn| turn.cpu_s_per_gb)),
        ratio_uring: against(&|turn| turn.gb_per_s),
        ratio_uring_cpu: against(&|turn| turn.cpu_s_per_gb),
        skipped: side.skipped.clone(),
    }
}
