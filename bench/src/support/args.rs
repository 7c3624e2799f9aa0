//! Arguments that several subcommands share, and the parsers of their values.

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use stratakv::ByteSize;
use stratakv::options::{ChecksumChoice, DriverChoice};

/// Arguments of every subcommand that opens a store below `--device`.
#[derive(Args, Debug)]
pub(crate) struct CommonArgs {
    /// Directory on the device to measure. kvbench writes into a new directory below it and removes that at the end.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    pub(crate) device: PathBuf,
    /// Rounds. Each side is measured once per round, and figures are medians over the rounds.
    #[arg(long, default_value_t = 5, value_parser = between(1, 1000))]
    pub(crate) rounds: u32,
    /// I/O driver of the engine.
    #[arg(long, value_enum, default_value_t = DriverArg::Auto)]
    pub(crate) driver: DriverArg,
    /// Payload checksum of the store.
    #[arg(long, value_enum, default_value_t = ChecksumArg::Crc64)]
    pub(crate) checksum: ChecksumArg,
    /// Print one JSON object per result instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// An I/O driver on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DriverArg {
    Auto,
    Uring,
    Posix,
    #[cfg(feature = "glommio")]
    Glommio,
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

impl From<DriverArg> for DriverChoice {
    fn from(driver: DriverArg) -> Self {
        match driver {
            DriverArg::Auto => Self::Auto,
            DriverArg::Uring => Self::Uring,
            DriverArg::Posix => Self::Posix,
            #[cfg(feature = "glommio")]
            DriverArg::Glommio => Self::Glommio,
            #[cfg(feature = "tokio-uring")]
            DriverArg::TokioUring => Self::TokioUring,
        }
    }
}

/// A payload checksum on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ChecksumArg {
    Crc64,
    Crc32,
}

impl From<ChecksumArg> for ChecksumChoice {
    fn from(checksum: ChecksumArg) -> Self {
        match checksum {
            ChecksumArg::Crc64 => Self::Crc64Nvme,
            ChecksumArg::Crc32 => Self::Crc32,
        }
    }
}

/// A setting that is off or on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    Off,
    On,
}

/// Returns a parser of numbers from `low` to `high`, both included.
pub(crate) fn between(low: i64, high: i64) -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(low..=high)
}

/// Returns a parser of 16-bit numbers from `low` to `high`, both included.
pub(crate) fn between_u16(low: i64, high: i64) -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(low..=high)
}

/// Parses a number of bytes with an optional unit.
///
/// # Errors
/// The text is not a size.
pub(crate) fn size(text: &str) -> Result<ByteSize, String> {
    text.parse().map_err(|e: stratakv::Error| e.to_string())
}

/// Parses a share from 0 to 1.
///
/// # Errors
/// The text is not a number from 0 to 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is not a number; give a share from 0 to 1"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(format!("{text} is not between 0 and 1")) }
}

/// Refuses a block size that the engine's groups cannot have.
///
/// # Errors
/// `block` is not a multiple of 4 KiB from 4 KiB to 512 KiB.
pub(crate) fn check_block(block: ByteSize) -> anyhow::Result<()> {
    let page = stratakv_format::PAGE_BYTES as u64;
    if !block.0.is_multiple_of(page) || !(1..=128).contains(&(block.0 / page)) {
        anyhow::bail!("--block {block}: blocks are multiples of 4 KiB, from 4 KiB to 512 KiB");
    }
    Ok(())
}
