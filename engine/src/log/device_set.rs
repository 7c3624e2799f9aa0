//! The devices of a store by index: some may be missing, some may join while others are in use.

use super::devices::Device;
use crate::layout::{Candidate, Placed};
use crate::metrics::lock;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::{MEMBER_ACTIVE, MEMBER_LOST, MEMBER_REMOVED, Member};
use stratakv_format::superblock::DEVICES_MAX;

/// What one unit of a member's weight stands for beside devices that are weighed by their size: a GiB.
const WEIGHT_BYTES: f64 = (1_u64 << 30) as f64;

/// Devices by index. A place is filled once; who is gone for good keeps it, marked as such.
pub(crate) struct DeviceList {
    places: Box<[OnceLock<Box<Device>>]>,
    /// One past the highest index that is or was in use.
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

    /// Fills a place; `false` when it is taken.
    pub(crate) fn add(&self, device: Device) -> bool {
        let at = usize::from(device.index.0);
        let Some(place) = self.places.get(at) else { return false };
        let added = place.set(Box::new(device)).is_ok();
        self.slots.fetch_max(at + 1, Ordering::AcqRel);
        added
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Device> {
        self.get_any(index).filter(|device| !device.is_removed())
    }

    /// Also one that is no member any more.
    pub(crate) fn get_any(&self, index: usize) -> Option<&Device> {
        self.places.get(index)?.get().map(AsRef::as_ref)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        (0..self.slots()).filter_map(|index| self.get(index))
    }

    /// Devices that are there.
    pub(crate) fn len(&self) -> usize {
        self.iter().count()
    }

    /// One past the highest index that is or was in use.
    pub(crate) fn slots(&self) -> usize {
        self.slots.load(Ordering::Acquire)
    }
}

impl Device {
    pub(crate) fn member(&self) -> Member {
        *lock(&self.member)
    }

    /// It has been lost: nothing is written to it any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.member().state == MEMBER_LOST
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.member().state == MEMBER_REMOVED
    }

    /// It neither leaves nor is gone.
    pub(crate) fn is_active(&self) -> bool {
        self.member().state == MEMBER_ACTIVE
    }

    /// Whether new frames may go to it.
    pub(crate) fn takes_frames(&self) -> bool {
        self.is_active() && self.directory.poison().check().is_ok()
    }

    /// Its share of the data: as was said or measured when it joined, else by its size.
    fn weight(&self) -> f64 {
        match self.member().weight.get() {
            0 => self.total_bytes as f64,
            weight => f64::from(weight) * WEIGHT_BYTES,
        }
    }
}

/// Members that change, and those that have the manifest in place of those of them that go: of these, which take frames.
pub(crate) fn with_heirs(mut members: Vec<Member>, takers: &[Member]) -> Vec<Member> {
    for at in 0..members.len() {
        let gone = matches!(members[at].state, MEMBER_LOST | MEMBER_REMOVED) && members[at].manifest_copies > 0;
        if gone {
            members[at].manifest_copies = 0;
            let others = takers.iter().filter(|other| members.iter().all(|member| member.device != other.device));
            // One that is left alone has it twice, as one that was alone from the start.
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
    /// What the manifest says of a device from now on.
    pub(crate) fn put_member(&self, member: Member) {
        if let Some(device) = self.list.get(usize::from(member.device.get())) {
            *lock(&device.member) = member;
        }
    }

    /// Members as they are when these change: where one goes that has the manifest, another has it in its place.
    pub(crate) fn change(&self, changed: impl Iterator<Item = Member>) -> Vec<Member> {
        let others: Vec<Member> = self.list.iter().filter(|device| device.takes_frames()).map(Device::member).collect();
        with_heirs(changed.collect(), &others)
    }

    /// Whether a device is there and has not failed for good.
    pub(crate) fn is_sound(&self, device: DeviceIndex) -> bool {
        let own = self.list.get(usize::from(device.0));
        own.is_some_and(|own| !own.is_lost() && own.directory.poison().check().is_ok())
    }

    /// Devices that take frames.
    pub(crate) fn open_count(&self) -> usize {
        self.list.iter().filter(|device| device.takes_frames()).count()
    }

    /// Whether reads that are late are tried on other copies.
    pub(crate) fn hedges(&self) -> bool {
        self.latencies.is_on() && !self.list.iter().any(|device| device.directory.is_simulated())
    }

    /// The devices for a frame of these parts, the best first.
    pub(crate) fn order(&self, placed: &Placed, parts: &[(usize, u64)], pointer: usize) -> Vec<DeviceIndex> {
        let candidate = |index| match self.list.get(index) {
            Some(device) if device.takes_frames() => Candidate { weight: device.weight(), open: true },
            _ => Candidate { weight: 1.0, open: false },
        };
        let candidates: Vec<Candidate> = (0..self.list.slots()).map(candidate).collect();
        placed.order(&candidates, parts, pointer).into_iter().map(|index| DeviceIndex(index as u16)).collect()
    }
}
