//! `kvbench devices` makes and removes devices of a known speed, and `kvbench scale` measures stores on several of
//! them.

mod args;
mod mounts;
pub(crate) mod scale;
mod set;
mod throttle;

pub(crate) use args::DevicesCommand;
pub(crate) use mounts::unavailable;
pub(crate) use set::{DeviceSet, DeviceSpec};
pub(crate) use throttle::limits_unavailable;

use crate::support::report::{print, print_skipped};
use anyhow::Result;
use args::{DownArgs, UpArgs};
use set::{set_directory, take_down};

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
    let spec = DeviceSpec {
        count: args.count,
        bytes: args.size.0,
        read_bps: args.read_bps.map(|bps| bps.0),
        write_bps: args.write_bps.map(|bps| bps.0),
        slow: args.slow,
    };
    let devices = DeviceSet::up(&args.dir, &spec)?;
    for device in &devices.list {
        print(args.json, &device.path.display().to_string(), device)?;
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
