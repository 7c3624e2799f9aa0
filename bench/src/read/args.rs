//! Arguments of `kvbench read` and `kvbench drivers`.

use crate::support::args::{CommonArgs, between, check_block, size};
use anyhow::{Result, bail};
use clap::Args;
use stratakv::ByteSize;

/// Arguments of `kvbench read`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kvbench read --device /nvme0 --block 16KiB,64KiB --fio --bare --json
  kvbench read --device /nvme0 --block 64KiB --batch 32 --attend

fio and the plain bare loop touch nothing of what they read. The engine verifies every byte. The fields bare_touched_*
are of the bare loop that reads every byte in memory once, which is the least that a user of a read does.")]
pub(crate) struct ReadArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) reads: BatchArgs,
    /// Read by tickets, through the shard's thread, even with one batch in flight.
    #[arg(long)]
    pub(crate) tickets: bool,
    /// Also measure fio with the same batches.
    #[arg(long)]
    pub(crate) fio: bool,
    /// Also measure a bare io_uring loop: alone, with every byte read by the processor, and with checksums.
    #[arg(long)]
    pub(crate) bare: bool,
    /// Read, verify and attend instead, against bare loops that do the same, on one core and on two.
    #[arg(long, conflicts_with_all = ["fio", "bare", "tickets"])]
    pub(crate) attend: bool,
}

/// Arguments of `kvbench drivers`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench drivers --device /nvme0 --block 16KiB,64KiB --json

glommio and tokio-uring are measured if kvbench was built with --features glommio,tokio-uring.")]
pub(crate) struct DriversArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) reads: BatchArgs,
}

/// Sizes of the batches that are read, and of the data that they are read from.
#[derive(Args, Debug)]
pub(crate) struct BatchArgs {
    /// Bytes of a block, separated by commas: multiples of 4 KiB up to 512 KiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,16KiB,64KiB,128KiB", value_parser = size)]
    pub(crate) block: Vec<ByteSize>,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 64, value_parser = between(1, 256))]
    pub(crate) batch: u32,
    /// Batches in flight at the same time.
    #[arg(long, default_value_t = 1, value_parser = between(1, 16))]
    pub(crate) in_flight: u32,
    /// Seconds of each turn.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,
    /// Bytes of keys and values to read from.
    #[arg(long, default_value = "1GiB", value_parser = size)]
    pub(crate) size: ByteSize,
}

impl BatchArgs {
    /// Refuses sizes that leave too few blocks or no time to measure.
    ///
    /// # Errors
    /// A value is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        for block in &self.block {
            check_block(*block)?;
            let (size, batch) = (self.size, self.batch);
            if size.0 / block.0 < 4 * u64::from(batch) {
                bail!("--size {size}: too few blocks of {block} for batches of {batch}; four batches are the least");
            }
        }
        if !(self.seconds > 0.0 && self.seconds <= 3600.0) {
            bail!("--seconds {}: a turn takes more than 0 and at most 3600 seconds", self.seconds);
        }
        Ok(())
    }

    /// Returns the bytes of the buffers that reads of `block` bytes fill at the same time.
    pub(crate) fn buffer_bytes(&self, block: ByteSize) -> u64 {
        block.0 * u64::from(self.batch) * u64::from(self.in_flight)
    }
}
