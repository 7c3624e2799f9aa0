//! `kvbench commit`: a durable commit of one decode step, against the least that two ordered syncs can cost: the same bytes
//! written and synced, then one page written and synced.

use crate::bare::{Pages, open_direct};
use crate::cli::CommitArgs;
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{KvSource, check_interrupt, layout, open_store, settle, work_directory};
use anyhow::{Context, Result};
use rustix::fs::FallocateFlags;
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, Durability, SequenceOptions, Store, Summary};

const LAYERS: u16 = 32;
const GROUP: u16 = 8;
/// Bytes of a step as the device sees them, generously: for the room to ask for.
const STEP_BYTES_MAX: u64 = 2 << 20;

/// Latencies in microseconds. A commit's is that of the call alone: the groups were appended before.
#[derive(Debug, Serialize)]
struct CommitResult {
    commits: u32,
    /// Bytes of frames that one commit writes.
    bytes_per_commit: u64,
    p50_us: f64,
    p99_us: f64,
    plain_p50_us: f64,
    plain_p99_us: f64,
    ratio_p50: Option<f64>,
    ratio_p99: Option<f64>,
    /// The appends of the step, all layers.
    append_p50_us: f64,
    syncs_per_commit: f64,
    driver: String,
}

pub(crate) fn run(args: &CommitArgs) -> Result<()> {
    let bytes = u64::from(args.commits) * STEP_BYTES_MAX;
    let dir = work_directory(&args.common.device, 2 * bytes + (256 << 20))?;
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize((256 << 20) + bytes / 4))?;
    let options = SequenceOptions::new().key("commit").summary(Summary::MinMax);
    let mut sequence = store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
    let mut source = KvSource::new(usize::from(GROUP));
    let mut plain = Plain::new(dir.path(), bytes)?;
    let (mut own, mut appends, mut plains, mut sizes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let syncs = |store: &Store| store.status().devices.iter().map(|d| d.counters.syncs).sum::<u64>();
    settle(dir.path())?;
    let mut syncs_before = 0;
    for step in 0..=args.commits {
        check_interrupt()?;
        if step % 50 == 0 {
            eprintln!("kvbench: {}: commit {step} of {}", dir.path().display(), args.commits);
        }
        let start = Instant::now();
        for layer in 0..usize::from(LAYERS) {
            let (keys, values) = source.pair(usize::from(GROUP));
            sequence.append(layer, keys, values)?;
        }
        let appended = start.elapsed();
        let before = store.status().written_bytes;
        let start = Instant::now();
        sequence.commit(Durability::Sync)?;
        let committed = start.elapsed();
        let bytes = store.status().written_bytes - before;
        let plain = plain.step(bytes)?;
        // The first commit creates the sequence and opens files.
        if step == 0 {
            syncs_before = syncs(&store);
            continue;
        }
        own.push(committed.as_secs_f64() * 1e6);
        appends.push(appended.as_secs_f64() * 1e6);
        plains.push(plain * 1e6);
        sizes.push(bytes as f64);
    }
    let result = CommitResult {
        commits: args.commits,
        bytes_per_commit: median(&sizes) as u64,
        p50_us: rounded(median(&own)),
        p99_us: rounded(percentile(&own, 0.99)),
        plain_p50_us: rounded(median(&plains)),
        plain_p99_us: rounded(percentile(&plains, 0.99)),
        ratio_p50: ratio(median(&own), median(&plains)),
        ratio_p99: ratio(percentile(&own, 0.99), percentile(&plains, 0.99)),
        append_p50_us: rounded(median(&appends)),
        syncs_per_commit: rounded((syncs(&store) - syncs_before) as f64 / f64::from(args.commits)),
        driver: store.status().devices.first().map(|device| device.driver.clone()).unwrap_or_default(),
    };
    drop(sequence);
    store.close()?;
    print(args.common.json, "commit", &result)
}

/// Two preallocated files and plain calls.
struct Plain {
    data: File,
    log: File,
    pages: Pages,
    offset: u64,
    page: u64,
}

impl Plain {
    fn new(directory: &Path, bytes: u64) -> Result<Self> {
        let create = |name: &str, bytes: u64| -> Result<File> {
            let path = directory.join(name);
            let file = open_direct(&path, true)?;
            let place = || format!("reserve {}", path.display());
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).with_context(place)?;
            file.sync_all().with_context(place)?;
            Ok(file)
        };
        let log_bytes = (bytes / STEP_BYTES_MAX + 2) * 4096;
        let mut pages = Pages::new(STEP_BYTES_MAX as usize)?;
        fastrand::Rng::with_seed(13).fill(pages.bytes_mut());
        Ok(Self {
            data: create("data", bytes + 4 * STEP_BYTES_MAX)?,
            log: create("log", log_bytes)?,
            pages,
            offset: 0,
            page: 0,
        })
    }

    /// Writes `bytes`, syncs, writes a page, syncs; seconds.
    fn step(&mut self, bytes: u64) -> Result<f64> {
        let buffer = self.pages.bytes_mut();
        let len = (bytes as usize).next_multiple_of(4096).min(buffer.len());
        let start = Instant::now();
        self.data.write_all_at(&buffer[..len], self.offset).context("write")?;
        self.data.sync_data().context("fdatasync")?;
        self.log.write_all_at(&buffer[..4096], self.page).context("write")?;
        self.log.sync_data().context("fdatasync")?;
        let seconds = start.elapsed().as_secs_f64();
        self.offset += len as u64;
        self.page += 4096;
        Ok(seconds)
    }
}
