//! Maintenance of a store by its caller: capacity, cleaning, eviction, health and closing.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::maintenance;
use crate::metrics::{DeviceSnapshot, Evicted, lock};
use crate::options::ByteSize;
use serde::Serialize;
use std::sync::Arc;
use stratakv_format::manifest::MEMBER_LOST;

/// The result of cleaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CleanReport {
    /// Segments that were emptied.
    pub segments: u64,
    /// Frames that were moved.
    pub frames: u64,
    /// Bytes that were moved.
    pub bytes: u64,
}

impl From<maintenance::CleaningResult> for CleanReport {
    fn from(done: maintenance::CleaningResult) -> Self {
        Self { segments: done.segments, frames: done.frames, bytes: done.bytes }
    }
}

/// The health of a store: the faults since it was opened, and whether it still takes writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// The reason why nothing can be committed until the store is opened again, or none if commits work.
    pub read_only: Option<String>,
    /// Devices that take no more writes, because a sync failed: index and cause.
    pub poisoned: Vec<(u16, String)>,
    /// The counters of each device: errors, short completions, retries, and its work.
    pub devices: Vec<DeviceSnapshot>,
    /// Blocks and frames that did not match their checksum when they were read. Each counts once per read.
    pub checksum_failures: u64,
    /// Appends that found no space at first.
    pub no_space: u64,
    /// Directories and states of stored clusters that did not verify and are not used.
    pub dropped_clusters: u64,
    /// Layers of attached methods that were restored from their stored state, without clustering keys.
    pub restored_layers: u64,
    /// Sequences that were evicted for space.
    pub evictions: u64,
    /// Sequences that expired.
    pub expirations: u64,
    /// Evictions and expirations that no observer heard, because too many happened before one was set.
    pub events_lost: u64,
    /// Segments that cleaning emptied.
    pub cleaned_segments: u64,
    /// Bytes that cleaning moved.
    pub moved_bytes: u64,
    /// Segments that cannot be emptied because something in them is damaged or unreadable.
    pub stuck_segments: u64,
    /// Commits that wait for the next sync.
    pub queued_commits: u64,
    /// Devices that were declared lost, by index, and whose frames do not all have new copies yet.
    pub lost: Vec<u16>,
    /// Devices whose reads fail, by index. Copies on other devices are read first.
    pub avoided: Vec<u16>,
    /// Copies that failed a read and were not checked yet, or that are damaged and could not be repaired.
    pub suspect_copies: u64,
    /// Copies of the manifest that are missing because devices have no space. They are written as soon as there is
    /// space.
    pub owed_manifests: u64,
}

impl Health {
    /// Returns whether the store met no fault since it was opened.
    #[must_use]
    pub fn is_well(&self) -> bool {
        let faults = |device: &DeviceSnapshot| device.errors + device.checksum_failures + device.damaged_metadata;
        self.read_only.is_none()
            && self.poisoned.is_empty()
            && self.lost.is_empty()
            && self.suspect_copies + self.owed_manifests == 0
            && self.checksum_failures + self.stuck_segments == 0
            && self.devices.iter().all(|device| faults(device) == 0)
    }
}

impl Store {
    /// Returns the health of the store.
    #[must_use]
    pub fn health(&self) -> Health {
        let inner = &self.inner;
        let list = &inner.devices.list;
        let poisoned = |device: &crate::log::Device| {
            device.directory.poison().cause().map(|cause| (device.index.0, cause.to_owned()))
        };
        let devices: Vec<DeviceSnapshot> = list.iter().map(|device| device.counters.snapshot()).collect();
        let own = &inner.activity.counters;
        // One lock at a time. A lock taken in a field below would be held until the last field.
        let stuck_segments = lock(&inner.space).stuck_segments();
        let lost = {
            let catalog = lock(&inner.catalog);
            let lost = catalog.members.values().filter(|member| member.state == MEMBER_LOST);
            lost.map(|member| member.device.get()).collect()
        };
        Health {
            read_only: inner.committer.check().err().map(|e| e.to_string()),
            poisoned: list.iter().filter_map(poisoned).collect(),
            checksum_failures: devices.iter().map(|device| device.checksum_failures).sum(),
            devices,
            no_space: own.no_space.get(),
            dropped_clusters: own.dropped_clusters.get(),
            restored_layers: own.restored_layers.get(),
            evictions: own.evictions.get(),
            expirations: own.expirations.get(),
            events_lost: inner.activity.observers.lost.get(),
            cleaned_segments: own.cleaned_segments.get(),
            moved_bytes: own.moved_bytes.get(),
            stuck_segments,
            queued_commits: inner.committer.waiting() as u64,
            lost,
            avoided: list
                .iter()
                .filter(|device| device.profile.status().avoided)
                .map(|device| device.index.0)
                .collect(),
            suspect_copies: inner.devices.suspects.len() as u64,
            owed_manifests: inner.committer.owed_copies(),
        }
    }

    /// Sets the observer of evictions and expirations. It also hears those since the store was opened.
    ///
    /// The thread that evicts calls it, and holds no lock of the store meanwhile. The observer may use the store and
    /// should be quick.
    pub fn on_eviction(&self, observer: impl Fn(&Evicted) + Send + Sync + 'static) {
        self.inner.activity.observers.set(Arc::new(observer));
    }

    /// Does the maintenance that is due now, in place of the background:
    /// 1. Deletes sequences that have expired.
    /// 2. Evicts sequences if live data is above the high watermark.
    /// 3. Cleans segments if few are free.
    ///
    /// # Errors
    /// A commit failed.
    pub fn run_maintenance(&self) -> Result<CleanReport> {
        maintenance::run_due(&self.inner, false).map(CleanReport::from)
    }

    /// Cleans dead data as far as that frees whole segments. Reads have priority.
    ///
    /// # Errors
    /// A commit failed.
    pub fn clean(&self) -> Result<CleanReport> {
        maintenance::clean_all(&self.inner).map(CleanReport::from)
    }

    /// Sets the most bytes of all files, or none for all that the devices hold. It is valid until the store is closed.
    ///
    /// A smaller capacity is reached at once: the store removes free files, cleans, and evicts evictable sequences.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: the data that must stay takes more. No file grows until the capacity is reached. Or a
    /// commit failed.
    pub fn set_capacity(&self, capacity: Option<ByteSize>) -> Result<()> {
        lock(&self.inner.space).set_capacity(capacity.map(ByteSize::bytes));
        maintenance::shrink(&self.inner)
    }

    /// Closes the store: commits what is queued, and marks it closed.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`]: clones, sequences or readers of it are alive, and the store stays open. Or only reads are
    /// in flight: the store is then closed and durable, but its directories stay locked until the tickets are dropped.
    /// Or the caller is a child of the process that opened it. Or the error of the last commit.
    pub fn close(self) -> Result<()> {
        let in_use = || {
            let text = "close: the store is still in use by clones, sequences or readers; drop them first";
            Error::new(ErrorKind::InUse, text)
        };
        // The threads to wait for do not exist in a child.
        self.inner.devices.check_process()?;
        if self.inner.background.is_maintenance_thread() {
            // An observer of evictions calls. The thread uses the store, and a caller of `close` may wait for it.
            return Err(in_use());
        }
        // One clone after another, because a close that fails starts the maintenance thread again.
        let closing = self.inner.background.closing();
        let _one = lock(&closing);
        self.inner.background.stop(&self.inner.devices.maintenance_wake);
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                let devices = Arc::downgrade(&inner.devices);
                inner.shut()?;
                drop(inner);
                match devices.strong_count() {
                    0 => Ok(()),
                    reads => {
                        let text = format!(
                            "close: the store is closed, but {reads} reads hold its directories until they are dropped"
                        );
                        Err(Error::new(ErrorKind::InUse, text))
                    }
                }
            }
            Err(inner) => {
                if !inner.committer.is_read_only() {
                    super::components::start_maintenance(&inner)?;
                }
                // Before the next clone closes.
                drop(inner);
                Err(in_use())
            }
        }
    }
}
