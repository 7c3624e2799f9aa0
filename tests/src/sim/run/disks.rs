//! Disks that rot, are lost, leave and come back, beside copies of everything.

use super::{Runner, Stop, Stopped, failed};
use crate::sim::case::{Regime, SLOTS};
use crate::sim::coverage;
use stratakv::sim::{Event, events};
use stratakv::{Error, ErrorKind, Store, StoreOptions};

/// How often what is rotten is looked for, at most.
const HEALINGS: usize = 8;

impl Runner<'_> {
    /// Whether every frame has all the copies that were asked for, and more than one.
    fn has_copies(&self) -> bool {
        let roomy = !self.limited && self.case.regime == Regime::Plain;
        self.case.copies > 1 && roomy && !self.changed
    }

    /// Whether a disk can be lost without loss.
    pub(super) fn may_lose(&self, disk: usize) -> bool {
        self.has_copies() && !self.flipped && self.disks.len() > 1 && self.disks.contains(&disk)
    }

    /// Takes note of a disk that the store gave up by itself.
    pub(super) fn note_given_up(&mut self) {
        let lost = self.store.as_ref().is_some_and(|store| !store.health().lost.is_empty());
        if lost && !self.changed {
            self.coverage.add(coverage::DISK_GIVEN_UP);
            self.changed = true;
        }
    }

    /// Opens the store without a disk.
    pub(super) fn open_without(&mut self, disk: usize) -> Stopped {
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

    /// Repairs until nothing is left to be done, which must be possible.
    pub(super) fn repair_all(&mut self) -> Stopped {
        self.mark_commits();
        let repaired = self.store()?.repair();
        self.by_itself(0, repaired.is_ok())?;
        // It commits only where it has something to do, and then all that waits.
        if repaired.is_ok() && events(Event::GroupCommit) > self.commits {
            self.model.attempted(true);
        }
        match repaired {
            Ok(done) if done.left == 0 => Ok(()),
            Ok(_) if self.simulation.is_down() => Err(Stop::Down),
            Ok(done) => failed(format!("repair leaves work: {done:?}")),
            Err(e) => self.fault("repair", &e),
        }
    }

    fn other_copies(&self) -> Stopped<u64> {
        Ok(self.store()?.status().devices.iter().map(|device| device.counters.other_copies).sum())
    }

    /// A bit in every page of every segment of a disk rots.
    fn rot_disk(&self, disk: usize) {
        for path in self.simulation.files(disk).into_iter().filter(|path| path.starts_with("segments/")) {
            let Some(mut bytes) = self.simulation.contents(disk, &path) else { continue };
            let pages = bytes.len() / 4096;
            // Not the header and trailer of the segment, which no copy makes good.
            for (nth, page) in bytes.chunks_mut(4096).enumerate().take(pages.saturating_sub(1)).skip(1) {
                page[(nth * 331 + self.case.seed as usize) % 4096] ^= 4;
            }
            self.simulation.replace(disk, &path, &bytes);
        }
    }

    /// A disk rots; everything is read all the same, and after a repair from where it was to be read.
    pub(super) fn heal(&mut self, slot: usize) -> Stopped {
        if !self.has_copies() || self.flipped {
            return self.check(slot);
        }
        // What is written is on the medium.
        self.close_all()?;
        let flushed = self.store()?.flush();
        self.model.attempted(flushed.is_ok());
        flushed.or_else(|e| self.fault("flush", &e))?;
        self.flipped = true;
        self.rot_disk(self.disks[slot % self.disks.len()]);
        let mut found = false;
        // What is healed lies elsewhere, and other copies are read then, which may be rotten as well.
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

    /// The index in the store of a disk; none when it is no device of it.
    fn index(&self, disk: usize) -> Stopped<Option<u16>> {
        let path = format!("simulated-{disk}");
        Ok(self.store()?.status().devices.iter().find(|device| device.path == path).map(|device| device.index))
    }

    fn close_all(&mut self) -> Stopped {
        (0..SLOTS).try_for_each(|slot| self.close(slot))
    }

    pub(super) fn lose(&mut self, disk: usize) -> Stopped {
        if !self.may_lose(disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.changed = true;
        let lost = self.store()?.declare_lost(index);
        self.by_itself(0, lost.is_ok())?;
        self.model.attempted(lost.is_ok());
        match lost {
            Ok(()) => self.coverage.add(coverage::DISK_LOST),
            Err(e) => return self.fault("declare a disk lost", &e),
        }
        self.close_all()?;
        self.repair_all()?;
        for slot in 0..SLOTS {
            self.check(slot)?;
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, disk: usize) -> Stopped {
        if self.disks.len() < 2 || !self.disks.contains(&disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.close_all()?;
        self.changed = true;
        let removed = self.store()?.remove_device(index);
        self.by_itself(0, removed.is_ok())?;
        self.model.attempted(removed.is_ok());
        match removed {
            Ok(_) => {
                self.coverage.add(coverage::DISK_REMOVED);
                self.disks.retain(|own| *own != disk);
                Ok(())
            }
            // The others are full, damaged, or gone.
            Err(e) if matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::Busy | ErrorKind::NoSpace) => {
                self.note(|| format!("disk {disk} stays: {e:?}"));
                Ok(())
            }
            Err(e) => self.fault("remove a disk", &e),
        }
    }

    pub(super) fn add(&mut self, disk: usize) -> Stopped {
        if disk >= self.case.geometry.devices || self.disks.contains(&disk) || self.index(disk)?.is_some() {
            return Ok(());
        }
        // Whether the store has it if the power goes is for the next open to say.
        self.disks.push(disk);
        self.disks.sort_unstable();
        let added = self.simulation.add_device(self.store()?, disk);
        self.by_itself(0, added.is_ok())?;
        self.model.attempted(added.is_ok());
        match added {
            Ok(_) => {
                self.coverage.add(coverage::DISK_BACK);
                Ok(())
            }
            Err(e) => self.fault("add a disk", &e),
        }
    }

    /// Opens the store on the disks that it still has: one that left, or did not quite join, is refused by its name.
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

    /// Whether the manifest may be beyond reading: the one disk that is left has one copy of it.
    pub(super) fn manifest_may_be_gone(&self, e: &Error) -> bool {
        let text = e.to_string();
        let unreadable = e.kind() == ErrorKind::Io && text.contains("every copy of the manifest");
        let flipped = self.simulation.flips_hit() > 0 && text.contains("the manifest is damaged in every copy");
        self.changed && self.disks.len() == 1 && !self.simulation.is_down() && (unreadable || flipped)
    }
}
