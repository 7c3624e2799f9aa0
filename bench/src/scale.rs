//! `kvbench scale`: what several devices are worth. On devices of a known speed, which it makes and takes away: batches over 1, 2 and
//! 4 devices; a selection of which most lies on one device, with copies and without; one device that is slower than the others.

use crate::cli::ScaleArgs;
use crate::devices::{self, Devices, Spec};
use crate::read::append_random;
use crate::report::{median, print, ratio, rounded};
use crate::threads;
use crate::work::{TOKEN_LAYER_BYTES, check_interrupt, cpu_seconds, layout, settle};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stratakv::{BalancePolicy, ByteSize, CreateOptions, ReadTicket, Sequence, Store, StoreOptions};

/// Memory of each store.
const MEMORY: ByteSize = ByteSize::mib(512);
/// Bytes read before a turn counts: limits let a little through at first, and profiles follow what they see.
const WARM_UP: f64 = 0.35;

#[derive(Debug, Default, Serialize)]
struct ScaleResult {
    /// `devices`, `skew`, `slow` or `unthrottled`.
    test: &'static str,
    devices: u32,
    copies: u8,
    policy: &'static str,
    /// Bytes per second that the devices together are limited to.
    limit_gb_per_s: Option<f64>,
    gb_per_s: f64,
    /// Of the limits together.
    ratio_limit: Option<f64>,
    /// `devices`: beside as many times one device. `skew`, `slow`: beside the rate of the ideal split, as it was limited.
    ratio: Option<f64>,
    /// Bytes that the busiest device brought, of all.
    busiest_share: f64,
    device_bytes_per_selected: f64,
}

pub(crate) struct Place {
    pub(crate) devices: Devices,
    stores: u32,
}

pub(crate) struct Turn {
    pub(crate) gb_per_s: f64,
    busiest_share: f64,
    amplification: f64,
    /// Of all threads.
    pub(crate) cpu_s_per_gb: f64,
    /// System calls that moved bytes.
    pub(crate) calls_per_gb: f64,
    /// From a batch's submission until it was waited for, in microseconds.
    pub(crate) latencies_us: Vec<f64>,
}

pub(crate) fn run(args: &ScaleArgs) -> Result<()> {
    if let Some(why) = devices::missing().or_else(devices::throttle_missing) {
        return devices::skipped(args.json, &why);
    }
    let page = stratakv_format::PAGE_BYTES as u64;
    if !args.block.0.is_multiple_of(page) || !(1..=128).contains(&(args.block.0 / page)) {
        bail!("--block {}: multiples of 4 KiB from 4 KiB to 512 KiB", args.block);
    }
    if !(args.seconds >= 0.2 && args.seconds <= 600.0) {
        bail!("--seconds {}: from 0.2 to 600", args.seconds);
    }
    // At most a copy of everything on each device, one store at a time.
    let bytes = args.size.0 + args.size.0 / 2 + (256 << 20);
    let spec = Spec { count: 4, bytes, read_bps: None, write_bps: None, slow: None };
    let mut place = Place { devices: Devices::up(&args.dir, &spec)?, stores: 0 };
    let outcome =
        if args.shard_threads.is_empty() { measure(args, &mut place) } else { threads::measure(args, &mut place) };
    place.devices.down().and(outcome)
}

fn measure(args: &ScaleArgs, place: &mut Place) -> Result<()> {
    let rate = args.bps.0;
    let gb = |devices: f64| rounded(devices * rate as f64 / 1e9);
    // The rate of one device, then of several.
    let mut one = 0.0;
    for count in [1_u32, 2, 4] {
        let test = Test { devices: (0..count).collect(), copies: 1, skew: false };
        let store = test.store(args, place, BalancePolicy::EarliestFinish)?;
        if count == 1 {
            let turn = median_turn(args, &store.0, &store.1, &test, None, place)?;
            print_turn(
                args,
                &turn,
                ScaleResult { test: "unthrottled", devices: 1, copies: 1, ..ScaleResult::default() },
            )?;
        }
        let turn = median_turn(args, &store.0, &store.1, &test, Some(&vec![rate; count as usize]), place)?;
        if count == 1 {
            one = turn.gb_per_s;
        }
        let result = ScaleResult {
            test: "devices",
            devices: count,
            copies: 1,
            policy: "spread",
            limit_gb_per_s: Some(gb(f64::from(count))),
            ratio: ratio(turn.gb_per_s, one * f64::from(count)),
            ..ScaleResult::default()
        };
        print_turn(args, &turn, result)?;
        test.clear(store)?;
    }
    // Most of the selection has its first copy on one device of four.
    for (copies, policy, name) in [
        (1, BalancePolicy::EarliestFinish, "no copies"),
        (2, BalancePolicy::FirstCopy, "first replica"),
        (2, BalancePolicy::FewestReads, "no balance by speed"),
        (2, BalancePolicy::EarliestFinish, "spread"),
    ] {
        let test = Test { devices: (0..4).collect(), copies, skew: true };
        let store = test.store(args, place, policy)?;
        let turn = median_turn(args, &store.0, &store.1, &test, Some(&[rate; 4]), place)?;
        let limit = gb(4.0);
        let result = ScaleResult {
            test: "skew",
            devices: 4,
            copies,
            policy: name,
            limit_gb_per_s: Some(limit),
            ratio: ratio(turn.gb_per_s, limit),
            ..ScaleResult::default()
        };
        print_turn(args, &turn, result)?;
        test.clear(store)?;
    }
    // One of two devices at a quarter of the other's speed; everything is on both.
    for (policy, name) in [
        (BalancePolicy::FirstCopy, "first replica"),
        (BalancePolicy::FewestReads, "no balance by speed"),
        (BalancePolicy::EarliestFinish, "spread"),
    ] {
        let test = Test { devices: vec![0, 1], copies: 2, skew: false };
        let store = test.store(args, place, policy)?;
        let turn = median_turn(args, &store.0, &store.1, &test, Some(&[rate, rate / 4]), place)?;
        let limit = gb(1.25);
        let result = ScaleResult {
            test: "slow",
            devices: 2,
            copies: 2,
            policy: name,
            limit_gb_per_s: Some(limit),
            ratio: ratio(turn.gb_per_s, limit),
            ..ScaleResult::default()
        };
        print_turn(args, &turn, result)?;
        test.clear(store)?;
    }
    Ok(())
}

fn print_turn(args: &ScaleArgs, turn: &Turn, result: ScaleResult) -> Result<()> {
    let result = ScaleResult {
        gb_per_s: rounded(turn.gb_per_s),
        ratio_limit: result.limit_gb_per_s.and_then(|limit| ratio(turn.gb_per_s, limit)),
        busiest_share: rounded(turn.busiest_share),
        device_bytes_per_selected: rounded(turn.amplification),
        ..result
    };
    print(args.json, &format!("scale: {}, {} devices, {} copies", result.test, result.devices, result.copies), &result)
}

pub(crate) struct Test {
    pub(crate) devices: Vec<u32>,
    pub(crate) copies: u8,
    pub(crate) skew: bool,
}

/// A store with its sequence, and where it is.
type Filled = (Store, Sequence, Vec<PathBuf>);

/// The key of a store's sequence.
pub(crate) const KEY: &str = "scale";

/// How stores are opened, but for their devices.
pub(crate) fn options(args: &ScaleArgs, policy: BalancePolicy) -> StoreOptions {
    let options = StoreOptions::default().memory_limit(MEMORY).driver(args.driver.into());
    options.balance(policy).hedge_percentile(None).segment_bytes(ByteSize::mib(32))
}

impl Test {
    /// A fresh store on these devices, filled without limits.
    pub(crate) fn store(&self, args: &ScaleArgs, place: &mut Place, policy: BalancePolicy) -> Result<Filled> {
        check_interrupt()?;
        place.stores += 1;
        let mut options = options(args, policy);
        let mut paths = Vec::new();
        for device in &self.devices {
            place.devices.limit(*device as usize, None, None)?;
            let path = place.devices.list[*device as usize].path.join(format!("store-{}", place.stores));
            std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
            options = options.device(&path);
            paths.push(path);
        }
        let store = options.open()?;
        let group = (args.block.0 / TOKEN_LAYER_BYTES) as u16;
        let sequence = store.create_sequence(&layout(1, group)?, CreateOptions::new().key(KEY).replicas(self.copies));
        let mut sequence = sequence?;
        append_random(&mut sequence, (args.size.0 / args.block.0 * u64::from(group)) as usize)?;
        paths.iter().try_for_each(|path| settle(path))?;
        Ok((store, sequence, paths))
    }

    fn clear(&self, (store, sequence, paths): Filled) -> Result<()> {
        drop(sequence);
        store.close()?;
        remove(&paths)
    }

    /// Groups of a batch, rising. With a skew four of five have their first copy on the first device.
    fn choose(&self, random: &mut fastrand::Rng, groups: &[Vec<u64>], count: usize) -> Vec<u64> {
        let mut chosen = std::collections::BTreeSet::new();
        let all: u64 = groups.iter().map(|own| own.len() as u64).sum();
        while chosen.len() < count {
            let group = if !self.skew {
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
}

pub(crate) fn remove(paths: &[PathBuf]) -> Result<()> {
    paths.iter().try_for_each(|path| std::fs::remove_dir_all(path).with_context(|| path.display().to_string()))
}

fn median_turn(
    args: &ScaleArgs,
    store: &Store,
    sequence: &Sequence,
    test: &Test,
    limits: Option<&[u64]>,
    place: &Place,
) -> Result<Turn> {
    let groups = first_copies(store, sequence)?;
    // A skewed choice takes four fifths of a batch from the first device, each group once.
    let least = if test.skew { args.batch as usize } else { 1 };
    if groups.iter().any(|own| own.len() < least) {
        bail!("--size {} is too small for batches of {}: a device holds too few groups", args.size, args.batch);
    }
    for (at, device) in test.devices.iter().enumerate() {
        let limit = limits.and_then(|limits| limits.get(at)).copied();
        place.devices.limit(*device as usize, limit, None)?;
    }
    turn(args, store, sequence, test, &groups, args.seconds * WARM_UP)?;
    let turns: Vec<Turn> =
        (0..args.rounds).map(|_| turn(args, store, sequence, test, &groups, args.seconds)).collect::<Result<_>>()?;
    let of = |value: fn(&Turn) -> f64| median(&turns.iter().map(value).collect::<Vec<_>>());
    Ok(Turn {
        gb_per_s: of(|turn| turn.gb_per_s),
        busiest_share: of(|turn| turn.busiest_share),
        amplification: of(|turn| turn.amplification),
        cpu_s_per_gb: of(|turn| turn.cpu_s_per_gb),
        calls_per_gb: of(|turn| turn.calls_per_gb),
        latencies_us: Vec::new(),
    })
}

/// Groups by the device that their first copy is on.
pub(crate) fn first_copies(store: &Store, sequence: &Sequence) -> Result<Vec<Vec<u64>>> {
    let devices = store.status().devices.len();
    let mut by_device = vec![Vec::new(); devices];
    for group in 0..sequence.len() / sequence.layout().group_tokens() as u64 {
        let first = sequence.group_devices(0, group)?.first().copied();
        let first = first.with_context(|| format!("group {group} is on no device"))?;
        by_device[usize::from(first)].push(group);
    }
    Ok(by_device)
}

pub(crate) fn turn(
    args: &ScaleArgs,
    store: &Store,
    sequence: &Sequence,
    test: &Test,
    groups: &[Vec<u64>],
    seconds: f64,
) -> Result<Turn> {
    let mut random = fastrand::Rng::with_seed(11);
    let read_bytes = || store.status().devices.iter().map(|device| device.counters.read_bytes).collect::<Vec<_>>();
    let calls = || store.status().devices.iter().map(|device| device.counters.submissions).sum::<u64>();
    let (before, calls_before, cpu) = (read_bytes(), calls(), cpu_seconds());
    let mut tickets: VecDeque<(Instant, ReadTicket)> = VecDeque::new();
    let (mut selected, mut asked) = (0_u64, 0_u64);
    let mut latencies_us = Vec::new();
    let mut finish = |tickets: &mut VecDeque<(Instant, ReadTicket)>| -> Result<()> {
        if let Some((submitted, ticket)) = tickets.pop_front() {
            let bytes = ticket.selected_bytes();
            ticket.wait()?.get(0)?;
            selected += bytes;
            latencies_us.push(submitted.elapsed().as_secs_f64() * 1e6);
        }
        Ok(())
    };
    let (length, start) = (Duration::from_secs_f64(seconds), Instant::now());
    while start.elapsed() < length {
        check_interrupt()?;
        let chosen = test.choose(&mut random, groups, args.batch as usize);
        let view = sequence.select_groups(0, &chosen)?;
        let submitted = Instant::now();
        let ticket = store.read(&[&view])?;
        asked += ticket.device_bytes();
        tickets.push_back((submitted, ticket));
        if tickets.len() >= args.in_flight as usize {
            finish(&mut tickets)?;
        }
    }
    while !tickets.is_empty() {
        finish(&mut tickets)?;
    }
    let took = start.elapsed().as_secs_f64();
    let (cpu, made) = (cpu_seconds() - cpu, calls() - calls_before);
    let read: Vec<u64> = read_bytes().iter().zip(&before).map(|(after, before)| after - before).collect();
    let total: u64 = read.iter().sum();
    Ok(Turn {
        gb_per_s: selected as f64 / 1e9 / took,
        busiest_share: read.iter().copied().max().unwrap_or(0) as f64 / total.max(1) as f64,
        amplification: asked as f64 / selected.max(1) as f64,
        cpu_s_per_gb: cpu * 1e9 / selected.max(1) as f64,
        calls_per_gb: made as f64 * 1e9 / selected.max(1) as f64,
        latencies_us,
    })
}
