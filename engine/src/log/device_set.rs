//! The devices of a store by index. Some may be missing, and some may join while others are in use.

use super::devices::Device;
use crate::layout::{Candidate, Placed};
use crate::metrics::lock;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::superblock::DEVICES_MAX;

/// Bytes that one unit of a member's weight stands for, next to devices that are weighed by size.
const WEIGHT_BYTES: f64 = (1_u64 << 30) as f64;

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

impl Device {
    pub(crate) fn member(&self) -> Member {
        *lock(&self.member)
    }

    /// Returns whether it was declared lost. Nothing is written to a lost device.
    pub(crate) fn is_lost(&self) -> bool {
        self.member().state == MEMBER_LOST
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.member().state == MEMBER_REMOVED
    }

    /// Returns whether it neither leaves nor is gone.
    pub(crate) fn is_active(&self) -> bool {
        self.member().state == MEMBER_ACTIVE
    }

    /// Returns whether it takes new frames.
    pub(crate) fn takes_frames(&self) -> bool {
        self.is_active() && self.directory.poison().check().is_ok()
    }

    /// Returns its share of the data: the weight it joined with, or its size.
    fn weight(&self) -> f64 {
        match self.member().weight.get() {
            0 => self.total_bytes as f64,
            weight => f64::from(weight) * WEIGHT_BYTES,
        }
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

impl super::Devices {
    /// Replaces what the manifest says of a device.
    pub(crate) fn put_member(&self, member: Member) {
        if let Some(device) = self.list.get(usize::from(member.device.get())) {
            *lock(&device.member) = member;
        }
    }

    /// Returns the changed members with the heirs of their manifest copies: see [`with_heirs`].
    pub(crate) fn change(&self, changed: impl Iterator<Item = Member>) -> Vec<Member> {
        let others: Vec<Member> = self.list.iter().filter(|device| device.takes_frames()).map(Device::member).collect();
        with_heirs(changed.collect(), &others)
    }

    /// Returns whether a device is present and not poisoned.
    pub(crate) fn is_sound(&self, device: DeviceIndex) -> bool {
        let own = self.list.get(usize::from(device.0));
        own.is_some_and(|own| !own.is_lost() && own.directory.poison().check().is_ok())
    }

    /// Returns how many devices take frames.
    pub(crate) fn open_count(&self) -> usize {
        self.list.iter().filter(|device| device.takes_frames()).count()
    }

    /// Returns whether late reads are tried on other copies.
    pub(crate) fn hedges(&self) -> bool {
        self.latencies.is_on() && !self.list.iter().any(|device| device.directory.is_simulated())
    }

    /// Returns the devices for a frame of these parts, the best first. `parts` are layers with their bytes.
    pub(crate) fn order(&self, placed: &Placed, parts: &[(usize, u64)], pointer: usize) -> Vec<DeviceIndex> {
        let candidate = |index| match self.list.get(index) {
            Some(device) if device.takes_frames() => Candidate { weight: device.weight(), open: true },
            _ => Candidate { weight: 1.0, open: false },
        };
        let candidates: Vec<Candidate> = (0..self.list.slots()).map(candidate).collect();
        placed.order(&candidates, parts, pointer).into_iter().map(|index| DeviceIndex(index as u16)).collect()
    }
}
