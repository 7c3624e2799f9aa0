//! `kvbench open`: how long a stored sequence takes to open, by how it was written, and to fork.

use crate::cli::OpenArgs;
use crate::report::{median, percentile, print, rounded};
use crate::work::{TOKEN_LAYER_BYTES, check_interrupt, layout, open_store, work_directory};
use crate::written::{decode, source};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Store, StoredSummary};

/// Times in milliseconds. Frames are read around the page cache; everything else lies in it unless `cold` says otherwise.
#[derive(Debug, Serialize)]
struct OpenResult {
    /// Tokens from one commit to the next; 0: one commit behind everything.
    per: u32,
    tokens: u32,
    layers: u16,
    group: u16,
    summary: bool,
    frames: usize,
    /// What was done about the page cache before every opening.
    cold: &'static str,
    rounds: u32,
    store_open_ms: f64,
    open_ms: f64,
    open_worst_ms: f64,
    /// Bytes read from the devices to open the sequence.
    read_bytes: u64,
    /// Its tables and token ids in memory.
    index_bytes: usize,
    summary_bytes: u64,
    /// What a selector keeps that is attached then, whether it was stored with the groups, how long that took, and what it read.
    selector: Option<String>,
    stored: bool,
    attach_ms: f64,
    attach_read_bytes: u64,
    fork_ms: f64,
    fork_worst_ms: f64,
    /// Bytes that all the forks wrote to the devices.
    fork_device_bytes: u64,
}

pub(crate) fn run(args: &OpenArgs) -> Result<()> {
    let kv_bytes = u64::from(args.tokens) * TOKEN_LAYER_BYTES * u64::from(args.layers);
    let dir = work_directory(&args.common.device, 5 * kv_bytes / 2 + (512 << 20))?;
    for per in &args.per {
        let path = dir.path().join("store");
        let result = measure(args, &path, *per, kv_bytes)?;
        print(args.common.json, &format!("open, a commit per {per} tokens"), &result)?;
        std::fs::remove_dir_all(&path)?;
    }
    Ok(())
}

fn measure(args: &OpenArgs, path: &Path, per: u32, kv_bytes: u64) -> Result<OpenResult> {
    let memory = ByteSize((512 << 20) + if args.summary { kv_bytes / 4 } else { 0 });
    {
        let store = open_store(&args.common, path, memory)?;
        let options = CreateOptions::new().key("open");
        let options = if args.summary { options.store_summary(StoredSummary::MinMax) } else { options };
        let mut sequence = store.create_sequence(&layout(args.layers, args.group)?, options)?;
        if let Some(kept) = args.selector.filter(|_| args.stored) {
            let selector = kept.selector(sequence.layout())?;
            sequence.attach_stored(selector)?;
        }
        decode(&mut sequence, &mut source(), args.tokens, per)?;
        drop(sequence);
        store.close()?;
    }
    let (mut store_opens, mut opens, mut forks) = (Vec::new(), Vec::new(), Vec::new());
    let (mut cold, mut frames, mut read_bytes, mut fork_device_bytes) = ("", 0, 0, 0);
    let (mut index_bytes, mut summary_bytes) = (0, 0);
    let (mut attaches, mut attach_read_bytes) = (Vec::new(), 0);
    for _ in 0..args.common.rounds {
        check_interrupt()?;
        cold = drop_caches(path)?;
        let start = Instant::now();
        let store = open_store(&args.common, path, memory)?;
        store_opens.push(start.elapsed().as_secs_f64() * 1e3);
        let read = || store.status().devices.iter().map(|device| device.counters.read_bytes).sum::<u64>();
        let (before, index_before) = (read(), index(&store));
        let start = Instant::now();
        let mut sequence = store.open_sequence("open")?;
        opens.push(start.elapsed().as_secs_f64() * 1e3);
        anyhow::ensure!(sequence.len() == u64::from(args.tokens), "{} tokens came back", sequence.len());
        read_bytes = read() - before;
        index_bytes = index(&store).saturating_sub(index_before);
        summary_bytes = sequence.summary_bytes();
        frames = store.sequences().first().map_or(0, |info| info.frames);
        if let Some(kept) = args.selector {
            let selector = kept.selector(sequence.layout())?;
            let (before, start) = (read(), Instant::now());
            sequence.attach(selector)?;
            attaches.push(start.elapsed().as_secs_f64() * 1e3);
            attach_read_bytes = read() - before;
        }
        let written = || store.usage().map(|usage| usage.lifetime_bytes);
        let before = written()?;
        for _ in 0..20 {
            let start = Instant::now();
            let fork = sequence.fork()?;
            forks.push(start.elapsed().as_secs_f64() * 1e3);
            anyhow::ensure!(fork.len() == sequence.len(), "a fork of {} tokens", fork.len());
        }
        fork_device_bytes = written()? - before;
        drop(sequence);
        store.close()?;
    }
    Ok(OpenResult {
        per,
        tokens: args.tokens,
        layers: args.layers,
        group: args.group,
        summary: args.summary,
        frames,
        cold,
        rounds: args.common.rounds,
        store_open_ms: rounded(median(&store_opens)),
        open_ms: rounded(median(&opens)),
        open_worst_ms: rounded(percentile(&opens, 1.0)),
        read_bytes,
        index_bytes,
        summary_bytes,
        selector: args.selector.map(|kept| format!("{kept:?}")),
        stored: args.stored,
        attach_ms: if attaches.is_empty() { 0.0 } else { rounded(median(&attaches)) },
        attach_read_bytes,
        fork_ms: rounded(median(&forks)),
        fork_worst_ms: rounded(percentile(&forks, 1.0)),
        fork_device_bytes,
    })
}

/// Bytes of tables in memory.
fn index(store: &Store) -> usize {
    let memory = store.status().memory;
    memory.categories.iter().find(|own| format!("{:?}", own.category) == "Index").map_or(0, |own| own.used_bytes)
}

/// Empties the page cache as far as this process may: all of it, names and inodes too, or the files of one directory.
pub(crate) fn drop_caches(directory: &Path) -> Result<&'static str> {
    rustix::fs::sync();
    if std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok() {
        return Ok("page cache, names and inodes dropped");
    }
    let mut left = vec![directory.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                left.push(entry.path());
            } else {
                let file = std::fs::File::open(entry.path())?;
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
            }
        }
    }
    Ok("file contents dropped; names and inodes may be cached")
}
