//! Where the bytes of a store are.

use super::Store;
use crate::catalog::Catalog;
use crate::error::Result;
use crate::metrics::lock;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use stratakv_format::LayoutId;

/// Where the bytes of a store are. Always `live + dead + free + reserved + metadata + in_flight == capacity`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// The capacity that was set; without one, the bytes of all files and what the file systems have free.
    pub capacity_bytes: u64,
    /// True if a capacity was set.
    pub limited: bool,
    /// Frames that sequences refer to.
    pub live_bytes: u64,
    /// Frames that nobody refers to any more, and what is left of sealed segments: cleaning brings it back.
    pub dead_bytes: u64,
    /// What appends may take: room in open segments, free segments, and files that are not there yet.
    pub free_bytes: u64,
    /// Free segments that only cleaning takes, and the files of the next manifest generation.
    pub reserved_bytes: u64,
    /// Manifest, superblocks, headers and trailers of segments.
    pub metadata_bytes: u64,
    /// Frames that no commit has named yet.
    pub in_flight_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// True if all segment files made since the store was opened have their blocks reserved. Where the file system
    /// cannot do that (`false`), they take space only as they are written, and a device may be full although
    /// `free_bytes` says it is not.
    pub preallocated: bool,
    /// Bytes written to the devices since the store was created: data, metadata, moves.
    pub lifetime_bytes: u64,
    /// By device.
    pub devices: Vec<DeviceUsage>,
    /// By namespace: layout with fingerprint.
    pub namespaces: Vec<NamespaceUsage>,
}

/// One device's part of [`Usage`]: its segments. Always `live + dead + free + reserved + metadata + in_flight ==
/// segment_bytes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceUsage {
    /// Index.
    pub device: u16,
    /// As in [`Usage`].
    pub live_bytes: u64,
    /// As in [`Usage`].
    pub dead_bytes: u64,
    /// As in [`Usage`], files that are not there yet left out.
    pub free_bytes: u64,
    /// Free segments that only cleaning takes.
    pub reserved_bytes: u64,
    /// As in [`Usage`].
    pub in_flight_bytes: u64,
    /// Headers and trailers of segments.
    pub metadata_bytes: u64,
    /// Bytes of its segment files.
    pub segment_bytes: u64,
    /// Bytes of its file system that are free; none when it cannot be told.
    pub available_bytes: Option<u64>,
}

/// Sequences of one layout and fingerprint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NamespaceUsage {
    /// Number of the layout in this store.
    pub layout: u32,
    /// Fingerprint, in hexadecimal digits.
    pub fingerprint: String,
    /// Sequences.
    pub sequences: u64,
    /// Committed tokens; a token that forks share counts once per fork.
    pub tokens: u64,
    /// Bytes of their frames, all copies; a frame that forks share counts once.
    pub live_bytes: u64,
    /// Adapters.
    pub adapters: u64,
    /// Bytes of their frames, not among `live_bytes`.
    pub adapter_bytes: u64,
}

impl Usage {
    /// What the parts add up to: [`Usage::capacity_bytes`].
    #[must_use]
    pub fn sum_bytes(&self) -> u64 {
        let used = self.live_bytes + self.dead_bytes + self.in_flight_bytes;
        used + self.free_bytes + self.reserved_bytes + self.metadata_bytes
    }
}

impl Store {
    /// Where the bytes are, as of now.
    ///
    /// # Errors
    /// The free space of a file system cannot be told, and no capacity was set.
    pub fn usage(&self) -> Result<Usage> {
        let inner = &self.inner;
        let devices = &inner.devices;
        let (bytes, namespaces, file_bytes) = {
            let catalog = lock(&inner.catalog);
            let space = lock(&inner.space);
            (space.bytes(devices, &catalog), namespaces(&catalog), space.file_bytes(devices))
        };
        let mut usage = Usage {
            limited: bytes.capacity.is_some(),
            reserved_bytes: bytes.spare_manifest,
            metadata_bytes: bytes.manifest + bytes.superblocks,
            file_bytes,
            preallocated: !bytes.sparse,
            lifetime_bytes: inner.committer.lifetime_bytes(),
            namespaces,
            ..Usage::default()
        };
        let mut available = 0;
        let mut seen = HashSet::new();
        for (index, own) in &bytes.devices {
            let directory = &devices.get(*index)?.directory;
            let space = directory.space();
            // Directories on one file system share what it has.
            let open = devices.get(*index)?.takes_frames();
            if usage.limited || open && seen.insert(directory.identity().device) {
                available += match (&space, usage.limited) {
                    (Ok(space), _) => space.available,
                    (Err(_), true) => 0,
                    (Err(e), false) => return Err(e.duplicate()),
                };
            }
            usage.live_bytes += own.live;
            usage.dead_bytes += own.dead;
            usage.in_flight_bytes += own.in_flight;
            usage.free_bytes += own.free;
            usage.reserved_bytes += own.reserved;
            usage.metadata_bytes += own.metadata;
            usage.devices.push(DeviceUsage {
                device: index.0,
                live_bytes: own.live,
                dead_bytes: own.dead,
                free_bytes: own.free,
                reserved_bytes: own.reserved,
                in_flight_bytes: own.in_flight,
                metadata_bytes: own.metadata,
                segment_bytes: own.files,
                available_bytes: space.ok().map(|space| space.available),
            });
        }
        // A capacity below what there is already is what there is until cleaning has given it back.
        usage.capacity_bytes = bytes.capacity.map_or(file_bytes + available, |capacity| capacity.max(file_bytes));
        let room = usage.capacity_bytes - file_bytes;
        let owed = if usage.limited { bytes.owed_manifest.min(room) } else { 0 };
        usage.reserved_bytes += owed;
        usage.free_bytes += room - owed;
        debug_assert_eq!(usage.sum_bytes(), usage.capacity_bytes, "{usage:?}");
        Ok(usage)
    }
}

fn namespaces(catalog: &Catalog) -> Vec<NamespaceUsage> {
    let mut found: BTreeMap<LayoutId, NamespaceUsage> = BTreeMap::new();
    let mut seen = HashSet::new();
    for meta in catalog.sequences.values() {
        let own = found.entry(meta.layout).or_default();
        let mut bytes = 0;
        for (id, _) in &meta.refs {
            if let Some(frame) = catalog.frames.get(id)
                && seen.insert(*id)
            {
                bytes += frame.locations().map(|location| location.bytes()).sum::<u64>();
            }
        }
        if meta.adapter.is_some() {
            own.adapters += 1;
            own.adapter_bytes += bytes;
        } else {
            own.sequences += 1;
            own.tokens += meta.tokens;
            own.live_bytes += bytes;
        }
    }
    for (id, own) in &mut found {
        own.layout = id.0;
        if let Some(layout) = catalog.layouts.get(id) {
            own.fingerprint = layout.raw().fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        }
    }
    found.into_values().collect()
}
