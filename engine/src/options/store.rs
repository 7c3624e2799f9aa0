//! Options of a store: directories, limits, drivers, threads, cleaning.
//!
//! Defaults are in [`StoreOptions::default`]. The component that uses an option checks it when the store is opened.

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

/// How a read chooses among the copies of a frame. Use [`BalancePolicy::EarliestFinish`]. The others are for
/// comparison.
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

/// How a store is opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreOptions {
    /// Device directories, one per disk. Their order does not matter for an existing store.
    pub devices: Vec<PathBuf>,
    /// True if the store is created when its directories are empty or missing. Default true.
    pub create: bool,
    /// True if the store is opened for reading only: nothing is written, not even by recovery. Default false.
    pub read_only: bool,
    /// Bytes of all files of the store together, at most. Default: as many as the devices have.
    pub capacity: Option<ByteSize>,
    /// Memory of buffers, tails, summaries and indexes, at most. Default 512 MiB.
    pub memory_limit: ByteSize,
    /// Bytes of a segment file. Used on creation only. Default: see [`StoreOptions::segment_size`].
    pub segment_bytes: Option<ByteSize>,
    /// Bytes of group data that are collected before they are written. Default 4 MiB. An eighth of a segment is the
    /// maximum, so that little is left unused at its end.
    pub frame_bytes: ByteSize,
    /// The payload checksum. Used on creation only.
    pub checksum: ChecksumChoice,
    /// The driver.
    pub driver: DriverChoice,
    /// Threads that serve devices, at most. More devices share them. Default: one per device.
    pub shard_threads: Option<usize>,
    /// CPUs of the device threads, with the threads that their drivers start. The `i`th thread runs on the `i`th CPU of
    /// the list, cyclically. Default: any CPU.
    pub shard_cpus: Vec<usize>,
    /// NUMA nodes of the device threads, instead of `shard_cpus`: the nodes that the disks are attached to. Buffers
    /// come from any node. Default: any node.
    pub shard_nodes: Vec<usize>,
    /// Milliseconds until a lazy commit is synced, at most. Default 1000.
    pub lazy_delay_ms: u64,
    /// True if the store is opened although devices are missing. Frames without a copy elsewhere give errors. Default
    /// false.
    pub allow_degraded: bool,
    /// Bytes between two blocks that one request may cover, if that is faster than two requests. Default: by the
    /// profile of the device, at most 64 KiB. 0: only the selected blocks are read.
    pub gap_limit: Option<ByteSize>,
    /// How a read chooses among copies.
    pub balance: BalancePolicy,
    /// The share of read parts that are not late. A part that takes longer than this share is read from other copies as
    /// well, and the first good answer counts. `None` switches this off. Default 0.99.
    pub hedge_percentile: Option<f64>,
    /// The share of the space for frames that may be live before evictable sequences are deleted. Needs a capacity.
    /// Default 0.95.
    pub high_watermark: f64,
    /// The share at which eviction stops. Default 0.90.
    pub low_watermark: f64,
    /// Bytes per second that cleaning moves in the background, at most. An append that waits for space, and
    /// [`Store::clean`](crate::Store::clean), ignore it. Default: as fast as reads allow.
    pub cleaning_rate: Option<ByteSize>,
    /// The cache of blocks for all sequences without one of their own. Default: none.
    pub cache: Option<CacheOptions>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            create: true,
            read_only: false,
            capacity: None,
            memory_limit: ByteSize::mib(512),
            segment_bytes: None,
            frame_bytes: ByteSize::mib(4),
            checksum: ChecksumChoice::default(),
            driver: DriverChoice::default(),
            shard_threads: None,
            shard_cpus: Vec::new(),
            shard_nodes: Vec::new(),
            lazy_delay_ms: 1000,
            allow_degraded: false,
            gap_limit: None,
            balance: BalancePolicy::default(),
            hedge_percentile: Some(0.99),
            high_watermark: 0.95,
            low_watermark: 0.90,
            cleaning_rate: None,
            cache: None,
        }
    }
}

impl StoreOptions {
    /// Adds a device directory.
    #[must_use]
    pub fn device(mut self, directory: impl Into<PathBuf>) -> Self {
        self.devices.push(directory.into());
        self
    }

    /// Sets whether to create the store when its directories are empty or missing.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Sets whether to open for reading only.
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

    /// Limits the bytes of all files of the store together.
    #[must_use]
    pub fn capacity(mut self, capacity: ByteSize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Limits the memory of the store.
    #[must_use]
    pub fn memory_limit(mut self, limit: ByteSize) -> Self {
        self.memory_limit = limit;
        self
    }

    /// Sets the bytes of a segment file, on creation.
    #[must_use]
    pub fn segment_bytes(mut self, bytes: ByteSize) -> Self {
        self.segment_bytes = Some(bytes);
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

    /// Sets the bytes of group data that are collected before they are written.
    #[must_use]
    pub fn frame_bytes(mut self, bytes: ByteSize) -> Self {
        self.frame_bytes = bytes;
        self
    }

    /// Sets the payload checksum, on creation.
    #[must_use]
    pub fn checksum(mut self, checksum: ChecksumChoice) -> Self {
        self.checksum = checksum;
        self
    }

    /// Sets the driver.
    #[must_use]
    pub fn driver(mut self, driver: DriverChoice) -> Self {
        self.driver = driver;
        self
    }

    /// Sets whether to open a store although devices are missing.
    #[must_use]
    pub fn allow_degraded(mut self, allow: bool) -> Self {
        self.allow_degraded = allow;
        self
    }

    /// Sets how a read chooses among copies.
    #[must_use]
    pub fn balance(mut self, policy: BalancePolicy) -> Self {
        self.balance = policy;
        self
    }

    /// Sets the share of read parts that are not late: see [`StoreOptions::hedge_percentile`].
    #[must_use]
    pub fn hedge_percentile(mut self, share: Option<f64>) -> Self {
        self.hedge_percentile = share;
        self
    }

    /// Limits the bytes per second that cleaning moves in the background.
    #[must_use]
    pub fn cleaning_rate(mut self, bytes_per_second: ByteSize) -> Self {
        self.cleaning_rate = Some(bytes_per_second);
        self
    }

    /// Sets the shares of the space for frames at which eviction begins (`high`) and stops (`low`).
    #[must_use]
    pub fn watermarks(mut self, high: f64, low: f64) -> Self {
        (self.high_watermark, self.low_watermark) = (high, low);
        self
    }

    /// Limits the bytes between two blocks that one request may cover.
    #[must_use]
    pub fn gap_limit(mut self, limit: ByteSize) -> Self {
        self.gap_limit = Some(limit);
        self
    }

    /// Limits the threads that serve devices.
    #[must_use]
    pub fn shard_threads(mut self, threads: usize) -> Self {
        self.shard_threads = Some(threads);
        self
    }

    /// Sets the CPUs of the device threads.
    #[must_use]
    pub fn shard_cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.shard_cpus = cpus.into_iter().collect();
        self
    }

    /// Sets the NUMA nodes of the device threads.
    #[must_use]
    pub fn shard_nodes(mut self, nodes: impl IntoIterator<Item = usize>) -> Self {
        self.shard_nodes = nodes.into_iter().collect();
        self
    }

    /// Limits the time until a lazy commit is synced.
    #[must_use]
    pub fn lazy_delay(mut self, delay: Duration) -> Self {
        self.lazy_delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// Sets the cache of blocks for all sequences without one of their own.
    #[must_use]
    pub fn cache(mut self, cache: CacheOptions) -> Self {
        self.cache = Some(cache);
        self
    }
}
