//! Limits of a device, given one by one or by a profile, and the rate of the host that they are compared with.
//!
//! A profile is the read speed of a real device, scaled down to what two cores can drive. Bytes and requests are scaled
//! by the same factor. Small requests are therefore limited by their number up to the same size as on the real device.
//! Writes have no profile, because the figures to reproduce are of reads.

use crate::support::args::size;
use crate::support::bare::{BareReader, write_file};
use crate::support::interrupt::check_interrupt;
use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};
use stratakv::ByteSize;

/// Bytes and requests per second of a device; none for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceLimits {
    pub(crate) read_bps: Option<u64>,
    pub(crate) write_bps: Option<u64>,
    pub(crate) read_iops: Option<u64>,
    pub(crate) write_iops: Option<u64>,
}

impl DeviceLimits {
    /// Removes every limit.
    pub(crate) const NONE: Self = Self { read_bps: None, write_bps: None, read_iops: None, write_iops: None };

    /// Returns a limit of bytes read per second.
    pub(crate) fn read_bps(bps: u64) -> Self {
        Self { read_bps: Some(bps), ..Self::NONE }
    }
}

/// A real device whose read speed is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceProfile {
    /// Samsung PM9A3, a 69th: 100 MB/s and 16,000 requests per second.
    #[value(name = "pm9a3")]
    Pm9a3,
    /// Intel Optane 900P, a 69th: 36 MB/s and 8,000 requests per second.
    #[value(name = "900p")]
    Optane900p,
    /// UFS 4.0, a 29th: 100 MB/s and 4,000 requests per second, so requests limit it below 24 KiB.
    #[value(name = "ufs4")]
    Ufs4,
    /// eMMC: 250 MB/s, requests not limited.
    #[value(name = "emmc")]
    Emmc,
    /// An NVMe disk: 1 GB/s, requests not limited.
    #[value(name = "nvme")]
    Nvme,
}

impl DeviceProfile {
    /// Returns the limits of reads.
    pub(crate) fn limits(self) -> DeviceLimits {
        let (read_bps, read_iops) = match self {
            Self::Pm9a3 => (100_000_000, Some(16_000)),
            Self::Optane900p => (36_000_000, Some(8_000)),
            Self::Ufs4 => (100_000_000, Some(4_000)),
            Self::Emmc => (250_000_000, None),
            Self::Nvme => (1_000_000_000, None),
        };
        DeviceLimits { read_iops, ..DeviceLimits::read_bps(read_bps) }
    }
}

/// Limits of reads on the command line.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct ReadLimitArgs {
    /// Read limits of a real device, scaled down. The options below replace one of them.
    #[arg(long, value_enum)]
    pub(crate) profile: Option<DeviceProfile>,
    /// Bytes per second that each device may read. Without it and a profile they are not limited.
    #[arg(long, value_parser = size)]
    pub(crate) read_bps: Option<ByteSize>,
    /// Requests per second that each device may read by. Without it and a profile they are not limited.
    #[arg(long, value_name = "N", value_parser = requests())]
    pub(crate) read_iops: Option<u64>,
}

impl ReadLimitArgs {
    /// Returns the limits. A limit that is not given is the profile's.
    pub(crate) fn limits(&self) -> DeviceLimits {
        let profile = self.profile.map_or(DeviceLimits::NONE, DeviceProfile::limits);
        DeviceLimits {
            read_bps: self.read_bps.map(|bps| bps.0).or(profile.read_bps),
            read_iops: self.read_iops.or(profile.read_iops),
            ..profile
        }
    }
}

/// Returns a parser of requests per second. The kernel takes 32 bits, and 0 would remove the limit.
pub(crate) fn requests() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=u64::from(u32::MAX))
}

/// Bytes of the requests by which the host is measured.
const HOST_BLOCK: usize = 4096;
/// Requests that are in flight at the same time.
const HOST_BATCH: u32 = 64;
/// The longest file that is read.
const HOST_FILE_BYTES: u64 = 64 << 20;
/// The length of the measurement.
const HOST_TIME: Duration = Duration::from_millis(300);

/// Returns the random direct reads of 4 KiB per second that the host completes below `directory`, which is on a device
/// of `bytes` bytes without limits.
///
/// # Errors
/// The file cannot be written or read, or the run was interrupted.
pub(super) fn host_read_iops(directory: &Path, bytes: u64) -> Result<u64> {
    let path = directory.join("host-rate");
    let outcome = write_file(&path, (bytes / 4).min(HOST_FILE_BYTES)).and_then(|()| read_rate(&path));
    std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    outcome
}

fn read_rate(path: &Path) -> Result<u64> {
    let mut reader = BareReader::new(path, HOST_BLOCK, HOST_BATCH as usize)?;
    let (mut batches, start) = (0_u32, Instant::now());
    while start.elapsed() < HOST_TIME {
        check_interrupt()?;
        reader.batch()?;
        batches += 1;
    }
    Ok((f64::from(batches) * f64::from(HOST_BATCH) / start.elapsed().as_secs_f64()) as u64)
}

/// Returns a warning if the host completes fewer reads than `devices` devices of this limit may have; none if it
/// completes enough.
pub(super) fn host_warning(host_iops: u64, read_iops: u64, devices: u32) -> Option<String> {
    let needed = read_iops.saturating_mul(u64::from(devices));
    (host_iops < needed).then(|| {
        format!(
            "this host completes {host_iops} reads of 4 KiB per second, but {devices} devices of {read_iops} need \
             {needed}; the host's own limit shows in their figures, so use fewer devices or a lower --read-iops"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        limits: ReadLimitArgs,
    }

    fn limits(line: &str) -> Result<DeviceLimits, clap::Error> {
        Line::try_parse_from(std::iter::once("kvbench").chain(line.split_whitespace())).map(|line| line.limits.limits())
    }

    #[test]
    fn profiles_have_the_scaled_figures_of_their_devices() {
        for (name, read_bps, read_iops) in [
            ("pm9a3", 100_000_000, Some(16_000)),
            ("900p", 36_000_000, Some(8_000)),
            ("ufs4", 100_000_000, Some(4_000)),
            ("emmc", 250_000_000, None),
            ("nvme", 1_000_000_000, None),
        ] {
            let expected = DeviceLimits { read_bps: Some(read_bps), read_iops, ..DeviceLimits::NONE };
            assert_eq!(limits(&format!("--profile {name}")).unwrap(), expected, "{name}");
        }
        assert_eq!(DeviceProfile::value_variants().len(), 5);
    }

    #[test]
    fn options_replace_the_limits_of_a_profile() {
        assert_eq!(limits("").unwrap(), DeviceLimits::NONE);
        assert_eq!(limits("--read-iops 500").unwrap(), DeviceLimits { read_iops: Some(500), ..DeviceLimits::NONE });
        let mixed = limits("--profile ufs4 --read-bps 1MiB").unwrap();
        assert_eq!((mixed.read_bps, mixed.read_iops), (Some(1 << 20), Some(4_000)));
        let mixed = limits("--profile emmc --read-iops 9").unwrap();
        assert_eq!((mixed.read_bps, mixed.read_iops), (Some(250_000_000), Some(9)));
        for wrong in ["--read-iops 0", "--read-iops 4294967296", "--read-iops 4K", "--profile ssd"] {
            assert!(limits(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn host_is_reported_if_it_is_slower_than_all_devices_together() {
        assert_eq!(host_warning(64_000, 16_000, 4), None);
        let warning = host_warning(63_999, 16_000, 4).unwrap();
        assert!(warning.contains("63999 reads") && warning.contains("need 64000"), "{warning}");
    }
}
