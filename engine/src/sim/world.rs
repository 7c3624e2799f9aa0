//! The simulated machine: its disks, its power, and the faults to come.
//!
//! An operation takes these steps:
//! 1. [`World::arrive`] hands the pages of a write to its file. From then on a crash may land any part of them.
//! 2. [`World::begin`] extends the trace hash, counts down the power failure and the faults, and returns the
//!    operation's [`Fate`].
//! 3. [`World::disturb`] may change the fate of a queued transfer: it is short, interrupted, misdirected or lost.
//! 4. [`World::complete`], [`World::fail`] or [`World::forget`] ends a write by its fate.
//!
//! After a power failure every operation fails until [`World::restart`], which decides what landed on each disk.
//!
//! Invariants:
//! - Equal seeds and equal calls give equal traces, because `rng` makes every choice.
//! - An operation without power, or with a handle of an earlier epoch, fails and is neither counted nor traced.
//! - A fault strikes once, apart from a slow, an unreachable, a stale or a read-only device, and refused memory.
//!
//! The callers are `directory.rs`, `sim_file.rs` and `mod.rs`. They hold the world's lock during each call.

use super::disk::{Disk, NameNode};
use super::disk_file::DiskFile;
use super::pages::{PAGE, Pages, SECTOR_BYTES};
use super::random::Rng;
use crate::error::{Error, ErrorKind, Result};
use crate::io::coverage;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Faults to come. Each countdown counts the operations of its kind on all devices together, and strikes once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// A write fails with EIO. A part of it may be on the medium.
    pub write: Option<u64>,
    /// A write fails with ENOSPC. Nothing of it is on the medium.
    pub full: Option<u64>,
    /// A sync fails with EIO. Later syncs succeed, but they do not make the pending writes durable.
    pub sync: Option<u64>,
    /// A read fails with EIO.
    pub read: Option<u64>,
    /// A page of the failed read stays unreadable until it is written.
    pub read_stays: bool,
    /// Creating a file, or making one longer, fails with ENOSPC.
    pub create: Option<u64>,
    /// Creating a file, or making one longer, fails with EIO.
    pub create_io: Option<u64>,
    /// Opening a file, listing a directory, or opening it for a sync, fails with EIO.
    pub names: Option<u64>,
    /// Renaming or removing a file, or making a directory, fails with EIO. The names are unchanged.
    pub change: Option<u64>,
    /// A queued read or write moves fewer bytes than requested.
    pub short: Option<u64>,
    /// A queued read or write is interrupted before it moves anything.
    pub interrupted: Option<u64>,
    /// A read returns one wrong bit. The medium is unchanged.
    pub flip: Option<u64>,
    /// A queued write to a segment lands at another place in it and reports success.
    pub misdirected: Option<u64>,
    /// A queued write to a segment reports success and never happens.
    pub phantom: Option<u64>,
    /// The operations of other devices mostly complete before the operations of this device.
    pub slow: Option<usize>,
    /// The milliseconds that pass whenever an operation of the slow device waits.
    #[serde(skip_serializing_if = "is_zero")]
    pub slow_ms: u64,
    /// A device, how often its queued operations are passed over before one completes again, and whether that one then
    /// fails with EIO, as after a reset. A second passes each time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hang: Option<(usize, u64, bool)>,
    /// A device and a number of its operations. Each later one fails with ESTALE until the machine restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stale: Option<(usize, u64)>,
    /// A device and a number of its operations. Each later one that would change something fails with EROFS until the
    /// machine restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<(usize, u64)>,
    /// Reservations of memory that still succeed, and then reservations that are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<(u64, u64)>,
    /// Every operation of this device fails with EIO, until other faults are set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<usize>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The kind of an operation, for the trace and the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationKind {
    Read = 1,
    Write,
    Sync,
    Names,
    Create,
    Change,
}

/// The fate of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Done,
    /// The power fails while the operation is in flight.
    Caught,
    /// The device reports an error.
    Failed(Errno),
    /// Only this many sectors move.
    Short(usize),
    /// The write lands this many pages from its place.
    Misdirected(i64),
    /// The write reports success and does not happen.
    Phantom,
    /// One bit, by number, is wrong.
    Flipped(u64),
}

/// A file, by disk and by number on the disk.
pub(super) type FilePlace = (usize, usize);

/// The simulated machine.
pub(super) struct World {
    pub(super) disks: Vec<Disk>,
    pub(super) pages: Pages,
    pub(super) rng: Rng,
    pub(super) capacity: u64,
    /// True if the capacity counts all files. Otherwise it counts segment files only.
    pub(super) whole: bool,
    /// Number of restarts. Handles of an earlier epoch are dead.
    pub(super) epoch: u64,
    pub(super) down: bool,
    pub(super) crash_in: Option<u64>,
    pub(super) operations: u64,
    /// The power fails before the next operation.
    pub(super) operations_max: u64,
    /// Operations that change something.
    pub(super) changes: u64,
    /// The largest total size of all files since the last call of `take_peak_bytes`.
    peak_bytes: u64,
    /// The number of operations begun. It orders completions and syncs.
    pub(super) moment: u64,
    writes: u64,
    pub(super) trace: u64,
    pub(super) faults: Faults,
    pub(super) faults_hit: u64,
    /// Faults that were reported to the caller.
    pub(super) refused: u64,
    /// Writes that went astray.
    pub(super) astray_hit: u64,
    /// Reads that returned a wrong bit.
    pub(super) flips_hit: u64,
    /// Unreadable ranges: first byte and end.
    unreadable: Vec<(FilePlace, u64, u64)>,
    /// A device that was reset: its next operation fails.
    reset: Option<usize>,
}

/// Returns the error of an operation that failed with an error number.
pub(super) fn errno(doing: String, errno: Errno) -> Error {
    Error::io(doing, errno.into())
}

/// Counts a fault down. Returns whether it strikes now.
fn strikes(countdown: &mut Option<u64>) -> bool {
    match countdown {
        Some(0) => {
            *countdown = None;
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

/// Counts down the operations of a device before a fault that stays. Returns whether the fault is there.
fn has_begun(fault: &mut Option<(usize, u64)>, device: usize) -> bool {
    match fault {
        Some((own, left)) if *own == device => {
            let has_begun = *left == 0;
            *left = left.saturating_sub(1);
            has_begun
        }
        _ => false,
    }
}

impl World {
    pub(super) fn new(devices: usize, capacity: u64, seed: u64) -> Self {
        let mut disks = vec![Disk::default(); devices];
        for disk in &mut disks {
            disk.names.insert(".".into(), NameNode::Directory);
            disk.put(".", NameNode::Directory);
            disk.sync_names(".");
        }
        Self {
            disks,
            pages: Pages::new(),
            rng: Rng::new(seed),
            capacity,
            whole: false,
            epoch: 0,
            down: false,
            crash_in: None,
            operations: 0,
            operations_max: u64::MAX,
            changes: 0,
            peak_bytes: 0,
            moment: 0,
            writes: 0,
            trace: 0xcbf2_9ce4_8422_2325,
            faults: Faults::default(),
            faults_hit: 0,
            refused: 0,
            astray_hit: 0,
            flips_hit: 0,
            unreadable: Vec::new(),
            reset: None,
        }
    }

    fn mix(&mut self, value: u64) {
        self.trace = (self.trace ^ value).wrapping_mul(0x0000_0100_0000_01b3);
    }

    /// Lets a write arrive. Returns its number, or none without power.
    pub(super) fn arrive(&mut self, epoch: u64, place: FilePlace, offset: u64, bytes: &[u8]) -> Option<u64> {
        if self.down || epoch != self.epoch {
            return None;
        }
        self.writes += 1;
        for value in [u64::MAX, place.0 as u64, place.1 as u64, offset] {
            self.mix(value);
        }
        let file = self.disks[place.0].files.get_mut(place.1)?;
        for (index, page) in bytes.as_chunks().0.iter().enumerate() {
            file.arrive(self.writes, offset as usize / PAGE + index, self.pages.put(page));
        }
        Some(self.writes)
    }

    /// Begins an operation. Returns its fate.
    ///
    /// # Errors
    /// The power is off, or was off since the file was opened.
    pub(super) fn begin(
        &mut self,
        epoch: u64,
        kind: OperationKind,
        place: FilePlace,
        range: (u64, u64),
    ) -> Result<Fate> {
        if self.down || epoch != self.epoch {
            return Err(lost_power());
        }
        if self.operations >= self.operations_max {
            // Power is the one thing that ends any loop of the store.
            self.down = true;
            return Err(lost_power());
        }
        self.operations += 1;
        self.changes += u64::from(matches!(
            kind,
            OperationKind::Write | OperationKind::Sync | OperationKind::Change | OperationKind::Create
        ));
        self.moment += 1;
        for value in [kind as u64, place.0 as u64, place.1 as u64, range.0, range.1] {
            self.mix(value);
        }
        match &mut self.crash_in {
            Some(0) => {
                self.down = true;
                return Ok(Fate::Caught);
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let faults = &mut self.faults;
        let fate = match kind {
            _ if faults.unreachable == Some(place.0) => Fate::Failed(Errno::IO),
            _ if self.reset.take_if(|device| *device == place.0).is_some() => Fate::Failed(Errno::IO),
            _ if has_begun(&mut faults.stale, place.0) => {
                coverage!(HandleStale);
                Fate::Failed(Errno::STALE)
            }
            OperationKind::Write | OperationKind::Sync | OperationKind::Create | OperationKind::Change
                if has_begun(&mut faults.read_only, place.0) =>
            {
                coverage!(ReadOnlyMidway);
                Fate::Failed(Errno::ROFS)
            }
            OperationKind::Read if strikes(&mut faults.read) => {
                if faults.read_stays {
                    let page = self.rng.below(range.1.div_ceil(PAGE as u64)) * PAGE as u64 + range.0;
                    self.unreadable.push((place, page, page + PAGE as u64));
                }
                Fate::Failed(Errno::IO)
            }
            OperationKind::Read if strikes(&mut faults.flip) => {
                self.flips_hit += 1;
                return Ok(Fate::Flipped(self.rng.below(range.1 * 8)));
            }
            OperationKind::Write if strikes(&mut faults.write) => Fate::Failed(Errno::IO),
            OperationKind::Write if strikes(&mut faults.full) => Fate::Failed(Errno::NOSPC),
            OperationKind::Sync if strikes(&mut faults.sync) => Fate::Failed(Errno::IO),
            OperationKind::Create if strikes(&mut faults.create) => Fate::Failed(Errno::NOSPC),
            OperationKind::Create if strikes(&mut faults.create_io) => Fate::Failed(Errno::IO),
            OperationKind::Names if strikes(&mut faults.names) => Fate::Failed(Errno::IO),
            OperationKind::Change if strikes(&mut faults.change) => Fate::Failed(Errno::IO),
            _ => return Ok(Fate::Done),
        };
        self.faults_hit += 1;
        self.refused += 1;
        Ok(fate)
    }

    /// Returns whether a hanging device passes over an operation this time. The last time, it comes back.
    pub(super) fn hangs(&mut self, device: usize) -> bool {
        let Some((own, left, resets)) = &mut self.faults.hang else { return false };
        if *own != device {
            return false;
        }
        if *left > 0 {
            *left -= 1;
            return true;
        }
        coverage!(DeviceHung);
        self.reset = resets.then_some(device);
        self.faults.hang = None;
        false
    }

    /// Returns whether opening a directory for a sync fails this time.
    pub(super) fn refuses_directory(&mut self) -> bool {
        let strikes = !self.down && strikes(&mut self.faults.names);
        self.faults_hit += u64::from(strikes);
        self.refused += u64::from(strikes);
        strikes
    }

    /// Returns the fate of a queued transfer of `len` bytes that met no other fault.
    pub(super) fn disturb(
        &mut self,
        kind: OperationKind,
        place: FilePlace,
        offset: u64,
        len: usize,
        in_segment: bool,
    ) -> Fate {
        let faults = &mut self.faults;
        // The driver hides these two faults from its callers, so `faults_hit` does not count them.
        if strikes(&mut faults.short) {
            let sectors = len / SECTOR_BYTES;
            return Fate::Short(1 + self.rng.below(sectors.saturating_sub(1) as u64) as usize);
        }
        if strikes(&mut faults.interrupted) {
            return Fate::Failed(Errno::INTR);
        }
        let fate = if kind == OperationKind::Write && in_segment && strikes(&mut faults.misdirected) {
            let pages = self.disks[place.0].files.get(place.1).map_or(0, |file| file.len() / PAGE);
            let room = (pages - len / PAGE) as u64;
            self.astray_hit += 1;
            Fate::Misdirected(self.rng.below(room + 1) as i64 - (offset / PAGE as u64) as i64)
        } else if kind == OperationKind::Write && in_segment && strikes(&mut faults.phantom) {
            self.astray_hit += 1;
            Fate::Phantom
        } else {
            return Fate::Done;
        };
        self.faults_hit += 1;
        fate
    }

    /// Lets `bytes` of a write complete, `shift` pages from their place.
    pub(super) fn complete(&mut self, place: FilePlace, write: u64, offset: u64, bytes: usize, shift: i64) {
        let offset = offset.wrapping_add_signed(shift * PAGE as i64);
        self.heal(place, offset, offset + bytes as u64);
        if let Some(file) = self.disks[place.0].files.get_mut(place.1) {
            file.complete(&mut self.pages, write, bytes / SECTOR_BYTES, self.moment, shift);
        }
    }

    /// Lets a write fail. Nothing of it is on the medium if the device was full or the write was interrupted.
    pub(super) fn fail(&mut self, place: FilePlace, write: u64, e: Errno) {
        if let Some(file) = self.disks[place.0].files.get_mut(place.1) {
            match e {
                Errno::NOSPC | Errno::INTR | Errno::STALE | Errno::ROFS => file.forget(write),
                _ => file.fail(&mut self.pages, write, self.moment, &mut self.rng),
            }
        }
    }

    /// Forgets a write that reported success but never happened.
    pub(super) fn forget(&mut self, place: FilePlace, write: u64) {
        if let Some(file) = self.disks[place.0].files.get_mut(place.1) {
            file.forget(write);
        }
    }

    pub(super) fn is_unreadable(&self, place: FilePlace, start: u64, end: u64) -> bool {
        self.unreadable.iter().any(|bad| bad.0 == place && bad.1 < end && start < bad.2)
    }

    /// Makes unreadable ranges readable again if a write covered them.
    pub(super) fn heal(&mut self, place: FilePlace, start: u64, end: u64) {
        self.unreadable.retain(|bad| bad.0 != place || bad.1 < start || end < bad.2);
    }

    fn file_bytes(&self) -> u64 {
        self.disks.iter().map(Disk::all_bytes).sum()
    }

    /// Records the total size after a file was created or made longer.
    pub(super) fn grew(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.file_bytes());
    }

    pub(super) fn take_peak_bytes(&mut self) -> u64 {
        let now = self.file_bytes();
        std::mem::replace(&mut self.peak_bytes, now).max(now)
    }

    /// Restores the power. Each disk decides which of its changes landed, and all faults are cleared.
    pub(super) fn restart(&mut self) {
        for disk in &mut self.disks {
            disk.crash(&mut self.pages, &mut self.rng);
            disk.locks.clear();
        }
        self.down = false;
        self.crash_in = None;
        self.faults = Faults::default();
        self.reset = None;
        self.epoch += 1;
    }

    /// Flips a bit: see [`super::Simulation::rot`].
    pub(super) fn rot(&mut self, prefix: &str, copies: usize, below: u64) -> bool {
        let place = self.rng.next_u64();
        let bit = self.rng.below(8) as u32;
        let mut found = Vec::new();
        for (disk, own) in self.disks.iter().enumerate() {
            let files = own.names.iter().filter(|(path, _)| path.starts_with(prefix));
            found.extend(files.filter_map(|(_, node)| match node {
                NameNode::File(index) => Some((disk, *index)),
                NameNode::Directory => None,
            }));
        }
        if found.is_empty() {
            return false;
        }
        let first = if copies == 1 { place as usize % found.len() } else { 0 };
        for &(disk, file) in found.iter().skip(first).take(copies) {
            if let Some(file) = self.disks[disk].files.get_mut(file) {
                let len = (file.len() as u64).min(below).max(1);
                file.rot(&mut self.pages, (place % len) as usize, bit);
            }
        }
        self.faults_hit += 1;
        true
    }

    pub(super) fn files(&self, disk: usize) -> Vec<String> {
        let names = self.disks.get(disk).into_iter().flat_map(|disk| &disk.names);
        names.filter(|(_, node)| matches!(node, NameNode::File(_))).map(|(path, _)| path.clone()).collect()
    }

    pub(super) fn contents(&self, disk: usize, path: &str) -> Option<Vec<u8>> {
        let disk = self.disks.get(disk)?;
        let NameNode::File(file) = disk.names.get(path)? else { return None };
        let pages = disk.files.get(*file)?.pages();
        Some(pages.iter().flat_map(|page| self.pages.get(*page)).copied().collect())
    }

    /// Adds durable files to the disks.
    pub(super) fn hold(&mut self, files: &[(usize, String, Vec<u8>)]) {
        for disk in &mut self.disks {
            for directory in [stratakv_format::manifest::DIRECTORY, stratakv_format::segment::DIRECTORY] {
                disk.put(directory, NameNode::Directory);
            }
            disk.sync_names(".");
        }
        for (device, path, bytes) in files {
            if let Some(disk) = self.disks.get_mut(*device) {
                let mut file = DiskFile::default();
                file.replace(&mut self.pages, bytes);
                disk.hold(path, file);
            }
        }
    }

    pub(super) fn replace(&mut self, disk: usize, path: &str, bytes: &[u8]) {
        let Some(disk) = self.disks.get_mut(disk) else { return };
        let Some(NameNode::File(file)) = disk.names.get(path) else { return };
        if let Some(file) = disk.files.get_mut(*file) {
            file.replace(&mut self.pages, bytes);
        }
    }

    pub(super) fn dump(&self, path: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        for (index, disk) in self.disks.iter().enumerate() {
            let root = path.join(index.to_string());
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&root)?;
            for (name, node) in &disk.names {
                match node {
                    NameNode::Directory if name == "." => {}
                    NameNode::Directory => std::fs::DirBuilder::new().mode(0o700).create(root.join(name))?,
                    NameNode::File(file) => {
                        let mut options = std::fs::OpenOptions::new();
                        let mut out = options.write(true).create_new(true).mode(0o600).open(root.join(name))?;
                        let pages = self.disks[index].files.get(*file).map_or(&[][..], |file| file.pages());
                        for page in pages {
                            std::io::Write::write_all(&mut out, self.pages.get(*page))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the error of an operation without power.
pub(super) fn lost_power() -> Error {
    Error::new(ErrorKind::Closed, "the simulated machine has no power")
}
