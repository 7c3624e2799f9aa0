//! `kvbench written`: bytes that the devices take for a sequence that is prefilled, or decoded and committed at some pace,
//! over those of its keys, values and summaries.

use crate::cli::WrittenArgs;
use crate::report::{print, ratio, rounded};
use crate::work::{KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, work_directory};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, Sequence, StoredSummary};

/// Tokens of an append when nothing is committed in between.
const CHUNK: usize = 512;

#[derive(Debug, Serialize)]
struct WrittenResult {
    /// Tokens from one commit to the next; 0: one commit behind everything.
    per: u32,
    tokens: u32,
    layers: u16,
    group: u16,
    commits: u64,
    kv_bytes: u64,
    /// Of the whole groups there are.
    summary_bytes: u64,
    /// What a selector keeps, written with the groups.
    selector: Option<String>,
    /// Of the whole groups there are.
    selector_bytes: u64,
    /// Written to the devices by the engine's own count: frames, manifest, headers of segments, padding.
    device_bytes: u64,
    /// Written by this process meanwhile by the kernel's count; none where it does not say.
    process_bytes: Option<u64>,
    /// Device bytes over those of keys, values, summaries and what the selector keeps.
    write_amplification: Option<f64>,
    /// Device bytes over those of keys and values.
    write_amplification_kv: Option<f64>,
    /// Frames that the sequence refers to in the end.
    frames: usize,
    /// Of the files, in the end.
    live_bytes: u64,
    dead_bytes: u64,
    /// All of the above: appends and commits.
    seconds: f64,
    commit_ms: f64,
}

/// Appends `tokens` tokens with their ids and commits after every `per` of them, or once behind everything. Gives the
/// number of commits and the seconds that they took.
pub(crate) fn decode(sequence: &mut Sequence, source: &mut KvSource, tokens: u32, per: u32) -> Result<(u64, f64)> {
    let layers = sequence.layout().layers();
    let step = if per == 0 { CHUNK } else { (per as usize).min(CHUNK) };
    let (mut left, mut since, mut commits, mut seconds) = (tokens as usize, 0, 0_u64, 0.0);
    while left > 0 {
        check_interrupt()?;
        let now = step.min(left).min(if per == 0 { usize::MAX } else { per as usize - since });
        for layer in 0..layers {
            let (keys, values) = source.pair(now);
            sequence.append(layer, keys, values)?;
        }
        let first = sequence.token_ids().len() as u32;
        sequence.append_token_ids(&(first..first + now as u32).collect::<Vec<_>>())?;
        left -= now;
        since += now;
        if left == 0 || since == per as usize {
            let start = Instant::now();
            sequence.commit(Durability::Sync)?;
            seconds += start.elapsed().as_secs_f64();
            commits += 1;
            since = 0;
        }
        if commits.is_multiple_of(4096) && commits > 0 && since == 0 {
            eprintln!("kvbench: {} of {tokens} tokens", tokens as usize - left);
        }
    }
    Ok((commits, seconds))
}

/// A source for [`decode`].
pub(crate) fn source() -> KvSource {
    KvSource::new(CHUNK)
}

pub(crate) fn run(args: &WrittenArgs) -> Result<()> {
    let kv_bytes = u64::from(args.tokens) * TOKEN_LAYER_BYTES * u64::from(args.layers);
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
    let options = CreateOptions::new().key("written");
    let options = if summary { options.store_summary(StoredSummary::MinMax) } else { options };
    let mut sequence = store.create_sequence(&layout(args.layers, args.group)?, options)?;
    let attached = args.selector.map(|kept| kept.selector(sequence.layout())).transpose()?;
    let attached = attached.map(|selector| sequence.attach_stored(selector)).transpose()?;
    let mut source = source();
    let written = || store.usage().map(|usage| usage.lifetime_bytes);
    let (before, process, start) = (written()?, process_bytes(), Instant::now());
    let (commits, commit_seconds) = decode(&mut sequence, &mut source, args.tokens, per)?;
    let (seconds, device_bytes) = (start.elapsed().as_secs_f64(), written()? - before);
    let process_bytes = process.ok().zip(process_bytes().ok()).map(|(before, after)| after - before);
    let groups = u64::from(args.tokens / u32::from(args.group)) * u64::from(args.layers);
    // Minimum and maximum of each key's elements: as much as one token's keys and values.
    let summary_bytes = if summary { groups * TOKEN_LAYER_BYTES } else { 0 };
    let mut selector_bytes = 0;
    if let Some(attached) = attached {
        let mut records = Vec::new();
        for layer in 0..usize::from(args.layers) {
            for summary in sequence.selector_summaries(attached, layer)? {
                summary.encode(0..summary.groups().min(1), &mut records);
                selector_bytes += (records.len() * summary.groups()) as u64;
                records.clear();
            }
        }
    }
    let usage = store.usage()?;
    let result = WrittenResult {
        per,
        tokens: args.tokens,
        layers: args.layers,
        group: args.group,
        commits,
        kv_bytes,
        summary_bytes,
        selector: args.selector.map(|kept| format!("{kept:?}")),
        selector_bytes,
        device_bytes,
        process_bytes,
        write_amplification: ratio(device_bytes as f64, (kv_bytes + summary_bytes + selector_bytes) as f64),
        write_amplification_kv: ratio(device_bytes as f64, kv_bytes as f64),
        frames: store.sequences().first().map_or(0, |info| info.frames),
        live_bytes: usage.live_bytes,
        dead_bytes: usage.dead_bytes,
        seconds: rounded(seconds),
        commit_ms: rounded(commit_seconds * 1e3 / commits.max(1) as f64),
    };
    drop(sequence);
    store.close()?;
    Ok(result)
}

/// Bytes that this process has caused to be written, by the kernel's count.
fn process_bytes() -> Result<u64> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.trim().parse().ok()).context("/proc/self/io names no write_bytes")
}
