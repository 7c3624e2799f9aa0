//! Arguments of `kvbench devices up` and `down`.

use crate::devices::limits::{DeviceLimits, ReadLimitArgs, requests};
use crate::support::args::{between, size};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use stratakv::ByteSize;

/// Subcommands of `kvbench devices`.
#[derive(Subcommand, Debug)]
pub(crate) enum DevicesCommand {
    /// Makes image files, loop devices, ext4 file systems, and limits of bytes and requests per second (cgroup v1).
    Up(UpArgs),
    /// Unmounts, detaches and removes the devices, including partly made ones.
    Down(DownArgs),
}

/// Arguments of `kvbench devices up`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples: kvbench devices up --dir /nvme0 --count 4 --size 2GiB --read-bps 250M --write-bps 250M \\
           --slow 3:60M --json
          kvbench devices up --dir /nvme0 --count 1 --profile pm9a3
          kvbench devices up --dir /nvme0 --profile ufs4 --read-iops 2000 --write-iops 1000

With a limit of read requests, kvbench first measures for 0.3 s how many direct reads of 4 KiB the host completes. It
warns if that is fewer than the devices may have together, and prints it as `host_read_iops`. A read counts as one
request, whatever its length, unless the kernel splits it."
)]
pub(crate) struct UpArgs {
    /// Directory for the images and mount points.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Number of devices.
    #[arg(long, default_value_t = 4, value_parser = between(1, 16))]
    pub(crate) count: u32,
    /// Bytes of each device.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
    #[command(flatten)]
    pub(crate) read: ReadLimitArgs,
    /// Bytes per second that each device may write. Without it they are not limited.
    #[arg(long, value_parser = size)]
    pub(crate) write_bps: Option<ByteSize>,
    /// Requests per second that each device may write by. Without it they are not limited.
    #[arg(long, value_name = "N", value_parser = requests())]
    pub(crate) write_iops: Option<u64>,
    /// One slower device: its number, from 0, and its bytes per second for reads and for writes.
    #[arg(long, value_name = "K:BPS", value_parser = slow)]
    pub(crate) slow: Option<(u32, u64)>,
    /// Print one JSON object per device instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

impl UpArgs {
    /// Returns the limits of each device.
    pub(super) fn limits(&self) -> DeviceLimits {
        let write_bps = self.write_bps.map(|bps| bps.0);
        DeviceLimits { write_bps, write_iops: self.write_iops, ..self.read.limits() }
    }
}

/// Arguments of `kvbench devices down`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench devices down --dir /nvme0 --json")]
pub(crate) struct DownArgs {
    /// The directory that was given to `up`.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Print a JSON object instead of text if the command is skipped.
    #[arg(long)]
    pub(crate) json: bool,
}

fn slow(text: &str) -> Result<(u32, u64), String> {
    let wrong = || format!("{text:?} is not K:BPS, a device and its bytes per second (try 3:60M)");
    let (device, bps) = text.split_once(':').ok_or_else(wrong)?;
    Ok((device.parse().map_err(|_| wrong())?, size(bps)?.0))
}
