//! The machine: its disks, its power, the faults it has in store.

use super::disk::{Disk, Node, SECTOR_BYTES};
use super::random::Rng;
use crate::error::{Error, ErrorKind, Result};
use std::path::Path;

/// Faults to come: each counts down the operations of its kind, on all devices together, and strikes once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A write fails with EIO; part of it may be on the medium.
    pub write: Option<u64>,
    /// A sync fails with EIO; syncs behind it succeed, but what was pending never lands by them.
    pub sync: Option<u64>,
    /// A read fails with EIO.
    pub read: Option<u64>,
    /// A page of the failed read stays unreadable until it is written.
    pub read_stays: bool,
    /// Creating a file fails with ENOSPC.
    pub create: Option<u64>,
}

const PAGE: u64 = 4096;

/// What an operation does, for the trace and the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read = 1,
    Write,
    Sync,
    Names,
    Create,
}

/// How far an operation gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Done,
    /// The power goes while it is on its way.
    Caught,
    /// The device reports an error.
    Failed,
}

pub(super) struct World {
    pub(super) disks: Vec<Disk>,
    pub(super) rng: Rng,
    pub(super) capacity: u64,
    /// The capacity is that of all files, not of segments alone.
    pub(super) whole: bool,
    /// Counts restarts: handles of an earlier one are dead.
    pub(super) epoch: u64,
    pub(super) down: bool,
    pub(super) crash_in: Option<u64>,
    pub(super) operations: u64,
    pub(super) trace: u64,
    pub(super) faults: Faults,
    pub(super) faults_hit: u64,
    /// Disk, file, first byte and end of what cannot be read.
    unreadable: Vec<(usize, usize, u64, u64)>,
}

pub(super) fn errno(doing: String, errno: rustix::io::Errno) -> Error {
    Error::io(doing, errno.into())
}

impl World {
    pub(super) fn new(devices: usize, capacity: u64, seed: u64) -> Self {
        let mut disks = vec![Disk::default(); devices];
        for disk in &mut disks {
            disk.names.insert(".".into(), Node::Directory);
            disk.put(".", Node::Directory);
            disk.sync_names(".");
        }
        Self {
            disks,
            rng: Rng::new(seed),
            capacity,
            whole: false,
            epoch: 0,
            down: false,
            crash_in: None,
            operations: 0,
            trace: 0xcbf2_9ce4_8422_2325,
            faults: Faults::default(),
            faults_hit: 0,
            unreadable: Vec::new(),
        }
    }

    fn mix(&mut self, value: u64) {
        self.trace = (self.trace ^ value).wrapping_mul(0x0000_0100_0000_01b3);
    }

    /// Begins an operation.
    ///
    /// # Errors
    /// The power is gone, or was in between.
    pub(super) fn begin(&mut self, epoch: u64, kind: Kind, place: (usize, usize), range: (u64, u64)) -> Result<Fate> {
        if self.down || epoch != self.epoch {
            return Err(lost_power());
        }
        self.operations += 1;
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
        let countdown = match kind {
            Kind::Read => &mut self.faults.read,
            Kind::Write => &mut self.faults.write,
            Kind::Sync => &mut self.faults.sync,
            Kind::Create => &mut self.faults.create,
            Kind::Names => return Ok(Fate::Done),
        };
        match countdown {
            Some(0) => {
                *countdown = None;
                self.faults_hit += 1;
                if kind == Kind::Read && self.faults.read_stays {
                    let page = self.rng.below(range.1.div_ceil(PAGE)) * PAGE + range.0;
                    self.unreadable.push((place.0, place.1, page, page + PAGE));
                }
                Ok(Fate::Failed)
            }
            Some(left) => {
                *left -= 1;
                Ok(Fate::Done)
            }
            None => Ok(Fate::Done),
        }
    }

    pub(super) fn is_unreadable(&self, disk: usize, file: usize, start: u64, end: u64) -> bool {
        self.unreadable.iter().any(|bad| (bad.0, bad.1) == (disk, file) && bad.2 < end && start < bad.3)
    }

    /// A write makes what it covers readable again.
    pub(super) fn heal(&mut self, disk: usize, file: usize, start: u64, end: u64) {
        self.unreadable.retain(|bad| (bad.0, bad.1) != (disk, file) || bad.2 < start || end < bad.3);
    }

    pub(super) fn restart(&mut self) {
        for disk in &mut self.disks {
            disk.crash(&mut self.rng);
        }
        self.down = false;
        self.crash_in = None;
        self.faults = Faults::default();
        self.epoch += 1;
    }

    pub(super) fn rot(&mut self, prefix: &str, copies: usize, below: u64) -> bool {
        let place = self.rng.next_u64();
        let bit = self.rng.below(8) as u32;
        let mut found = Vec::new();
        for (disk, own) in self.disks.iter().enumerate() {
            let files = own.names.iter().filter(|(path, _)| path.starts_with(prefix));
            found.extend(files.filter_map(|(_, node)| match node {
                Node::File(index) => Some((disk, *index)),
                Node::Directory => None,
            }));
        }
        if found.is_empty() {
            return false;
        }
        let first = if copies == 1 { place as usize % found.len() } else { 0 };
        for &(disk, file) in found.iter().skip(first).take(copies) {
            if let Some(file) = self.disks[disk].files.get_mut(file) {
                let len = (file.live.len() as u64).min(below).max(1);
                file.rot((place % len) as usize, bit);
            }
        }
        self.faults_hit += 1;
        true
    }

    pub(super) fn dump(&self, path: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        for (index, disk) in self.disks.iter().enumerate() {
            let root = path.join(index.to_string());
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&root)?;
            for (name, node) in &disk.names {
                match node {
                    Node::Directory if name == "." => {}
                    Node::Directory => std::fs::DirBuilder::new().mode(0o700).create(root.join(name))?,
                    Node::File(file) => {
                        let mut options = std::fs::OpenOptions::new();
                        let mut out = options.write(true).create_new(true).mode(0o600).open(root.join(name))?;
                        let bytes = self.disks[index].files.get(*file).map_or(&[][..], |file| &file.live);
                        std::io::Write::write_all(&mut out, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Part of a write reaches the medium although the device reports an error.
    pub(super) fn write_in_part(&mut self, disk: usize, file: usize, offset: usize, bytes: &[u8]) {
        for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            if self.rng.one_in(2)
                && let Some(file) = self.disks[disk].files.get_mut(file)
            {
                file.write(offset + index * SECTOR_BYTES, sector);
            }
        }
    }
}

pub(super) fn lost_power() -> Error {
    Error::new(ErrorKind::Closed, "the simulated machine has no power")
}
