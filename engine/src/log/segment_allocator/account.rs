//! The account of bytes: what is live, dead, in flight, free or reserved, per device.

use super::SegmentAllocator;
use crate::catalog::Catalog;
use crate::log::devices::Devices;
use stratakv_format::superblock::SLOTS;
use stratakv_format::{DeviceIndex, PAGE_BYTES, SegmentId};

/// Bytes of the segments of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceBytes {
    pub(crate) live: u64,
    pub(crate) dead: u64,
    pub(crate) in_flight: u64,
    /// Free pages of open segments, and free segments beyond the reserve. On a device that takes no frames they count
    /// as dead.
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    /// Headers and trailers of segments.
    pub(crate) metadata: u64,
    pub(crate) files: u64,
}

/// Bytes of the whole store.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpaceBytes {
    pub(crate) devices: Vec<(DeviceIndex, DeviceBytes)>,
    pub(crate) manifest: u64,
    pub(crate) spare_manifest: u64,
    /// Bytes that the capacity leaves and that are kept for the next manifest generation.
    pub(crate) owed_manifest: u64,
    pub(crate) superblocks: u64,
    pub(crate) capacity: Option<u64>,
    pub(crate) sparse: bool,
}

impl SegmentAllocator {
    /// Returns the bytes of all files: segments, manifest, superblocks.
    pub(crate) fn file_bytes(&self, devices: &Devices) -> u64 {
        let segments: u64 = self.devices.values().map(super::DeviceSpace::files).sum();
        let superblocks = (devices.list.len() * SLOTS * PAGE_BYTES) as u64;
        segments * self.segment_bytes() + self.metadata_bytes + self.spare_bytes + superblocks
    }

    /// Returns the bytes that the capacity still allows.
    pub(crate) fn allowance(&self, devices: &Devices) -> u64 {
        self.capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(self.file_bytes(devices)))
    }

    /// Returns the bytes that the next manifest generation needs beyond its spare files.
    pub(super) fn owed_bytes(&self) -> u64 {
        self.metadata_bytes.saturating_sub(self.spare_bytes)
    }

    pub(crate) fn segment_bytes(&self) -> u64 {
        u64::from(self.segment_pages) * PAGE_BYTES as u64
    }

    pub(crate) fn capacity(&self) -> Option<u64> {
        self.capacity
    }

    pub(crate) fn set_capacity(&mut self, capacity: Option<u64>) {
        self.capacity = capacity;
    }

    /// Returns the account of all bytes.
    ///
    /// The caller holds the catalog's lock, because pages move from in flight to live under it.
    pub(crate) fn bytes(&self, devices: &Devices, catalog: &Catalog) -> SpaceBytes {
        let list = self.devices.iter().map(|(device, own)| {
            let mut bytes = DeviceBytes { files: own.files() * self.segment_bytes(), ..DeviceBytes::default() };
            for (id, active) in own.open_segments() {
                self.add(&mut bytes, catalog, (*device, id), u64::from(active));
            }
            for id in &own.sealed {
                self.add(&mut bytes, catalog, (*device, *id), 0);
            }
            let kept = super::reserve(own.used()).min(own.free.len() as u64);
            bytes.reserved = kept * self.segment_bytes();
            // Files that are being created or removed hold nothing.
            let others = own.aside.len() as u64 + own.opening + own.leaving;
            bytes.free += (own.free.len() as u64 - kept + others) * self.segment_bytes();
            if !super::takes_frames(devices, *device) {
                // No frame may use this space. It comes back when the device leaves.
                bytes.dead += std::mem::take(&mut bytes.free) + std::mem::take(&mut bytes.reserved);
            }
            (*device, bytes)
        });
        SpaceBytes {
            devices: list.collect(),
            manifest: self.metadata_bytes,
            spare_manifest: self.spare_bytes,
            owed_manifest: self.owed_bytes(),
            superblocks: (devices.list.len() * SLOTS * PAGE_BYTES) as u64,
            capacity: self.capacity,
            sparse: self.sparse,
        }
    }

    /// Adds a used segment with `room` free pages.
    fn add(&self, bytes: &mut DeviceBytes, catalog: &Catalog, key: (DeviceIndex, SegmentId), room: u64) {
        let page = PAGE_BYTES as u64;
        let in_flight = self.in_flight(key);
        let used = u64::from(self.segment_pages) - 2 - room;
        let live = catalog.segments.get(&key).map_or(0, |meta| meta.live_pages);
        // A damaged manifest may have frames that overlap and sum up to more than the segment has.
        let live = live.min(used.saturating_sub(in_flight));
        bytes.live += live * page;
        bytes.in_flight += in_flight * page;
        bytes.dead += used.saturating_sub(live + in_flight) * page;
        bytes.free += room * page;
        bytes.metadata += 2 * page;
    }
}

impl super::DeviceSpace {
    /// Returns the open segments with their free pages.
    fn open_segments(&self) -> impl Iterator<Item = (SegmentId, u32)> {
        let open = self.streams.values().chain(&self.partial);
        open.map(|active| (active.handle.key.1, active.room()))
    }
}
