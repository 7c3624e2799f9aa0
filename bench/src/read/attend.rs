//! `kvbench read --attend` measures a decode step's work on random blocks: read, verify, attend.
//!
//! Sides of each round, one batch in flight:
//! 1. The engine's one call that does all three, on one core.
//! 2. The engine's read, and attention after it, on one core.
//! 3. A bare loop on one core that reads everything, then verifies everything, then attends to everything.
//! 4. A bare loop on one core that does all three with each stretch of blocks as they arrive.
//! 5. The engine's one call on two cores.
//!
//! The engine's sides open the store for each turn, and warm up for a quarter of a turn. On two cores the engine
//! decides by itself whether a call uses the second one. The process is restricted to as many cores as the side may
//! use. The order of the sides rotates from round to round. Ratios are medians of the ratios of each round.

use super::args::ReadArgs;
use super::attend_loops::{AttendLoop, EngineCall, engine_attends};
use super::baseline::{BareBatches, BareTurn, bare_turn};
use super::batches::{KEY, fill};
use super::checksum_kind;
use crate::support::bare::write_file;
use crate::support::cpus::ProcessCpus;
use crate::support::directory::{settle, work_directory};
use crate::support::report::{median, median_of, percentile, print, ratio, rounded};
use crate::support::store::{driver_name, open_store, open_store_with};
use anyhow::Result;
use serde::Serialize;
use std::time::Duration;
use stratakv::options::HelperUse;
use stratakv::{ByteSize, OpenSequence, StoreOptions};

/// Medians of one block size.
#[derive(Debug, Serialize)]
struct AttendResult {
    block: u64,
    batch: u32,
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    p50_us: f64,
    p99_us: f64,
    /// The engine's read, then attention over the batch.
    apart_gb_per_s: f64,
    /// The bare loop that reads, then verifies, then attends.
    steps_gb_per_s: f64,
    steps_cpu_s_per_gb: f64,
    /// The bare loop that verifies and attends as blocks arrive.
    parts_gb_per_s: f64,
    parts_cpu_s_per_gb: f64,
    parts_p99_us: f64,
    /// The engine's call over its read and attention apart.
    ratio_apart: Option<f64>,
    ratio_steps: Option<f64>,
    ratio_parts: Option<f64>,
    /// The engine's call on two cores, if the process may use two.
    two_cores_gb_per_s: Option<f64>,
    two_cores_cpu_s_per_gb: Option<f64>,
    /// Two cores over one.
    ratio_two_cores: Option<f64>,
    driver: String,
}

/// The sides, in the order of the first round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Engine,
    Apart,
    Steps,
    Parts,
    TwoCores,
}

const SIDES: [Side; 5] = [Side::Engine, Side::Apart, Side::Steps, Side::Parts, Side::TwoCores];

/// Runs `kvbench read --attend`.
///
/// # Errors
/// The device has no space, a read fails, or the run was interrupted.
pub(super) fn run(args: &ReadArgs) -> Result<()> {
    for block in &args.reads.block {
        let result = measure(args, *block)?;
        print(args.common.json, &format!("read and attend {block}"), &result)?;
    }
    Ok(())
}

fn measure(args: &ReadArgs, block: ByteSize) -> Result<AttendResult> {
    let reads = &args.reads;
    let dir = work_directory(&args.common.device, 2 * reads.size.0 + (256 << 20))?;
    let memory = ByteSize((4 * reads.buffer_bytes(block)).max(256 << 20));
    let path = dir.path().join("store");
    let store = open_store(&args.common, &path, memory)?;
    eprintln!("kvbench: {}: writing {} in blocks of {block}", dir.path().display(), reads.size);
    drop(fill(&store, block.0, reads.size.0)?);
    let driver = driver_name(&store.status());
    store.close()?;
    let raw = dir.path().join("raw");
    write_file(&raw, reads.size.0)?;
    settle(dir.path())?;

    let cpus = ProcessCpus::new()?;
    let length = Duration::from_secs_f64(reads.seconds);
    let mut random = fastrand::Rng::with_seed(5);
    let mut bare = AttendLoop::new(checksum_kind(args.common.checksum), block.0)?;
    let of = BareBatches { file: &raw, block: block.0, batch: reads.batch };
    let mut turns: [Vec<BareTurn>; SIDES.len()] = Default::default();
    for round in 0..=args.common.rounds as usize {
        eprintln!("kvbench: {block}: round {round} of {}", args.common.rounds);
        for at in 0..SIDES.len() {
            let at = (round + at) % SIDES.len();
            let two = SIDES[at] == Side::TwoCores;
            if two && cpus.count() < 2 {
                continue;
            }
            cpus.restrict(if two { 2 } else { 1 })?;
            let mut engine = |helper, call| -> Result<BareTurn> {
                let options = StoreOptions::default().memory_limit(memory).attend_helper(helper);
                let store = open_store_with(&args.common, None, &path, options)?;
                let sequence = store.open_sequence(KEY, OpenSequence::new())?;
                engine_attends(&store, &sequence, reads.batch, call, length / 4, &mut random)?;
                let turn = engine_attends(&store, &sequence, reads.batch, call, length, &mut random);
                drop(sequence);
                store.close()?;
                turn
            };
            let turn = match SIDES[at] {
                Side::Engine => engine(HelperUse::Off, EngineCall::Joined)?,
                Side::Apart => engine(HelperUse::Off, EngineCall::Apart)?,
                Side::TwoCores => engine(HelperUse::Auto, EngineCall::Joined)?,
                Side::Steps => bare_turn(of, length, |reader| bare.steps(reader))?,
                Side::Parts => bare_turn(of, length, |reader| bare.parts(reader))?,
            };
            // The round before the first warms all sides up.
            if round > 0 {
                turns[at].push(turn);
            }
        }
    }
    drop(cpus);
    Ok(result(args, block.0, &turns, driver))
}

fn result(args: &ReadArgs, block: u64, turns: &[Vec<BareTurn>; SIDES.len()], driver: String) -> AttendResult {
    let of = |side: Side| SIDES.iter().position(|own| *own == side).map_or(&[][..], |at| turns[at].as_slice());
    let rate = |side| rounded(median_of(of(side), |turn| turn.gb_per_s));
    let cpu = |side| rounded(median_of(of(side), |turn| turn.cpu_s_per_gb));
    let latency = |side, share| rounded(median_of(of(side), |turn| percentile(&turn.latencies_us, share)));
    let over = |side, other| {
        let rounds = of(side).iter().zip(of(other));
        let ratios: Vec<f64> = rounds.filter_map(|(own, other)| ratio(own.gb_per_s, other.gb_per_s)).collect();
        (!ratios.is_empty()).then(|| rounded(median(&ratios)))
    };
    let two = !of(Side::TwoCores).is_empty();
    AttendResult {
        block,
        batch: args.reads.batch,
        gb_per_s: rate(Side::Engine),
        cpu_s_per_gb: cpu(Side::Engine),
        p50_us: latency(Side::Engine, 0.5),
        p99_us: latency(Side::Engine, 0.99),
        apart_gb_per_s: rate(Side::Apart),
        steps_gb_per_s: rate(Side::Steps),
        steps_cpu_s_per_gb: cpu(Side::Steps),
        parts_gb_per_s: rate(Side::Parts),
        parts_cpu_s_per_gb: cpu(Side::Parts),
        parts_p99_us: latency(Side::Parts, 0.99),
        ratio_apart: over(Side::Engine, Side::Apart),
        ratio_steps: over(Side::Engine, Side::Steps),
        ratio_parts: over(Side::Engine, Side::Parts),
        two_cores_gb_per_s: two.then(|| rate(Side::TwoCores)),
        two_cores_cpu_s_per_gb: two.then(|| cpu(Side::TwoCores)),
        ratio_two_cores: over(Side::TwoCores, Side::Engine),
        driver,
    }
}
