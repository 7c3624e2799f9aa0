//! `kvbench drivers` reads the same batches of random blocks with every driver that was built in, in rotation.

use crate::read::args::DriversArgs;
use crate::read::batches::{BatchPattern, EngineTurn, KEY, engine_turn, fill, throughput};
use crate::read::result::ReadThroughput;
use crate::support::args::DriverArg;
use crate::support::directory::{settle, work_directory};
use crate::support::report::{median, median_of, print, ratio, rounded};
use crate::support::store::{open_store, open_store_with};
use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use stratakv::{ByteSize, OpenSequence, StoreOptions};

/// Medians of one driver and one way to call it.
#[derive(Debug, Serialize)]
struct DriverResult {
    driver: String,
    /// `blocking` (the calling thread drives the device; io_uring only) or `tickets` (the shard's thread does).
    path: &'static str,
    block: u64,
    batch: u32,
    in_flight: u32,
    #[serde(flatten)]
    throughput: ReadThroughput,
    /// User and system time of all threads, checksums included.
    cpu_s_per_gb: f64,
    /// Throughput over io_uring's through tickets: the median of the ratios of each round.
    ratio_uring: Option<f64>,
    /// CPU over io_uring's through tickets: the median of the ratios of each round.
    ratio_uring_cpu: Option<f64>,
    /// The reason why it could not run.
    skipped: Option<String>,
}

/// A driver with one way to call it, and its turns.
struct DriverCandidate {
    driver: DriverArg,
    pattern: BatchPattern,
    turns: Vec<EngineTurn>,
    skipped: Option<String>,
}

/// Runs `kvbench drivers`.
pub(crate) fn run(args: &DriversArgs) -> Result<()> {
    args.reads.check()?;
    for block in &args.reads.block {
        measure(args, *block)?;
    }
    Ok(())
}

/// Returns the candidates: first io_uring through tickets, with which the others are compared, then io_uring driven by
/// the calling thread, then the other drivers.
fn candidates(args: &DriversArgs) -> Vec<DriverCandidate> {
    let (batch, in_flight) = (args.reads.batch, args.reads.in_flight);
    let candidate = |driver, tickets, in_flight| {
        let pattern = BatchPattern { batch, in_flight, tickets };
        DriverCandidate { driver, pattern, turns: Vec::new(), skipped: None }
    };
    let mut all = vec![candidate(DriverArg::Uring, true, in_flight), candidate(DriverArg::Uring, false, 1)];
    let others =
        DriverArg::value_variants().iter().filter(|driver| !matches!(driver, DriverArg::Auto | DriverArg::Uring));
    all.extend(others.map(|driver| candidate(*driver, true, in_flight)));
    all
}

fn measure(args: &DriversArgs, block: ByteSize) -> Result<()> {
    let dir = work_directory(&args.common.device, args.reads.size.0 + (256 << 20))?;
    let path = dir.path().join("store");
    let memory = ByteSize((4 * args.reads.buffer_bytes(block)).max(256 << 20));
    eprintln!("kvbench: {}: writing {} in blocks of {block}", dir.path().display(), args.reads.size);
    let store = open_store(&args.common, &path, memory)?;
    drop(fill(&store, block.0, args.reads.size.0)?);
    store.close()?;
    settle(dir.path())?;
    let mut candidates = candidates(args);
    for round in 1..=args.common.rounds {
        eprintln!("kvbench: {block}: round {round} of {}", args.common.rounds);
        for candidate in &mut candidates {
            if candidate.skipped.is_none()
                && let Err(e) = turn(args, &path, memory, candidate)
            {
                eprintln!("kvbench: {e:#}");
                candidate.skipped = Some(format!("skipped: {e:#}"));
            }
        }
    }
    for candidate in &candidates {
        let result = result(block.0, candidate, &candidates[0]);
        print(args.common.json, &format!("{} by {}", result.driver, result.path), &result)?;
    }
    Ok(())
}

/// Opens the store with the candidate's driver, warms up for a quarter of a turn, and measures one turn.
fn turn(args: &DriversArgs, path: &Path, memory: ByteSize, candidate: &mut DriverCandidate) -> Result<()> {
    let options = StoreOptions::default().memory_limit(memory);
    let store = open_store_with(&args.common, Some(candidate.driver), path, options)?;
    let sequence = store.open_sequence(KEY, OpenSequence::new())?;
    let length = Duration::from_secs_f64(args.reads.seconds);
    let mut random = fastrand::Rng::with_seed(candidate.turns.len() as u64);
    engine_turn(candidate.pattern, &store, &sequence, length / 4, &mut random)?;
    candidate.turns.push(engine_turn(candidate.pattern, &store, &sequence, length, &mut random)?);
    drop(sequence);
    store.close()?;
    Ok(())
}

fn result(block: u64, candidate: &DriverCandidate, first: &DriverCandidate) -> DriverResult {
    let against = |value: &dyn Fn(&EngineTurn) -> f64| {
        let rounds = candidate.turns.iter().zip(&first.turns);
        let ratios: Vec<f64> = rounds.filter_map(|(own, first)| ratio(value(own), value(first))).collect();
        (!ratios.is_empty()).then(|| rounded(median(&ratios)))
    };
    DriverResult {
        driver: candidate.driver.to_possible_value().map_or_else(String::new, |name| name.get_name().to_owned()),
        path: candidate.pattern.path(),
        block,
        batch: candidate.pattern.batch,
        in_flight: candidate.pattern.in_flight,
        throughput: throughput(&candidate.turns, block),
        cpu_s_per_gb: rounded(median_of(&candidate.turns, |turn| turn.cpu_s_per_gb)),
        ratio_uring: against(&|turn| turn.gb_per_s),
        ratio_uring_cpu: against(&|turn| turn.cpu_s_per_gb),
        skipped: candidate.skipped.clone(),
    }
}
