//! `kvbench commit`: a durable commit of one decode step, against the least that two ordered syncs can cost: the same bytes
//! written and synced, then one page written and synced.

use crate::bare::{Pages, open_direct};
use crate::cli::CommitArgs;
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{
    KvSource, TOKEN_LAYER_BYTES, check_interrupt, cpu_seconds, layout, open_store, settle, work_directory,
};
use anyhow::{Context, Result, bail};
use rustix::fs::FallocateFlags;
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, Sequence, Store, StoredSummary};

const LAYERS: u16 = 32;
const GROUP: u16 = 8;
/// The largest commit that plain calls repeat whole: one that writes the groups of 64 tokens.
const PLAIN_BYTES_MAX: usize = 16 << 20;
/// What is written to see how fast the device is.
const BANDWIDTH_BYTES: usize = 512 << 20;

/// Latencies in microseconds. A commit's is that of the call alone: the groups were appended before.
#[derive(Debug, Serialize)]
struct CommitResult {
    commits: u32,
    step_tokens: u32,
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
    // Every token by itself, then in its group, with summaries and headers.
    let step_bytes = u64::from(args.step) * TOKEN_LAYER_BYTES * u64::from(LAYERS);
    let bytes = u64::from(args.commits) * (3 * step_bytes + (64 << 10));
    let many = if args.sequences > 1 { 3 * bytes } else { 0 };
    let dir = work_directory(&args.common.device, 2 * bytes + many + (512 << 20))?;
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize((1 << 30) + bytes / 4))?;
    let options = CreateOptions::new().key("commit").store_summary(StoredSummary::MinMax);
    let mut sequence = store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
    let step_tokens = args.step as usize;
    let mut source = KvSource::new(step_tokens);
    let mut plain = Plain::new(dir.path(), bytes, u64::from(args.commits))?;
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
            let (keys, values) = source.pair(step_tokens);
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
        step_tokens: args.step,
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
    print(args.common.json, "commit", &result)?;
    if args.sequences > 1 {
        // One alone does nothing but append and commit too, so that both are measured alike.
        let alone = together(&store, args, 1)?;
        let together = together(&store, args, args.sequences)?;
        let device = plain.bandwidth()?;
        let per_commit = together.bytes as f64 / together.commits as f64;
        let allowed = (10.0 * alone.per_second()).min(0.9 * device / per_commit);
        let result = TogetherResult {
            sequences: args.sequences,
            step_tokens: args.step,
            commits: together.commits,
            bytes_per_commit: per_commit as u64,
            alone_per_s: rounded(alone.per_second()),
            together_per_s: rounded(together.per_second()),
            syncs_per_commit: rounded(together.syncs as f64 / together.commits as f64),
            cpu_ms_per_commit: rounded(together.cpu * 1e3 / together.commits as f64),
            device_gb_per_s: rounded(device / 1e9),
            ratio_alone: ratio(together.per_second(), alone.per_second()),
            ratio_device: ratio(together.per_second() * per_commit, device),
            ratio_target: ratio(together.per_second(), allowed),
        };
        print(args.common.json, "commits together", &result)?;
    }
    Ok(store.close()?)
}

/// Commits of several sequences at the same time, appends included.
#[derive(Debug, Serialize)]
struct TogetherResult {
    sequences: u32,
    step_tokens: u32,
    commits: u64,
    /// Bytes written to the device.
    bytes_per_commit: u64,
    /// Commits per second of one sequence, and of all of them.
    alone_per_s: f64,
    together_per_s: f64,
    syncs_per_commit: f64,
    cpu_ms_per_commit: f64,
    /// Sequential writes by plain calls of four threads.
    device_gb_per_s: f64,
    ratio_alone: Option<f64>,
    /// Bytes per second over those of the plain calls.
    ratio_device: Option<f64>,
    /// Over the smaller of 10 x one alone and 0.9 x what the device allows for these bytes.
    ratio_target: Option<f64>,
}

struct Turn {
    commits: u64,
    bytes: u64,
    syncs: u64,
    seconds: f64,
    cpu: f64,
}

impl Turn {
    fn per_second(&self) -> f64 {
        self.commits as f64 / self.seconds
    }
}

/// `count` sequences, each on a thread, append a step and commit it, as often as `--commits` says in all.
fn together(store: &Store, args: &CommitArgs, count: u32) -> Result<Turn> {
    let each = args.commits.div_ceil(count).max(8);
    let mut sequences = Vec::new();
    for _ in 0..count {
        sequences.push(store.create_sequence(&layout(LAYERS, GROUP)?, CreateOptions::new())?);
    }
    let decode = |sequence: &mut Sequence, commits: u32| -> Result<()> {
        let mut source = KvSource::new(args.step as usize);
        for _ in 0..commits {
            check_interrupt()?;
            for layer in 0..usize::from(LAYERS) {
                let (keys, values) = source.pair(args.step as usize);
                sequence.append(layer, keys, values)?;
            }
            sequence.commit(Durability::Sync)?;
        }
        Ok(())
    };
    let all = |sequences: &mut [Sequence], commits: u32| -> Result<()> {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                sequences.iter_mut().map(|sequence| scope.spawn(move || decode(sequence, commits))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(_) => bail!("a thread that commits panicked"),
            })
        })
    };
    // All memory that they take together is mapped, and each has written its groups once.
    all(&mut sequences, 64_u32.div_ceil(args.step) + 1)?;
    let written = || store.usage().map(|usage| usage.lifetime_bytes);
    let synced = || store.status().devices.iter().map(|device| device.counters.syncs).sum::<u64>();
    let (bytes, syncs, cpu, start) = (written()?, synced(), cpu_seconds(), Instant::now());
    all(&mut sequences, each)?;
    let turn = Turn {
        commits: u64::from(each) * u64::from(count),
        bytes: written()? - bytes,
        syncs: synced() - syncs,
        seconds: start.elapsed().as_secs_f64(),
        cpu: cpu_seconds() - cpu,
    };
    sequences.into_iter().try_for_each(|sequence| sequence.delete(Durability::Lazy))?;
    store.flush()?;
    Ok(turn)
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
    fn new(directory: &Path, bytes: u64, steps: u64) -> Result<Self> {
        let create = |name: &str, bytes: u64| -> Result<File> {
            let path = directory.join(name);
            let file = open_direct(&path, true)?;
            let place = || format!("reserve {}", path.display());
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).with_context(place)?;
            file.sync_all().with_context(place)?;
            Ok(file)
        };
        let mut pages = Pages::new(PLAIN_BYTES_MAX)?;
        fastrand::Rng::with_seed(13).fill(pages.bytes_mut());
        Ok(Self {
            data: create("data", (bytes + 4 * PLAIN_BYTES_MAX as u64).max(BANDWIDTH_BYTES as u64))?,
            log: create("log", (steps + 2) * 4096)?,
            pages,
            offset: 0,
            page: 0,
        })
    }

    /// Bytes per second of four threads that write a megabyte at a time over what is there, and a sync.
    fn bandwidth(&mut self) -> Result<f64> {
        let (file, buffer) = (&self.data, &*self.pages.bytes_mut());
        let each = BANDWIDTH_BYTES / 4;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let write = |at: usize| -> Result<()> {
                (0..each)
                    .step_by(1 << 20)
                    .try_for_each(|offset| Ok(file.write_all_at(&buffer[..1 << 20], (at * each + offset) as u64)?))
            };
            let threads: Vec<_> = (0..4).map(|at| scope.spawn(move || write(at))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome.context("write"),
                Err(_) => bail!("a thread that writes panicked"),
            })
        })?;
        file.sync_data().context("fdatasync")?;
        Ok(BANDWIDTH_BYTES as f64 / start.elapsed().as_secs_f64())
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
