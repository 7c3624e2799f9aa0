//! Several sequences that commit at the same time, compared with one alone and with the device.

use crate::store::commit::args::{CommitArgs, GROUP, LAYERS};
use crate::store::commit::plain::PlainFiles;
use crate::support::measure::cpu_seconds;
use crate::support::model::{KvSource, layout};
use crate::support::report::{print, ratio, rounded};
use crate::support::store::device_sum;
use anyhow::{Result, bail};
use serde::Serialize;
use std::time::Instant;
use stratakv::{CreateOptions, Durability, Sequence, Store};

/// Commits of several sequences at the same time, appends included.
#[derive(Debug, Serialize)]
struct ConcurrentResult {
    sequences: u32,
    step_tokens: u32,
    commits: u64,
    /// Bytes written to the device.
    bytes_per_commit: u64,
    /// Commits per second of one sequence alone.
    alone_per_s: f64,
    /// Commits per second of all sequences together.
    together_per_s: f64,
    syncs_per_commit: f64,
    cpu_ms_per_commit: f64,
    #[serde(flatten)]
    device: DeviceComparison,
}

/// The commits over one sequence alone, and over the device.
#[derive(Debug, Serialize)]
struct DeviceComparison {
    /// Sequential writes by plain calls of four threads.
    device_gb_per_s: f64,
    ratio_alone: Option<f64>,
    /// Bytes per second over the rate of the plain calls.
    ratio_device: Option<f64>,
    /// Commits per second over the target: 10 x one alone, but at most 0.9 x the rate that the device allows.
    ratio_target: Option<f64>,
}

/// Totals of one burst of commits.
struct CommitBurst {
    commits: u64,
    bytes: u64,
    syncs: u64,
    seconds: f64,
    cpu: f64,
}

impl CommitBurst {
    fn per_second(&self) -> f64 {
        self.commits as f64 / self.seconds
    }

    fn per_commit(&self, total: f64) -> f64 {
        total / self.commits as f64
    }
}

/// Measures one sequence alone, then `--sequences` together, and prints the result.
///
/// # Errors
/// A commit or a plain write fails, or the run was interrupted.
pub(super) fn run(store: &Store, args: &CommitArgs, plain: &mut PlainFiles) -> Result<()> {
    // One alone only appends and commits too, so that both are measured alike.
    let alone = burst(store, args, 1)?;
    let together = burst(store, args, args.sequences)?;
    let device = plain.bandwidth()?;
    let bytes_per_commit = together.per_commit(together.bytes as f64);
    let target = (10.0 * alone.per_second()).min(0.9 * device / bytes_per_commit);
    let result = ConcurrentResult {
        sequences: args.sequences,
        step_tokens: args.step,
        commits: together.commits,
        bytes_per_commit: bytes_per_commit as u64,
        alone_per_s: rounded(alone.per_second()),
        together_per_s: rounded(together.per_second()),
        syncs_per_commit: rounded(together.per_commit(together.syncs as f64)),
        cpu_ms_per_commit: rounded(together.per_commit(together.cpu * 1e3)),
        device: DeviceComparison {
            device_gb_per_s: rounded(device / 1e9),
            ratio_alone: ratio(together.per_second(), alone.per_second()),
            ratio_device: ratio(together.per_second() * bytes_per_commit, device),
            ratio_target: ratio(together.per_second(), target),
        },
    };
    print(args.common.json, "commits together", &result)
}

/// Lets `count` sequences append and commit steps, each on its own thread, `--commits` in all but at least 8 each.
fn burst(store: &Store, args: &CommitArgs, count: u32) -> Result<CommitBurst> {
    let each = args.commits.div_ceil(count).max(8);
    let mut sequences = Vec::new();
    for _ in 0..count {
        sequences.push(store.create_sequence(&layout(LAYERS, GROUP)?, CreateOptions::new())?);
    }
    // The warm-up maps all memory that the sequences take together, and each writes its groups once.
    commit_all(args, &mut sequences, 64_u32.div_ceil(args.step) + 1)?;
    let written = || store.usage().map(|usage| usage.lifetime_bytes);
    let synced = || device_sum(store, |device| device.counters.syncs);
    let (bytes, syncs, cpu, start) = (written()?, synced(), cpu_seconds(), Instant::now());
    commit_all(args, &mut sequences, each)?;
    let burst = CommitBurst {
        commits: u64::from(each) * u64::from(count),
        bytes: written()? - bytes,
        syncs: synced() - syncs,
        seconds: start.elapsed().as_secs_f64(),
        cpu: cpu_seconds() - cpu,
    };
    sequences.into_iter().try_for_each(|sequence| sequence.delete(Durability::Lazy))?;
    store.flush()?;
    Ok(burst)
}

/// Appends and commits `commits` steps to each sequence, each on its own thread.
fn commit_all(args: &CommitArgs, sequences: &mut [Sequence], commits: u32) -> Result<()> {
    let decode = |sequence: &mut Sequence| -> Result<()> {
        let mut source = KvSource::new(args.step as usize);
        for _ in 0..commits {
            source.append(sequence, args.step as usize)?;
            sequence.commit(Durability::Sync)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let decode = &decode;
        let threads: Vec<_> = sequences.iter_mut().map(|sequence| scope.spawn(move || decode(sequence))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("commit: a thread panicked"),
        })
    })
}
