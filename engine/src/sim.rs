//! A store on simulated devices: the whole engine on disks that lose, tear and reorder what was not synced.

use crate::error::Result;
use crate::options::StoreOptions;
use crate::store::Store;

pub use crate::device::sim::{Event, Faults, Geometry, Mutant, Rng, Simulation, events, set_mutant, take_events};

impl Simulation {
    /// Opens the store on these disks, by the product's own code. `options` name no devices.
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open(&self, options: StoreOptions) -> Result<Store> {
        Store::open_in(options, self.directories())
    }
}
