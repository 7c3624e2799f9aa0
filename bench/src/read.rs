//! `kvbench read`: batches of random groups through selections and read tickets, checksums verified.

use crate::bare::{BareReader, Pages, write_file};
use crate::cli::{Checksum, ReadArgs};
use crate::fio::{self, Refill};
use crate::report::{median, percentile, print, ratio, rounded};
use crate::work::{
    KvSource, TOKEN_LAYER_BYTES, check_interrupt, cpu_seconds, layout, open_store, settle, thread_cpu_seconds,
    work_directory,
};
use anyhow::{Result, bail};
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv::{ByteSize, CreateOptions, Durability, ReadTicket, Sequence, SequenceId, Store};
use stratakv_format::{PayloadChecksum, PlaneIdentity};

/// Selections drawn for a turn.
const SELECTIONS: usize = 512;
/// Sides that take turns: the engine, the bare loop, the same with checksums, fio, fio with its queue kept full.
const SIDES: usize = 5;
/// Memory that no cache holds.
const COLD_BYTES: u64 = 256 << 20;

/// One block size. CPU is user and system time of all threads. `fio_*` submits a batch when the one before has ended, as the
/// engine does with one batch in flight; `fio_full_*` keeps its queue full.
#[derive(Debug, Default, Serialize)]
struct ReadResult {
    block: u64,
    batch: u32,
    in_flight: u32,
    /// `read_now` (the calling thread at the device) or `tickets` (through the shard).
    path: &'static str,
    gb_per_s: f64,
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    /// p99 over p50.
    tail: f64,
    cpu_s_per_gb: f64,
    /// Of checksums alone, over one batch of buffers again and again.
    checksum_cpu_s_per_gb: f64,
    /// The same over more memory than the caches hold: blocks that a device has just brought are not in the cache either.
    checksum_cold_cpu_s_per_gb: f64,
    /// What is left without the checksums, as measured over hot buffers and over cold ones.
    io_cpu_s_per_gb: f64,
    io_cold_cpu_s_per_gb: f64,
    bare_gb_per_s: Option<f64>,
    bare_cpu_s_per_gb: Option<f64>,
    /// p99 over p50 of the bare loop's batches.
    bare_tail: Option<f64>,
    ratio_bare: Option<f64>,
    ratio_bare_cpu: Option<f64>,
    ratio_bare_cpu_cold: Option<f64>,
    /// The bare loop with the same checksums over what it has just read.
    bare_checked_gb_per_s: Option<f64>,
    bare_checked_cpu_s_per_gb: Option<f64>,
    ratio_bare_checked: Option<f64>,
    ratio_bare_checked_cpu: Option<f64>,
    /// Own CPU over 1.25 x the bare loop's and 1.1 x what checksums add to it: at most 1 is the target.
    ratio_cpu_allowed: Option<f64>,
    fio_gb_per_s: Option<f64>,
    fio_cpu_s_per_gb: Option<f64>,
    ratio_fio: Option<f64>,
    fio_full_gb_per_s: Option<f64>,
    ratio_fio_full: Option<f64>,
    fio_pages: Option<&'static str>,
    fio_skipped: Option<&'static str>,
    huge_pages: String,
    driver: String,
    direct: bool,
    requests_per_batch: f64,
    system_calls_per_batch: f64,
}

pub(crate) fn run(args: &ReadArgs) -> Result<()> {
    check(&args.block, args.size, args.batch, args.seconds)?;
    for block in &args.block {
        let result = measure(args, block.0)?;
        print(args.common.json, &format!("read {block}"), &result)?;
    }
    Ok(())
}

/// Refuses sizes that nothing can be measured with.
pub(crate) fn check(blocks: &[ByteSize], size: ByteSize, batch: u32, seconds: f64) -> Result<()> {
    let page = stratakv_format::PAGE_BYTES as u64;
    for block in blocks {
        if block.0 % page != 0 || !(1..=128).contains(&(block.0 / page)) {
            bail!("--block {block}: multiples of 4 KiB from 4 KiB to 512 KiB");
        }
        if size.0 / block.0 < 4 * u64::from(batch) {
            bail!("--size {size} holds too few blocks of {block} for batches of {batch}");
        }
    }
    if !(seconds > 0.0 && seconds <= 3600.0) {
        bail!("--seconds {seconds}: above 0, at most 3600");
    }
    Ok(())
}

fn measure(args: &ReadArgs, block: u64) -> Result<ReadResult> {
    let with_fio = args.fio && fio::is_installed();
    let beside = if args.bare || with_fio { args.size.0 } else { 0 };
    let dir = work_directory(&args.common.device, args.size.0 + beside + (256 << 20))?;
    let buffers = block * u64::from(args.batch) * u64::from(args.in_flight);
    let store = open_store(&args.common, &dir.path().join("store"), ByteSize((4 * buffers).max(256 << 20)))?;
    eprintln!("kvbench: {}: writing {} in blocks of {}", dir.path().display(), args.size, ByteSize(block));
    let sequence = fill(&store, block, args.size.0)?;
    let raw = dir.path().join("raw");
    if beside > 0 {
        write_file(&raw, args.size.0)?;
    }
    settle(dir.path())?;

    let mut memory = Pages::new(COLD_BYTES.max(buffers) as usize)?;
    fastrand::Rng::with_seed(9).fill(memory.bytes_mut());
    let mut sides = Sides::default();
    let length = Duration::from_secs_f64(args.seconds);
    let mut random = fastrand::Rng::with_seed(5);
    turn(RateLimiter::of(args), &store, &sequence, block, length / 4, &mut random)?;
    for round in 1..=args.common.rounds {
        eprintln!("kvbench: {}: round {round} of {}", ByteSize(block), args.common.rounds);
        // Who goes first changes with every round: a disk's rate depends on what it has just done.
        for at in 0..SIDES {
            match (round as usize + at) % SIDES {
                1 => sides.own.push(turn(RateLimiter::of(args), &store, &sequence, block, length, &mut random)?),
                2 if args.bare => sides.bare.push(bare_turn(&raw, block, args.batch, length, None)?),
                3 if with_fio => sides.fio.push(fio::read(&raw, block, args.batch, args.seconds, Refill::Batches)?),
                4 if args.bare => {
                    sides.bare_checked.push(bare_turn(&raw, block, args.batch, length, Some(checksum_of(args)))?);
                }
                0 if with_fio => sides.fio_full.push(fio::read(&raw, block, args.batch, args.seconds, Refill::Always)?),
                _ => {}
            }
        }
        sides.checksum.push(checksum_turn(
            checksum_of(args),
            block,
            &memory.bytes_mut()[..buffers as usize],
            length / 8,
        )?);
        sides.checksum_cold.push(checksum_turn(checksum_of(args), block, memory.bytes_mut(), length / 8)?);
    }
    let mut result = sides.result(args, block);
    let status = store.status();
    result.huge_pages = status.pages.unwrap_or_else(|| "none".to_owned());
    if let Some(device) = status.devices.first() {
        (result.driver, result.direct) = (device.driver.clone(), device.direct);
    }
    if args.fio && !with_fio {
        eprintln!("kvbench: fio {}", fio::MISSING);
        result.fio_skipped = Some(fio::MISSING);
    }
    drop(sequence);
    store.close()?;
    Ok(result)
}

/// A sequence of one layer whose groups are exactly `block` bytes.
pub(crate) fn fill(store: &Store, block: u64, bytes: u64) -> Result<Sequence> {
    let group = (block / TOKEN_LAYER_BYTES) as u16;
    let mut sequence = store.create_sequence(&layout(1, group)?, CreateOptions::new().key("read"))?;
    append_random(&mut sequence, (bytes / block * u64::from(group)) as usize)?;
    Ok(sequence)
}

/// Appends and commits random tokens to the only layer of a sequence.
pub(crate) fn append_random(sequence: &mut Sequence, tokens: usize) -> Result<()> {
    let chunk = 1024;
    let mut source = KvSource::new(chunk);
    let mut left = tokens;
    while left > 0 {
        check_interrupt()?;
        let tokens = left.min(chunk);
        let (keys, values) = source.pair(tokens);
        sequence.append(0, keys, values)?;
        left -= tokens;
    }
    Ok(sequence.commit(Durability::Sync)?)
}

/// How batches are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimiter {
    /// Blocks of a batch.
    pub(crate) batch: u32,
    pub(crate) in_flight: u32,
    /// Through the shard's thread, where a single batch is in flight too.
    pub(crate) tickets: bool,
}

impl RateLimiter {
    fn of(args: &ReadArgs) -> Self {
        Self { batch: args.batch, in_flight: args.in_flight, tickets: args.tickets }
    }

    pub(crate) fn path(self) -> &'static str {
        if !self.tickets && self.in_flight == 1 { "read_now" } else { "tickets" }
    }
}

pub(crate) struct Turn {
    pub(crate) gb_per_s: f64,
    pub(crate) cpu_s_per_gb: f64,
    pub(crate) latencies_us: Vec<f64>,
    requests_per_batch: f64,
    system_calls_per_batch: f64,
}

/// The engine's turn: selections of `batch` random groups, `in_flight` tickets on their way.
pub(crate) fn turn(
    pace: RateLimiter,
    store: &Store,
    sequence: &Sequence,
    block: u64,
    length: Duration,
    random: &mut fastrand::Rng,
) -> Result<Turn> {
    let groups = sequence.len() / sequence.layout().group_tokens() as u64;
    let calls = || store.status().devices.iter().map(|device| device.counters.submissions).sum::<u64>();
    let mut latencies_us = Vec::new();
    let (mut batches, mut requests) = (0_u64, 0_u64);
    let mut tickets: VecDeque<(Instant, ReadTicket)> = VecDeque::new();
    let mut finish = |tickets: &mut VecDeque<(Instant, ReadTicket)>| -> Result<()> {
        if let Some((start, ticket)) = tickets.pop_front() {
            let batch = ticket.wait()?;
            // Damage stays inside the batch until somebody asks.
            black_box(batch.get(0)?);
            latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
            batches += 1;
        }
        Ok(())
    };
    // Drawn beforehand: the bare loop and fio draw their offsets with next to nothing.
    let chosen: Vec<Vec<u64>> = (0..SELECTIONS).map(|_| choose(random, groups, pace.batch as usize)).collect();
    let (mut next, mut own_us, mut own_requests) = (0, Vec::new(), 0);
    let (calls_before, cpu, start) = (calls(), cpu_seconds(), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let chosen = &chosen[next % chosen.len()];
        next += 1;
        let begun = Instant::now();
        let view = sequence.select_groups(0, chosen)?;
        if pace.path() == "read_now" {
            let batch = store.read_now(&[&view])?;
            black_box(batch.get(0)?);
            drop(batch);
            own_us.push(begun.elapsed().as_secs_f64() * 1e6);
            own_requests += chosen.len() as u64;
            continue;
        }
        let ticket = store.read(&[&view])?;
        requests += ticket.requests() as u64;
        tickets.push_back((begun, ticket));
        if tickets.len() >= pace.in_flight as usize {
            finish(&mut tickets)?;
        }
    }
    while !tickets.is_empty() {
        finish(&mut tickets)?;
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    batches += own_us.len() as u64;
    requests += own_requests;
    latencies_us.extend(own_us);
    let gb = (batches * u64::from(pace.batch) * block) as f64 / 1e9;
    Ok(Turn {
        gb_per_s: gb / seconds,
        cpu_s_per_gb: cpu / gb,
        latencies_us,
        requests_per_batch: requests as f64 / batches as f64,
        system_calls_per_batch: (calls() - calls_before) as f64 / batches as f64,
    })
}

/// `count` different groups in rising order, no two neighbours: each is a request of its own, as with the bare loop and fio.
fn choose(random: &mut fastrand::Rng, groups: u64, count: usize) -> Vec<u64> {
    let mut chosen = BTreeSet::new();
    while chosen.len() < count {
        let group = random.u64(..groups);
        // No neighbour on either side.
        let next = chosen.range(group.saturating_sub(1)..).next();
        if next.is_none_or(|&next| next > group + 1) {
            chosen.insert(group);
        }
    }
    chosen.into_iter().collect()
}

fn bare_turn(
    file: &Path,
    block: u64,
    batch: u32,
    length: Duration,
    checksum: Option<PayloadChecksum>,
) -> Result<BareTurn> {
    let mut reader = BareReader::new(file, block as usize, batch as usize)?;
    let mut latencies_us = Vec::new();
    let (cpu, start) = (thread_cpu_seconds(), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let begun = Instant::now();
        reader.batch()?;
        if let Some(kind) = checksum {
            compute(kind, block, reader.blocks());
        }
        latencies_us.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), thread_cpu_seconds() - cpu);
    let gb = (latencies_us.len() as u64 * u64::from(batch) * block) as f64 / 1e9;
    Ok(BareTurn { gb_per_s: gb / seconds, cpu_s_per_gb: cpu / gb, tail: tail(&latencies_us) })
}

/// p99 over p50.
fn tail(latencies_us: &[f64]) -> f64 {
    percentile(latencies_us, 0.99) / percentile(latencies_us, 0.5)
}

fn checksum_of(args: &ReadArgs) -> PayloadChecksum {
    match args.common.checksum {
        Checksum::Crc64 => PayloadChecksum::Crc64Nvme,
        Checksum::Crc32 => PayloadChecksum::Crc32,
    }
}

/// The checksums of both planes of every block in `bytes`.
fn compute(kind: PayloadChecksum, block: u64, bytes: &[u8]) {
    for (group, planes) in bytes.chunks_exact(block as usize).enumerate() {
        for (plane, data) in planes.chunks_exact(block as usize / 2).enumerate() {
            let identity = PlaneIdentity::new(1, SequenceId(1), 1, 0, group as u64, 8).with_plane(plane as u16);
            black_box(kind.compute(&identity, data));
        }
    }
}

/// CPU seconds per GB of the checksums alone, over and over.
fn checksum_turn(kind: PayloadChecksum, block: u64, bytes: &[u8], length: Duration) -> Result<f64> {
    let mut passes = 0_u64;
    let (cpu, start) = (thread_cpu_seconds(), Instant::now());
    while passes == 0 || start.elapsed() < length {
        check_interrupt()?;
        compute(kind, block, bytes);
        passes += 1;
    }
    Ok((thread_cpu_seconds() - cpu) / ((passes * bytes.len() as u64) as f64 / 1e9))
}

/// A turn of the bare loop.
struct BareTurn {
    gb_per_s: f64,
    cpu_s_per_gb: f64,
    /// See [`tail`].
    tail: f64,
}

#[derive(Default)]
struct Sides {
    own: Vec<Turn>,
    bare: Vec<BareTurn>,
    bare_checked: Vec<BareTurn>,
    fio: Vec<fio::FioRun>,
    fio_full: Vec<fio::FioRun>,
    checksum: Vec<f64>,
    checksum_cold: Vec<f64>,
}

impl Sides {
    fn result(&self, args: &ReadArgs, block: u64) -> ReadResult {
        let own = |value: &dyn Fn(&Turn) -> f64| median(&self.own.iter().map(value).collect::<Vec<_>>());
        let some = |values: Vec<f64>| (!values.is_empty()).then(|| median(&values));
        let gb_per_s = own(&|turn| turn.gb_per_s);
        let cpu = own(&|turn| turn.cpu_s_per_gb);
        let checksum = median(&self.checksum);
        let checksum_cold = median(&self.checksum_cold);
        let of = |turns: &[BareTurn], value: &dyn Fn(&BareTurn) -> f64| some(turns.iter().map(value).collect());
        let (bare, checked) = (of(&self.bare, &|turn| turn.gb_per_s), of(&self.bare_checked, &|turn| turn.gb_per_s));
        let bare_cpu = of(&self.bare, &|turn| turn.cpu_s_per_gb);
        let checked_cpu = of(&self.bare_checked, &|turn| turn.cpu_s_per_gb);
        let allowed = bare_cpu.zip(checked_cpu).map(|(bare, checked)| 1.25 * bare + 1.1 * (checked - bare).max(0.0));
        let fio = some(self.fio.iter().map(|run| run.gb_per_s).collect());
        let fio_cpu = some(self.fio.iter().map(|run| run.cpu_s_per_gb).collect());
        let fio_full = some(self.fio_full.iter().map(|run| run.gb_per_s).collect());
        let io_cpu = (cpu - checksum).max(0.0);
        ReadResult {
            block,
            batch: args.batch,
            in_flight: args.in_flight,
            path: RateLimiter::of(args).path(),
            gb_per_s: rounded(gb_per_s),
            iops: rounded(gb_per_s * 1e9 / block as f64),
            p50_us: rounded(own(&|turn| percentile(&turn.latencies_us, 0.5))),
            p99_us: rounded(own(&|turn| percentile(&turn.latencies_us, 0.99))),
            tail: rounded(own(&|turn| tail(&turn.latencies_us))),
            cpu_s_per_gb: rounded(cpu),
            checksum_cpu_s_per_gb: rounded(checksum),
            checksum_cold_cpu_s_per_gb: rounded(checksum_cold),
            io_cpu_s_per_gb: rounded(io_cpu),
            io_cold_cpu_s_per_gb: rounded((cpu - checksum_cold).max(0.0)),
            bare_gb_per_s: bare.map(rounded),
            bare_cpu_s_per_gb: bare_cpu.map(rounded),
            bare_tail: of(&self.bare, &|turn| turn.tail).map(rounded),
            ratio_bare: bare.and_then(|bare| ratio(gb_per_s, bare)),
            ratio_bare_cpu: bare_cpu.and_then(|bare| ratio(io_cpu, bare)),
            ratio_bare_cpu_cold: bare_cpu.and_then(|bare| ratio((cpu - checksum_cold).max(0.0), bare)),
            bare_checked_gb_per_s: checked.map(rounded),
            bare_checked_cpu_s_per_gb: checked_cpu.map(rounded),
            ratio_bare_checked: checked.and_then(|checked| ratio(gb_per_s, checked)),
            ratio_bare_checked_cpu: checked_cpu.and_then(|checked| ratio(cpu, checked)),
            ratio_cpu_allowed: allowed.and_then(|allowed| ratio(cpu, allowed)),
            fio_gb_per_s: fio.map(rounded),
            fio_cpu_s_per_gb: fio_cpu.map(rounded),
            ratio_fio: fio.and_then(|fio| ratio(gb_per_s, fio)),
            fio_full_gb_per_s: fio_full.map(rounded),
            ratio_fio_full: fio_full.and_then(|fio| ratio(gb_per_s, fio)),
            fio_pages: self.fio.first().map(|run| run.memory),
            requests_per_batch: rounded(own(&|turn| turn.requests_per_batch)),
            system_calls_per_batch: rounded(own(&|turn| turn.system_calls_per_batch)),
            ..ReadResult::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_groups_rise_and_are_no_neighbours() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100 {
            let chosen = choose(&mut random, 256, 64);
            assert_eq!(chosen.len(), 64);
            assert!(chosen.windows(2).all(|pair| pair[0] + 1 < pair[1]));
        }
    }
}
