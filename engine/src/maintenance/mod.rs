//! Maintenance: reclaims dead space, deletes what expires or is evicted, repairs copies, and cleans up after a crash.
//!
//! - [`background`] runs the maintenance thread and decides what is due.
//! - [`clean`] empties mostly dead segments. [`evict`] deletes expired and evictable sequences.
//! - [`pool_space`] releases clusters that keep mostly dead segments.
//! - [`repair`] replaces damaged and missing copies. [`frame_copy`] copies and verifies one frame for both.
//! - The functions of this file run when a store is opened. They finish what a crash interrupted.
//!
//! Every change to the catalog is a commit, so a crash at any point leaves either the old or the new state.

mod background;
mod clean;
mod evict;
mod frame_copy;
mod pool_space;
mod repair;

pub(crate) use background::{clean_all, make_room, release_clusters, run, run_due, shrink};
pub(crate) use clean::CleaningResult;
pub(crate) use evict::expire;
#[cfg(feature = "sim")]
pub(crate) use evict::releasable_bytes;
pub(crate) use repair::Repair;
pub use repair::RepairReport;

use crate::catalog::Catalog;
use crate::error::{ErrorKind, Result};
use crate::io::file::directory::Directory;
use crate::log::Devices;
use crate::metrics::lock;
use std::collections::BTreeMap;
use stratakv_format::superblock::{SLOTS, STATE_OPEN, Slot};
use stratakv_format::{DeviceIndex, manifest, segment};
use zerocopy::little_endian::{U16, U64};

/// Finishes a round of superblock writes that a crash cut short, before another round begins.
///
/// Invariant: no device has an epoch in both slots while another device has it in none.
///
/// # Errors
/// A superblock cannot be written.
pub(crate) fn level_epochs(devices: &Devices) -> Result<()> {
    let slots: Vec<Slot> = devices.list.iter().map(|device| *lock(&device.slot)).collect();
    let newest = slots.iter().map(|slot| (slot.epoch.get(), slot.device_count.get()));
    let Some((epoch, count)) = newest.max() else { return Ok(()) };
    for (device, slot) in devices.list.iter().zip(slots) {
        if slot.epoch.get() < epoch {
            device.write_superblock(|slot| {
                slot.epoch = U64::new(epoch);
                slot.device_count = U16::new(count);
            })?;
        }
    }
    Ok(())
}

/// Makes the space of an unfinished checkpoint usable, without needing new space.
///
/// 1. Write superblocks until every slot names the generation in force, so that no slot refers to another one.
/// 2. Rename the manifest files of other generations for the next generation. Duplicates are removed.
///
/// # Errors
/// A superblock cannot be written, or a file cannot be listed, renamed or removed.
pub(crate) fn settle_generation(
    devices: &Devices,
    slots: &[Slot],
    (generation, nonce): (u64, u64),
    held: &BTreeMap<DeviceIndex, u8>,
) -> Result<()> {
    if slots.iter().any(|slot| slot.manifest_generation.get() != generation) {
        let own = slots.iter().filter(|slot| slot.manifest_generation.get() == generation);
        let synced = own.map(|slot| slot.synced_through.get()).max().unwrap_or(0);
        for _ in 0..SLOTS {
            for device in devices.list.iter() {
                device.write_superblock(|slot| {
                    // A device may hold copies of one generation and none of the next.
                    if slot.manifest_generation.get() != generation {
                        slot.manifest_copies = held.get(&device.index).copied().unwrap_or(0);
                    }
                    slot.manifest_generation = U64::new(generation);
                    slot.manifest_nonce = U64::new(nonce);
                    slot.synced_through = U64::new(synced);
                    slot.state = STATE_OPEN;
                })?;
            }
        }
    }
    for device in devices.list.iter() {
        let directory = &*device.directory;
        let files: Vec<(String, u64, u8)> = directory
            .list(manifest::DIRECTORY)?
            .into_iter()
            .filter_map(|entry| manifest::parse_file_name(&entry.name).map(|(of, copy)| (entry.name, of, copy)))
            .collect();
        let kept = |copy| files.iter().any(|(_, of, other)| (*of, *other) == (generation + 1, copy));
        for (name, of, copy) in files.iter().filter(|(_, of, _)| *of != generation && *of != generation + 1) {
            let path = format!("{}/{name}", manifest::DIRECTORY);
            let next = manifest::file_name(generation + 1, *copy);
            let twice = files.iter().any(|(_, other, c)| c == copy && other < of && *other != generation);
            if kept(*copy) || twice { directory.remove_file(&path)? } else { directory.rename(&path, &next)? }
        }
    }
    Ok(())
}

/// Removes files that an unfinished checkpoint or an uncommitted segment left behind.
///
/// These are manifest files of generations other than `generation` and the next, and segment files that the catalog
/// does not name. Files of the next generation are kept for reuse. The caller must first make `generation` durable and
/// name it in the superblocks.
///
/// # Errors
/// A directory cannot be listed, or a file cannot be removed.
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
