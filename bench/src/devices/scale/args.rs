//! Arguments of `kvbench scale`.

use crate::support::args::{DriverArg, between, check_block, size};
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use stratakv::ByteSize;

/// Arguments of `kvbench scale`.
#[derive(Args, Debug)]
#[command(after_help = "Examples: kvbench scale --dir /nvme0 --json
          kvbench scale --dir /nvme0 --shard-threads 1,2 --json")]
pub(crate) struct ScaleArgs {
    /// Directory for the images of the devices.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    pub(crate) dir: PathBuf,
    /// Bytes per second of each device.
    #[arg(long, default_value = "250000000", value_parser = size)]
    pub(crate) bps: ByteSize,
    /// Bytes of a block: a multiple of 4 KiB up to 512 KiB.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    pub(crate) block: ByteSize,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 256, value_parser = between(8, 1024))]
    pub(crate) batch: u32,
    /// Batches in flight at the same time.
    #[arg(long, default_value_t = 4, value_parser = between(1, 16))]
    pub(crate) in_flight: u32,
    /// Bytes of keys and values in each store.
    #[arg(long, default_value = "512MiB", value_parser = size)]
    pub(crate) size: ByteSize,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 3.0)]
    pub(crate) seconds: f64,
    /// Turns of each case; figures are medians over them.
    #[arg(long, default_value_t = 3, value_parser = between(1, 100))]
    pub(crate) rounds: u32,
    /// Numbers of threads, separated by commas. Measures them instead of the other cases: four devices, with and
    /// without limits, served by each number of threads and by one thread per device, in rotation.
    #[arg(long, value_delimiter = ',', value_parser = between(1, 4))]
    pub(crate) shard_threads: Vec<u32>,
    /// I/O driver of the engine.
    #[arg(long, value_enum, default_value_t = DriverArg::Auto)]
    pub(crate) driver: DriverArg,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ScaleArgs {
    /// Refuses sizes that nothing can be measured with.
    ///
    /// # Errors
    /// A value is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        check_block(self.block)?;
        if !(self.seconds >= 0.2 && self.seconds <= 600.0) {
            bail!("--seconds {}: from 0.2 to 600", self.seconds);
        }
        Ok(())
    }
}
