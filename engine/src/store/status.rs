//! What a store tells about itself and its sequences.

use crate::cache::CacheStatus;
use crate::io::scheduler::profile::ProfileStatus;
use crate::metrics::{DeviceSnapshot, MemoryUsage};
use serde::Serialize;

/// What is stored about a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SequenceInfo {
    /// Id.
    pub id: u64,
    /// Key, empty when it has none.
    pub key: String,
    /// Committed tokens.
    pub tokens: u64,
    /// Bytes of its frames on devices, all copies, header and padding included.
    pub disk_bytes: u64,
    /// Frames that it refers to.
    pub frames: usize,
    /// The sequence it was forked from, which may be gone.
    pub parent: Option<u64>,
    /// When it was created, milliseconds since 1970.
    pub created_unix_ms: u64,
    /// When it was last committed, milliseconds since 1970.
    pub committed_unix_ms: u64,
    /// Milliseconds from its creation until it is deleted, 0 for never.
    pub ttl_ms: u64,
    /// Eviction priority, 0 for never.
    pub evictable: u8,
}

/// How a device is driven.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceStatus {
    /// Its index in the store, which stays the same for as long as it is a member.
    pub index: u16,
    /// Directory.
    pub path: String,
    /// `uring` or `posix`; `glommio` or `tokio-uring` with the features of these names.
    pub driver: String,
    /// What the driver has to do without, with cause and remedy.
    pub notes: Vec<String>,
    /// Whether I/O bypasses the page cache.
    pub direct: bool,
    /// Bytes of its file system that are free; none when it cannot be told.
    pub available_bytes: Option<u64>,
    /// What it did since the store was opened.
    pub counters: DeviceSnapshot,
    /// How fast it is.
    pub profile: ProfileStatus,
}

/// How a store runs.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStatus {
    /// Devices, by index.
    pub devices: Vec<DeviceStatus>,
    /// Memory, against `memory_limit`.
    pub memory: MemoryUsage,
    /// Pages behind the I/O buffers: `explicit`, `transparent` or `plain`; none before the first buffer.
    pub pages: Option<String>,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Bytes of frames that sequences refer to.
    pub live_bytes: u64,
    /// Bytes of frames written since the store was opened.
    pub written_bytes: u64,
    /// Sequences stored.
    pub sequences: usize,
    /// Resident blocks of the store's cache, if it has one. Caches of single sequences: [`crate::Sequence::cache_status`].
    pub cache: Option<CacheStatus>,
}
