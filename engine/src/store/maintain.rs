//! Keeping a store in shape: capacity, cleaning, eviction, and how it is.

use super::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::maintenance;
use crate::metrics::{DeviceSnapshot, Evicted, lock};
use crate::options::ByteSize;
use serde::Serialize;
use std::sync::Arc;
use stratakv_format::manifest::MEMBER_LOST;

/// What cleaning did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CleanReport {
    /// Segments that were emptied.
    pub segments: u64,
    /// Frames that were moved.
    pub frames: u64,
    /// Bytes that were moved.
    pub bytes: u64,
}

impl From<maintenance::Cleaned> for CleanReport {
    fn from(done: maintenance::Cleaned) -> Self {
        Self { segments: done.segments, frames: done.frames, bytes: done.bytes }
    }
}

/// How a store is: every kind of fault it met since it was opened, and whether it still takes writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// Why nothing can be committed until the store is opened again; none when all is well.
    pub read_only: Option<String>,
    /// Devices that take no more writes, because a sync failed: index and cause.
    pub poisoned: Vec<(u16, String)>,
    /// By device: errors, short completions, retries, and what it did.
    pub devices: Vec<DeviceSnapshot>,
    /// Blocks and frames that did not match their checksum when they were read, each counted once per reading.
    pub checksum_failures: u64,
    /// Appends that found no space at first.
    pub no_space: u64,
    /// Sequences evicted for want of space.
    pub evictions: u64,
    /// Sequences whose time to live was over.
    pub expirations: u64,
    /// Events of sequences that went before anybody observed, and were forgotten.
    pub events_lost: u64,
    /// Segments that cleaning emptied.
    pub cleaned_segments: u64,
    /// Bytes that cleaning moved.
    pub moved_bytes: u64,
    /// Segments that cannot be emptied because something in them is damaged or unreadable.
    pub stuck_segments: u64,
    /// Commits that wait for the next sync.
    pub queued_commits: u64,
    /// Devices that were declared lost, by index, and still owe copies to others.
    pub lost: Vec<u16>,
    /// Devices whose reads fail, by index: other copies are read first.
    pub avoided: Vec<u16>,
    /// Copies that failed a read and were not looked at yet, or were found damaged and could not be helped.
    pub suspect_copies: u64,
    /// Copies of the manifest that there should be and for which devices have no room. They are made as soon as there
    /// is.
    pub owed_manifests: u64,
}

impl Health {
    /// True if nothing was ever amiss: no fault, no refusal.
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
    /// How the store is.
    #[must_use]
    pub fn health(&self) -> Health {
        let inner = &self.inner;
        let list = &inner.devices.list;
        let poisoned = |device: &crate::log::Device| {
            device.directory.poison().cause().map(|cause| (device.index.0, cause.to_owned()))
        };
        let devices: Vec<DeviceSnapshot> = list.iter().map(|device| device.counters.snapshot()).collect();
        let own = &inner.activity.counters;
        // One lock at a time: what is locked in the fields below would stay so until the last of them.
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

    /// Who is told of sequences that are evicted or expire, from now on and of those that went since the store was
    /// opened. It is called on the thread that met the need, holding no lock of the store: it may use the store, and
    /// should be quick.
    pub fn on_eviction(&self, observer: impl Fn(&Evicted) + Send + Sync + 'static) {
        self.inner.activity.observers.set(Arc::new(observer));
    }

    /// Does what is due now, instead of the background: sequences expire, evictable ones go when what lives is above
    /// the high watermark, and segments are cleaned when few are free.
    ///
    /// # Errors
    /// A commit failed.
    pub fn run_maintenance(&self) -> Result<CleanReport> {
        maintenance::run_due(&self.inner, false).map(CleanReport::from)
    }

    /// Cleans all that is dead, as far as that frees whole segments. Reads go first.
    ///
    /// # Errors
    /// A commit failed.
    pub fn clean(&self) -> Result<CleanReport> {
        maintenance::clean_all(&self.inner).map(CleanReport::from)
    }

    /// The most bytes of all files from now on; none: what the devices take. A smaller one is reached at once by
    /// removing free files, cleaning, and evicting what may go. It holds for this opening of the store.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: what stays takes more. Nothing grows until it is reached. Or a commit failed.
    pub fn set_capacity(&self, capacity: Option<ByteSize>) -> Result<()> {
        lock(&self.inner.space).set_capacity(capacity.map(ByteSize::bytes));
        maintenance::shrink(&self.inner)
    }

    /// Closes the store: commits what is queued, and marks it closed. Sequences that are still open keep it open.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`]: clones, sequences or readers of it are alive, and it stays open; or only reads under way
    /// are: then it is closed and durable, but its directories stay locked until their tickets are dropped. Otherwise
    /// what the last commit brought.
    pub fn close(self) -> Result<()> {
        self.inner.background.stop(&self.inner.devices.tend);
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => {
                let devices = Arc::downgrade(&inner.devices);
                inner.shut()?;
                drop(inner);
                match devices.strong_count() {
                    0 => Ok(()),
                    reads => {
                        let text = format!(
                            "the store is closed, but {reads} reads hold its directories until they are dropped"
                        );
                        Err(Error::new(ErrorKind::InUse, text))
                    }
                }
            }
            Err(inner) => {
                super::components::start_maintenance(&inner)?;
                Err(Error::new(ErrorKind::InUse, "the store is still in use by clones, sequences or readers"))
            }
        }
    }
}
