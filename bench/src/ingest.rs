//! `kvbench ingest`: a prompt at LLaMA-3-8B geometry appended chunk by chunk, layer by layer, and committed.

use crate::cli::IngestArgs;
use crate::fio;
use crate::report::{median, print, ratio, rounded};
use crate::work::{
    KvSource, TOKEN_LAYER_BYTES, check_interrupt, cpu_seconds, layout, open_store, settle, work_directory,
};
use anyhow::{Result, bail};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, Store, StoredSummary};

const LAYERS: u16 = 32;
const GROUP: u16 = 8;

/// GB of keys and values; the commit at the end is part of the time, and fio's sync of its.
#[derive(Debug, Serialize)]
struct IngestResult {
    bytes: u64,
    chunk_tokens: u32,
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    /// The final commit alone, milliseconds.
    commit_ms: f64,
    device_bytes: u64,
    summary_bytes: u64,
    /// Bytes written to the device over those of keys, values and summaries.
    write_amplification: f64,
    /// Bytes written to the device over those of keys and values.
    write_amplification_kv: f64,
    /// Bytes written to the device per second.
    device_gb_per_s: f64,
    fio_gb_per_s: Option<f64>,
    fio_cpu_s_per_gb: Option<f64>,
    /// Keys and values per second against fio's bytes per second.
    ratio_fio: Option<f64>,
    /// All bytes written, summaries included, against fio's.
    ratio_fio_device: Option<f64>,
    fio_skipped: Option<&'static str>,
    huge_pages: String,
    driver: String,
}

struct Turn {
    seconds: f64,
    cpu: f64,
    commit_seconds: f64,
    device_bytes: u64,
    pages: String,
    driver: String,
}

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
        // Who goes first changes with every round: a disk may not have recovered from the turn before.
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
    print(args.common.json, &format!("ingest {}", ByteSize(bytes)), &result(args, bytes, &turns, &fio_runs, with_fio))
}

fn turn(args: &IngestArgs, path: &Path, tokens: u64, source: &mut KvSource) -> Result<Turn> {
    let bytes = tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS);
    // Summaries take an eighth of the keys and values, and grow in steps.
    let memory = ByteSize((256 << 20) + bytes / 4);
    let store = open_store(&args.common, path, memory)?;
    let options = CreateOptions::new().key("ingest");
    let options = if args.no_summary { options } else { options.store_summary(StoredSummary::MinMax) };
    let mut sequence = store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
    let written = |store: &Store| store.status().devices.iter().map(|d| d.counters.write_bytes).sum::<u64>();
    let before = written(&store);
    let (cpu, start) = (cpu_seconds(), Instant::now());
    let mut left = tokens as usize;
    while left > 0 {
        let chunk = left.min(args.chunk as usize);
        for layer in 0..usize::from(LAYERS) {
            check_interrupt()?;
            let (keys, values) = source.pair(chunk);
            sequence.append(layer, keys, values)?;
        }
        left -= chunk;
    }
    let committing = Instant::now();
    sequence.commit(Durability::Sync)?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let status = store.status();
    let turn = Turn {
        seconds,
        cpu,
        commit_seconds: committing.elapsed().as_secs_f64(),
        device_bytes: written(&store) - before,
        pages: status.pages.unwrap_or_else(|| "none".to_owned()),
        driver: status.devices.first().map(|device| device.driver.clone()).unwrap_or_default(),
    };
    drop(sequence);
    store.close()?;
    Ok(turn)
}

fn result(args: &IngestArgs, bytes: u64, turns: &[Turn], fio_runs: &[fio::FioRun], with_fio: bool) -> IngestResult {
    let own = |value: &dyn Fn(&Turn) -> f64| median(&turns.iter().map(value).collect::<Vec<_>>());
    let fio = |value: &dyn Fn(&fio::FioRun) -> f64| {
        (!fio_runs.is_empty()).then(|| median(&fio_runs.iter().map(value).collect::<Vec<_>>()))
    };
    let gb = bytes as f64 / 1e9;
    let gb_per_s = own(&|turn| gb / turn.seconds);
    let device_gb_per_s = own(&|turn| turn.device_bytes as f64 / 1e9 / turn.seconds);
    let device_bytes = own(&|turn| turn.device_bytes as f64);
    // What is stored: the memory behind the summaries grows in steps and is larger.
    let groups = bytes / (TOKEN_LAYER_BYTES * u64::from(GROUP));
    let summary_bytes = if args.no_summary { 0 } else { groups * TOKEN_LAYER_BYTES };
    let fio_gb_per_s = fio(&|run| run.gb_per_s);
    IngestResult {
        bytes,
        chunk_tokens: args.chunk,
        gb_per_s: rounded(gb_per_s),
        cpu_s_per_gb: rounded(own(&|turn| turn.cpu / gb)),
        commit_ms: rounded(own(&|turn| turn.commit_seconds * 1e3)),
        device_bytes: device_bytes as u64,
        summary_bytes,
        write_amplification: rounded(device_bytes / (bytes + summary_bytes) as f64),
        write_amplification_kv: rounded(device_bytes / bytes as f64),
        device_gb_per_s: rounded(device_gb_per_s),
        fio_gb_per_s: fio_gb_per_s.map(rounded),
        fio_cpu_s_per_gb: fio(&|run| run.cpu_s_per_gb).map(rounded),
        ratio_fio: fio_gb_per_s.and_then(|fio| ratio(gb_per_s, fio)),
        ratio_fio_device: fio_gb_per_s.and_then(|fio| ratio(device_gb_per_s, fio)),
        fio_skipped: (args.fio && !with_fio).then_some(fio::MISSING),
        huge_pages: turns.first().map(|turn| turn.pages.clone()).unwrap_or_default(),
        driver: turns.first().map(|turn| turn.driver.clone()).unwrap_or_default(),
    }
}
