//! The four devices of the measurements, and stores that are filled on some of them.

use crate::devices::limits::DeviceLimits;
use crate::devices::scale::args::ScaleArgs;
use crate::devices::set::DeviceSet;
use crate::read::append_random;
use crate::support::directory::{make_private, settle};
use crate::support::interrupt::check_interrupt;
use crate::support::model::{TOKEN_LAYER_BYTES, layout};
use anyhow::{Context, Result};
use std::path::PathBuf;
use stratakv::options::BalancePolicy;
use stratakv::{ByteSize, CreateOptions, Sequence, Store, StoreOptions};

/// The key of a store's sequence.
pub(super) const KEY: &str = "scale";
/// Memory limit of each store.
const MEMORY: ByteSize = ByteSize::mib(512);

/// The devices, and the number of stores made on them so far.
pub(super) struct ScaleRig {
    pub(super) devices: DeviceSet,
    stores: u32,
}

/// The devices of a store, the copies of its frames, and the selections from it.
pub(super) struct ScaleCase {
    /// Numbers of the devices.
    pub(super) devices: Vec<u32>,
    pub(super) copies: u8,
    /// True if most of a selection has its first copy on the first device.
    pub(super) skew: bool,
}

/// A filled store with its sequence, and the directories of both.
pub(super) struct FilledStore {
    pub(super) store: Store,
    pub(super) sequence: Sequence,
    pub(super) paths: Vec<PathBuf>,
}

/// Returns the options of a store, without its devices.
pub(super) fn store_options(args: &ScaleArgs, policy: BalancePolicy) -> StoreOptions {
    let options = StoreOptions::default().memory_limit(MEMORY).driver(args.driver.into());
    options.balance(policy).hedge_percentile(None).segment_bytes(ByteSize::mib(32))
}

impl ScaleRig {
    /// Returns a rig on these devices.
    pub(super) fn new(devices: DeviceSet) -> Self {
        Self { devices, stores: 0 }
    }

    /// Makes a new store for a case and fills it without limits.
    ///
    /// # Errors
    /// The store cannot be made or filled, or the run was interrupted.
    pub(super) fn fill(&mut self, args: &ScaleArgs, case: &ScaleCase, policy: BalancePolicy) -> Result<FilledStore> {
        check_interrupt()?;
        self.stores += 1;
        let mut options = store_options(args, policy);
        let mut paths = Vec::new();
        for device in &case.devices {
            self.devices.limit(*device as usize, &DeviceLimits::NONE)?;
            let path = self.devices.list[*device as usize].path.join(format!("store-{}", self.stores));
            make_private(&path)?;
            options = options.device(&path);
            paths.push(path);
        }
        let store = options.open()?;
        let group = (args.block.0 / TOKEN_LAYER_BYTES) as u16;
        let created = CreateOptions::new().key(KEY).copies(case.copies);
        let mut sequence = store.create_sequence(&layout(1, group)?, created)?;
        append_random(&mut sequence, (args.size.0 / args.block.0 * u64::from(group)) as usize)?;
        paths.iter().try_for_each(|path| settle(path))?;
        Ok(FilledStore { store, sequence, paths })
    }
}

impl FilledStore {
    /// Closes the store. Returns its directories.
    ///
    /// # Errors
    /// The store cannot be closed.
    pub(super) fn close(self) -> Result<Vec<PathBuf>> {
        drop(self.sequence);
        self.store.close()?;
        Ok(self.paths)
    }
}

/// Removes the directories of a store.
///
/// # Errors
/// One of them cannot be removed.
pub(super) fn remove(paths: &[PathBuf]) -> Result<()> {
    let remove_one =
        |path: &PathBuf| std::fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()));
    paths.iter().try_for_each(remove_one)
}
