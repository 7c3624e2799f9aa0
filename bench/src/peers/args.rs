//! Arguments of `kvbench peers`.

use super::peer::PeerName;
use crate::support::args::{between, check_block, size};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use stratakv::ByteSize;

/// Arguments of `kvbench peers`.
#[derive(Args, Debug)]
#[command(after_help = "Example: kvbench peers --device /nvme0 --size 2GiB --cores 1,2 --json

Without --features peers, only the engine, files and the bare loop are measured.")]
pub(crate) struct PeersArgs {
    /// Directory on the device to measure. kvbench writes into a new directory below it and removes that at the end.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    pub(super) device: PathBuf,
    /// Peers to measure, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = PeerName::value_variants().to_vec())]
    pub(super) peers: Vec<PeerName>,
    /// Bytes of a block: a multiple of 4 KiB up to 512 KiB.
    #[arg(long, default_value = "64KiB", value_parser = size)]
    pub(super) block: ByteSize,
    /// Blocks of a batch.
    #[arg(long, default_value_t = 32, value_parser = between(1, 256))]
    pub(super) batch: u32,
    /// Bytes that every peer stores.
    #[arg(long, default_value = "2GiB", value_parser = size)]
    pub(super) size: ByteSize,
    /// Cores of a process, separated by commas. Each count is measured by itself, with one caller per core.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_parser = between(1, 64))]
    pub(super) cores: Vec<u32>,
    /// Threads that read for one caller, in peers that read synchronously.
    #[arg(long, default_value_t = 16, value_parser = between(1, 256))]
    pub(super) threads: u32,
    /// Rounds. Each peer has a turn in each round, and figures are medians over the rounds.
    #[arg(long, default_value_t = 5, value_parser = between(1, 1000))]
    pub(super) rounds: u32,
    /// Rounds of ingest. The last one leaves the stores that are read.
    #[arg(long, default_value_t = 3, value_parser = between(1, 1000))]
    pub(super) ingest_rounds: u32,
    /// Seconds of a turn of reads, at most. A turn reads no block twice.
    #[arg(long, default_value_t = 3.0)]
    pub(super) seconds: f64,
    /// Print one JSON object per result instead of a table.
    #[arg(long)]
    pub(super) json: bool,
    /// One turn of one peer as JSON. `kvbench` starts itself with it.
    #[arg(long, hide = true)]
    pub(super) turn: Option<String>,
}

impl PeersArgs {
    /// Refuses sizes that leave too few blocks or no time to measure.
    ///
    /// # Errors
    /// A value is out of its range.
    pub(super) fn check(&self) -> Result<()> {
        check_block(self.block)?;
        let callers = u64::from(self.cores.iter().copied().max().unwrap_or(1));
        let least = 4 * callers * u64::from(self.batch);
        if self.blocks() < least {
            let (size, block) = (self.size, self.block);
            bail!("--size {size}: too few blocks of {block}; four batches per caller are the least, {least} blocks");
        }
        if self.blocks() >= 1 << 28 {
            bail!("--size {}: more than 2^28 blocks", self.size);
        }
        if !(self.seconds > 0.0 && self.seconds <= 3600.0) {
            bail!("--seconds {}: a turn takes more than 0 and at most 3600 seconds", self.seconds);
        }
        Ok(())
    }

    /// Returns the number of blocks that every peer stores.
    pub(super) fn blocks(&self) -> u64 {
        self.size.0 / self.block.0
    }
}
