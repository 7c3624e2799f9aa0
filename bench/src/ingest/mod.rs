//! `kvbench ingest` appends a prompt of LLaMA-3-8B's geometry chunk by chunk and layer by layer, and commits it.
//!
//! With `--fio` fio writes as many bytes sequentially, in rotation with the engine.

use crate::support::args::{CommonArgs, between, size};
use crate::support::directory::{settle, work_directory};
use crate::support::fio::{self, FioRun};
use crate::support::measure::cpu_seconds;
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES, layout};
use crate::support::report::{median_of, median_of_any, print, ratio, rounded};
use crate::support::store::{device_sum, driver_name, open_store, page_kind};
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, StoredSummary};

const LAYERS: u16 = 32;
const GROUP: u16 = 8;

/// Arguments of `kvbench ingest`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench ingest --device /nvme0 --size 8GiB --fio --json")]
pub(crate) struct IngestArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Bytes of keys and values to append in each round.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Tokens of one append.
    #[arg(long, default_value_t = 512, value_parser = between(1, 65_536))]
    pub(crate) chunk: u32,
    /// Store no min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
    /// Also measure fio with sequential writes.
    #[arg(long)]
    pub(crate) fio: bool,
}

/// Medians over the rounds. Rates count GB of keys and values. The engine's time includes its commit, and fio's its
/// sync.
#[derive(Debug, Serialize)]
struct IngestResult {
    bytes: u64,
    chunk_tokens: u32,
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    /// Milliseconds of the final commit alone.
    commit_ms: f64,
    #[serde(flatten)]
    written: IngestWrites,
    #[serde(flatten)]
    fio: FioWriteComparison,
    huge_pages: String,
    driver: String,
}

/// Bytes that the device received.
#[derive(Debug, Serialize)]
struct IngestWrites {
    device_bytes: u64,
    summary_bytes: u64,
    /// Bytes written to the device over the bytes of keys, values and summaries.
    write_amplification: f64,
    /// Bytes written to the device over the bytes of keys and values.
    write_amplification_kv: f64,
    /// Bytes written to the device per second.
    device_gb_per_s: f64,
}

/// fio, and the engine over it.
#[derive(Debug, Serialize)]
struct FioWriteComparison {
    fio_gb_per_s: Option<f64>,
    fio_cpu_s_per_gb: Option<f64>,
    /// Keys and values per second over fio's bytes per second.
    ratio_fio: Option<f64>,
    /// All bytes written per second, summaries included, over fio's.
    ratio_fio_device: Option<f64>,
    fio_skipped: Option<&'static str>,
}

/// Figures of one turn of the engine.
struct IngestTurn {
    seconds: f64,
    cpu: f64,
    commit_seconds: f64,
    device_bytes: u64,
    pages: String,
    driver: String,
}

/// Runs `kvbench ingest`.
pub(crate) fn run(args: &IngestArgs) -> Result<()> {
    let tokens = args.size.0 / (TOKEN_LAYER_BYTES * u64::from(LAYERS));
    if tokens == 0 {
        bail!("--size {}: less than a token of 128 KiB", args.size);
    }
    let bytes = tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS);
    let with_fio = args.fio && fio::is_installed();
    if args.fio && !with_fio {
        eprintln!("kvbench: fio {}", fio::MISSING);
    }
    let dir = work_directory(&args.common.device, bytes + bytes / 4 + (256 << 20))?;
    let mut source = KvSource::new(args.chunk as usize);
    let (mut turns, mut fio_runs) = (Vec::new(), Vec::new());
    for round in 1..=args.common.rounds {
        eprintln!("kvbench: {}: round {round} of {}", dir.path().display(), args.common.rounds);
        // The order alternates, because a disk may not have recovered from the turn before.
        for own in [round % 2 == 1, round % 2 == 0] {
            if own {
                settle(dir.path())?;
                let path = dir.path().join("store");
                turns.push(turn(args, &path, tokens, &mut source)?);
                std::fs::remove_dir_all(&path)?;
            } else if with_fio {
                settle(dir.path())?;
                let path = dir.path().join("raw");
                fio_runs.push(fio::write(&path, bytes)?);
                std::fs::remove_file(&path)?;
            }
        }
    }
    print(args.common.json, &format!("ingest {}", ByteSize(bytes)), &result(args, bytes, &turns, &fio_runs))
}

/// Appends and commits one prompt to a new store.
fn turn(args: &IngestArgs, path: &Path, tokens: u64, source: &mut KvSource) -> Result<IngestTurn> {
    let bytes = tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS);
    // Summaries take an eighth of the keys and values, and their memory grows in steps.
    let memory = ByteSize((256 << 20) + bytes / 4);
    let store = open_store(&args.common, path, memory)?;
    let options = CreateOptions::new().key("ingest");
    let options = if args.no_summary { options } else { options.store_summary(StoredSummary::MinMax) };
    let mut sequence = store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
    let written = || device_sum(&store, |device| device.counters.write_bytes);
    let before = written();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    source.append(&mut sequence, tokens as usize)?;
    let committing = Instant::now();
    sequence.commit(Durability::Sync)?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let commit_seconds = committing.elapsed().as_secs_f64();
    let status = store.status();
    let turn = IngestTurn {
        seconds,
        cpu,
        commit_seconds,
        device_bytes: written() - before,
        pages: page_kind(&status),
        driver: driver_name(&status),
    };
    drop(sequence);
    store.close()?;
    Ok(turn)
}

fn result(args: &IngestArgs, bytes: u64, turns: &[IngestTurn], fio_runs: &[FioRun]) -> IngestResult {
    let gb = bytes as f64 / 1e9;
    let gb_per_s = median_of(turns, |turn| gb / turn.seconds);
    let device_gb_per_s = median_of(turns, |turn| turn.device_bytes as f64 / 1e9 / turn.seconds);
    let device_bytes = median_of(turns, |turn| turn.device_bytes as f64);
    // Stored summaries. Their memory grows in steps and is larger.
    let groups = bytes / (TOKEN_LAYER_BYTES * u64::from(GROUP));
    let summary_bytes = if args.no_summary { 0 } else { groups * TOKEN_LAYER_BYTES };
    let fio_gb_per_s = median_of_any(fio_runs, |run| run.gb_per_s);
    IngestResult {
        bytes,
        chunk_tokens: args.chunk,
        gb_per_s: rounded(gb_per_s),
        cpu_s_per_gb: rounded(median_of(turns, |turn| turn.cpu / gb)),
        commit_ms: rounded(median_of(turns, |turn| turn.commit_seconds * 1e3)),
        written: IngestWrites {
            device_bytes: device_bytes as u64,
            summary_bytes,
            write_amplification: rounded(device_bytes / (bytes + summary_bytes) as f64),
            write_amplification_kv: rounded(device_bytes / bytes as f64),
            device_gb_per_s: rounded(device_gb_per_s),
        },
        fio: FioWriteComparison {
            fio_gb_per_s: fio_gb_per_s.map(rounded),
            fio_cpu_s_per_gb: median_of_any(fio_runs, |run| run.cpu_s_per_gb).map(rounded),
            ratio_fio: fio_gb_per_s.and_then(|fio| ratio(gb_per_s, fio)),
            ratio_fio_device: fio_gb_per_s.and_then(|fio| ratio(device_gb_per_s, fio)),
            fio_skipped: (args.fio && fio_runs.is_empty()).then_some(fio::MISSING),
        },
        huge_pages: turns.first().map(|turn| turn.pages.clone()).unwrap_or_default(),
        driver: turns.first().map(|turn| turn.driver.clone()).unwrap_or_default(),
    }
}
