//! Simulated devices: memory that loses, reorders and tears what was not synced when the power goes, and fails on demand.
//! Everything is decided by a seed, and runs on the calling thread.
//!
//! What survives a crash, as POSIX promises it and no more: the bytes of writes that had completed when a sync of their file
//! was submitted that ended; the names of a directory that a sync of that directory covered. Of the rest, completed or still
//! under way, any subset lands, in sectors of 512 bytes.

mod directory;
mod disk;
mod driver;
mod file;
mod pages;
mod random;
pub(crate) mod thread;
mod world;

pub(crate) use directory::{SimDirectory, SimFile};
pub(crate) use driver::SimDriver;
pub use random::Rng;
pub use world::Faults;

use crate::io::coverage;
use crate::io::file::directory::Directory;
use crate::io::planted;
use crate::metrics::lock;
pub use coverage::{CoverageMark as Event, events, take_events};
pub use planted::{Mutant, set_mutant};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::{Arc, Mutex};
use world::World;

/// Sizes of a simulation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Geometry {
    /// Devices.
    pub devices: usize,
    /// Bytes of segment files that each device takes; the manifest finds room beyond, unless `whole`.
    pub device_bytes: u64,
    /// Pages of a fresh manifest file.
    pub manifest_pages: u64,
    /// The most bytes of records of one manifest batch.
    pub batch_bytes: usize,
    /// `device_bytes` are those of all files.
    #[serde(default)]
    pub whole: bool,
}

/// A machine with its disks. It belongs to one thread: randomness and clock of that thread follow its seed while it lives.
pub struct Simulation {
    world: Arc<Mutex<World>>,
    devices: usize,
}

impl Simulation {
    /// Empty disks.
    #[must_use]
    pub fn new(geometry: &Geometry, seed: u64) -> Self {
        thread::enter(seed ^ 0x5eed, geometry.manifest_pages, geometry.batch_bytes);
        let mut world = World::new(geometry.devices, geometry.device_bytes, seed);
        world.whole = geometry.whole;
        Self { world: Arc::new(Mutex::new(world)), devices: geometry.devices }
    }

    /// The disks, as devices.
    pub(crate) fn directories(&self) -> Vec<Arc<dyn Directory>> {
        (0..self.devices).map(|disk| self.directory(disk)).collect()
    }

    pub(crate) fn directory(&self, disk: usize) -> Arc<dyn Directory> {
        SimDirectory::open(&self.world, disk)
    }

    /// The power goes at the `operations`-th device operation from now on, which is caught on its way.
    pub fn crash_in(&self, operations: u64) {
        lock(&self.world).crash_in = Some(operations);
    }

    /// The power goes now.
    pub fn crash(&self) {
        lock(&self.world).down = true;
    }

    /// Whether the power is gone: every operation fails until [`Simulation::restart`].
    #[must_use]
    pub fn is_down(&self) -> bool {
        lock(&self.world).down
    }

    /// The machine comes back with what landed. Handles of before stay dead.
    pub fn restart(&self) {
        lock(&self.world).restart();
    }

    /// Disks have so many bytes from now on: see [`Geometry::device_bytes`].
    pub fn resize(&self, device_bytes: u64) {
        lock(&self.world).capacity = device_bytes;
    }

    /// Sets the faults to come.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.world).faults = faults;
    }

    /// How many faults were met so far.
    #[must_use]
    pub fn faults_hit(&self) -> u64 {
        lock(&self.world).faults_hit
    }

    /// How many operations failed so far and said so.
    #[must_use]
    pub fn refused(&self) -> u64 {
        lock(&self.world).refused
    }

    /// How many writes went astray so far.
    #[must_use]
    pub fn astray_hit(&self) -> u64 {
        lock(&self.world).astray_hit
    }

    /// How many reads brought a wrong bit so far.
    #[must_use]
    pub fn flips_hit(&self) -> u64 {
        lock(&self.world).flips_hit
    }

    /// Device operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        lock(&self.world).operations
    }

    /// Device operations so far that change something: writes, syncs, names and lengths of files.
    #[must_use]
    pub fn changes(&self) -> u64 {
        lock(&self.world).changes
    }

    /// The most bytes that the files of all disks had at a time since the last call.
    #[must_use]
    pub fn take_peak_bytes(&self) -> u64 {
        lock(&self.world).take_peak_bytes()
    }

    /// Bytes of the files of a disk.
    #[must_use]
    pub fn bytes(&self, disk: usize) -> u64 {
        lock(&self.world).disks.get(disk).map_or(0, disk::Disk::all_bytes)
    }

    /// Lets time pass. By itself it goes on by a millisecond whenever somebody looks.
    pub fn advance(&self, milliseconds: u64) {
        thread::advance(milliseconds);
    }

    /// The time it is, in milliseconds since 1970.
    #[must_use]
    pub fn now(&self) -> u64 {
        thread::now()
    }

    /// A hash over every operation so far: equal seeds have equal ones.
    #[must_use]
    pub fn trace(&self) -> u64 {
        lock(&self.world).trace
    }

    /// Bit rot: flips one bit in a file whose path starts with `prefix`, on each of the first `copies` such files at the
    /// same offset, below `below` bytes. Says whether there was such a file.
    pub fn rot(&self, prefix: &str, copies: usize, below: u64) -> bool {
        lock(&self.world).rot(prefix, copies, below)
    }

    /// Disks that durably hold these files, each with its device, and no other. What a file lacks to whole pages is zeros.
    #[must_use]
    pub fn with_files(geometry: &Geometry, seed: u64, files: &[(usize, String, Vec<u8>)]) -> Self {
        let simulation = Self::new(geometry, seed);
        lock(&simulation.world).hold(files);
        simulation
    }

    /// Paths of the files of a device, in order.
    #[must_use]
    pub fn files(&self, device: usize) -> Vec<String> {
        lock(&self.world).files(device)
    }

    /// What a file holds; none without it.
    #[must_use]
    pub fn contents(&self, device: usize, path: &str) -> Option<Vec<u8>> {
        lock(&self.world).contents(device, path)
    }

    /// Puts other bytes, whole pages, on the medium under a file that exists.
    pub fn replace(&self, device: usize, path: &str, bytes: &[u8]) {
        lock(&self.world).replace(device, path, bytes);
    }

    /// Writes the files of all devices into directories `0`, `1`, ... below `path`.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn dump(&self, path: &Path) -> std::io::Result<()> {
        lock(&self.world).dump(path)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        thread::leave();
    }
}
