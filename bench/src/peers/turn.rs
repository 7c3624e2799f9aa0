//! One turn of one peer, in a process of its own: no other peer adds to its memory and CPU time.

use super::peer::{BatchReader, Peer, PeerName, PeerSetup};
use super::result::PeerFigures;
use super::source::BlockSource;
use crate::support::directory::disk_bytes;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::{cpu_seconds, process_peak_bytes, process_written_bytes};
use crate::support::report::percentile;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Bytes of one call that stores blocks.
const PUT_BYTES: usize = 4 << 20;

/// What a turn does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TurnPlan {
    pub(super) peer: PeerName,
    pub(super) dir: PathBuf,
    /// True to store all blocks, false to read them.
    pub(super) write: bool,
    pub(super) block: usize,
    pub(super) blocks: u64,
    pub(super) batch: usize,
    pub(super) threads: usize,
    /// The cores of the process. Each has one caller.
    pub(super) cores: usize,
    pub(super) seconds: f64,
    /// The seed of the order in which blocks are read.
    pub(super) seed: u64,
}

impl TurnPlan {
    /// Takes the turn in a new process.
    ///
    /// # Errors
    /// The process cannot be started, or its turn failed.
    pub(super) fn take(&self) -> Result<PeerFigures> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.arg("peers").arg("--turn").arg(serde_json::to_string(self)?).stderr(Stdio::inherit());
        let output = command.output().context("start a turn")?;
        if !output.status.success() {
            bail!("the turn of {} ended with {}", self.peer.text(), output.status);
        }
        serde_json::from_slice(&output.stdout).with_context(|| format!("the turn of {}", self.peer.text()))
    }

    /// Takes the turn in this process.
    ///
    /// # Errors
    /// The peer fails, or a block has other bytes than were written.
    pub(super) fn run(&self) -> Result<PeerFigures> {
        pin(self.cores)?;
        let source = Arc::new(BlockSource::new(self.block));
        let setup =
            PeerSetup { dir: self.dir.clone(), source, blocks: self.blocks, batch: self.batch, threads: self.threads };
        let peer = self.peer.open(&setup)?;
        if self.write { self.store(peer) } else { self.reads(peer) }
    }

    /// Stores all blocks and makes them durable.
    fn store(&self, mut peer: Box<dyn Peer>) -> Result<PeerFigures> {
        let written = process_written_bytes()?;
        let (cpu, start) = (cpu_seconds(), Instant::now());
        let step = (PUT_BYTES / self.block).max(1) as u64;
        for first in (0..self.blocks).step_by(step as usize) {
            check_interrupt()?;
            peer.put(first, step.min(self.blocks - first) as usize)?;
        }
        peer.finish()?;
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        peer.close()?;
        let bytes = (self.blocks * self.block as u64) as f64;
        Ok(PeerFigures {
            gb_per_s: bytes / 1e9 / seconds,
            cpu_s_per_gb: cpu / (bytes / 1e9),
            p50_us: None,
            p99_us: None,
            resident_mib: resident_mib()?,
            write_amplification: Some((process_written_bytes()? - written) as f64 / bytes),
            space: Some(disk_bytes(&self.dir)? as f64 / bytes),
        })
    }

    /// Reads batches of blocks in a random order, each block at most once, with one caller per core.
    fn reads(&self, peer: Box<dyn Peer>) -> Result<PeerFigures> {
        let mut order: Vec<u64> = (0..self.blocks).collect();
        fastrand::Rng::with_seed(self.seed).shuffle(&mut order);
        let callers = order.chunks(order.len().div_ceil(self.cores));
        // All callers have their readers before the clock starts.
        let meeting = Barrier::new(callers.len());
        let cpu = cpu_seconds();
        let outcomes: Vec<Result<CallerTurn>> = std::thread::scope(|scope| {
            let (peer, meeting) = (&*peer, &meeting);
            let start = |own| scope.spawn(move || self.caller(peer, meeting, own));
            let threads: Vec<_> = callers.map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a caller panicked"))).collect()
        });
        let turns = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
        let opening = turns.iter().map(|turn| turn.cpu_before).fold(cpu, f64::max);
        let cpu = cpu_seconds() - opening;
        let seconds = turns.iter().map(|turn| turn.seconds).fold(0.0, f64::max);
        let gb = turns.iter().map(|turn| turn.bytes).sum::<u64>() as f64 / 1e9;
        let latencies: Vec<f64> = turns.into_iter().flat_map(|turn| turn.latencies_us).collect();
        peer.close()?;
        Ok(PeerFigures {
            gb_per_s: gb / seconds,
            cpu_s_per_gb: cpu / gb,
            p50_us: Some(percentile(&latencies, 0.5)),
            p99_us: Some(percentile(&latencies, 0.99)),
            resident_mib: resident_mib()?,
            write_amplification: None,
            space: None,
        })
    }

    /// Reads the batches of one caller until its blocks or the time of the turn are used up.
    fn caller(&self, peer: &dyn Peer, meeting: &Barrier, own: &[u64]) -> Result<CallerTurn> {
        let reader = peer.reader();
        meeting.wait();
        let mut reader: Box<dyn BatchReader> = reader?;
        let mut turn = CallerTurn { cpu_before: cpu_seconds(), ..CallerTurn::default() };
        let (start, length) = (Instant::now(), Duration::from_secs_f64(self.seconds));
        for batch in own.chunks_exact(self.batch) {
            check_interrupt()?;
            let begun = Instant::now();
            turn.bytes += reader.read(batch)?;
            turn.latencies_us.push(begun.elapsed().as_secs_f64() * 1e6);
            if start.elapsed() >= length {
                break;
            }
        }
        turn.seconds = start.elapsed().as_secs_f64();
        Ok(turn)
    }
}

/// Figures of one caller.
#[derive(Default)]
struct CallerTurn {
    bytes: u64,
    seconds: f64,
    latencies_us: Vec<f64>,
    /// CPU seconds of the process when the caller began.
    cpu_before: f64,
}

fn resident_mib() -> Result<f64> {
    let bytes = process_peak_bytes().context("/proc/self/status has no VmHWM")?;
    Ok(bytes as f64 / f64::from(1 << 20))
}

/// Binds this process to its first `cores` cores, before it has other threads.
fn pin(cores: usize) -> Result<()> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).context("read the cores of this process")?;
    if cores > allowed.count() as usize {
        bail!("--cores {cores}: this process may use {}", allowed.count());
    }
    let mut own = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).take(cores).for_each(|cpu| own.set(cpu));
    sched_setaffinity(None, &own).context("bind this process to its cores")
}
