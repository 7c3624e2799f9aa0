//! `kvbench churn` keeps a store at a share of its capacity while sequences of mixed lengths come and go, and measures
//! the bytes that the devices receive.
//!
//! 1. Create sequences until one and a half times the live share has been written, so that segments hold dead bytes.
//! 2. Create sequences until `--turnover` times the live share has been written, and measure this part.
//! 3. Before a sequence is created, delete random ones until it fits below `--full`.

use crate::store::result::WriteAmplification;
use crate::support::args::{CommonArgs, size};
use crate::support::directory::{disk_bytes, make_private, work_directory};
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES, layout};
use crate::support::report::{print, ratio, rounded};
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::store::{Health, Usage};
use stratakv::{ByteSize, CreateOptions, Durability, SequenceId, Store, StoreOptions, StoredSummary};

const LAYERS: u16 = 4;
const GROUP: u16 = 8;
/// Tokens of one append.
const CHUNK: usize = 512;

/// Arguments of `kvbench churn`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench churn --device /nvme0 --capacity 4GiB --full 0.8 --json")]
pub(crate) struct ChurnArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Bytes of all files of the store.
    #[arg(long, default_value = "4GiB", value_parser = size)]
    pub(crate) capacity: ByteSize,
    /// Bytes of a segment. Without it the engine chooses by the capacity.
    #[arg(long, value_parser = size)]
    pub(crate) segment: Option<ByteSize>,
    /// Share of the capacity that is live.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) full: f64,
    /// Tokens of the shortest sequence, of 16 KiB each.
    #[arg(long, default_value_t = 64)]
    pub(crate) shortest: u64,
    /// Tokens of the longest sequence. Lengths of every magnitude in between are equally frequent.
    #[arg(long, default_value_t = 8192)]
    pub(crate) longest: u64,
    /// Bytes to write while measuring, in multiples of the live bytes.
    #[arg(long, default_value_t = 3.0)]
    pub(crate) turnover: f64,
    /// Seed of the lengths and of the choice of sequences to delete.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Store no min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
}

/// Bytes written to the devices during the churn, over the bytes of the sequences that were created.
#[derive(Debug, Serialize)]
struct ChurnResult {
    #[serde(flatten)]
    setup: ChurnSetup,
    sequences_written: u64,
    sequences_alive: usize,
    #[serde(flatten)]
    bytes: ChurnBytes,
    #[serde(flatten)]
    amplification: WriteAmplification,
    #[serde(flatten)]
    space: ChurnSpace,
    /// Keys and values written per second.
    gb_per_s: f64,
}

/// The store and the sequences.
#[derive(Debug, Serialize)]
struct ChurnSetup {
    capacity_bytes: u64,
    segment_bytes: u64,
    full: f64,
    summaries: bool,
    shortest_tokens: u64,
    longest_tokens: u64,
}

/// Bytes of the measured part.
#[derive(Debug, Serialize)]
struct ChurnBytes {
    kv_bytes: u64,
    summary_bytes: u64,
    device_bytes: u64,
    /// Bytes that cleaning moved, part of `device_bytes`.
    moved_bytes: u64,
    cleaned_segments: u64,
}

/// The store at the end.
#[derive(Debug, Serialize)]
struct ChurnSpace {
    /// Live bytes over the capacity.
    live_share: f64,
    /// Dead bytes over the capacity.
    dead_share: f64,
    /// Bytes of the files, as the store counts them, over the bytes that the directory takes on disk.
    usage_over_du: Option<f64>,
}

/// The store and its sequences.
struct Churn<'a> {
    args: &'a ChurnArgs,
    store: Store,
    source: KvSource,
    random: fastrand::Rng,
    alive: Vec<SequenceId>,
    written: u64,
    kv_bytes: u64,
}

/// The counters before the measured part.
struct ChurnStart {
    device_bytes: u64,
    kv_bytes: u64,
    written: u64,
    health: Health,
}

impl Churn<'_> {
    fn live(&self) -> Result<f64> {
        let usage = self.store.usage()?;
        Ok((usage.live_bytes + usage.in_flight_bytes) as f64 / usage.capacity_bytes as f64)
    }

    /// Draws a length between the shortest and the longest. Every magnitude is equally frequent.
    fn length(&mut self) -> u64 {
        let (low, high) = (self.args.shortest as f64, self.args.longest as f64);
        (low * (high / low).powf(self.random.f64())).round() as u64
    }

    fn create(&mut self, tokens: u64) -> Result<()> {
        let options = CreateOptions::new();
        let options = if self.args.no_summary { options } else { options.store_summary(StoredSummary::MinMax) };
        let mut sequence = self.store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
        self.source.append(&mut sequence, tokens as usize)?;
        sequence.commit(Durability::Sync)?;
        self.alive.push(sequence.id());
        self.written += 1;
        self.kv_bytes += tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS);
        Ok(())
    }

    fn delete(&mut self) -> Result<()> {
        if self.alive.is_empty() {
            let (longest, capacity) = (self.args.longest, self.args.capacity);
            bail!("--longest {longest}: a sequence does not fit in --capacity {capacity}; give a larger --capacity");
        }
        let at = self.random.usize(..self.alive.len());
        let id = self.alive.swap_remove(at);
        Ok(self.store.delete_sequence_id(id, Durability::Lazy)?)
    }

    /// Creates sequences until `bytes` of keys and values were written, and deletes others to stay below `--full`.
    fn run(&mut self, bytes: u64) -> Result<()> {
        let summary_share = if self.args.no_summary { 0.0 } else { 1.0 / f64::from(GROUP) };
        let target = self.kv_bytes + bytes;
        while self.kv_bytes < target {
            let tokens = self.length();
            let size = (tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS)) as f64 * (1.0 + summary_share);
            while self.live()? + size / self.args.capacity.0 as f64 > self.args.full {
                self.delete()?;
                self.store.flush()?;
            }
            self.create(tokens)?;
        }
        Ok(())
    }

    fn device_bytes(&self) -> Result<u64> {
        Ok(self.store.usage()?.lifetime_bytes)
    }

    fn result(&self, segment: ByteSize, start: &ChurnStart, seconds: f64, path: &Path) -> Result<ChurnResult> {
        let args = self.args;
        let (health, usage): (Health, Usage) = (self.store.health(), self.store.usage()?);
        let kv_bytes = self.kv_bytes - start.kv_bytes;
        let summary_bytes = if args.no_summary { 0 } else { kv_bytes / u64::from(GROUP) };
        let device_bytes = usage.lifetime_bytes - start.device_bytes;
        Ok(ChurnResult {
            setup: ChurnSetup {
                capacity_bytes: args.capacity.0,
                segment_bytes: segment.0,
                full: args.full,
                summaries: !args.no_summary,
                shortest_tokens: args.shortest,
                longest_tokens: args.longest,
            },
            sequences_written: self.written - start.written,
            sequences_alive: self.alive.len(),
            bytes: ChurnBytes {
                kv_bytes,
                summary_bytes,
                device_bytes,
                moved_bytes: health.moved_bytes - start.health.moved_bytes,
                cleaned_segments: health.cleaned_segments - start.health.cleaned_segments,
            },
            amplification: WriteAmplification::new(device_bytes, kv_bytes, summary_bytes),
            space: ChurnSpace {
                live_share: rounded(usage.live_bytes as f64 / usage.capacity_bytes as f64),
                dead_share: rounded(usage.dead_bytes as f64 / usage.capacity_bytes as f64),
                usage_over_du: ratio(usage.file_bytes as f64, disk_bytes(path)? as f64),
            },
            gb_per_s: rounded(kv_bytes as f64 / 1e9 / seconds),
        })
    }
}

/// Runs `kvbench churn`.
pub(crate) fn run(args: &ChurnArgs) -> Result<()> {
    if args.shortest == 0 || args.shortest > args.longest {
        bail!("--shortest {}: from 1 to --longest {}", args.shortest, args.longest);
    }
    if !(0.1..0.95).contains(&args.full) {
        bail!("--full {}: at least 0.1 and below 0.95", args.full);
    }
    let dir = work_directory(&args.common.device, args.capacity.0)?;
    let path = dir.path().join("store");
    make_private(&path)?;
    let options = StoreOptions::default().device(&path).capacity(args.capacity).segment_bytes(args.segment);
    let segment = options.segment_size();
    let options = options.driver(args.common.driver.into()).checksum(args.common.checksum.into());
    let mut churn = Churn {
        args,
        store: options.memory_limit(ByteSize::mib(512)).open()?,
        source: KvSource::new(CHUNK),
        random: fastrand::Rng::with_seed(args.seed),
        alive: Vec::new(),
        written: 0,
        kv_bytes: 0,
    };
    eprintln!("kvbench: {}: filling, then writing {} times the live bytes", dir.path().display(), args.turnover);
    let live_bytes = (args.capacity.0 as f64 * args.full) as u64;
    churn.run(live_bytes + live_bytes / 2)?;
    let before = ChurnStart {
        device_bytes: churn.device_bytes()?,
        kv_bytes: churn.kv_bytes,
        written: churn.written,
        health: churn.store.health(),
    };
    let start = Instant::now();
    churn.run((live_bytes as f64 * args.turnover) as u64)?;
    churn.store.flush()?;
    let seconds = start.elapsed().as_secs_f64();
    let result = churn.result(segment, &before, seconds, &path)?;
    churn.store.close()?;
    print(args.common.json, &format!("churn {}", args.capacity), &result)
}
