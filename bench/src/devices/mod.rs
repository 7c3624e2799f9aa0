//! `kvbench devices` makes and removes devices of a known speed, and `kvbench scale` measures stores on several of
//! them.

mod args;
mod limits;
mod mounts;
pub(crate) mod scale;
mod set;
mod throttle;

pub(crate) use args::DevicesCommand;
pub(crate) use limits::{DeviceLimits, ReadLimitArgs};
pub(crate) use mounts::unavailable;
pub(crate) use set::{DeviceSet, DeviceSpec};
pub(crate) use throttle::limits_unavailable;

use crate::support::report::{print, print_skipped};
use anyhow::Result;
use args::{DownArgs, UpArgs};
use serde::Serialize;
use set::{TestDevice, set_directory, take_down};

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
