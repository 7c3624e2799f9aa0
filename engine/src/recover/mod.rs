//! Opening: device directories and superblocks, then the manifest. Creating a store is the same path from nothing.

mod devices;
mod replay;

pub(crate) use devices::{Found, Opened, open_directories, read_devices};
pub(crate) use replay::{Replayed, replay};
