//! Recovery: reads superblocks and manifest when a store is opened. Creating a store starts on the same path.
//!
//! How a store is opened:
//! 1. `probe` opens and locks the directories, reads the superblocks, and checks that they belong to one store.
//! 2. `replay` reads the manifest generation that the newest superblock names and builds the catalog from it.
//!    `manifest_copies` reads its copies.
//! 3. The caller then finishes what a crash interrupted ([`crate::maintenance`]).
//!
//! Recovery reads no segment: the manifest alone defines the committed state. Only the undo of an interrupted creation
//! writes to a device.

mod manifest_copies;
mod probe;
mod replay;

pub(crate) use probe::{
    ProbeResult, ProbedDirectory, SUPERBLOCK_NEW, open_directories, read_devices, read_only_features, read_superblock,
    stale_device,
};
pub(crate) use replay::{ManifestState, replay};
