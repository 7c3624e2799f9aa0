//! `kvbench written` measures the bytes that the devices receive for a prefill, and for decodes that commit at some
//! pace. It compares them with the bytes of keys, values and summaries.

use crate::store::paced_append::{CHUNK, SequenceShape, append_at_pace};
use crate::store::result::{SequenceSetup, WriteAmplification};
use crate::support::args::{CommonArgs, between};
use crate::support::directory::work_directory;
use crate::support::measure::process_written_bytes;
use crate::support::method;
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES};
use crate::support::report::{print, rounded};
use crate::support::store::open_store;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::retrieval::{MethodSpec, SelectorId};
use stratakv::{ByteSize, Sequence};

/// Arguments of `kvbench written`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench written --device /nvme0 --per 0,64,1 --json")]
pub(crate) struct WrittenArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 4096, value_parser = between(1, 1 << 20))]
    pub(crate) tokens: u32,
    /// Tokens from one commit to the next, separated by commas; 0 is one commit at the end.
    #[arg(long, value_delimiter = ',', default_value = "0,64,1")]
    pub(crate) per: Vec<u32>,
    #[command(flatten)]
    pub(crate) shape: SequenceShape,
    /// Store no min/max summaries.
    #[arg(long)]
    pub(crate) no_summary: bool,
    /// Method whose summaries are written with the groups, such as `signs`, `shadowkv` or `kvswap:32`.
    #[arg(long, value_name = "METHOD", value_parser = method::registered)]
    pub(crate) selector: Option<MethodSpec>,
}

/// Bytes and times of one sequence that was written at one pace.
#[derive(Debug, Serialize)]
struct WrittenResult {
    #[serde(flatten)]
    setup: SequenceSetup,
    commits: u64,
    #[serde(flatten)]
    payload: WrittenPayload,
    /// Bytes written to the devices, as the engine counts them: frames, manifest, segment headers and padding.
    device_bytes: u64,
    /// Bytes that the kernel counts as written by this process; none if it does not say.
    process_bytes: Option<u64>,
    #[serde(flatten)]
    amplification: WriteAmplification,
    #[serde(flatten)]
    space: WrittenSpace,
    /// Seconds of all appends and commits.
    seconds: f64,
    /// Mean milliseconds of a commit.
    commit_ms: f64,
}

/// Bytes of data, counted over whole groups where it is kept per group.
#[derive(Debug, Serialize)]
struct WrittenPayload {
    kv_bytes: u64,
    summary_bytes: u64,
    /// The selector whose records were written with the groups.
    selector: Option<String>,
    selector_bytes: u64,
}

/// The store after the last commit.
#[derive(Debug, Serialize)]
struct WrittenSpace {
    /// Frames that the sequence refers to.
    frames: usize,
    live_bytes: u64,
    dead_bytes: u64,
}

/// Runs `kvbench written`.
pub(crate) fn run(args: &WrittenArgs) -> Result<()> {
    let kv_bytes = args.shape.kv_bytes(args.tokens);
    let dir = work_directory(&args.common.device, 3 * kv_bytes + (512 << 20))?;
    for per in &args.per {
        let path = dir.path().join("store");
        let result = measure(args, &path, *per, kv_bytes)?;
        print(args.common.json, &format!("written, a commit per {per} tokens"), &result)?;
        std::fs::remove_dir_all(&path)?;
    }
    Ok(())
}

fn measure(args: &WrittenArgs, path: &Path, per: u32, kv_bytes: u64) -> Result<WrittenResult> {
    let summary = !args.no_summary;
    let store = open_store(&args.common, path, ByteSize((512 << 20) + if summary { kv_bytes / 4 } else { 0 }))?;
    let mut sequence = args.shape.create(&store, "written", summary)?;
    let selector = args.selector.map(|spec| method::selector(&spec, args.shape.layers)).transpose()?;
    let attached = selector.map(|selector| sequence.attach_stored(selector)).transpose()?;
    let mut source = KvSource::new(CHUNK);
    let written = || store.usage().map(|usage| usage.lifetime_bytes);
    let (before, process_before, start) = (written()?, process_written_bytes(), Instant::now());
    let totals = append_at_pace(&mut sequence, &mut source, args.tokens, per)?;
    let (seconds, device_bytes) = (start.elapsed().as_secs_f64(), written()? - before);
    let process = process_before.ok().zip(process_written_bytes().ok());
    let groups = u64::from(args.tokens / u32::from(args.shape.group)) * u64::from(args.shape.layers);
    // The minimum and maximum of each key element take as much as one token's keys and values.
    let summary_bytes = if summary { groups * TOKEN_LAYER_BYTES } else { 0 };
    let selector_bytes = attached.map_or(Ok(0), |attached| record_bytes(&sequence, attached, args.shape.layers))?;
    let usage = store.usage()?;
    let result = WrittenResult {
        setup: args.shape.setup(args.tokens, per),
        commits: totals.commits,
        payload: WrittenPayload {
            kv_bytes,
            summary_bytes,
            selector: args.selector.map(|spec| spec.to_string()),
            selector_bytes,
        },
        device_bytes,
        process_bytes: process.map(|(before, after)| after - before),
        amplification: WriteAmplification::new(device_bytes, kv_bytes, summary_bytes + selector_bytes),
        space: WrittenSpace {
            frames: store.sequences().first().map_or(0, |info| info.frames),
            live_bytes: usage.live_bytes,
            dead_bytes: usage.dead_bytes,
        },
        seconds: rounded(seconds),
        commit_ms: rounded(totals.seconds * 1e3 / totals.commits.max(1) as f64),
    };
    drop(sequence);
    store.close()?;
    Ok(result)
}

/// Returns the bytes of a selector's records in all layers, from the size of each summary's first record.
fn record_bytes(sequence: &Sequence, selector: SelectorId, layers: u16) -> Result<u64> {
    let (mut bytes, mut record) = (0, Vec::new());
    for layer in 0..usize::from(layers) {
        for summary in sequence.selector_summaries(selector, layer)? {
            summary.encode(0..summary.groups().min(1), &mut record);
            bytes += (record.len() * summary.groups()) as u64;
            record.clear();
        }
    }
    Ok(bytes)
}
