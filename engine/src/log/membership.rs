//! Membership of devices: which take frames, and in which order a frame tries them.

use super::device::Device;
use super::device_set::with_heirs;
use super::devices::Devices;
use crate::layout::{Candidate, PlacedBytes};
use crate::metrics::lock;
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::Member;

impl Devices {
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
        self.latencies.is_on() && self.environment.measures_time()
    }

    /// Returns the devices for a frame of these parts, the best first. `parts` are layers with their bytes.
    pub(crate) fn order(&self, placed: &PlacedBytes, parts: &[(usize, u64)], pointer: usize) -> Vec<DeviceIndex> {
        let candidate = |index| match self.list.get(index) {
            Some(device) if device.takes_frames() => Candidate { weight: device.weight(), open: true },
            _ => Candidate { weight: 1.0, open: false },
        };
        let candidates: Vec<Candidate> = (0..self.list.slots()).map(candidate).collect();
        placed.order(&candidates, parts, pointer).into_iter().map(|index| DeviceIndex(index as u16)).collect()
    }
}
