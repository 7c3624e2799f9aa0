//! The devices of a store by index. Some may be missing, and some may join while others are in use.

use super::device::Device;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use stratakv_format::manifest::{MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::superblock::DEVICES_MAX;

/// Devices by index. A place is filled once. A removed device keeps its place, marked as removed.
pub(crate) struct DeviceList {
    places: Box<[OnceLock<Box<Device>>]>,
    /// One past the highest index in use, now or before.
    slots: AtomicUsize,
}

impl DeviceList {
    pub(crate) fn new(devices: Vec<Device>, slots: usize) -> Self {
        let list = Self {
            places: (0..DEVICES_MAX).map(|_| OnceLock::new()).collect(),
            slots: AtomicUsize::new(slots.min(DEVICES_MAX.into())),
        };
        devices.into_iter().for_each(|device| {
            list.add(device);
        });
        list
    }

    /// Fills a place. Returns false if it is taken.
    pub(crate) fn add(&self, device: Device) -> bool {
        let at = usize::from(device.index.0);
        let Some(place) = self.places.get(at) else { return false };
        let added = place.set(Box::new(device)).is_ok();
        self.slots.fetch_max(at + 1, Ordering::AcqRel);
        added
    }

    /// Returns a device that is a member.
    pub(crate) fn get(&self, index: usize) -> Option<&Device> {
        self.get_any(index).filter(|device| !device.is_removed())
    }

    /// Returns a device, also one that was removed.
    pub(crate) fn get_any(&self, index: usize) -> Option<&Device> {
        self.places.get(index)?.get().map(AsRef::as_ref)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        (0..self.slots()).filter_map(|index| self.get(index))
    }

    /// Returns how many members are present.
    pub(crate) fn len(&self) -> usize {
        self.iter().count()
    }

    /// Returns one past the highest index in use, now or before.
    pub(crate) fn slots(&self) -> usize {
        self.slots.load(Ordering::Acquire)
    }
}

/// Returns the changed members, and the members that hold the manifest in place of those that leave.
///
/// `takers` are the members that take frames. An heir is one of them.
pub(crate) fn with_heirs(mut members: Vec<Member>, takers: &[Member]) -> Vec<Member> {
    for at in 0..members.len() {
        let gone = matches!(members[at].state, MEMBER_LOST | MEMBER_REMOVED) && members[at].manifest_copies > 0;
        if gone {
            members[at].manifest_copies = 0;
            let others = takers.iter().filter(|other| members.iter().all(|member| member.device != other.device));
            // A device that is left alone holds two copies, like a store of one device.
            let heir = match others.collect::<Vec<_>>().as_slice() {
                [alone] if alone.manifest_copies < 2 => Some(Member { manifest_copies: 2, ..**alone }),
                others => others.iter().find(|o| o.manifest_copies == 0).map(|o| Member { manifest_copies: 1, ..**o }),
            };
            members.extend(heir);
        }
    }
    members
}
