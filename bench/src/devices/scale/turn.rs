//! Turns of batches from a store on several devices.

use crate::devices::scale::args::ScaleArgs;
use crate::devices::scale::rig::ScaleCase;
use crate::support::interrupt::check_interrupt;
use crate::support::measure::cpu_seconds;
use crate::support::report::median_of;
use crate::support::store::device_sum;
use anyhow::{Context, Result};
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use stratakv::read::ReadTicket;
use stratakv::{SelectRequest, Sequence, Store};

/// The length of the warm-up over the length of a turn. Fresh limits let a burst through, device profiles follow what
/// they measure, and the engine registers rings, files and buffers.
pub(super) const WARM_UP: f64 = 0.35;

/// Figures of one turn, or medians over several.
pub(super) struct ScaleTurn {
    pub(super) gb_per_s: f64,
    /// Bytes that the busiest device read over the bytes that all devices read.
    pub(super) busiest_share: f64,
    /// Bytes requested from the devices over bytes selected.
    pub(super) amplification: f64,
    /// User and system time of all threads.
    pub(super) cpu_s_per_gb: f64,
    /// System calls that moved bytes.
    pub(super) calls_per_gb: f64,
    /// Latency of each batch, from its submission until it was complete.
    pub(super) latencies_us: Vec<f64>,
}

impl ScaleTurn {
    /// Returns the medians of several turns, without latencies.
    pub(super) fn median(turns: &[Self]) -> Self {
        Self {
            gb_per_s: median_of(turns, |turn| turn.gb_per_s),
            busiest_share: median_of(turns, |turn| turn.busiest_share),
            amplification: median_of(turns, |turn| turn.amplification),
            cpu_s_per_gb: median_of(turns, |turn| turn.cpu_s_per_gb),
            calls_per_gb: median_of(turns, |turn| turn.calls_per_gb),
            latencies_us: Vec::new(),
        }
    }
}

/// Returns the groups of a sequence by the device that has their first copy.
///
/// # Errors
/// A group has no copy.
pub(super) fn first_copies(store: &Store, sequence: &Sequence) -> Result<Vec<Vec<u64>>> {
    let devices = store.status().devices.len();
    let mut by_device = vec![Vec::new(); devices];
    for group in 0..sequence.len() / sequence.layout().group_tokens() as u64 {
        let first = sequence.group_devices(0, group)?.first().copied();
        let first = first.with_context(|| format!("group {group} has no copy on any device"))?;
        by_device[usize::from(first)].push(group);
    }
    Ok(by_device)
}

/// Draws the groups of a batch in rising order. With a skew four of five have their first copy on the first device.
fn choose(case: &ScaleCase, random: &mut fastrand::Rng, groups: &[Vec<u64>], count: usize) -> Vec<u64> {
    let mut chosen = BTreeSet::new();
    let all: u64 = groups.iter().map(|own| own.len() as u64).sum();
    while chosen.len() < count {
        let group = if !case.skew {
            random.u64(..all)
        } else if chosen.len() * 5 < count * 4 {
            groups[0][random.usize(..groups[0].len())]
        } else {
            let own = &groups[1 + random.usize(..groups.len() - 1)];
            own[random.usize(..own.len())]
        };
        chosen.insert(group);
    }
    chosen.into_iter().collect()
}

/// A turn in progress: tickets in flight and the figures so far.
#[derive(Default)]
struct ScaleProgress {
    tickets: VecDeque<(Instant, ReadTicket)>,
    latencies_us: Vec<f64>,
    selected_bytes: u64,
    requested_bytes: u64,
}

impl ScaleProgress {
    /// Waits for the oldest ticket, if there is one.
    fn finish_oldest(&mut self) -> Result<()> {
        if let Some((submitted, ticket)) = self.tickets.pop_front() {
            let bytes = ticket.selected_bytes();
            ticket.wait()?.get(0)?;
            self.selected_bytes += bytes;
            self.latencies_us.push(submitted.elapsed().as_secs_f64() * 1e6);
        }
        Ok(())
    }
}

/// Measures batches for `seconds`, `--in-flight` at the same time.
///
/// # Errors
/// A read fails or a block is damaged, or the run was interrupted.
pub(super) fn turn(
    args: &ScaleArgs,
    store: &Store,
    sequence: &Sequence,
    case: &ScaleCase,
    groups: &[Vec<u64>],
    seconds: f64,
) -> Result<ScaleTurn> {
    let mut random = fastrand::Rng::with_seed(11);
    let read_bytes = || store.status().devices.iter().map(|device| device.counters.read_bytes).collect::<Vec<_>>();
    let calls = || device_sum(store, |device| device.counters.submissions);
    let (before, calls_before, cpu) = (read_bytes(), calls(), cpu_seconds());
    let mut progress = ScaleProgress::default();
    let (length, start) = (Duration::from_secs_f64(seconds), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let chosen = choose(case, &mut random, groups, args.batch as usize);
        let view = sequence.select(0, SelectRequest::groups(&chosen))?;
        let submitted = Instant::now();
        let ticket = store.read(&[&view]).submit()?;
        progress.requested_bytes += ticket.device_bytes();
        progress.tickets.push_back((submitted, ticket));
        if progress.tickets.len() >= args.in_flight as usize {
            progress.finish_oldest()?;
        }
    }
    while !progress.tickets.is_empty() {
        progress.finish_oldest()?;
    }
    let took = start.elapsed().as_secs_f64();
    let (cpu, made) = (cpu_seconds() - cpu, calls() - calls_before);
    let read: Vec<u64> = read_bytes().iter().zip(&before).map(|(after, before)| after - before).collect();
    let total: u64 = read.iter().sum();
    let selected = progress.selected_bytes;
    Ok(ScaleTurn {
        gb_per_s: selected as f64 / 1e9 / took,
        busiest_share: read.iter().copied().max().unwrap_or(0) as f64 / total.max(1) as f64,
        amplification: progress.requested_bytes as f64 / selected.max(1) as f64,
        cpu_s_per_gb: cpu * 1e9 / selected.max(1) as f64,
        calls_per_gb: made as f64 * 1e9 / selected.max(1) as f64,
        latencies_us: progress.latencies_us,
    })
}
