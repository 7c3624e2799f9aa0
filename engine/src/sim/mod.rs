//! The simulator: a machine with disks in memory that lose, tear and reorder what was not synced, and fail on demand.
//!
//! The store runs unchanged on it. The simulator implements the seams of `io::seams` and is given to a store
//! when the store is opened; no other room knows it. A seed decides everything, and all of it runs on the calling
//! thread, so equal seeds give equal histories.
//!
//! A power failure leaves what POSIX promises and no more:
//! - the bytes of writes that had completed when a sync of their file was submitted, if that sync succeeded,
//! - the names of a directory that a sync of that directory covered,
//! - of everything else, completed or in flight, any subset, in sectors of 512 bytes.
//!
//! | Part | File |
//! |---|---|
//! | clock, random numbers, sizes | `system.rs` |
//! | the environment of a store, buffers | `environment.rs` |
//! | scheduling: shards without threads | `scheduler.rs` |
//! | driver: operations complete in a chosen order | `driver.rs` |
//! | device directories and their files | `directory.rs`, `sim_file.rs` |
//! | the machine: power, faults, trace | `world.rs` |
//! | a disk, a file, page contents | `disk.rs`, `disk_file.rs`, `pages.rs` |
//!
//! Lock order: the locks of the world and of the system may be taken under any lock of a store. Both are leaves: no
//! other lock is taken under them.

mod directory;
mod disk;
mod disk_file;
mod driver;
mod environment;
mod pages;
mod random;
mod scheduler;
mod sim_file;
mod system;
mod world;

pub use crate::io::coverage::{CoverageMark as Event, events, take_events};
pub use crate::io::planted::{Mutant, set_mutant};
pub use random::Rng;
pub use world::Faults;

use crate::error::Result;
use crate::io::coverage;
use crate::io::file::directory::{Access, Directory};
use crate::maintenance::releasable_bytes;
use crate::metrics::{lock, refusal};
use crate::options::StoreOptions;
use crate::plan::Selection;
use crate::store::Store;
use directory::SimDirectory;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex};
use system::SimSystem;
use world::World;

/// The sizes of a simulated machine.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Geometry {
    /// Number of devices.
    pub devices: usize,
    /// Bytes of segment files that each device holds. The manifest needs more, unless `whole` is set.
    pub device_bytes: u64,
    /// Pages of a new manifest file.
    pub manifest_pages: u64,
    /// Bytes of records of one manifest batch, at most.
    pub batch_bytes: usize,
    /// True if `device_bytes` counts all files. Otherwise it counts segment files only.
    #[serde(default)]
    pub whole: bool,
    /// Files of segments that a store keeps open, at most. `None`: as on a real machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files: Option<usize>,
}

/// A simulated machine with its disks. It belongs to the thread that made it.
pub struct Simulation {
    world: Arc<Mutex<World>>,
    system: SimSystem,
    devices: usize,
    refused_memory: Cell<u64>,
}

impl Simulation {
    /// Returns a machine with empty disks. Coverage marks of this thread are counted while it lives.
    #[must_use]
    pub fn new(geometry: &Geometry, seed: u64) -> Self {
        coverage::start();
        refusal::set(None);
        let _ = refusal::take_refused();
        let Geometry { manifest_pages, batch_bytes, open_files, .. } = *geometry;
        let system = SimSystem::new(seed ^ 0x5eed, manifest_pages, batch_bytes, open_files);
        let mut world = World::new(geometry.devices, geometry.device_bytes, seed);
        world.whole = geometry.whole;
        Self { world: Arc::new(Mutex::new(world)), system, devices: geometry.devices, refused_memory: Cell::new(0) }
    }

    /// Returns a machine whose disks durably hold these files, each with its device, and no others.
    ///
    /// The last page of a file is filled with zeros.
    #[must_use]
    pub fn with_files(geometry: &Geometry, seed: u64, files: &[(usize, String, Vec<u8>)]) -> Self {
        let simulation = Self::new(geometry, seed);
        lock(&simulation.world).hold(files);
        simulation
    }

    fn directory(&self, disk: usize, access: Access) -> Result<Arc<dyn Directory>> {
        SimDirectory::open(&self.world, disk, access)
    }

    /// Opens the store on all disks, with the engine's own code. `options` name no devices.
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open(&self, options: StoreOptions) -> Result<Store> {
        let disks: Vec<usize> = (0..self.devices).collect();
        self.open_on(options, &disks)
    }

    /// Opens the store on some of the disks.
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open_on(&self, options: StoreOptions, disks: &[usize]) -> Result<Store> {
        let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let directories = disks.iter().map(|disk| self.directory(*disk, access)).collect::<Result<_>>()?;
        Store::open_in(options, environment::environment(&self.system), directories)
    }

    /// Adds a disk to a store on this machine, as [`Store::add_device`] does.
    ///
    /// # Errors
    /// As [`Store::add_device`].
    pub fn add_device(&self, store: &Store, disk: usize) -> Result<u16> {
        store.add_directory(self.directory(disk, Access::ReadWrite)?)
    }

    /// Lets the power fail during the `operations`-th device operation from now on.
    pub fn crash_in(&self, operations: u64) {
        lock(&self.world).crash_in = Some(operations);
    }

    /// Lets the power fail now.
    pub fn crash(&self) {
        lock(&self.world).down = true;
    }

    /// Returns whether the power is off. Every operation fails until [`Simulation::restart`].
    #[must_use]
    pub fn is_down(&self) -> bool {
        lock(&self.world).down
    }

    /// Restarts the machine with what landed on the disks. Stores that were open stay dead.
    pub fn restart(&self) {
        refusal::set(None);
        lock(&self.world).restart();
    }

    /// Sets the bytes of each disk: see [`Geometry::device_bytes`].
    pub fn resize(&self, device_bytes: u64) {
        lock(&self.world).capacity = device_bytes;
    }

    /// Sets the faults to come.
    pub fn set_faults(&self, faults: Faults) {
        refusal::set(faults.memory);
        lock(&self.world).faults = faults;
    }

    /// Returns how many faults have struck so far.
    #[must_use]
    pub fn faults_hit(&self) -> u64 {
        lock(&self.world).faults_hit
    }

    /// Returns how many operations have failed and reported it so far.
    #[must_use]
    pub fn refused(&self) -> u64 {
        lock(&self.world).refused
    }

    /// Returns how many writes went astray so far.
    #[must_use]
    pub fn astray_hit(&self) -> u64 {
        lock(&self.world).astray_hit
    }

    /// Returns how many reads returned a wrong bit so far.
    #[must_use]
    pub fn flips_hit(&self) -> u64 {
        lock(&self.world).flips_hit
    }

    /// Returns the number of device operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        lock(&self.world).operations
    }

    /// Lets the power fail for good after this many operations, so that a store that never stops writing does.
    pub fn limit_operations(&self, most: u64) {
        lock(&self.world).operations_max = most;
    }

    /// Returns true if the power failed because of [`Self::limit_operations`].
    #[must_use]
    pub fn is_endless(&self) -> bool {
        let world = lock(&self.world);
        world.operations >= world.operations_max
    }

    /// Returns the number of operations so far that changed something: writes, syncs, names and lengths of files.
    #[must_use]
    pub fn changes(&self) -> u64 {
        lock(&self.world).changes
    }

    /// Returns the largest total size of all files since the last call, in bytes.
    #[must_use]
    pub fn take_peak_bytes(&self) -> u64 {
        lock(&self.world).take_peak_bytes()
    }

    /// Returns the bytes of the files of a disk.
    #[must_use]
    pub fn bytes(&self, disk: usize) -> u64 {
        lock(&self.world).disks.get(disk).map_or(0, disk::Disk::all_bytes)
    }

    /// Lets time pass. Otherwise a millisecond passes each time the store reads the clock.
    pub fn advance(&self, milliseconds: u64) {
        self.system.advance(i64::try_from(milliseconds).unwrap_or(i64::MAX));
    }

    /// Sets the clock forward, or back if `milliseconds` is negative.
    pub fn set_clock(&self, milliseconds: i64) {
        self.system.advance(milliseconds);
    }

    /// Returns the latest time that the clock has shown, in milliseconds since 1970.
    #[must_use]
    pub fn latest(&self) -> u64 {
        self.system.latest()
    }

    /// Returns how many reservations of memory were refused so far.
    #[must_use]
    pub fn memory_refused(&self) -> u64 {
        self.refused_memory.set(self.refused_memory.get() + refusal::take_refused());
        self.refused_memory.get()
    }

    /// Returns the time in milliseconds since 1970.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.system.now()
    }

    /// Returns a hash over every operation so far. Equal seeds have equal hashes.
    #[must_use]
    pub fn trace(&self) -> u64 {
        lock(&self.world).trace
    }

    /// Flips one bit of a file whose path starts with `prefix`, below `below` bytes. Returns whether there was such a
    /// file.
    ///
    /// With more than one copy, flips the bit at the same offset of the first `copies` such files.
    pub fn rot(&self, prefix: &str, copies: usize, below: u64) -> bool {
        lock(&self.world).rot(prefix, copies, below)
    }

    /// Returns the paths of the files of a device, sorted.
    #[must_use]
    pub fn files(&self, device: usize) -> Vec<String> {
        lock(&self.world).files(device)
    }

    /// Returns the content of a file, or none if there is no such file.
    #[must_use]
    pub fn contents(&self, device: usize, path: &str) -> Option<Vec<u8>> {
        lock(&self.world).contents(device, path)
    }

    /// Replaces the bytes of a file on the medium. `bytes` are whole pages, and the file exists.
    pub fn replace(&self, device: usize, path: &str, bytes: &[u8]) {
        lock(&self.world).replace(device, path, bytes);
    }

    /// Writes the files of all devices into directories `0`, `1`, ... below `path`.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn dump(&self, path: &Path) -> std::io::Result<()> {
        lock(&self.world).dump(path)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        refusal::set(None);
        coverage::stop();
    }
}

/// Returns the bytes of stored clusters of closed sequences, which a full store gives up before it evicts one.
#[must_use]
pub fn releasable_cluster_bytes(store: &Store) -> u64 {
    releasable_bytes(store.inner())
}

/// Returns the K plane and the V plane of a selection's tail, `[kv_heads, group_tokens, head_dim]` each, in the
/// layout's dtype. The first `length % group_tokens` rows of every head hold tokens. Returns `None` when there is no
/// tail.
#[must_use]
pub fn tail(selection: &Selection) -> Option<[&[u8]; 2]> {
    let tail = selection.inner.tail.as_ref()?;
    let block = selection.inner.layout.plain_block(selection.inner.layer);
    Some([0, 1].map(|plane| {
        let (start, len) = block.plane(plane);
        tail.block.get(start..start + len).unwrap_or_default()
    }))
}
