//! Membership in a commit: devices that join, leave, or failed and are given up, where the store can do without them.

use super::{CommitFailure, Committer, NewGeneration, Queued};
use crate::catalog::RecordBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::log::devices::{Device, Failures};
use crate::metrics::lock;
use std::collections::BTreeSet;
use stratakv_format::DeviceIndex;
use stratakv_format::manifest::{self as m, Kind};
use zerocopy::little_endian::U64;

impl Committer {
    /// Appends records; devices that fail meanwhile are given up, if that can be.
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
        // The others have it. Those that failed are lost, durably, before anything is acknowledged.
        let lost = self.lost_to(failures, &[])?;
        let members = self.members_of(&[], &lost);
        let mut records = RecordBuffer::default();
        members.iter().for_each(|member| records.push(Kind::Member, member, &[]));
        match self.record(records, &mut [], false) {
            // What was to be recorded is: the caller must not try again.
            Err(CommitFailure::Stalled(e)) => Err(CommitFailure::Broken(e)),
            Err(broken) => Err(broken),
            Ok(()) => self.change_members(&members),
        }
    }

    /// The devices that failed, when the store can do without them: everything that was committed, is being committed, or is open
    /// has a copy on another.
    ///
    /// # Errors
    /// The first failure, when it cannot, or when it was not that of a device.
    pub(super) fn lost_to(&self, mut failures: Failures, group: &[Queued]) -> Result<BTreeSet<DeviceIndex>> {
        let lost: BTreeSet<DeviceIndex> = failures.keys().copied().collect();
        let of_device = |e: &Error| matches!(e.kind(), ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned);
        let other = failures.iter().find(|(_, e)| !of_device(e)).map(|(device, _)| *device);
        let first = other.or_else(|| lost.first().copied()).and_then(|device| failures.remove(&device));
        let Some(first) = first else { return Ok(lost) };
        if other.is_none() && self.can_do_without(&lost, group) { Ok(lost) } else { Err(first) }
    }

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
        let committed = || catalog.frames.values().map(|frame| frame.locations().map(|at| at.device).collect());
        one_is_left
            && announced.into_iter().all(elsewhere)
            && committed().all(elsewhere)
            && lock(&self.space).open_frames().into_iter().all(elsewhere)
    }

    /// What a commit records of members: what the group wants, and that these devices are lost.
    pub(super) fn members_of(&self, group: &[Queued], lost: &BTreeSet<DeviceIndex>) -> Vec<m::Member> {
        let epoch = U64::new(lock(&self.manifest).next_epoch().saturating_add(1));
        let failed = lost.iter().filter_map(|device| self.devices.list.get(usize::from(device.0)));
        let failed = failed.map(Device::member).filter(|member| member.state != m::MEMBER_LOST);
        let failed = self.devices.change(failed.map(|member| m::Member { state: m::MEMBER_LOST, ..member }));
        let wanted = group.iter().flat_map(|queued| queued.request.members.iter().copied());
        wanted.chain(failed).map(|member| m::Member { epoch, ..member }).collect()
    }

    /// What the manifest says of these devices since its last batch takes effect: their epoch is in the superblocks of those that
    /// are left, and the next generation lies on them, before anything is acknowledged, unless there is no room for it.
    pub(super) fn change_members(&self, members: &[m::Member]) -> Result<(), CommitFailure> {
        let Some(epoch) = members.iter().map(|member| member.epoch.get()).max() else { return Ok(()) };
        // All of them as they are by now: one may have failed since, and where that was while these were recorded, those who join
        // with them must get the epoch in the same two rounds as the others.
        lock(&self.catalog).members.values().for_each(|member| self.devices.put_member(*member));
        self.devices.suspects.owe();
        let mut manifest = lock(&self.manifest);
        manifest.members_changed();
        let epoch = epoch.max(manifest.epoch());
        manifest.set_next_epoch(epoch);
        match self.checkpoint(&mut manifest, &NewGeneration { beyond: true, ..NewGeneration::for_more() }) {
            // The manifest has it, and the superblocks do with the next generation that finds room.
            Err(CommitFailure::Stalled(_)) => {
                self.measure(&manifest);
                Ok(())
            }
            other => other,
        }
    }

    /// Nothing more is written to devices that go. That they do must not stand on them alone: with them, they would be refused, and
    /// without them missing. Who wants what cannot be is refused it, and nothing else.
    pub(super) fn let_go_of_leaving(
        &self,
        group: &mut [Queued],
        lost: &BTreeSet<DeviceIndex>,
    ) -> Result<(), CommitFailure> {
        for device in lost {
            self.let_go(*device).map_err(|failed| match failed {
                CommitFailure::Stalled(e) | CommitFailure::Broken(e) => CommitFailure::Broken(e),
            })?;
        }
        for queued in group {
            let goes = |member: &&m::Member| matches!(member.state, m::MEMBER_LOST | m::MEMBER_REMOVED);
            let going = queued.request.members.iter().filter(goes).map(|member| DeviceIndex(member.device.get()));
            match going.collect::<Vec<_>>().into_iter().try_for_each(|device| self.let_go(device)) {
                Err(CommitFailure::Stalled(e)) => {
                    queued.request.members.clear();
                    queued.request.refused = Some(e.during("no other device has room for the manifest"));
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Nothing more is written to a device that goes. Where it alone has the manifest, others get it first.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: they have no room for it. Nothing changed. Or a write failed.
    pub(super) fn let_go(&self, device: DeviceIndex) -> Result<(), CommitFailure> {
        let mut manifest = lock(&self.manifest);
        if !manifest.survives(device) {
            self.checkpoint(&mut manifest, &NewGeneration::for_more())?;
        }
        manifest.forget(device).map_err(CommitFailure::Stalled)
    }
}
