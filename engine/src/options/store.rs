//! Options of a store: directories, limits, drivers, threads, cleaning.
//!
//! The component that uses an option checks it when the store is opened.

use super::cache::CacheOptions;
use super::size::ByteSize;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use stratakv_format::PayloadChecksum;

/// The driver that moves bytes between memory and devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverChoice {
    /// io_uring if the kernel allows it, else `posix`. The status notes the cause.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// `pread` and `pwrite` from a pool of threads.
    Posix,
    /// Reads through a glommio executor on each device's thread, or an error. For hosts that run glommio; feature
    /// `glommio`.
    #[cfg(feature = "glommio")]
    Glommio,
    /// Reads through a tokio-uring runtime on each device's thread, or an error. For hosts that run tokio-uring;
    /// feature `tokio-uring`.
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

/// The checksum of the payload, recorded when a store is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChecksumChoice {
    /// CRC-64/NVME.
    #[default]
    Crc64Nvme,
    /// CRC-32.
    Crc32,
}

impl ChecksumChoice {
    pub(crate) fn kind(self) -> PayloadChecksum {
        match self {
            Self::Crc64Nvme => PayloadChecksum::Crc64Nvme,
            Self::Crc32 => PayloadChecksum::Crc32,
        }
    }
}

/// Segments per device that a store's capacity is divided into.
const SEGMENTS_OF_CAPACITY: u64 = 256;

/// How a read chooses among the copies of a frame, and among the pages of stored clusters that hold an entry. Use
/// [`BalancePolicy::EarliestFinish`]. The others are for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalancePolicy {
    /// The copy on the device that finishes first, by its speed and its queue (SWARM section 4.3).
    #[default]
    EarliestFinish,
    /// The copy on the device with the fewest reads of this selection so far.
    FewestReads,
    /// Always the first copy.
    FirstCopy,
}

/// Whether a call that reads and attends uses a second thread of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HelperUse {
    /// If calls with it were faster than calls without it.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always. Use it for comparison.
    Always,
}

impl HelperUse {
    /// Returns whether the helper is used, or none if the engine chooses.
    pub(crate) fn fixed(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::Off => Some(false),
            Self::Always => Some(true),
        }
    }
}

/// How a store is opened. Each setter names its default.
///
/// It is also read and written with serde: each option under the name of its setter, but `devices` as a
/// list, `high_watermark` and `low_watermark`, and `lazy_delay_ms` in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreOptions {
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) create: bool,
    pub(crate) read_only: bool,
    pub(crate) capacity: Option<ByteSize>,
    pub(crate) memory_limit: ByteSize,
    pub(crate) segment_bytes: Option<ByteSize>,
    pub(crate) frame_bytes: ByteSize,
    pub(crate) checksum: ChecksumChoice,
    pub(crate) driver: DriverChoice,
    pub(crate) shard_threads: Option<usize>,
    pub(crate) shard_cpus: Vec<usize>,
    pub(crate) shard_nodes: Vec<usize>,
    /// Whole milliseconds, at most `u64::MAX` of them.
    #[serde(rename = "lazy_delay_ms", with = "milliseconds")]
    pub(crate) lazy_delay: Duration,
    pub(crate) allow_degraded: bool,
    pub(crate) gap_limit: Option<ByteSize>,
    pub(crate) balance: BalancePolicy,
    pub(crate) attend_helper: HelperUse,
    pub(crate) hedge_percentile: Option<f64>,
    pub(crate) high_watermark: f64,
    pub(crate) low_watermark: f64,
    pub(crate) cleaning_rate: Option<ByteSize>,
    pub(crate) cache: Option<CacheOptions>,
}

/// Durations in settings are whole milliseconds.
mod milliseconds {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(super::whole_milliseconds(*duration))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

/// Returns a duration in milliseconds, rounded up.
fn whole_milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            create: true,
            read_only: false,
            capacity: None,
            memory_limit: Self::DEFAULT_MEMORY_LIMIT,
            segment_bytes: None,
            frame_bytes: ByteSize::mib(4),
            checksum: ChecksumChoice::default(),
            driver: DriverChoice::default(),
            shard_threads: None,
            shard_cpus: Vec::new(),
            shard_nodes: Vec::new(),
            lazy_delay: Duration::from_secs(1),
            allow_degraded: false,
            gap_limit: None,
            balance: BalancePolicy::default(),
            attend_helper: HelperUse::default(),
            hedge_percentile: Some(0.99),
            high_watermark: 0.95,
            low_watermark: 0.90,
            cleaning_rate: None,
            cache: None,
        }
    }
}

impl StoreOptions {
    /// The memory limit without [`Self::memory_limit`]: 512 MiB.
    pub const DEFAULT_MEMORY_LIMIT: ByteSize = ByteSize::mib(512);

    /// Adds a device directory, one per disk. The order of directories does not matter for an existing store.
    #[must_use]
    pub fn device(mut self, directory: impl Into<PathBuf>) -> Self {
        self.devices.push(directory.into());
        self
    }

    /// Sets whether to create the store when its directories are empty. A missing directory is an error. Default true.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Sets whether to open for reading only. Default false.
    ///
    /// No byte and no name in the directories changes. A store that a crash left is recovered in memory, and the
    /// directories may be on a read-only mount. Several processes may read at the same time, but not while one writes.
    /// Every call that would write returns [`ErrorKind::ReadOnly`](crate::ErrorKind::ReadOnly).
    ///
    /// ```
    /// use stratakv::{ByteSize, CreateOptions, ErrorKind, KvLayout, Store};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?.close()?;
    /// let store = Store::options().device(dir.path()).read_only(true).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
    /// let refused = store.create_sequence(&layout, CreateOptions::new()).unwrap_err();
    /// assert_eq!(refused.kind(), ErrorKind::ReadOnly);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Limits the bytes of all files of the store together. Default: as many as the devices have.
    ///
    /// Must leave space for three segments per device beside the superblocks and the manifest. For one device and
    /// segments of 4 MiB that is 28 MiB and 8 KiB. [`Self::open`] refuses less, unless the store has segments or is
    /// opened for reading.
    #[must_use]
    pub fn capacity(mut self, capacity: impl Into<Option<ByteSize>>) -> Self {
        self.capacity = capacity.into();
        self
    }

    /// Limits the memory of buffers, tails, summaries, indexes and caches. Default [`Self::DEFAULT_MEMORY_LIMIT`].
    #[must_use]
    pub fn memory_limit(mut self, limit: ByteSize) -> Self {
        self.memory_limit = limit;
        self
    }

    /// Sets the bytes of a segment file, on creation. Default: see [`Self::segment_size`].
    #[must_use]
    pub fn segment_bytes(mut self, bytes: impl Into<Option<ByteSize>>) -> Self {
        self.segment_bytes = bytes.into();
        self
    }

    /// Returns the bytes of a segment file on creation.
    ///
    /// If none are set: a 256th of the capacity per device, rounded down to a power of two from 4 to 64 MiB. Without a
    /// capacity: 64 MiB. In a store of few segments cleaning moves more, because sequences share segments.
    #[must_use]
    pub fn segment_size(&self) -> ByteSize {
        self.segment_bytes.unwrap_or_else(|| {
            let (least, most) = (ByteSize::mib(4).bytes(), ByteSize::mib(64).bytes());
            let share = self
                .capacity
                .map_or(most, |capacity| capacity.bytes() / self.devices.len().max(1) as u64 / SEGMENTS_OF_CAPACITY);
            ByteSize(1 << share.clamp(least, most).ilog2())
        })
    }

    /// Sets the bytes of group data that are collected before they are written. Default 4 MiB.
    ///
    /// An eighth of a segment is the maximum, so that little is left unused at its end.
    #[must_use]
    pub fn frame_bytes(mut self, bytes: ByteSize) -> Self {
        self.frame_bytes = bytes;
        self
    }

    /// Sets the payload checksum, on creation. Default [`ChecksumChoice::Crc64Nvme`].
    #[must_use]
    pub fn checksum(mut self, checksum: ChecksumChoice) -> Self {
        self.checksum = checksum;
        self
    }

    /// Sets the driver. Default [`DriverChoice::Auto`].
    #[must_use]
    pub fn driver(mut self, driver: DriverChoice) -> Self {
        self.driver = driver;
        self
    }

    /// Sets whether to open a store although devices are missing. Frames without a copy elsewhere give errors. Default
    /// false.
    #[must_use]
    pub fn allow_degraded(mut self, allow: bool) -> Self {
        self.allow_degraded = allow;
        self
    }

    /// Sets how a read chooses among copies. Default [`BalancePolicy::EarliestFinish`].
    #[must_use]
    pub fn balance(mut self, policy: BalancePolicy) -> Self {
        self.balance = policy;
        self
    }

    /// Sets whether [`ReadRequest::attend`](crate::store::ReadRequest::attend) reads and attends to half of its blocks
    /// on a thread of the store. The default measures which is faster. Results have the same bits.
    #[must_use]
    pub fn attend_helper(mut self, helper: HelperUse) -> Self {
        self.attend_helper = helper;
        self
    }

    /// Sets the share of read parts that are not late. Default 0.99.
    ///
    /// A part that takes longer than this share is read from other copies as well, and the first good answer counts.
    /// `None` switches this off.
    #[must_use]
    pub fn hedge_percentile(mut self, share: impl Into<Option<f64>>) -> Self {
        self.hedge_percentile = share.into();
        self
    }

    /// Limits the bytes per second that cleaning moves in the background. Default: as fast as reads allow.
    ///
    /// An append that waits for space, and [`Store::clean`](crate::Store::clean), ignore it.
    #[must_use]
    pub fn cleaning_rate(mut self, bytes_per_second: impl Into<Option<ByteSize>>) -> Self {
        self.cleaning_rate = bytes_per_second.into();
        self
    }

    /// Sets the shares of the space for frames at which the eviction of sequences begins (`high`) and stops (`low`).
    /// They need a capacity. Default 0.95 and 0.90.
    #[must_use]
    pub fn watermarks(mut self, high: f64, low: f64) -> Self {
        (self.high_watermark, self.low_watermark) = (high, low);
        self
    }

    /// Limits the bytes between two blocks that one request may cover, if that is faster than two requests.
    ///
    /// 0: only the selected blocks are read. Default: by the profile of the device, at most 64 KiB.
    #[must_use]
    pub fn gap_limit(mut self, limit: impl Into<Option<ByteSize>>) -> Self {
        self.gap_limit = limit.into();
        self
    }

    /// Limits the threads that serve devices. More devices share them. Default: one per device.
    #[must_use]
    pub fn shard_threads(mut self, threads: impl Into<Option<usize>>) -> Self {
        self.shard_threads = threads.into();
        self
    }

    /// Sets the CPUs of the device threads, with the threads that their drivers start. The `i`th thread runs on the
    /// `i`th CPU of the list, cyclically. Default: any CPU.
    #[must_use]
    pub fn shard_cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.shard_cpus = cpus.into_iter().collect();
        self
    }

    /// Sets the NUMA nodes of the device threads, instead of their CPUs: the nodes that the disks are attached to.
    /// Buffers come from any node. Default: any node.
    #[must_use]
    pub fn shard_nodes(mut self, nodes: impl IntoIterator<Item = usize>) -> Self {
        self.shard_nodes = nodes.into_iter().collect();
        self
    }

    /// Limits the time until a lazy commit is synced, in whole milliseconds. Default one second.
    #[must_use]
    pub fn lazy_delay(mut self, delay: Duration) -> Self {
        self.lazy_delay = Duration::from_millis(whole_milliseconds(delay));
        self
    }

    /// Sets the cache of blocks for all sequences without one of their own. Default: none.
    #[must_use]
    pub fn cache(mut self, cache: impl Into<Option<CacheOptions>>) -> Self {
        self.cache = cache.into();
        self
    }
}
