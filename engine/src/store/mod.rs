//! The store: opening, sequences, reads, status, close. One file per concern.
//!
//! [`Store`] is a handle. All state is in `StoreInner`, which the log owns.
//! The files add methods to the handle: `sequences`, `reading`, `adapters`, `members`, `maintain`, `repair`, `status`,
//! `usage`. `open` and `create` make the state, `start` starts devices, `components` puts all together.

mod adapters;
mod capacity;
mod components;
mod create;
mod maintain;
mod members;
mod open;
mod reading;
mod repair;
mod sequences;
mod start;
mod status;
mod usage;

#[cfg(test)]
pub(crate) mod tests;

pub use adapters::AdapterInfo;
pub use maintain::{CleanReport, Health};
pub use reading::ReadRequest;
pub use status::{DeviceStatus, SequenceInfo, StoreStatus};
pub use usage::{DeviceUsage, NamespaceUsage, Usage};

pub use crate::cache::{CacheStatus, PolicyReplay, ReplayedCluster};
pub use crate::io::PageBacking;
pub use crate::io::scheduler::profile::ProfileStatus;
pub use crate::maintenance::RepairReport;
pub use stratakv_format::DeviceIndex;

use crate::error::{Error, ErrorKind, Result};
use crate::events::span;
use crate::io::buffer::SLAB_BYTES;
use crate::io::file::directory::{Access, Directory};
use crate::io::file::open_roots::OpenRoots;
use crate::io::seams::Environment;
use crate::log::StoreInner;
use crate::options::{ComputeThreads, StoreOptions};
use crate::recovery::{ProbeResult, open_directories, read_devices};
use create::create;
use open::open_existing;
use std::sync::{Arc, PoisonError};

/// An open store. Clones are cheap and share it. It is closed when the last clone is dropped.
#[derive(Clone)]
pub struct Store {
    /// None for a simulated store. Declared first, because an open may wait for a store that is being closed.
    _roots: Option<Arc<OpenRoots>>,
    inner: Arc<StoreInner>,
}

impl Store {
    /// Returns the default options, to be changed and opened.
    #[must_use]
    pub fn options() -> StoreOptions {
        StoreOptions::default()
    }

    /// Opens or creates a store.
    ///
    /// # Errors
    /// The errors of [`StoreOptions::open`].
    pub fn open(options: StoreOptions) -> Result<Self> {
        let _span = span!("open");
        let memory = usize::try_from(options.memory_limit.bytes()).unwrap_or(usize::MAX);
        if memory < 2 * SLAB_BYTES {
            let text = format!(
                "open: memory_limit {} is below the {} bytes that buffers need; raise memory_limit",
                options.memory_limit,
                2 * SLAB_BYTES
            );
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let directories = open_directories(&options.devices, access)?;
        let roots = directories.iter().map(|directory| directory.identity()).collect();
        let store = Self::open_in(options, Environment::default(), directories)?;
        Ok(Self { _roots: Some(Arc::new(OpenRoots::new(roots))), ..store })
    }

    /// Lets sequences of this store select, and build summaries, on threads of the host from now on. `None`, the
    /// default, leaves everything on the calling thread.
    ///
    /// Results do not depend on it: every number of threads gives the same bits. The store holds the host until it is
    /// closed, so a host must not hold the store.
    pub fn set_compute_threads(&self, threads: Option<Arc<dyn ComputeThreads>>) {
        let mut own = self.inner.devices.compute.write().unwrap_or_else(PoisonError::into_inner);
        let former = std::mem::replace(&mut *own, threads);
        // A host may wait for its threads when it is dropped, and one of them may wait for this lock.
        drop(own);
        drop(former);
    }

    /// Opens or creates a store in these directories.
    pub(crate) fn open_in(
        options: StoreOptions,
        environment: Environment,
        directories: Vec<Arc<dyn Directory>>,
    ) -> Result<Self> {
        let memory = usize::try_from(options.memory_limit.bytes()).unwrap_or(usize::MAX);
        let (low, high) = (options.low_watermark, options.high_watermark);
        if !(low > 0.0 && low <= high && high <= 1.0) {
            let text = format!("open: watermarks {low} and {high} do not satisfy 0 < low <= high <= 1");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        if options.shard_threads == Some(0) {
            return Err(Error::new(
                ErrorKind::Configuration,
                "open: shard_threads is 0; at least one thread must serve the devices",
            ));
        }
        let inner = match read_devices(directories, options.read_only, memory)? {
            ProbeResult::Store(found) => open_existing(&options, environment, memory, found)?,
            ProbeResult::Empty(found) if options.create && !options.read_only => {
                create(&options, environment, memory, found)?
            }
            ProbeResult::Empty(found) => {
                let path = found.first().map(|f| f.directory.path().display().to_string()).unwrap_or_default();
                let text =
                    format!("open: device directory {path} holds no store, and the options do not ask to create one");
                return Err(Error::new(ErrorKind::Configuration, text));
            }
        };
        Ok(Self { _roots: None, inner })
    }

    pub(crate) fn inner(&self) -> &Arc<StoreInner> {
        &self.inner
    }

    /// Makes every lazy commit durable.
    ///
    /// # Errors
    /// [`ErrorKind::Indeterminate`], [`ErrorKind::Poisoned`]: a sync failed.
    pub fn flush(&self) -> Result<()> {
        self.inner.flush_commits()
    }
}

impl StoreOptions {
    /// Opens the store, or creates it.
    ///
    /// # Errors
    /// - [`ErrorKind::Configuration`]: no device is given, or one is missing, given twice, of another store, or open to
    ///   other users.
    /// - [`ErrorKind::InvalidArgument`]: the capacity is too small for the segments of a store that has none yet.
    /// - [`ErrorKind::StaleDevice`]: a device that left the store is given.
    /// - [`ErrorKind::InUse`]: another process has the store, or another [`Store`] of this process has.
    /// - [`ErrorKind::Unsupported`]: another version wrote it.
    /// - [`ErrorKind::Corruption`]: every copy of its metadata is damaged.
    pub fn open(self) -> Result<Store> {
        Store::open(self)
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("devices", &self.inner.devices.list.len()).finish_non_exhaustive()
    }
}
