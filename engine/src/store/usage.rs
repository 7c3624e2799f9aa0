//! The usage of space: what the bytes of a store are used for.

use super::Store;
use crate::catalog::Catalog;
use crate::error::Result;
use crate::metrics::lock;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use stratakv_format::LayoutId;

/// The bytes of a store by use. Always `live + dead + free + reserved + metadata + in_flight == capacity`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// The capacity that was set. Without one, the bytes of all files plus the free bytes of the file systems.
    pub capacity_bytes: u64,
    /// True if a capacity was set.
    pub limited: bool,
    /// Frames that sequences refer to.
    pub live_bytes: u64,
    /// Frames that nothing refers to any more, and unused pages of sealed segments. Cleaning makes them free.
    pub dead_bytes: u64,
    /// Bytes for appends: unused pages of open segments, free segments, and segments that are not created yet.
    pub free_bytes: u64,
    /// Free segments that only cleaning takes, and the files of the next manifest generation.
    pub reserved_bytes: u64,
    /// Manifest, superblocks, headers and trailers of segments.
    pub metadata_bytes: u64,
    /// Frames that no commit has named yet.
    pub in_flight_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// True if all segment files that were created since the store was opened have their blocks reserved. If the file
    /// system cannot do that (`false`), they take space as they are written. A device may then be full although
    /// `free_bytes` is above 0.
    pub preallocated: bool,
    /// Bytes written to the devices since the store was created: data, metadata and moved data.
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
    /// As in [`Usage`], without segments that are not created yet.
    pub free_bytes: u64,
    /// Free segments that only cleaning takes.
    pub reserved_bytes: u64,
    /// As in [`Usage`].
    pub in_flight_bytes: u64,
    /// Headers and trailers of segments.
    pub metadata_bytes: u64,
    /// Bytes of its segment files.
    pub segment_bytes: u64,
    /// Bytes of its file system that are free, or none if the system does not report them.
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
    /// Committed tokens. A token that forks share counts once per fork.
    pub tokens: u64,
    /// Bytes of their frames, all copies. A frame that forks share counts once.
    pub live_bytes: u64,
    /// Adapters.
    pub adapters: u64,
    /// Bytes of their frames, which `live_bytes` does not include.
    pub adapter_bytes: u64,
}

impl Usage {
    /// Returns the sum of the parts, which equals [`Usage::capacity_bytes`].
    #[must_use]
    pub fn sum_bytes(&self) -> u64 {
        let used = self.live_bytes + self.dead_bytes + self.in_flight_bytes;
        used + self.free_bytes + self.reserved_bytes + self.metadata_bytes
    }
}

impl Store {
    /// Returns the usage of space now.
    ///
    /// # Errors
    /// A file system does not report its free space, and no capacity was set.
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
            // Directories on one file system share its free space.
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
        // If the files already exceed the capacity, their bytes count as the capacity until cleaning has freed the
        // rest.
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
    for (id, meta) in &catalog.sequences {
        let is_listed = catalog.is_listed(*id);
        let own = found.entry(meta.layout).or_default();
        let mut bytes = 0;
        for (frame, _) in &meta.refs {
            if seen.insert(*frame)
                && let Some(frame) = catalog.frames.get(frame)
            {
                bytes += frame.locations().map(|location| location.bytes()).sum::<u64>();
            }
        }
        if meta.adapter.is_some() {
            own.adapters += u64::from(is_listed);
            own.adapter_bytes += bytes;
        } else {
            own.sequences += u64::from(is_listed);
            own.tokens += if is_listed { meta.tokens } else { 0 };
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
