//! What a store tells about itself and its sequences.

use super::Store;
use crate::cache::CacheStatus;
use crate::io::buffer::slab::PageBacking;
use crate::io::scheduler::profile::ProfileStatus;
use crate::log::Device;
use crate::metrics::{DeviceSnapshot, MemoryUsage, lock};
use serde::Serialize;
use stratakv_format::PAGE_BYTES;

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
    /// True if I/O bypasses the page cache.
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
            (live, catalog.sequences.len() - catalog.adapters.len())
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
