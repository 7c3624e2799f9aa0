//! Devices in a commit: devices that join, devices that leave, and devices that failed and are declared lost.
//!
//! A device is declared lost only if every frame that was committed, is being committed or is open has a copy
//! elsewhere.

use super::failure::CommitFailure;
use super::generation::NewGeneration;
use super::{Committer, Queued};
use crate::catalog::RecordBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::log::device::Device;
use crate::log::devices::Failures;
use crate::metrics::lock;
use std::collections::BTreeSet;
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::{self as m, Kind};
use zerocopy::little_endian::U64;

impl Committer {
    /// Appends records to the manifest. Devices that fail meanwhile are given up, if the store can do without them.
    pub(super) fn record(
        &self,
        records: RecordBuffer,
        group: &mut [Queued],
        counted: bool,
    ) -> Result<(), CommitFailure> {
        let failures = self.append(records, group, counted)?;
        if failures.is_empty() {
            return Ok(());
        }
        // The other devices have the records. Failed devices are recorded as lost before anything is acknowledged.
        let lost = self.lost_to(failures, &[])?;
        let members = self.members_of(&[], &lost);
        let mut records = RecordBuffer::default();
        members.iter().for_each(|member| records.push(Kind::Member, member, &[]));
        match self.record(records, &mut [], false) {
            // The records themselves are durable, so the caller must not try again.
            Err(CommitFailure::Stalled(e)) => Err(CommitFailure::Broken(e)),
            Err(broken) => Err(broken),
            Ok(()) => self.change_members(&members),
        }
    }

    /// Returns the devices that failed, if the store can do without them.
    ///
    /// # Errors
    /// The first failure, if the store cannot do without the devices or if the failure is not one of a device.
    pub(super) fn lost_to(&self, mut failures: Failures, group: &[Queued]) -> Result<BTreeSet<DeviceIndex>> {
        let lost: BTreeSet<DeviceIndex> = failures.keys().copied().collect();
        let of_device = |e: &Error| matches!(e.kind(), ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned);
        let other = failures.iter().find(|(_, e)| !of_device(e)).map(|(device, _)| *device);
        let first = other.or_else(|| lost.first().copied()).and_then(|device| failures.remove(&device));
        let Some(first) = first else { return Ok(lost) };
        if other.is_some() || !self.can_do_without(&lost, group) {
            return Err(first);
        }
        lost.iter().for_each(|device| event!(error, device = device, cause = first, "a device that fails is given up"));
        Ok(lost)
    }

    /// Returns whether everything that was committed, is being committed or is open has a copy on a sound device.
    fn can_do_without(&self, lost: &BTreeSet<DeviceIndex>, group: &[Queued]) -> bool {
        let sound = |device: DeviceIndex| !lost.contains(&device) && self.devices.is_sound(device);
        let changing: BTreeSet<u16> =
            group.iter().flat_map(|queued| &queued.request.members).map(|member| member.device.get()).collect();
        let stays = |member: &m::Member| member.state == m::MEMBER_ACTIVE && !changing.contains(&member.device.get());
        let announced = group.iter().flat_map(|queued| queued.request.records.announced().into_values());
        let catalog = lock(&self.catalog);
        let one_is_left = catalog.members.values().any(|m| stays(m) && sound(DeviceIndex(m.device.get())));
        let elsewhere = |mut devices: Vec<DeviceIndex>| {
            let hit = devices.iter().any(|device| lost.contains(device));
            devices.retain(|device| sound(*device));
            !hit || !devices.is_empty()
        };
        // No sequence needs a derived frame.
        let needed = || catalog.frames.values().filter(|frame| !frame.derived);
        let committed = || needed().map(|frame| frame.locations().map(|at| at.device).collect());
        one_is_left
            && announced.into_iter().all(elsewhere)
            && committed().all(elsewhere)
            && lock(&self.space).open_frames().into_iter().all(elsewhere)
    }

    /// Returns the members that a commit records: those that the group changes, and these devices as lost ones.
    pub(super) fn members_of(&self, group: &[Queued], lost: &BTreeSet<DeviceIndex>) -> Vec<m::Member> {
        let epoch = U64::new(lock(&self.manifest).next_epoch().saturating_add(1));
        let failed = lost.iter().filter_map(|device| self.devices.list.get(usize::from(device.0)));
        let failed = failed.map(Device::member).filter(|member| member.state != m::MEMBER_LOST);
        let failed = self.devices.change(failed.map(|member| m::Member { state: m::MEMBER_LOST, ..member }));
        let wanted = group.iter().flat_map(|queued| queued.request.members.iter().copied());
        wanted.chain(failed).map(|member| m::Member { epoch, ..member }).collect()
    }

    /// Makes recorded changes of members take effect before anything is acknowledged: the remaining devices get the
    /// next generation, and the new epoch in their superblocks. Without space for a generation both happen with the
    /// next one that finds some.
    pub(super) fn change_members(&self, members: &[m::Member]) -> Result<(), CommitFailure> {
        let Some(epoch) = members.iter().map(|member| member.epoch.get()).max() else { return Ok(()) };
        // All members, as they are by now. One may have failed while these were recorded. Devices that join must get
        // the epoch in the same two rounds as the others.
        lock(&self.catalog).members.values().for_each(|member| self.devices.put_member(*member));
        self.devices.suspects.owe();
        let mut manifest = lock(&self.manifest);
        manifest.members_changed();
        let epoch = epoch.max(manifest.epoch());
        manifest.set_next_epoch(epoch);
        match self.checkpoint(&mut manifest, &NewGeneration { beyond: true, ..NewGeneration::for_more() }) {
            // The manifest has the change. The superblocks get it with the next generation that finds space.
            Err(CommitFailure::Stalled(_)) => {
                self.measure(&manifest);
                Ok(())
            }
            other => other,
        }
    }

    /// Stops writing to devices that leave. Another device must hold the manifest that says so: a store opened with
    /// them would refuse them, and one opened without them would miss them. A request that cannot be met loses its
    /// change of members only.
    pub(super) fn release_leaving_devices(
        &self,
        group: &mut [Queued],
        lost: &BTreeSet<DeviceIndex>,
    ) -> Result<(), CommitFailure> {
        for device in lost {
            self.release_device(*device).map_err(|failed| match failed {
                CommitFailure::Stalled(e) | CommitFailure::Broken(e) => CommitFailure::Broken(e),
            })?;
        }
        for queued in group {
            let goes = |member: &&m::Member| matches!(member.state, m::MEMBER_LOST | m::MEMBER_REMOVED);
            let going = queued.request.members.iter().filter(goes).map(|member| DeviceIndex(member.device.get()));
            match going.collect::<Vec<_>>().into_iter().try_for_each(|device| self.release_device(device)) {
                Err(CommitFailure::Stalled(e)) => {
                    queued.request.members.clear();
                    queued.request.refused =
                        Some(e.during("remove device: no other device has space for the manifest"));
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Stops writing to a device. If it alone has the manifest, other devices get the manifest first.
    ///
    /// # Errors
    /// [`CommitFailure::Stalled`]: the other devices have no space for the manifest. Nothing changed.
    /// [`CommitFailure::Broken`]: a write failed.
    pub(super) fn release_device(&self, device: DeviceIndex) -> Result<(), CommitFailure> {
        let mut manifest = lock(&self.manifest);
        if !manifest.survives(device) {
            self.checkpoint(&mut manifest, &NewGeneration::for_more())?;
        }
        manifest.forget(device).map_err(CommitFailure::Stalled)
    }
}
