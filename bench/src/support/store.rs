//! Opening the store that is measured, and sums over its devices.

use crate::support::args::{CommonArgs, DriverArg};
use crate::support::directory::make_private;
use anyhow::Result;
use std::path::Path;
use stratakv::store::{DeviceStatus, StoreStatus};
use stratakv::{ByteSize, Store, StoreOptions};

/// Opens the store in `directory` with `memory` as its limit. The directory is made if it does not exist.
///
/// # Errors
/// The directory cannot be made, or the store cannot be opened.
pub(crate) fn open_store(common: &CommonArgs, directory: &Path, memory: ByteSize) -> Result<Store> {
    open_store_with(common, None, directory, StoreOptions::default().memory_limit(memory))
}

/// Opens the store in `directory` with options that name no device, and with `driver` in place of `--driver` if it is
/// given.
///
/// # Errors
/// As [`open_store`].
pub(crate) fn open_store_with(
    common: &CommonArgs,
    driver: Option<DriverArg>,
    directory: &Path,
    options: StoreOptions,
) -> Result<Store> {
    if !directory.exists() {
        make_private(directory)?;
    }
    let options = options.device(directory);
    let store = options.driver(driver.unwrap_or(common.driver).into()).checksum(common.checksum.into()).open()?;
    for device in store.status().devices {
        for note in device.notes {
            eprintln!("kvbench: {note}");
        }
        if !device.direct {
            eprintln!("kvbench: {} has no direct I/O: reads come from the page cache", device.path);
        }
    }
    Ok(store)
}

/// Returns the sum of a counter over the devices of a store.
pub(crate) fn device_sum(store: &Store, counter: impl Fn(&DeviceStatus) -> u64) -> u64 {
    store.status().devices.iter().map(counter).sum()
}

/// Returns the bytes that the store has read from its devices since it was opened.
pub(crate) fn read_bytes(store: &Store) -> u64 {
    device_sum(store, |device| device.counters.read_bytes)
}

/// Returns the name of the driver of a store's first device.
pub(crate) fn driver_name(status: &StoreStatus) -> String {
    status.devices.first().map(|device| device.driver.clone()).unwrap_or_default()
}

/// Returns the kind of pages behind a store's I/O buffers: `explicit`, `transparent`, `plain` or `none`.
pub(crate) fn page_kind(status: &StoreStatus) -> String {
    status.pages.clone().unwrap_or_else(|| "none".to_owned())
}
