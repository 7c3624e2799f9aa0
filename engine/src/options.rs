//! Settings, apart from the components that use them. The defaults stand in [`StoreOptions::default`].

use crate::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use stratakv_format::PayloadChecksum;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (unit, name) in units {
            if self.0 >= unit {
                return write!(f, "{:.1} {name}", self.0 as f64 / unit as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    /// Reads `4096`, `64KiB`, `512M`, `1.5 GiB`: binary multiples, the letters after K, M, G, T are optional.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::new(ErrorKind::InvalidArgument, format!("{text:?} is no size (try 64KiB, 512MiB, 2GiB)"));
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let number: f64 = trimmed[..digits].parse().map_err(|_| wrong())?;
        let shift = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let bytes = number * (1_u64 << shift) as f64;
        if !bytes.is_finite() || bytes >= u64::MAX as f64 { Err(wrong()) } else { Ok(Self(bytes as u64)) }
    }
}

/// Which driver moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverChoice {
    /// io_uring where the kernel allows it, else `posix`, with a note that names the cause.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// `pread` and `pwrite` from a pool of threads.
    Posix,
    /// Reads through a glommio executor on each device's thread, or an error. For hosts that run glommio; feature `glommio`.
    #[cfg(feature = "glommio")]
    Glommio,
    /// Reads through a tokio-uring runtime on each device's thread, or an error. For hosts that run tokio-uring; feature
    /// `tokio-uring`.
    #[cfg(feature = "tokio-uring")]
    TokioUring,
}

/// What protects the payload: recorded when a store is created.
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

/// Segments that a store's capacity is meant to make up, per device.
const SEGMENTS_OF_CAPACITY: u64 = 256;

/// How the copies of a frame are chosen from. [`BalancePolicy::EarliestFinish`] is what to use; the others are there to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalancePolicy {
    /// The copy on the device that ends first, by its speed and what is queued there.
    #[default]
    EarliestFinish,
    /// The copy on the device with the fewest reads of this selection, in the order of the selection.
    FewestReads,
    /// Always the first copy.
    FirstCopy,
}

/// How a store is opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreOptions {
    /// Device directories, one per disk. The order does not matter for a store that exists.
    pub devices: Vec<PathBuf>,
    /// Create the store when its directories are empty or missing. Default true.
    pub create: bool,
    /// Open for reading only: nothing is written, not even what recovery would. Default false.
    pub read_only: bool,
    /// The most bytes of all files of the store together. Default: no limit but the devices.
    pub capacity: Option<ByteSize>,
    /// The most memory: buffers, tails, summaries, indexes. Default 512 MiB.
    pub memory_limit: ByteSize,
    /// Bytes of a segment file; only used on creation. Default: see [`StoreOptions::segment_size`].
    pub segment_bytes: Option<ByteSize>,
    /// Bytes of group data collected in memory before they are written. Default 4 MiB; at most an eighth of a segment, so that
    /// little is left at its end.
    pub frame_bytes: ByteSize,
    /// Payload checksum; only used on creation.
    pub checksum: ChecksumChoice,
    /// Driver.
    pub driver: DriverChoice,
    /// The most threads that serve devices; further devices share them, a device that joins later that of the fewest devices.
    /// Default: one per device.
    pub shard_threads: Option<usize>,
    /// CPUs that the threads of the devices are kept on: the `i`th thread on the `i`th, round and round, with the threads that a driver
    /// starts. Default: none, threads run anywhere.
    pub shard_cpus: Vec<usize>,
    /// NUMA nodes on whose CPUs the threads of the devices are kept, likewise: those that the disks hang on. In place of `shard_cpus`.
    /// Says nothing of memory: buffers come from whichever node the kernel gives. Default: none.
    pub shard_nodes: Vec<usize>,
    /// The longest time until a lazy commit is synced, in milliseconds. Default 1000.
    pub lazy_delay_ms: u64,
    /// Open a store that devices are missing of: what has a copy elsewhere is there, the rest is an error. Default false.
    pub allow_degraded: bool,
    /// Bytes between two blocks, at most, that are read along when that is faster than two requests. Default: what the profile of
    /// the device says, 64 KiB at most. 0: nothing is read but the units that selected blocks lie in.
    pub gap_limit: Option<ByteSize>,
    /// How copies are chosen from.
    pub balance: BalancePolicy,
    /// A part of a read that takes longer than this share of all parts did is read from other copies as well, and the first
    /// good answer counts. None switches it off. Default 0.99.
    pub hedge_percentile: Option<f64>,
    /// With a capacity: the share of the room for frames that may live before evictable sequences go. Default 0.95.
    pub high_watermark: f64,
    /// The share that may live when they have gone. Default 0.90.
    pub low_watermark: f64,
    /// Bytes per second that the background moves to free segments, at most. An append that waits for the room, and
    /// [`Store::clean`](crate::Store::clean), do not wait for this. Default: as fast as reads leave room for.
    pub cleaning_rate: Option<ByteSize>,
    /// Keeps blocks that were read, for all sequences that have no cache of their own. Default: none.
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

    /// Whether to create the store when its directories are empty or missing.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Whether to open for reading only. No byte and no name in the directories changes: a store that a crash left is
    /// recovered in memory, and the directories may lie on a read-only mount. Several processes may read at once, none while
    /// one writes. Every call that would write is an [`ErrorKind::ReadOnly`].
    ///
    /// ```
    /// use stratakv::{ByteSize, ErrorKind, KvLayout, CreateOptions, Store};
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

    /// The most bytes of all files of the store together.
    #[must_use]
    pub fn capacity(mut self, capacity: ByteSize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// The most memory the store takes.
    #[must_use]
    pub fn memory_limit(mut self, limit: ByteSize) -> Self {
        self.memory_limit = limit;
        self
    }

    /// Bytes of a segment file, on creation.
    #[must_use]
    pub fn segment_bytes(mut self, bytes: ByteSize) -> Self {
        self.segment_bytes = Some(bytes);
        self
    }

    /// Bytes of a segment file when a store is created: what was set, else a 256th of the capacity of a device, rounded down to
    /// a power of two and within 4 and 64 MiB; 64 MiB without a capacity. A store of few segments has much to move when
    /// sequences go, for they share segments.
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

    /// Bytes of group data collected in memory before they are written.
    #[must_use]
    pub fn frame_bytes(mut self, bytes: ByteSize) -> Self {
        self.frame_bytes = bytes;
        self
    }

    /// Payload checksum, on creation.
    #[must_use]
    pub fn checksum(mut self, checksum: ChecksumChoice) -> Self {
        self.checksum = checksum;
        self
    }

    /// Driver.
    #[must_use]
    pub fn driver(mut self, driver: DriverChoice) -> Self {
        self.driver = driver;
        self
    }

    /// Whether to open a store that devices are missing of.
    #[must_use]
    pub fn allow_degraded(mut self, allow: bool) -> Self {
        self.allow_degraded = allow;
        self
    }

    /// How copies are chosen from.
    #[must_use]
    pub fn balance(mut self, policy: BalancePolicy) -> Self {
        self.balance = policy;
        self
    }

    /// See [`StoreOptions::hedge_percentile`].
    #[must_use]
    pub fn hedge_percentile(mut self, share: Option<f64>) -> Self {
        self.hedge_percentile = share;
        self
    }

    /// Bytes per second that the background moves, at most.
    #[must_use]
    pub fn cleaning_rate(mut self, bytes_per_second: ByteSize) -> Self {
        self.cleaning_rate = Some(bytes_per_second);
        self
    }

    /// The shares of the room for frames that may live before evictable sequences go, and when they have gone.
    #[must_use]
    pub fn watermarks(mut self, high: f64, low: f64) -> Self {
        (self.high_watermark, self.low_watermark) = (high, low);
        self
    }

    /// Limits what is read between two blocks.
    #[must_use]
    pub fn gap_limit(mut self, limit: ByteSize) -> Self {
        self.gap_limit = Some(limit);
        self
    }

    /// Serves the devices with so many threads at most.
    #[must_use]
    pub fn shard_threads(mut self, threads: usize) -> Self {
        self.shard_threads = Some(threads);
        self
    }

    /// Keeps the threads of the devices on these CPUs.
    #[must_use]
    pub fn shard_cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.shard_cpus = cpus.into_iter().collect();
        self
    }

    /// Keeps the threads of the devices on the CPUs of these NUMA nodes.
    #[must_use]
    pub fn shard_nodes(mut self, nodes: impl IntoIterator<Item = usize>) -> Self {
        self.shard_nodes = nodes.into_iter().collect();
        self
    }

    /// The longest time until a lazy commit is synced.
    #[must_use]
    pub fn lazy_delay(mut self, delay: Duration) -> Self {
        self.lazy_delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// Keeps blocks that were read, for all sequences that have no cache of their own.
    #[must_use]
    pub fn cache(mut self, cache: CacheOptions) -> Self {
        self.cache = Some(cache);
        self
    }
}

/// Which resident blocks go when others come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// Slots in turn, whatever is asked for (KVSwap section 3.4). Cheapest, and enough when the capacity is a few times what
    /// a step reads.
    Fifo,
    /// The least recently used. Keeps all of the last step's blocks as soon as they fit.
    #[default]
    Lru,
    /// The lowest `f * (base + size / bandwidth) / size`, with `f` rising by one at steps that ask for the block and falling
    /// by one at those that do not (SWARM section 4.4). For capacities below what a step reads.
    CostEffective {
        /// Latency of one read, in microseconds.
        base_us: u32,
        /// Bandwidth of the device, in MiB per second.
        mib_per_s: u32,
    },
    /// S3-FIFO: a general policy that resists scans.
    S3Fifo,
}

/// A cache of resident blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOptions {
    /// Bytes, of which whole multiples of 2 MiB hold blocks. Taken off `memory_limit` at once, so that reads and appends
    /// always have the rest.
    pub bytes: ByteSize,
    /// Policy.
    #[serde(default)]
    pub policy: CachePolicy,
}

impl CacheOptions {
    /// This capacity under the default policy.
    #[must_use]
    pub const fn new(bytes: ByteSize) -> Self {
        Self { bytes, policy: CachePolicy::Lru }
    }

    /// This policy.
    #[must_use]
    pub const fn policy(mut self, policy: CachePolicy) -> Self {
        self.policy = policy;
        self
    }
}

/// What a commit promises when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// It survives power loss: data, then the manifest record, are on stable storage.
    Sync,
    /// It is written, and synced within [`StoreOptions::lazy_delay_ms`] or at close. A crash before may lose it.
    Lazy,
    /// It may vanish; it never costs a sync. It becomes durable with the sequence's next commit of another kind or at
    /// close.
    None,
}

/// Summaries a sequence carries for selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoredSummary {
    /// Element-wise minimum and maximum of the keys of each group (LeoAM section 4.1; Quest).
    MinMax,
}

/// Where a handle of a sequence has its min/max records ([`StoredSummary::MinMax`]), the bounds that selectors (Quest, LeoAM) choose by,
/// and what other selectors know of groups whose records stand with them
/// ([`Sequence::attach_stored`](crate::Sequence::attach_stored)). Selections are the same, to the bit. Forks and readers have theirs
/// where the handle has that they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SummaryResidency {
    /// In memory, read when the sequence is opened.
    #[default]
    Resident,
    /// On the devices (LeoAM): a selection reads those of its layer, in one batch, and gives them back. Of groups in memory bounds
    /// are made from the keys; other selectors keep those of groups from the first one on whose record
    /// stands on no device, and of a few before it.
    /// [`Pipeline::stream`](crate::pipeline::Pipeline::stream) reads them ahead.
    Streamed,
}

/// How a sequence is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreateOptions {
    pub(crate) key: String,
    pub(crate) summaries: Vec<StoredSummary>,
    pub(crate) residency: SummaryResidency,
    /// 0 for as many as there are by default: 1.
    pub(crate) replicas: u8,
    pub(crate) ttl_ms: u64,
    pub(crate) evictable: u8,
}

impl CreateOptions {
    /// No key, no summary.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The name to open it by, up to 512 bytes. Without one the sequence is found only by its id.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = key.into();
        self
    }

    /// Copies of everything that the sequence writes, each on another device: 1 to 3. Default 1. Reads are balanced over the
    /// copies, and a device that fails or is lost takes nothing with it as long as another has a copy.
    #[must_use]
    pub fn replicas(mut self, copies: u8) -> Self {
        self.replicas = if copies == 0 { u8::MAX } else { copies };
        self
    }

    /// How long it lives from its creation, in whole milliseconds. Then it is deleted, once nobody has it open.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1);
        self
    }

    /// It may be deleted when space is short and nobody has it open: those of the highest `priority` go first, of those the
    /// least recently used. 0, the default, keeps it.
    #[must_use]
    pub fn evictable(mut self, priority: u8) -> Self {
        self.evictable = priority;
        self
    }

    /// Adds a summary.
    #[must_use]
    pub fn store_summary(mut self, summary: StoredSummary) -> Self {
        if !self.summaries.contains(&summary) {
            self.summaries.push(summary);
        }
        self
    }

    /// Where this handle has its min/max records: `OpenOptions::summaries` says so for those that come later.
    #[must_use]
    pub fn summary_residency(mut self, summaries: SummaryResidency) -> Self {
        self.residency = summaries;
        self
    }
}

/// How many tokens of a layer a step attends to, the tail and the newest groups included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Every token.
    All,
    /// This many tokens.
    Tokens(usize),
    /// This share of the tokens there are, above 0 and at most 1.
    Share(f64),
}

impl Budget {
    /// This many tokens.
    #[must_use]
    pub const fn tokens(tokens: usize) -> Self {
        Self::Tokens(tokens)
    }

    /// This share of the tokens there are.
    #[must_use]
    pub const fn share(share: f64) -> Self {
        Self::Share(share)
    }

    /// Tokens of `length`.
    ///
    /// # Errors
    /// Zero tokens, or a share outside (0, 1].
    pub fn of(self, length: usize) -> Result<usize> {
        let wrong = |what: &str| Err(Error::new(ErrorKind::InvalidArgument, format!("budget: {what}")));
        match self {
            Self::All => Ok(length),
            Self::Tokens(0) => wrong("0 tokens attend to nothing; give at least 1"),
            Self::Tokens(tokens) => Ok(tokens.min(length)),
            Self::Share(share) if share > 0.0 && share <= 1.0 => Ok((length as f64 * share) as usize),
            Self::Share(share) => wrong(&format!("share {share} is not in (0, 1]")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_defaults_hold() {
        let options = StoreOptions::default();
        assert_eq!(options.memory_limit, ByteSize::mib(512));
        assert_eq!((options.segment_bytes, options.segment_size()), (None, ByteSize::mib(64)));
        let of = |capacity, devices: u32| {
            let options = (0..devices).fold(StoreOptions::default(), |options, i| options.device(i.to_string()));
            options.capacity(capacity).segment_size()
        };
        assert_eq!(of(ByteSize::mib(64), 1), ByteSize::mib(4));
        assert_eq!(of(ByteSize::gib(5), 1), ByteSize::mib(16));
        assert_eq!(of(ByteSize::gib(5), 2), ByteSize::mib(8));
        assert_eq!(of(ByteSize::gib(500), 2), ByteSize::mib(64));
        assert_eq!(options.frame_bytes, ByteSize::mib(4));
        assert_eq!(options.lazy_delay_ms, 1000);
        assert!(!options.allow_degraded && options.balance == BalancePolicy::EarliestFinish);
        assert_eq!(options.hedge_percentile, Some(0.99));
        assert_eq!(options.cleaning_rate, None);
        assert_eq!((options.high_watermark, options.low_watermark), (0.95, 0.90));
        assert!(options.create && options.capacity.is_none() && options.devices.is_empty() && options.cache.is_none());
        assert_eq!(CacheOptions::new(ByteSize(0)).policy, CachePolicy::default());
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("4096", 4096), ("64KiB", 65536), ("512M", 512 << 20), ("1.5 GiB", 3 << 29), ("1t", 1 << 40)]
        {
            assert_eq!(text.parse::<ByteSize>().unwrap().bytes(), bytes, "{text}");
        }
        for text in ["", "x", "1Q", "-4", "1e3", "999999999999T"] {
            assert_eq!(text.parse::<ByteSize>().unwrap_err().kind(), ErrorKind::InvalidArgument, "{text}");
        }
    }

    #[test]
    fn budgets_count_tokens() {
        assert_eq!(Budget::tokens(400).of(4096).unwrap(), 400);
        assert_eq!(Budget::tokens(400).of(100).unwrap(), 100);
        assert_eq!(Budget::share(1.0 / 13.0).of(4096).unwrap(), 315);
        for bad in [Budget::tokens(0), Budget::share(0.0), Budget::share(1.5), Budget::share(f64::NAN)] {
            assert!(bad.of(10).is_err());
        }
    }
}
