//! A store on simulated devices: the whole engine on disks that lose, tear and reorder what was not synced.

use crate::error::Result;
use crate::options::StoreOptions;
use crate::plan::Selection;
use crate::store::Store;

pub use crate::io::sim::{Event, Faults, Geometry, Mutant, Rng, Simulation, events, set_mutant, take_events};

impl Simulation {
    /// Opens the store on these disks, by the product's own code. `options` name no devices.
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open(&self, options: StoreOptions) -> Result<Store> {
        Store::open_in(options, self.directories())
    }

    /// Opens the store on some of the disks.
    ///
    /// # Errors
    /// As [`StoreOptions::open`].
    pub fn open_on(&self, options: StoreOptions, disks: &[usize]) -> Result<Store> {
        Store::open_in(options, disks.iter().map(|disk| self.directory(*disk)).collect())
    }

    /// [`Store::add_device`], of a disk.
    ///
    /// # Errors
    /// As that.
    pub fn add_device(&self, store: &Store, disk: usize) -> Result<u16> {
        store.add_directory(self.directory(disk))
    }
}

/// Returns the K plane and the V plane of a selection's tail, `[kv_heads, group_tokens, head_dim]` each, in the layout's
/// dtype. The first `length % group_tokens` rows of every head hold tokens. Returns `None` when there is no tail.
#[must_use]
pub fn tail(selection: &Selection) -> Option<[&[u8]; 2]> {
    let tail = selection.inner.tail.as_ref()?;
    let block = selection.inner.layout.plain_block(selection.inner.layer);
    Some([0, 1].map(|plane| {
        let (start, len) = block.plane(plane);
        tail.block.get(start..start + len).unwrap_or_default()
    }))
}
