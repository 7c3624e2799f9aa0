//! Stores on scratch directories.

use crate::scratch::device_dirs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;
use stratakv::{ByteSize, Result, Store, StoreOptions};
use tempfile::TempDir;

/// Returns options with small segments and frames: 256 KiB and 64 KiB, with 32 MiB of memory. No lazy commit falls due
/// during a test.
#[must_use]
pub fn small() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(32)).segment_bytes(ByteSize::kib(256));
    options.frame_bytes(ByteSize::kib(64)).lazy_delay(Duration::from_secs(3600))
}

/// Returns options with segments of 4 MiB, frames of 256 KiB and 48 MiB of memory. Reads never read over gaps, so the
/// measured speed of the device does not change their bytes.
#[must_use]
pub fn medium() -> StoreOptions {
    let options = Store::options().memory_limit(ByteSize::mib(48)).segment_bytes(ByteSize::mib(4));
    options.frame_bytes(ByteSize::kib(256)).gap_limit(ByteSize(0))
}

/// Returns the options of [`small`] on these devices.
#[must_use]
pub fn small_options<P: AsRef<Path>>(dirs: &[P]) -> StoreOptions {
    dirs.iter().fold(small(), |options, dir| options.device(dir.as_ref()))
}

/// A store on scratch directories. Dropping it drops the store and deletes the directories.
#[derive(Debug)]
pub struct TestStore {
    /// None between [`Self::take`] and [`Self::reopen`]. Declared first, because it is dropped before the directories.
    store: Option<Store>,
    options: StoreOptions,
    dirs: Vec<PathBuf>,
    _scratch: TempDir,
}

impl TestStore {
    /// Opens a new store on one device.
    ///
    /// # Panics
    /// The store does not open.
    #[must_use]
    pub fn new(options: StoreOptions) -> Self {
        Self::on_devices(1, options)
    }

    /// Opens a new store on `devices` devices.
    ///
    /// # Panics
    /// The store does not open.
    #[must_use]
    pub fn on_devices(devices: usize, options: StoreOptions) -> Self {
        Self::in_scratch(tempfile::tempdir().expect("a scratch directory"), devices, options)
    }

    /// Opens a new store on `devices` devices in a scratch directory.
    ///
    /// # Panics
    /// The store does not open.
    #[must_use]
    pub fn in_scratch(scratch: TempDir, devices: usize, options: StoreOptions) -> Self {
        let dirs = device_dirs(scratch.path(), devices);
        let options = dirs.iter().fold(options, |options, dir| options.device(dir));
        let store = Some(options.clone().open().expect("a store"));
        Self { store, options, dirs, _scratch: scratch }
    }

    /// Returns the device directories.
    #[must_use]
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// Returns the options of the store, its devices included.
    #[must_use]
    pub fn options(&self) -> StoreOptions {
        self.options.clone()
    }

    /// Takes the open store, so that the caller can close or drop it before [`Self::reopen`].
    ///
    /// # Panics
    /// The store is not open.
    #[must_use]
    pub fn take(&mut self) -> Store {
        self.store.take().expect("an open store")
    }

    /// Closes the store.
    ///
    /// # Errors
    /// The close fails, as in [`Store::close`].
    ///
    /// # Panics
    /// The store is not open.
    pub fn close(&mut self) -> Result<()> {
        self.take().close()
    }

    /// Drops the store if it is open, and opens it again.
    ///
    /// # Panics
    /// The store does not open.
    pub fn reopen(&mut self) {
        self.reopen_with(self.options());
    }

    /// Drops the store if it is open, and opens it with these options, which include the devices.
    ///
    /// # Panics
    /// The store does not open.
    pub fn reopen_with(&mut self, options: StoreOptions) {
        self.store = None;
        self.store = Some(options.open().expect("the store opens again"));
    }
}

impl Deref for TestStore {
    type Target = Store;

    /// Returns the open store.
    ///
    /// # Panics
    /// The store was closed and not opened again.
    fn deref(&self) -> &Store {
        self.store.as_ref().expect("an open store")
    }
}
