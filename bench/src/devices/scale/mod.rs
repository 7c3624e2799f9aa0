//! `kvbench scale` measures reads from several devices of a known speed, which it makes and removes.
//!
//! There are three series of cases:
//!
//! 1. `devices` reads batches over 1, 2 and 4 devices.
//! 2. `skew` reads a selection of which most has its first copy on one device of four. Frames have one copy or two.
//! 3. `slow` slows one of two devices to a quarter of the other's speed. Frames have two copies.
//!
//! With `--shard-threads` it measures numbers of threads on four devices instead.

mod args;
mod rig;
mod threads;
mod turn;

pub(crate) use args::ScaleArgs;

use crate::devices::limits::DeviceLimits;
use crate::devices::mounts::unavailable;
use crate::devices::set::{DeviceSet, DeviceSpec};
use crate::devices::throttle::limits_unavailable;
use crate::support::report::{print, print_skipped, ratio, rounded};
use anyhow::{Result, bail};
use rig::{FilledStore, ScaleCase, ScaleRig, remove};
use serde::Serialize;
use stratakv::options::BalancePolicy;
use turn::{ScaleTurn, WARM_UP, first_copies, turn};

/// Medians of one case.
#[derive(Debug, Serialize)]
struct ScaleResult {
    /// `devices`, `skew`, `slow` or `unthrottled`.
    test: &'static str,
    devices: usize,
    copies: u8,
    policy: &'static str,
    /// The sum of the devices' limits.
    limit_gb_per_s: Option<f64>,
    gb_per_s: f64,
    /// The rate over the sum of the limits.
    ratio_limit: Option<f64>,
    /// `devices`: the rate over the rate of one device times their number. `skew`, `slow`: the rate over that of an
    /// ideal split.
    ratio: Option<f64>,
    /// Bytes that the busiest device read over the bytes that all devices read.
    busiest_share: f64,
    device_bytes_per_selected: f64,
}

/// Runs `kvbench scale`.
pub(crate) fn run(args: &ScaleArgs) -> Result<()> {
    if let Some(why) = unavailable().or_else(limits_unavailable) {
        return print_skipped(args.json, &why);
    }
    args.check()?;
    // One device holds at most a copy of everything, for one store at a time.
    let bytes = args.size.0 + args.size.0 / 2 + (256 << 20);
    let spec = DeviceSpec { count: 4, bytes, limits: DeviceLimits::NONE, slow: None };
    let mut rig = ScaleRig::new(DeviceSet::up(&args.dir, &spec)?);
    let outcome =
        if args.shard_threads.is_empty() { measure(args, &mut rig) } else { threads::measure(args, &mut rig) };
    rig.devices.down().and(outcome)
}

fn measure(args: &ScaleArgs, rig: &mut ScaleRig) -> Result<()> {
    measure_counts(args, rig)?;
    let rate = args.bps.0;
    let policies = [
        (1, BalancePolicy::EarliestFinish, "no copies"),
        (2, BalancePolicy::FirstCopy, "first copy"),
        (2, BalancePolicy::FewestReads, "no balance by speed"),
        (2, BalancePolicy::EarliestFinish, "spread"),
    ];
    for (copies, policy, name) in policies {
        let case = ScaleCase { devices: (0..4).collect(), copies, skew: true };
        measure_policy(args, rig, ("skew", &case), (policy, name), &[rate; 4])?;
    }
    for (copies, policy, name) in policies.into_iter().filter(|(copies, ..)| *copies == 2) {
        let case = ScaleCase { devices: vec![0, 1], copies, skew: false };
        measure_policy(args, rig, ("slow", &case), (policy, name), &[rate, rate / 4])?;
    }
    Ok(())
}

/// Measures one device without limits, then 1, 2 and 4 devices with limits.
fn measure_counts(args: &ScaleArgs, rig: &mut ScaleRig) -> Result<()> {
    let mut one_gb_per_s = 0.0;
    for count in [1_u32, 2, 4] {
        let case = ScaleCase { devices: (0..count).collect(), copies: 1, skew: false };
        let filled = rig.fill(args, &case, BalancePolicy::EarliestFinish)?;
        if count == 1 {
            let turn = median_turn(args, &filled, &case, None, rig)?;
            print_case(args, &turn, ("unthrottled", &case), "", None)?;
        }
        let limits = vec![args.bps.0; count as usize];
        let turn = median_turn(args, &filled, &case, Some(&limits), rig)?;
        if count == 1 {
            one_gb_per_s = turn.gb_per_s;
        }
        let ideal = one_gb_per_s * f64::from(count);
        print_case(args, &turn, ("devices", &case), "spread", Some((gb_per_s(&limits), ideal)))?;
        remove(&filled.close()?)?;
    }
    Ok(())
}

/// Measures a case under one policy. The ideal split reads at the sum of the limits.
fn measure_policy(
    args: &ScaleArgs,
    rig: &mut ScaleRig,
    (test, case): (&'static str, &ScaleCase),
    (policy, name): (BalancePolicy, &'static str),
    limits: &[u64],
) -> Result<()> {
    let filled = rig.fill(args, case, policy)?;
    let turn = median_turn(args, &filled, case, Some(limits), rig)?;
    let limit = gb_per_s(limits);
    print_case(args, &turn, (test, case), name, Some((limit, limit)))?;
    remove(&filled.close()?)
}

/// Returns the sum of limits in GB per second, rounded.
fn gb_per_s(limits: &[u64]) -> f64 {
    rounded(limits.iter().sum::<u64>() as f64 / 1e9)
}

/// Prints a case with the sum of its limits and the rate of an ideal split, if it has limits.
fn print_case(
    args: &ScaleArgs,
    turn: &ScaleTurn,
    (test, case): (&'static str, &ScaleCase),
    policy: &'static str,
    limit_and_ideal: Option<(f64, f64)>,
) -> Result<()> {
    let result = ScaleResult {
        test,
        devices: case.devices.len(),
        copies: case.copies,
        policy,
        limit_gb_per_s: limit_and_ideal.map(|(limit, _)| limit),
        gb_per_s: rounded(turn.gb_per_s),
        ratio_limit: limit_and_ideal.and_then(|(limit, _)| ratio(turn.gb_per_s, limit)),
        ratio: limit_and_ideal.and_then(|(_, ideal)| ratio(turn.gb_per_s, ideal)),
        busiest_share: rounded(turn.busiest_share),
        device_bytes_per_selected: rounded(turn.amplification),
    };
    print(args.json, &format!("scale: {test}, {} devices, {} copies", result.devices, result.copies), &result)
}

/// Sets the limits, warms up, and returns the medians over `--rounds` turns.
fn median_turn(
    args: &ScaleArgs,
    filled: &FilledStore,
    case: &ScaleCase,
    limits: Option<&[u64]>,
    rig: &ScaleRig,
) -> Result<ScaleTurn> {
    let FilledStore { store, sequence, .. } = filled;
    let groups = first_copies(store, sequence)?;
    // A skewed batch takes four fifths of its groups from the first device, each group once.
    let least = if case.skew { args.batch as usize } else { 1 };
    if groups.iter().any(|own| own.len() < least) {
        bail!("--size {}: a device has too few groups for batches of {}; give a larger --size", args.size, args.batch);
    }
    for (at, device) in case.devices.iter().enumerate() {
        let limit = limits.and_then(|limits| limits.get(at)).copied();
        rig.devices.limit(*device as usize, &limit.map_or(DeviceLimits::NONE, DeviceLimits::read_bps))?;
    }
    turn(args, store, sequence, case, &groups, args.seconds * WARM_UP)?;
    let turns: Vec<ScaleTurn> =
        (0..args.rounds).map(|_| turn(args, store, sequence, case, &groups, args.seconds)).collect::<Result<_>>()?;
    Ok(ScaleTurn::median(&turns))
}
