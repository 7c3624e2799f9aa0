//! Disks that are damaged, lost, removed and added again, in stores with several copies.

use super::{Runner, StepResult, Stop, failed};
use crate::sim::case::{Regime, SLOTS};
use crate::sim::coverage;
use stratakv::sim::{Event, events};
use stratakv::{Error, ErrorKind, Store, StoreOptions};

/// The largest number of rounds of reading and repair after a disk was damaged.
const HEALINGS: usize = 8;

impl Runner<'_> {
    /// Returns whether every frame has all its copies, and more than one.
    fn has_copies(&self) -> bool {
        let roomy = !self.limited && self.case.regime == Regime::Plain;
        self.case.copies > 1 && roomy && !self.changed
    }

    /// Returns whether the loss of a disk loses no data.
    pub(super) fn may_lose(&self, disk: usize) -> bool {
        self.has_copies() && !self.flipped && self.disks.len() > 1 && self.disks.contains(&disk)
    }

    /// Records that the store gave up a disk after a failure.
    pub(super) fn note_given_up(&mut self) {
        let lost = self.store.as_ref().is_some_and(|store| !store.health().lost.is_empty());
        if lost && !self.changed {
            self.coverage.add(coverage::DISK_GIVEN_UP);
            self.changed = true;
        }
    }

    /// Opens the store without a disk. An open that does not allow this must fail.
    pub(super) fn open_without(&mut self, disk: usize) -> StepResult {
        self.note(|| format!("disk {disk} does not come back"));
        self.disks.retain(|own| *own != disk);
        let refused = self.simulation.open_on(self.options(), &self.disks).err().map(|e| e.kind());
        if refused != Some(ErrorKind::Configuration) {
            return failed(format!("opened without disk {disk}: {refused:?}"));
        }
        self.changed = true;
        self.open_with(self.options().allow_degraded(true))?;
        self.coverage.add(coverage::DISK_LOST);
        Ok(())
    }

    /// Repairs the store. The repair must leave nothing to do.
    pub(super) fn repair_all(&mut self) -> StepResult {
        self.mark_commits();
        let repaired = self.store()?.repair();
        self.by_itself(0, repaired.is_ok())?;
        // A repair commits only if it has something to do, and then commits all queued changes too.
        if repaired.is_ok() && events(Event::GroupCommit) > self.commits {
            self.model.sync_attempted(true);
        }
        match repaired {
            Ok(done) if done.left == 0 => Ok(()),
            Ok(_) if self.simulation.is_down() => Err(Stop::Down),
            Ok(done) => failed(format!("repair leaves work: {done:?}")),
            Err(e) => self.fault("repair", &e),
        }
    }

    fn other_copies(&self) -> StepResult<u64> {
        Ok(self.store()?.status().devices.iter().map(|device| device.counters.other_copies).sum())
    }

    /// Flips a bit in every page of every segment of a disk.
    fn rot_disk(&self, disk: usize) {
        for path in self.simulation.files(disk).into_iter().filter(|path| path.starts_with("segments/")) {
            let Some(mut bytes) = self.simulation.contents(disk, &path) else { continue };
            let pages = bytes.len() / 4096;
            // The header and trailer of a segment stay, because they have no copies.
            for (nth, page) in bytes.chunks_mut(4096).enumerate().take(pages.saturating_sub(1)).skip(1) {
                page[(nth * 331 + self.case.seed as usize) % 4096] ^= 4;
            }
            self.simulation.replace(disk, &path, &bytes);
        }
    }

    /// Damages a disk. All reads must still succeed, and after repairs no read may need another copy.
    pub(super) fn heal(&mut self, slot: usize) -> StepResult {
        if !self.has_copies() || self.flipped {
            return self.check(slot);
        }
        // The damage must hit the medium, so everything is written first.
        self.close_all()?;
        let flushed = self.store()?.flush();
        self.model.sync_attempted(flushed.is_ok());
        flushed.or_else(|e| self.fault("flush", &e))?;
        self.flipped = true;
        self.rot_disk(self.disks[slot % self.disks.len()]);
        let mut found = false;
        // A repaired copy has a new place. Later reads may choose other copies, which may be damaged too.
        for _ in 0..HEALINGS {
            let before = self.other_copies()?;
            self.check(slot)?;
            if self.other_copies()? == before {
                break;
            }
            found = true;
            self.repair_all()?;
        }
        let before = self.other_copies()?;
        self.check(slot)?;
        if self.other_copies()? != before {
            return failed("a copy that was found rotten was not healed");
        }
        if found {
            self.coverage.add(coverage::HEALED);
        }
        Ok(())
    }

    /// Returns the device index of a disk, or none if it is not a device of the store.
    fn index(&self, disk: usize) -> StepResult<Option<u16>> {
        let path = format!("simulated-{disk}");
        Ok(self.store()?.status().devices.iter().find(|device| device.path == path).map(|device| device.index))
    }

    fn close_all(&mut self) -> StepResult {
        (0..SLOTS).try_for_each(|slot| self.close(slot))
    }

    pub(super) fn lose(&mut self, disk: usize) -> StepResult {
        if !self.may_lose(disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.changed = true;
        let lost = self.store()?.declare_lost(index);
        self.by_itself(0, lost.is_ok())?;
        self.model.sync_attempted(lost.is_ok());
        match lost {
            Ok(()) => self.coverage.add(coverage::DISK_LOST),
            Err(e) => return self.fault("declare a disk lost", &e),
        }
        self.close_all()?;
        self.repair_all()?;
        self.must_have_left(disk)?;
        for slot in 0..SLOTS {
            self.check(slot)?;
        }
        Ok(())
    }

    /// Checks that a lost disk is no device of the repaired store, because no frame is left on it.
    fn must_have_left(&self, disk: usize) -> StepResult {
        let sound = self.readers.is_empty() && self.simulation.faults_hit() == 0 && !self.simulation.is_down();
        match sound && self.index(disk)?.is_some() {
            true => failed(format!("disk {disk} was lost, the store was repaired, and the disk is still a device")),
            false => Ok(()),
        }
    }

    pub(super) fn remove(&mut self, disk: usize) -> StepResult {
        if self.disks.len() < 2 || !self.disks.contains(&disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.close_all()?;
        self.changed = true;
        let removed = self.store()?.remove_device(index);
        self.by_itself(0, removed.is_ok())?;
        self.model.sync_attempted(removed.is_ok());
        match removed {
            Ok(_) => {
                self.coverage.add(coverage::DISK_REMOVED);
                self.disks.retain(|own| *own != disk);
                Ok(())
            }
            // The other disks are full, damaged or missing.
            Err(e) if matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::Busy | ErrorKind::NoSpace) => {
                self.note(|| format!("disk {disk} stays: {e:?}"));
                Ok(())
            }
            Err(e) => self.fault("remove a disk", &e),
        }
    }

    pub(super) fn add(&mut self, disk: usize) -> StepResult {
        if disk >= self.case.geometry.devices || self.disks.contains(&disk) || self.index(disk)?.is_some() {
            return Ok(());
        }
        // If the power fails now, only the next open tells whether the disk is a member.
        self.disks.push(disk);
        self.disks.sort_unstable();
        let added = self.simulation.add_device(self.store()?, disk);
        self.by_itself(0, added.is_ok())?;
        self.model.sync_attempted(added.is_ok());
        match added {
            Ok(_) => {
                self.coverage.add(coverage::DISK_BACK);
                Ok(())
            }
            // The store holds the directory of a disk that left it until it is closed.
            Err(e) if e.kind() == ErrorKind::InUse && self.changed => {
                self.disks.retain(|own| *own != disk);
                Ok(())
            }
            Err(e) => self.fault("add a disk", &e),
        }
    }

    /// Opens the store on its disks. Drops each disk that the error names, because it left or its joining was
    /// interrupted.
    pub(super) fn open_store(&mut self, options: &StoreOptions) -> Result<Store, Error> {
        loop {
            let opened = self.simulation.open_on(options.clone(), &self.disks);
            let left = self.changed || self.simulation.faults_hit() > 0;
            let refused = match &opened {
                Err(e) if left && matches!(e.kind(), ErrorKind::StaleDevice | ErrorKind::Configuration) => {
                    let named = |disk: &usize| e.to_string().contains(&format!("simulated-{disk}:"));
                    self.disks.iter().position(named)
                }
                _ => None,
            };
            match refused {
                Some(at) if self.disks.len() > 1 => {
                    let disk = self.disks.remove(at);
                    self.changed = true;
                    self.note(|| format!("disk {disk} has left: {:?}", opened.err()));
                }
                _ => return opened,
            }
        }
    }

    /// Returns whether the manifest may be unreadable, because the only remaining disk holds its only copy.
    pub(super) fn manifest_may_be_gone(&self, e: &Error) -> bool {
        let text = e.to_string();
        let unreadable = e.kind() == ErrorKind::Io && text.contains("every copy of the manifest");
        let flipped = self.simulation.flips_hit() > 0 && text.contains("the manifest is damaged in every copy");
        self.changed && self.disks.len() == 1 && !self.simulation.is_down() && (unreadable || flipped)
    }
}
