//! `kvbench churn`: a store kept at a share of its capacity while sequences of mixed lengths come and go, and what the devices
//! take for it.

use crate::cli::ChurnArgs;
use crate::report::{print, ratio, rounded};
use crate::work::{KvSource, TOKEN_LAYER_BYTES, check_interrupt, layout, work_directory};
use anyhow::{Result, bail};
use serde::Serialize;
use std::os::unix::fs::DirBuilderExt;
use std::time::Instant;
use stratakv::{ByteSize, CreateOptions, Durability, SequenceId, Store, StoreOptions, StoredSummary};

const LAYERS: u16 = 4;
const GROUP: u16 = 8;
/// Tokens appended at once.
const CHUNK: usize = 512;

/// Bytes written to the devices while sequences came and went, over those of the sequences that came.
#[derive(Debug, Serialize)]
struct ChurnResult {
    capacity_bytes: u64,
    segment_bytes: u64,
    full: f64,
    summaries: bool,
    shortest_tokens: u64,
    longest_tokens: u64,
    sequences_written: u64,
    sequences_alive: usize,
    /// Bytes of keys and values that were appended in the churn.
    kv_bytes: u64,
    summary_bytes: u64,
    device_bytes: u64,
    /// Bytes that cleaning moved, part of `device_bytes`.
    moved_bytes: u64,
    cleaned_segments: u64,
    /// Device bytes over those of keys, values and summaries.
    write_amplification: Option<f64>,
    /// Device bytes over those of keys and values.
    write_amplification_kv: Option<f64>,
    /// Live bytes over the capacity at the end.
    live_share: f64,
    dead_share: f64,
    /// Bytes of the files over those that the directory takes on disk, at the end.
    usage_over_du: Option<f64>,
    gb_per_s: f64,
}

/// The store and what lives in it.
struct Churn<'a> {
    args: &'a ChurnArgs,
    store: Store,
    source: KvSource,
    random: fastrand::Rng,
    alive: Vec<SequenceId>,
    written: u64,
    kv_bytes: u64,
}

impl Churn<'_> {
    fn live(&self) -> Result<f64> {
        let usage = self.store.usage()?;
        Ok((usage.live_bytes + usage.in_flight_bytes) as f64 / usage.capacity_bytes as f64)
    }

    /// A length between the shortest and the longest, every magnitude as often as the others.
    fn length(&mut self) -> u64 {
        let (low, high) = (self.args.shortest as f64, self.args.longest as f64);
        (low * (high / low).powf(self.random.f64())).round() as u64
    }

    fn create(&mut self, tokens: u64) -> Result<()> {
        let options = if self.args.no_summary {
            CreateOptions::new()
        } else {
            CreateOptions::new().store_summary(StoredSummary::MinMax)
        };
        let mut sequence = self.store.create_sequence(&layout(LAYERS, GROUP)?, options)?;
        let mut left = tokens as usize;
        while left > 0 {
            check_interrupt()?;
            let chunk = left.min(CHUNK);
            for layer in 0..usize::from(LAYERS) {
                let (keys, values) = self.source.pair(chunk);
                sequence.append(layer, keys, values)?;
            }
            left -= chunk;
        }
        sequence.commit(Durability::Sync)?;
        self.alive.push(sequence.id());
        self.written += 1;
        self.kv_bytes += tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS);
        Ok(())
    }

    fn delete(&mut self) -> Result<()> {
        if self.alive.is_empty() {
            bail!("--longest {} does not fit in --capacity {}", self.args.longest, self.args.capacity);
        }
        let at = self.random.usize(..self.alive.len());
        let id = self.alive.swap_remove(at);
        Ok(self.store.delete_sequence_id(id, Durability::Lazy)?)
    }

    /// Sequences come, and others go whenever there is more alive than there may be, until `bytes` came.
    fn run(&mut self, bytes: u64) -> Result<()> {
        let own = (2 * GROUP as u64 * u64::from(!self.args.no_summary)) as f64 / (2 * GROUP * GROUP) as f64;
        let target = self.kv_bytes + bytes;
        while self.kv_bytes < target {
            let tokens = self.length();
            let size = (tokens * TOKEN_LAYER_BYTES * u64::from(LAYERS)) as f64 * (1.0 + own);
            while self.live()? + size / self.args.capacity.0 as f64 > self.args.full {
                self.delete()?;
                self.store.flush()?;
            }
            self.create(tokens)?;
        }
        Ok(())
    }
}

pub(crate) fn run(args: &ChurnArgs) -> Result<()> {
    if args.shortest == 0 || args.shortest > args.longest || !(0.1..0.95).contains(&args.full) {
        bail!("--shortest is at least 1 and at most --longest, --full is from 0.1 to 0.95");
    }
    let dir = work_directory(&args.common.device, args.capacity.0)?;
    let path = dir.path().join("store");
    std::fs::DirBuilder::new().mode(0o700).create(&path)?;
    let mut options = StoreOptions::default().device(&path).capacity(args.capacity);
    options.segment_bytes = args.segment;
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
    eprintln!("kvbench: {}: filling, then {} times what lives", dir.path().display(), args.turnover);
    // Once around, so that deletions have left their marks before anything counts.
    let lives = (args.capacity.0 as f64 * args.full) as u64;
    churn.run(lives + lives / 2)?;
    let device = |churn: &Churn<'_>| churn.store.usage().map(|usage| usage.lifetime_bytes);
    let (before, kv_before, written_before) = (device(&churn)?, churn.kv_bytes, churn.written);
    let health = churn.store.health();
    let start = Instant::now();
    churn.run((lives as f64 * args.turnover) as u64)?;
    churn.store.flush()?;
    let seconds = start.elapsed().as_secs_f64();
    let (after, usage) = (churn.store.health(), churn.store.usage()?);
    let (device_bytes, kv_bytes) = (usage.lifetime_bytes - before, churn.kv_bytes - kv_before);
    let summary_bytes = if args.no_summary { 0 } else { kv_bytes / u64::from(GROUP) };
    let result = ChurnResult {
        capacity_bytes: args.capacity.0,
        segment_bytes: segment.0,
        full: args.full,
        summaries: !args.no_summary,
        shortest_tokens: args.shortest,
        longest_tokens: args.longest,
        sequences_written: churn.written - written_before,
        sequences_alive: churn.alive.len(),
        kv_bytes,
        summary_bytes,
        device_bytes,
        moved_bytes: after.moved_bytes - health.moved_bytes,
        cleaned_segments: after.cleaned_segments - health.cleaned_segments,
        write_amplification: ratio(device_bytes as f64, (kv_bytes + summary_bytes) as f64),
        write_amplification_kv: ratio(device_bytes as f64, kv_bytes as f64),
        live_share: rounded(usage.live_bytes as f64 / usage.capacity_bytes as f64),
        dead_share: rounded(usage.dead_bytes as f64 / usage.capacity_bytes as f64),
        usage_over_du: ratio(usage.file_bytes as f64, du(&path)? as f64),
        gb_per_s: rounded(kv_bytes as f64 / 1e9 / seconds),
    };
    churn.store.close()?;
    print(args.common.json, &format!("churn {}", args.capacity), &result)
}

/// Bytes that the files below a directory take on disk.
fn du(dir: &std::path::Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut sum = 0;
    for entry in std::fs::read_dir(dir)? {
        let meta = entry.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?.metadata()?;
        sum += if meta.is_dir() { du(&entry?.path())? } else { meta.blocks() * 512 };
    }
    Ok(sum)
}
