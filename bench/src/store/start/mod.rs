//! `kvbench start` measures how long a large store takes to open, after a clean close and after a crash.
//!
//! 1. Make a store of many sequences in sparse files: see `synthetic_store`.
//! 2. In each round and for each state, write the manifest and a superblock in that state, and drop the caches.
//! 3. Open the store, then one random sequence, and read its blocks.

mod checkpoint;
mod geometry;
mod segments;
mod synthetic_store;

use crate::support::args::{CommonArgs, size};
use crate::support::directory::{disk_bytes, drop_caches, work_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::report::{median, percentile, print, rounded};
use crate::support::store::open_store;
use anyhow::{Result, ensure};
use clap::Args;
use geometry::{FRAMES_PER_SEQUENCE, SEGMENT_BYTES};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, OpenSequence, SelectRequest, SequenceId, Store};
use stratakv_format::superblock::{STATE_CLOSED, STATE_OPEN};
use synthetic_store::SyntheticStore;

/// Arguments of `kvbench start`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench start --device /nvme0 --sequences 100000 --stored 1TiB --json")]
pub(crate) struct StartArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Sequences, of two frames each.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) sequences: u64,
    /// Bytes of the segment files, which are sparse.
    #[arg(long, default_value = "1TiB", value_parser = size)]
    pub(crate) stored: ByteSize,
}

/// Sizes of the store, and times in milliseconds.
#[derive(Debug, Serialize)]
struct StartResult {
    #[serde(flatten)]
    sizes: StoreSizes,
    cold: &'static str,
    rounds: u32,
    #[serde(flatten)]
    times: StartTimes,
}

/// The synthetic store.
#[derive(Debug, Serialize)]
struct StoreSizes {
    sequences: u64,
    frames: u64,
    segments: u64,
    segment_bytes: u64,
    /// Bytes of all segment files together, holes included.
    stored_bytes: u64,
    /// Bytes that all files take on disk.
    disk_bytes: u64,
    manifest_bytes: u64,
}

/// Opening the store and a sequence.
#[derive(Debug, Serialize)]
struct StartTimes {
    open_ms: f64,
    open_worst_ms: f64,
    /// Opening after a crash. The superblock says that a writer had it open, so the engine writes a new generation
    /// first.
    crashed_ms: f64,
    crashed_worst_ms: f64,
    /// Memory that the open store holds.
    memory_bytes: usize,
    /// Opening the first sequence, which has two frames.
    sequence_ms: f64,
}

/// Times of all rounds, in milliseconds.
#[derive(Default)]
struct StartSamples {
    closed: Vec<f64>,
    crashed: Vec<f64>,
    sequence: Vec<f64>,
    cold: &'static str,
    memory_bytes: usize,
}

/// Runs `kvbench start`.
pub(crate) fn run(args: &StartArgs) -> Result<()> {
    let frames = args.sequences * FRAMES_PER_SEQUENCE;
    // Headers, their places in the files, and two generations of two copies of the manifest.
    let dir = work_directory(&args.common.device, frames * 12_000 + args.sequences * 4000 + (256 << 20))?;
    let path = dir.path().join("store");
    eprintln!("kvbench: {}: making {} sequences, {}", path.display(), args.sequences, args.stored);
    let made = SyntheticStore::new(args.sequences, args.stored, &path)?;
    let disk_bytes = disk_bytes(&path)?;
    let mut samples = StartSamples::default();
    for round in 0..args.common.rounds {
        eprintln!("kvbench: round {} of {}", round + 1, args.common.rounds);
        for state in [STATE_CLOSED, STATE_OPEN] {
            check_interrupt()?;
            made.write_manifest(&path, state)?;
            samples.open(args, &path, state, round)?;
        }
    }
    let result = StartResult {
        sizes: StoreSizes {
            sequences: args.sequences,
            frames,
            segments: made.segments,
            segment_bytes: SEGMENT_BYTES,
            stored_bytes: made.stored_bytes(),
            disk_bytes,
            manifest_bytes: made.manifest.len() as u64,
        },
        cold: samples.cold,
        rounds: args.common.rounds,
        times: samples.times(),
    };
    print(args.common.json, &format!("start {}", ByteSize(made.stored_bytes())), &result)
}

impl StartSamples {
    /// Opens the store with cold caches, then one sequence, which a seed of `round` chooses.
    fn open(&mut self, args: &StartArgs, path: &Path, state: u8, round: u32) -> Result<()> {
        self.cold = drop_caches(path)?;
        let start = Instant::now();
        let store = open_store(&args.common, path, ByteSize::mib(512))?;
        let times = if state == STATE_CLOSED { &mut self.closed } else { &mut self.crashed };
        times.push(start.elapsed().as_secs_f64() * 1e3);
        let status = store.status();
        let (found, expected) = (status.sequences as u64, args.sequences);
        ensure!(found == expected, "open: the store has {found} sequences, but {expected} were written");
        self.memory_bytes = status.memory.used_bytes;
        self.open_sequence(&store, 1 + fastrand::Rng::with_seed(u64::from(round)).u64(..args.sequences))?;
        Ok(store.close()?)
    }

    fn open_sequence(&mut self, store: &Store, id: u64) -> Result<()> {
        let start = Instant::now();
        let mut sequence = store.open_sequence(SequenceId(id), OpenSequence::new())?;
        self.sequence.push(start.elapsed().as_secs_f64() * 1e3);
        let view = sequence.reader()?.select(0, SelectRequest::all())?;
        store.read(&[&view]).wait()?.get(0)?;
        Ok(())
    }

    fn times(&self) -> StartTimes {
        StartTimes {
            open_ms: rounded(median(&self.closed)),
            open_worst_ms: rounded(percentile(&self.closed, 1.0)),
            crashed_ms: rounded(median(&self.crashed)),
            crashed_worst_ms: rounded(percentile(&self.crashed, 1.0)),
            memory_bytes: self.memory_bytes,
            sequence_ms: rounded(median(&self.sequence)),
        }
    }
}
