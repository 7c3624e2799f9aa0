//! The engine's side of a read measurement: a store of equal groups, and turns of random batches from it.

use crate::read::result::ReadThroughput;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::cpu_seconds;
use crate::support::model::{KvSource, TOKEN_LAYER_BYTES, layout};
use crate::support::report::{median_of, percentile, rounded};
use crate::support::store::device_sum;
use anyhow::Result;
use std::collections::{BTreeSet, VecDeque};
use std::hint::black_box;
use std::time::{Duration, Instant};
use stratakv::read::ReadTicket;
use stratakv::{CreateOptions, Durability, SelectRequest, Sequence, Store};

/// The key of the sequence that is read.
pub(crate) const KEY: &str = "read";
/// Selections that are drawn for a turn before it begins.
pub(super) const SELECTIONS: usize = 512;
/// Tokens of one append.
const CHUNK: usize = 1024;

/// The way in which batches are requested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchPattern {
    /// Blocks of a batch.
    pub(crate) batch: u32,
    /// Batches in flight at the same time.
    pub(crate) in_flight: u32,
    /// True if batches go through the shard's thread even with one in flight.
    pub(crate) tickets: bool,
}

impl BatchPattern {
    /// Returns the engine's call that serves this pattern, as results name it.
    pub(crate) fn path(self) -> &'static str {
        if !self.tickets && self.in_flight == 1 { "blocking" } else { "tickets" }
    }
}

/// Figures of one turn of the engine.
pub(crate) struct EngineTurn {
    pub(crate) gb_per_s: f64,
    /// User and system time of all threads.
    pub(crate) cpu_s_per_gb: f64,
    /// Latency of each batch, from selection until its first block was checked.
    pub(crate) latencies_us: Vec<f64>,
    pub(crate) requests_per_batch: f64,
    pub(crate) system_calls_per_batch: f64,
}

/// Creates and commits a sequence of one layer whose groups have exactly `block` bytes each.
pub(crate) fn fill(store: &Store, block: u64, bytes: u64) -> Result<Sequence> {
    let group = (block / TOKEN_LAYER_BYTES) as u16;
    let mut sequence = store.create_sequence(&layout(1, group)?, CreateOptions::new().key(KEY))?;
    append_random(&mut sequence, (bytes / block * u64::from(group)) as usize)?;
    Ok(sequence)
}

/// Appends random tokens to a sequence and commits them.
pub(crate) fn append_random(sequence: &mut Sequence, tokens: usize) -> Result<()> {
    KvSource::new(CHUNK).append(sequence, tokens)?;
    Ok(sequence.commit(Durability::Sync)?)
}

/// A turn in progress: tickets in flight and the figures so far.
#[derive(Default)]
struct Progress {
    tickets: VecDeque<(Instant, ReadTicket)>,
    latencies_us: Vec<f64>,
    requests: u64,
}

impl Progress {
    fn completed(&mut self, start: Instant) {
        self.latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
    }

    /// Waits for the oldest ticket, if there is one.
    fn finish_oldest(&mut self) -> Result<()> {
        if let Some((start, ticket)) = self.tickets.pop_front() {
            let batch = ticket.wait()?;
            // A damaged block fails here, because the batch reports damage per block.
            black_box(batch.get(0)?);
            self.completed(start);
        }
        Ok(())
    }
}

/// Measures the engine for `length`: random selections of one batch each, up to `in_flight` tickets at the same time.
///
/// # Errors
/// A read fails or a block is damaged, or the run was interrupted.
pub(crate) fn engine_turn(
    pattern: BatchPattern,
    store: &Store,
    sequence: &Sequence,
    length: Duration,
    random: &mut fastrand::Rng,
) -> Result<EngineTurn> {
    let group_tokens = sequence.layout().group_tokens() as u64;
    let groups = sequence.len() / group_tokens;
    let system_calls = || device_sum(store, |device| device.counters.submissions);
    // Selections are drawn before the turn, because the bare loop and fio draw their offsets at almost no cost.
    let selections: Vec<Vec<u64>> = (0..SELECTIONS).map(|_| choose(random, groups, pattern.batch as usize)).collect();
    let mut selections = selections.iter().cycle();
    let mut progress = Progress::default();
    let (calls_before, cpu, start) = (system_calls(), cpu_seconds(), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let Some(chosen) = selections.next() else { break };
        let begun = Instant::now();
        let view = sequence.select(0, SelectRequest::groups(chosen))?;
        if pattern.path() == "blocking" {
            let batch = store.read(&[&view]).wait()?;
            black_box(batch.get(0)?);
            drop(batch);
            progress.completed(begun);
            progress.requests += chosen.len() as u64;
            continue;
        }
        let ticket = store.read(&[&view]).submit()?;
        progress.requests += ticket.requests() as u64;
        progress.tickets.push_back((begun, ticket));
        if progress.tickets.len() >= pattern.in_flight as usize {
            progress.finish_oldest()?;
        }
    }
    while !progress.tickets.is_empty() {
        progress.finish_oldest()?;
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let batches = progress.latencies_us.len() as u64;
    let gb = (batches * u64::from(pattern.batch) * group_tokens * TOKEN_LAYER_BYTES) as f64 / 1e9;
    Ok(EngineTurn {
        gb_per_s: gb / seconds,
        cpu_s_per_gb: cpu / gb,
        latencies_us: progress.latencies_us,
        requests_per_batch: progress.requests as f64 / batches as f64,
        system_calls_per_batch: (system_calls() - calls_before) as f64 / batches as f64,
    })
}

/// Returns the medians of throughput and latency over turns that read blocks of `block` bytes.
pub(crate) fn throughput(turns: &[EngineTurn], block: u64) -> ReadThroughput {
    let gb_per_s = median_of(turns, |turn| turn.gb_per_s);
    ReadThroughput {
        gb_per_s: rounded(gb_per_s),
        iops: rounded(gb_per_s * 1e9 / block as f64),
        p50_us: rounded(median_of(turns, |turn| percentile(&turn.latencies_us, 0.5))),
        p99_us: rounded(median_of(turns, |turn| percentile(&turn.latencies_us, 0.99))),
    }
}

/// Draws `count` different groups in rising order, none next to another.
///
/// The engine would join neighbours into one request. The bare loop and fio issue one request per block.
pub(super) fn choose(random: &mut fastrand::Rng, groups: u64, count: usize) -> Vec<u64> {
    let mut chosen = BTreeSet::new();
    while chosen.len() < count {
        let group = random.u64(..groups);
        let next = chosen.range(group.saturating_sub(1)..).next();
        if next.is_none_or(|&next| next > group + 1) {
            chosen.insert(group);
        }
    }
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_groups_rise_and_are_not_neighbours() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100 {
            let chosen = choose(&mut random, 256, 64);
            assert_eq!(chosen.len(), 64);
            assert!(chosen.windows(2).all(|pair| pair[0] + 1 < pair[1]));
        }
    }
}
