//! `kvbench open` measures how long a stored sequence takes to open, by the pace of its commits, and to fork.

use crate::store::paced_append::{CHUNK, SequenceShape, append_at_pace};
use crate::store::result::SequenceSetup;
use crate::support::args::{CommonArgs, between};
use crate::support::directory::{drop_caches, work_directory};
use crate::support::interrupt::check_interrupt;
use crate::support::method;
use crate::support::model::KvSource;
use crate::support::report::{median, percentile, print, rounded};
use crate::support::store::{open_store, read_bytes};
use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stratakv::metrics::Category;
use stratakv::retrieval::{MethodSpec, Selector};
use stratakv::{ByteSize, OpenSequence, Sequence, Store};

/// The key of the sequence.
const KEY: &str = "open";
/// Forks of a round.
const FORKS: usize = 20;

/// Arguments of `kvbench open`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench open --device /nvme0 --tokens 32768 --per 0,1 --json")]
pub(crate) struct OpenArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 32_768, value_parser = between(1, 1 << 20))]
    pub(crate) tokens: u32,
    /// Tokens from one commit to the next, separated by commas; 0 is one commit at the end.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    pub(crate) per: Vec<u32>,
    #[command(flatten)]
    pub(crate) shape: SequenceShape,
    /// Store min/max summaries, which are read when the sequence is opened.
    #[arg(long)]
    pub(crate) summary: bool,
    /// Method whose selector is attached after opening, such as `signs`, `shadowkv` or `kvswap:32`. The attachment is
    /// measured.
    #[arg(long, value_name = "METHOD", value_parser = method::registered)]
    pub(crate) selector: Option<MethodSpec>,
    /// Write the selector's summaries with the groups.
    #[arg(long, requires = "selector")]
    pub(crate) stored: bool,
}

/// Times in milliseconds. Frames are read around the page cache. All else may be cached, unless `cold` says otherwise.
#[derive(Debug, Serialize)]
struct OpenResult {
    #[serde(flatten)]
    setup: SequenceSetup,
    summary: bool,
    frames: usize,
    /// The part of the page cache that was dropped before every opening.
    cold: &'static str,
    rounds: u32,
    #[serde(flatten)]
    opening: OpenFigures,
    #[serde(flatten)]
    attachment: AttachFigures,
    #[serde(flatten)]
    fork: ForkFigures,
}

/// Opening the store and the sequence.
#[derive(Debug, Serialize)]
struct OpenFigures {
    store_open_ms: f64,
    open_ms: f64,
    open_worst_ms: f64,
    /// Bytes read from the devices to open the sequence.
    read_bytes: u64,
    /// Memory of the sequence's tables and token ids.
    index_bytes: usize,
    summary_bytes: u64,
}

/// Attaching a selector after opening.
#[derive(Debug, Serialize)]
struct AttachFigures {
    selector: Option<String>,
    /// True if the selector's summaries were stored with the groups.
    stored: bool,
    attach_ms: f64,
    attach_read_bytes: u64,
}

/// Forking the sequence.
#[derive(Debug, Serialize)]
struct ForkFigures {
    fork_ms: f64,
    fork_worst_ms: f64,
    /// Bytes that all forks of a round wrote to the devices.
    fork_device_bytes: u64,
}

/// Times of all rounds, and counts of the last one.
#[derive(Default)]
struct OpenSamples {
    store_open_ms: Vec<f64>,
    open_ms: Vec<f64>,
    attach_ms: Vec<f64>,
    fork_ms: Vec<f64>,
    cold: &'static str,
    frames: usize,
    read_bytes: u64,
    index_bytes: usize,
    summary_bytes: u64,
    attach_read_bytes: u64,
    fork_device_bytes: u64,
}

/// Runs `kvbench open`.
pub(crate) fn run(args: &OpenArgs) -> Result<()> {
    let kv_bytes = args.shape.kv_bytes(args.tokens);
    let dir = work_directory(&args.common.device, 5 * kv_bytes / 2 + (512 << 20))?;
    let memory = ByteSize((512 << 20) + if args.summary { kv_bytes / 4 } else { 0 });
    let selector = args.selector.map(|spec| method::selector(&spec, args.shape.layers)).transpose()?;
    for per in &args.per {
        let path = dir.path().join("store");
        write(args, &path, (*per, memory), selector.as_ref().filter(|_| args.stored))?;
        let mut samples = OpenSamples::default();
        for _ in 0..args.common.rounds {
            check_interrupt()?;
            samples.round(args, &path, memory, selector.as_ref())?;
        }
        print(args.common.json, &format!("open, a commit per {per} tokens"), &samples.result(args, *per))?;
        std::fs::remove_dir_all(&path)?;
    }
    Ok(())
}

/// Writes a store with one sequence, and the records of a selector if one is given.
fn write(
    args: &OpenArgs,
    path: &Path,
    (per, memory): (u32, ByteSize),
    stored: Option<&Arc<dyn Selector>>,
) -> Result<()> {
    let store = open_store(&args.common, path, memory)?;
    let mut sequence = args.shape.create(&store, KEY, args.summary)?;
    if let Some(selector) = stored {
        sequence.attach_stored(Arc::clone(selector))?;
    }
    append_at_pace(&mut sequence, &mut KvSource::new(CHUNK), args.tokens, per)?;
    drop(sequence);
    Ok(store.close()?)
}

impl OpenSamples {
    /// Opens the store and the sequence with cold caches, attaches the selector, and forks.
    fn round(
        &mut self,
        args: &OpenArgs,
        path: &Path,
        memory: ByteSize,
        selector: Option<&Arc<dyn Selector>>,
    ) -> Result<()> {
        self.cold = drop_caches(path)?;
        let start = Instant::now();
        let store = open_store(&args.common, path, memory)?;
        self.store_open_ms.push(milliseconds(start));
        let (read_before, index_before) = (read_bytes(&store), index_bytes(&store));
        let start = Instant::now();
        let mut sequence = store.open_sequence(KEY, OpenSequence::new())?;
        self.open_ms.push(milliseconds(start));
        let (found, expected) = (sequence.len(), u64::from(args.tokens));
        ensure!(found == expected, "open: the sequence has {found} tokens, but {expected} were committed");
        self.read_bytes = read_bytes(&store) - read_before;
        self.index_bytes = index_bytes(&store).saturating_sub(index_before);
        self.summary_bytes = sequence.summary_bytes();
        self.frames = store.sequences().first().map_or(0, |info| info.frames);
        if let Some(selector) = selector {
            let (before, start) = (read_bytes(&store), Instant::now());
            sequence.attach(Arc::clone(selector))?;
            self.attach_ms.push(milliseconds(start));
            self.attach_read_bytes = read_bytes(&store) - before;
        }
        self.fork(&store, &mut sequence)?;
        drop(sequence);
        Ok(store.close()?)
    }

    fn fork(&mut self, store: &Store, sequence: &mut Sequence) -> Result<()> {
        let before = store.usage()?.lifetime_bytes;
        for _ in 0..FORKS {
            let start = Instant::now();
            let fork = sequence.fork()?;
            self.fork_ms.push(milliseconds(start));
            let (found, expected) = (fork.len(), sequence.len());
            ensure!(found == expected, "fork: it has {found} tokens, but its origin has {expected}");
        }
        self.fork_device_bytes = store.usage()?.lifetime_bytes - before;
        Ok(())
    }

    fn result(&self, args: &OpenArgs, per: u32) -> OpenResult {
        OpenResult {
            setup: args.shape.setup(args.tokens, per),
            summary: args.summary,
            frames: self.frames,
            cold: self.cold,
            rounds: args.common.rounds,
            opening: OpenFigures {
                store_open_ms: rounded(median(&self.store_open_ms)),
                open_ms: rounded(median(&self.open_ms)),
                open_worst_ms: rounded(percentile(&self.open_ms, 1.0)),
                read_bytes: self.read_bytes,
                index_bytes: self.index_bytes,
                summary_bytes: self.summary_bytes,
            },
            attachment: AttachFigures {
                selector: args.selector.map(|spec| spec.to_string()),
                stored: args.stored,
                attach_ms: rounded(median(&self.attach_ms)),
                attach_read_bytes: self.attach_read_bytes,
            },
            fork: ForkFigures {
                fork_ms: rounded(median(&self.fork_ms)),
                fork_worst_ms: rounded(percentile(&self.fork_ms, 1.0)),
                fork_device_bytes: self.fork_device_bytes,
            },
        }
    }
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Returns the bytes of the store's tables in memory.
fn index_bytes(store: &Store) -> usize {
    let memory = store.status().memory;
    memory.categories.iter().find(|own| own.category == Category::Index).map_or(0, |own| own.used_bytes)
}
