//! Giving back: what an open finds that nobody names any more.

use crate::device::directory::Directory;
use crate::error::{ErrorKind, Result};
use crate::index::Catalog;
use stratakv_format::{DeviceIndex, manifest, segment};

/// Removes manifest files of generations other than the one in force and the next, for which they are kept, and segment files that the catalog does not know: what an unfinished
/// checkpoint or an uncommitted segment left. Call only when `generation` is durable and named by the superblock.
pub(crate) fn remove_leftovers(
    directory: &dyn Directory,
    device: DeviceIndex,
    generation: u64,
    catalog: &Catalog,
) -> Result<()> {
    let remove = |path: &str| match directory.remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    for entry in directory.list(manifest::DIRECTORY)? {
        if manifest::parse_file_name(&entry.name)
            .is_some_and(|(other, _)| other != generation && other != generation + 1)
        {
            remove(&format!("{}/{}", manifest::DIRECTORY, entry.name))?;
        }
    }
    for entry in directory.list(segment::DIRECTORY)? {
        if let Some(id) = segment::parse_file_name(&entry.name)
            && !catalog.segments.contains_key(&(device, id))
        {
            remove(&segment::file_name(id))?;
        }
    }
    Ok(())
}
