//! Disks that rot, are lost, leave and come back, beside copies of everything.

use super::{Runner, Stop};
use crate::sim::case::{Regime, SLOTS};
use crate::sim::coverage::{self, Coverage};
use stratakv::ErrorKind;
use stratakv::sim::{Event, events};

/// How often what is rotten is looked for, at most.
const HEALINGS: usize = 8;

impl Runner<'_> {
    /// Whether every frame has all the copies that were asked for, and more than one.
    fn has_copies(&self) -> bool {
        let roomy = self.case.capacity.is_none() && self.case.regime == Regime::Plain;
        self.case.copies > 1 && roomy && !self.changed
    }

    /// Whether a disk can be lost without loss.
    pub(super) fn may_lose(&self, disk: usize) -> bool {
        self.has_copies() && !self.flipped && self.disks.len() > 1 && self.disks.contains(&disk)
    }

    /// Takes note of a disk that the store gave up by itself.
    pub(super) fn note_given_up(&mut self, coverage: &mut Coverage) {
        let lost = self.store.as_ref().is_some_and(|store| !store.health().lost.is_empty());
        if lost && !self.changed {
            coverage.add(coverage::DISK_GIVEN_UP);
            self.changed = true;
        }
    }

    /// Opens the store without a disk.
    pub(super) fn open_without(&mut self, disk: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        self.note(|| format!("disk {disk} does not come back"));
        self.disks.retain(|own| *own != disk);
        let refused = self.simulation.open_on(self.options(), &self.disks).err().map(|e| e.kind());
        if refused != Some(ErrorKind::Configuration) {
            return Err(Stop::Failed(format!("opened without disk {disk}: {refused:?}")));
        }
        self.changed = true;
        match self.simulation.open_on(self.options().allow_degraded(true), &self.disks) {
            Ok(store) => {
                coverage.add(coverage::DISK_LOST);
                self.store = Some(store);
                Ok(())
            }
            Err(e) => {
                self.fault("open without a disk", &e, coverage)?;
                Err(Stop::Broken)
            }
        }
    }

    /// Repairs until nothing is left to be done, which must be possible.
    pub(super) fn repair_all(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        self.mark_commits();
        let repaired = self.store()?.repair();
        // It commits only where it has something to do, and then all that waits.
        self.model.attempted(repaired.is_ok() && events(Event::GroupCommit) > self.commits);
        match repaired {
            Ok(done) if done.left == 0 => Ok(()),
            Ok(_) if self.simulation.is_down() => Err(Stop::Down),
            Ok(done) => Err(Stop::Failed(format!("repair leaves work: {done:?}"))),
            Err(e) => self.fault("repair", &e, coverage),
        }
    }

    fn other_copies(&self) -> Result<u64, Stop> {
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
    pub(super) fn heal(&mut self, slot: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        if !self.has_copies() || self.flipped {
            return self.check(slot, coverage);
        }
        // What is written is on the medium.
        self.close_all(coverage)?;
        let flushed = self.store()?.flush();
        self.model.attempted(flushed.is_ok());
        flushed.or_else(|e| self.fault("flush", &e, coverage))?;
        self.flipped = true;
        self.rot_disk(self.disks[slot % self.disks.len()]);
        let mut found = false;
        // What is healed lies elsewhere, and other copies are read then, which may be rotten as well.
        for _ in 0..HEALINGS {
            let before = self.other_copies()?;
            self.check(slot, coverage)?;
            if self.other_copies()? == before {
                break;
            }
            found = true;
            self.repair_all(coverage)?;
        }
        let before = self.other_copies()?;
        self.check(slot, coverage)?;
        if self.other_copies()? != before {
            return Err(Stop::Failed("a copy that was found rotten was not healed".into()));
        }
        if found {
            coverage.add(coverage::HEALED);
        }
        Ok(())
    }

    /// The index in the store of a disk; none when it is no device of it.
    fn index(&self, disk: usize) -> Result<Option<u16>, Stop> {
        let path = format!("simulated-{disk}");
        Ok(self.store()?.status().devices.iter().find(|device| device.path == path).map(|device| device.index))
    }

    fn close_all(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        (0..SLOTS).try_for_each(|slot| self.close(slot, coverage))
    }

    pub(super) fn lose(&mut self, disk: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        if !self.may_lose(disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.changed = true;
        let lost = self.store()?.declare_lost(index);
        self.model.attempted(lost.is_ok());
        match lost {
            Ok(()) => coverage.add(coverage::DISK_LOST),
            Err(e) => return self.fault("declare a disk lost", &e, coverage),
        }
        self.close_all(coverage)?;
        self.repair_all(coverage)?;
        for slot in 0..SLOTS {
            self.check(slot, coverage)?;
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, disk: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        if self.disks.len() < 2 || !self.disks.contains(&disk) {
            return Ok(());
        }
        let Some(index) = self.index(disk)? else { return Ok(()) };
        self.close_all(coverage)?;
        self.changed = true;
        let removed = self.store()?.remove_device(index);
        self.model.attempted(removed.is_ok());
        match removed {
            Ok(_) => {
                coverage.add(coverage::DISK_REMOVED);
                self.disks.retain(|own| *own != disk);
                Ok(())
            }
            // The others are full, damaged, or gone.
            Err(e) if matches!(e.kind(), ErrorKind::InvalidArgument | ErrorKind::Busy | ErrorKind::NoSpace) => {
                self.note(|| format!("disk {disk} stays: {e:?}"));
                Ok(())
            }
            Err(e) => self.fault("remove a disk", &e, coverage),
        }
    }

    pub(super) fn add(&mut self, disk: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        if disk >= self.case.geometry.devices || self.disks.contains(&disk) || self.index(disk)?.is_some() {
            return Ok(());
        }
        // Whether the store has it if the power goes is for the next open to say.
        self.disks.push(disk);
        self.disks.sort_unstable();
        let added = self.simulation.add_device(self.store()?, disk);
        self.model.attempted(added.is_ok());
        match added {
            Ok(_) => {
                coverage.add(coverage::DISK_BACK);
                Ok(())
            }
            Err(e) => self.fault("add a disk", &e, coverage),
        }
    }
}
