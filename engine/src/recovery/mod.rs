//! Opening: device directories and superblocks, then the manifest. Creating a store is the same path from nothing.

mod probe;
mod replay;

pub(crate) use probe::{
    ProbeResult, ProbedDirectory, SUPERBLOCK_NEW, open_directories, read_devices, read_only_features, read_superblock,
    stale_device,
};
pub(crate) use replay::{Replayed, replay};
