//! Giving back: what an open finds that nobody names any more, what is dead, and what may go.

mod background;
mod clean;
mod evict;
mod frame_copy;
mod repair;

pub(crate) use background::{clean_all, make_room, run, shrink, tend};
pub(crate) use clean::Cleaned;
pub(crate) use evict::expire;
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

/// Where a round of superblocks with a new epoch was cut, it is ended before any other begins: no device has that epoch in both
/// slots while another has it in none.
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

/// What an unfinished checkpoint left is made room of: all slots name the generation in force, so that nothing refers to an
/// older one, and files of any other are kept for the next. No new space is needed for any of this.
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
                    // Not every device that holds copies of one generation holds them of the next.
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

/// Removes manifest files of generations other than the one in force and the next, for which they are kept, and segment files
/// that the catalog does not know: what an unfinished checkpoint or an uncommitted segment left. Call only when `generation` is durable and named by the superblock.
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
