//! `kvbench devices` makes and removes devices of a known speed, and `kvbench scale` measures stores on several of
//! them.

mod args;
mod limits;
mod mounts;
pub(crate) mod scale;
mod set;
mod throttle;

pub(crate) use args::DevicesCommand;
pub(crate) use limits::{DeviceLimits, DeviceProfile, ReadLimitArgs};
pub(crate) use mounts::unavailable;
pub(crate) use set::{DeviceSet, DeviceSpec};
pub(crate) use throttle::limits_unavailable;

use crate::support::directory::work_directory;
use crate::support::report::{print, print_skipped};
use anyhow::Result;
use args::{DownArgs, UpArgs};
use serde::Serialize;
use set::{TestDevice, set_directory, take_down};
use std::path::Path;

/// Calls `body` with a directory for a run of `bytes` bytes below `device`. With limits the directory is on a device of
/// that speed, which `body` gets as well. It has no limits yet. Prints why if such a device cannot be made here.
///
/// # Errors
/// There is not enough space, a step fails, or the errors of `body`.
pub(crate) fn in_directory(
    device: &Path,
    bytes: u64,
    limits: &DeviceLimits,
    json: bool,
    body: &mut dyn FnMut(&Path, Option<&DeviceSet>) -> Result<()>,
) -> Result<()> {
    if *limits == DeviceLimits::NONE {
        return body(work_directory(device, bytes)?.path(), None);
    }
    if let Some(why) = unavailable().or_else(limits_unavailable) {
        return print_skipped(json, &why);
    }
    with_devices(device, (1, bytes), limits, &mut |limited| body(&limited.list[0].path, Some(limited)))
}

/// Calls `body` with a number of devices below `device` that hold `bytes` bytes each. They have no limits yet. Warns if
/// the host is slower than `limits`. The caller has checked that devices can be made and limited.
///
/// # Errors
/// There is not enough space, a step fails, or the errors of `body`.
fn with_devices(
    device: &Path,
    (count, bytes): (u32, u64),
    limits: &DeviceLimits,
    body: &mut dyn FnMut(&DeviceSet) -> Result<()>,
) -> Result<()> {
    let spec = DeviceSpec { count, bytes: bytes + bytes / 20, limits: DeviceLimits::NONE, slow: None };
    let mut limited = DeviceSet::up(device, &spec)?;
    limited.measure_host(spec.bytes, limits)?;
    let outcome = body(&limited);
    let down = limited.down();
    outcome.and(down)
}

/// Calls `body` with devices as [`in_directory`], also if no limit is ever set. Prints why if they cannot be made here.
///
/// # Errors
/// As [`in_directory`].
pub(crate) fn on_devices(
    device: &Path,
    (count, bytes): (u32, u64),
    limits: &DeviceLimits,
    json: bool,
    body: &mut dyn FnMut(&DeviceSet) -> Result<()>,
) -> Result<()> {
    match unavailable().or_else(limits_unavailable) {
        Some(why) => print_skipped(json, &why),
        None => with_devices(device, (count, bytes), limits, body),
    }
}

/// A device that was made.
#[derive(Debug, Serialize)]
struct DeviceResult<'a> {
    #[serde(flatten)]
    device: &'a TestDevice,
    #[serde(flatten)]
    limits: DeviceLimits,
    /// Direct reads of 4 KiB per second that the host completes; none if read requests are not limited.
    host_read_iops: Option<u64>,
}

/// Runs `kvbench devices`.
pub(crate) fn run(command: &DevicesCommand) -> Result<()> {
    match command {
        DevicesCommand::Up(args) => up(args),
        DevicesCommand::Down(args) => down(args),
    }
}

fn up(args: &UpArgs) -> Result<()> {
    if let Some(why) = unavailable() {
        return print_skipped(args.json, &why);
    }
    let spec = DeviceSpec { count: args.count, bytes: args.size.0, limits: args.limits(), slow: args.slow };
    let devices = DeviceSet::up(&args.dir, &spec)?;
    for (index, device) in devices.list.iter().enumerate() {
        let limits = spec.limits_of(index as u32);
        let result = DeviceResult { device, limits, host_read_iops: devices.host_read_iops };
        print(args.json, &device.path.display().to_string(), &result)?;
    }
    devices.keep();
    Ok(())
}

fn down(args: &DownArgs) -> Result<()> {
    if let Some(why) = unavailable() {
        return print_skipped(args.json, &why);
    }
    take_down(&set_directory(&args.dir)?)
}
