//! The status of a store and of its sequences.

use super::Store;
use crate::cache::CacheStatus;
use crate::io::buffer::slab::PageBacking;
use crate::io::scheduler::profile::ProfileStatus;
use crate::log::Device;
use crate::metrics::{DeviceSnapshot, MemoryUsage, lock};
use serde::Serialize;
use stratakv_format::PAGE_BYTES;

/// The stored properties of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SequenceInfo {
    /// Id.
    pub id: u64,
    /// Key, or empty if it has none.
    pub key: String,
    /// Committed tokens.
    pub tokens: u64,
    /// Bytes of its frames on devices, all copies, header and padding included.
    pub disk_bytes: u64,
    /// Frames that it refers to.
    pub frames: usize,
    /// The sequence that it was forked from, which may be deleted.
    pub parent: Option<u64>,
    /// The time of its creation, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// The time of its last commit, in milliseconds since 1970. It is never earlier than a use of any sequence before,
    /// even if the clock went back.
    pub committed_unix_ms: u64,
    /// Milliseconds from its creation until it is deleted, 0 for never.
    pub ttl_ms: u64,
    /// Eviction priority, 0 for never.
    pub evictable: u8,
}

/// The status of a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceStatus {
    /// Its index in the store, which stays the same as long as it is a member.
    pub index: u16,
    /// Directory.
    pub path: String,
    /// `uring` or `posix`. With the features of these names also `glommio` or `tokio-uring`.
    pub driver: String,
    /// The features of the system that the driver lacks, each with the cause and what helps.
    pub notes: Vec<String>,
    /// True if I/O bypasses the page cache.
    pub direct: bool,
    /// Bytes of its file system that are free, or none if the system does not report them.
    pub available_bytes: Option<u64>,
    /// Its counters since the store was opened.
    pub counters: DeviceSnapshot,
    /// Its profile: the expected time of reads.
    pub profile: ProfileStatus,
}

/// The status of a store.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStatus {
    /// Devices, by index.
    pub devices: Vec<DeviceStatus>,
    /// Memory, against `memory_limit`.
    pub memory: MemoryUsage,
    /// The pages of the I/O buffers: `explicit`, `transparent` or `plain`. None before the first buffer.
    pub pages: Option<String>,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Bytes of frames that sequences refer to. Those of a deleted sequence count until its deletion is committed.
    pub live_bytes: u64,
    /// Bytes of frames written since the store was opened.
    pub written_bytes: u64,
    /// Sequences stored, as [`Store::sequences`] lists them.
    pub sequences: usize,
    /// Resident blocks of the store's cache, if it has one. Caches of single sequences:
    /// [`crate::Sequence::cache_status`].
    pub cache: Option<CacheStatus>,
}

impl Store {
    /// Returns how the store runs: drivers, memory, bytes.
    #[must_use]
    pub fn status(&self) -> StoreStatus {
        let inner = &self.inner;
        let devices = &inner.devices;
        let device = |device: &Device| {
            let status = device.shard.status();
            DeviceStatus {
                index: device.index.0,
                path: device.directory.path().display().to_string(),
                driver: status.name.to_owned(),
                notes: status.notes,
                direct: device.directory.direct_io().is_direct(),
                available_bytes: device.directory.space().ok().map(|space| space.available),
                counters: device.counters.snapshot(),
                profile: device.profile.status(),
            }
        };
        let pages = devices.arena.usage().backing.map(|backing| {
            match backing {
                PageBacking::Explicit => "explicit",
                PageBacking::Transparent => "transparent",
                PageBacking::Plain => "plain",
            }
            .to_owned()
        });
        let (live_bytes, sequences) = {
            let catalog = lock(&inner.catalog);
            let live: u64 = catalog.segments.values().map(|s| s.live_pages * PAGE_BYTES as u64).sum();
            (live, catalog.listed().count())
        };
        // Taken after the catalog is released, so that one lock is held at a time.
        let file_bytes = lock(&inner.space).file_bytes(devices);
        StoreStatus {
            devices: devices.list.iter().map(device).collect(),
            memory: devices.budget.usage(),
            pages,
            file_bytes,
            live_bytes,
            written_bytes: inner.activity.written_bytes(),
            sequences,
            cache: inner.cache.as_ref().map(|cache| cache.status()),
        }
    }
}
