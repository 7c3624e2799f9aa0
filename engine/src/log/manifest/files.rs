//! The files of a manifest generation: which copies exist, and how long they may be.
//!
//! A generation leaves half of the available space to the next one, because both exist during a checkpoint.

use crate::catalog::{Catalog, RecordBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory};
use crate::io::seams::Sizes;
use crate::log::devices::Devices;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stratakv_format::manifest as m;
use stratakv_format::{DeviceIndex, PAGE_BYTES};

/// Free pages that a generation must have behind its checkpoint, at least.
const SPARE_PAGES: u64 = 2;

/// Returns how many copies of the manifest the device of this index holds in a store of `devices` devices.
pub(crate) fn copies_for(index: DeviceIndex, devices: usize) -> u8 {
    match (devices, index.0) {
        (1, _) => 2,
        (_, 0..=2) => 1,
        _ => 0,
    }
}

/// How a generation begins.
pub(crate) struct GenerationStart {
    pub(crate) generation: u64,
    pub(crate) previous: u64,
    pub(crate) first_batch: u64,
    pub(crate) epoch: u64,
    /// Free pages behind the checkpoint.
    pub(crate) room: u64,
    /// Bytes that all copies together should not exceed.
    pub(crate) limit: u64,
    /// True if they may exceed it.
    pub(crate) beyond: bool,
    /// Bytes of the previous generation's files, which are free once this generation is in force.
    pub(crate) released: u64,
    /// Devices that nothing is written to.
    pub(crate) gone: BTreeSet<DeviceIndex>,
}

impl GenerationStart {
    /// Returns how many bytes a file should have, and must have at least, to begin with this checkpoint.
    pub(super) fn sizes(&self, state: &RecordBuffer, sizes: &Sizes) -> (u64, u64) {
        let (state_bytes, room_bytes) =
            (pages_of(state, sizes.batch_bytes) * PAGE_BYTES as u64, self.room * PAGE_BYTES as u64);
        let wanted = wanted_bytes(state_bytes, room_bytes, sizes);
        // The minimum on a full device: the checkpoint, and as many batches as one commit takes.
        let least = state_bytes + room_bytes + (1 + SPARE_PAGES) * PAGE_BYTES as u64;
        (wanted.min(m::FILE_BYTES_MAX), least)
    }

    /// Returns the bytes that leave as much to the next generation.
    pub(super) fn half(&self) -> u64 {
        half(self.limit, self.released)
    }
}

/// Returns how many bytes a file should have behind a checkpoint of `state_bytes`.
fn wanted_bytes(state_bytes: u64, room_bytes: u64, sizes: &Sizes) -> u64 {
    // Slack of a sixteenth, so that a small checkpoint does not add a whole unit.
    let fresh = sizes.manifest_bytes - sizes.manifest_bytes / 16;
    (fresh + 2 * state_bytes + room_bytes).next_multiple_of(sizes.zero_bytes as u64)
}

/// Returns the bytes of all manifest files of a store with these members and no data: one generation, and the files
/// kept for the next one.
///
/// Counts the copies of a new store with as many active devices. A store that devices left and joined may have more.
/// They share the space, so that it opens with the capacity that it was created with.
pub(crate) fn bytes_without_data(members: &BTreeMap<DeviceIndex, m::Member>, sizes: &Sizes) -> u64 {
    let mut catalog = Catalog::default();
    catalog.members.clone_from(members);
    let file = wanted_bytes(pages_of(&catalog.checkpoint(), sizes.batch_bytes) * PAGE_BYTES as u64, 0, sizes);
    let active = members.values().filter(|member| member.state == m::MEMBER_ACTIVE).count();
    let copies: u64 = (0..active).map(|index| u64::from(copies_for(DeviceIndex(index as u16), active))).sum();
    2 * copies * file
}

/// Returns half of the bytes for two generations: `limit`, and `released`, the bytes of the previous files.
pub(super) fn half(limit: u64, released: u64) -> u64 {
    limit.saturating_add(released) / 2
}

/// Returns the copies of the manifest that the devices should have.
pub(super) fn copies(devices: &Devices, gone: &BTreeSet<DeviceIndex>) -> Vec<(DeviceIndex, u8)> {
    let written = devices.list.iter().filter(|device| !device.is_lost() && !gone.contains(&device.index));
    written.flat_map(|device| (0..device.member().manifest_copies).map(move |copy| (device.index, copy))).collect()
}

/// Returns the copies that a generation gets: all that the previous generation has, and new ones for which there is
/// space.
///
/// `new_copies` is the bytes of a new copy and the bytes that a generation may take, or `None` for no new copies. A new
/// copy needs space on its device for itself and for its successor, so that it never takes a device's last space.
pub(super) fn affordable(
    devices: &Devices,
    all: &[(DeviceIndex, u8)],
    previous: u64,
    new_copies: Option<(u64, u64)>,
) -> Result<Vec<(DeviceIndex, u8)>> {
    let (mut there, mut new) = (Vec::new(), Vec::new());
    for (device, copy) in all {
        let directory = &*devices.get(*device)?.directory;
        let has = |generation| kept_bytes(directory, &m::file_name(generation, *copy));
        if has(previous)? > 0 {
            there.push((*device, *copy));
        } else if let Some((bytes, _)) = new_copies {
            let fits = bytes <= room_for_copy(directory, previous + 1, *copy)?;
            new.extend(fits.then_some((*device, *copy)));
        }
    }
    // Without a previous generation, this is the first one.
    if there.is_empty() {
        return Ok(all.to_vec());
    }
    // Segments could take what the capacity leaves now, before the next generation needs it.
    let more = new_copies.map_or(0, |(bytes, half)| (half / bytes.max(1)).saturating_sub(there.len() as u64));
    there.extend(new.into_iter().take(usize::try_from(more).unwrap_or(usize::MAX)));
    there.sort_unstable();
    Ok(there)
}

/// Returns how many bytes a new copy may have, so that its device has space for an equal file of the next generation.
pub(super) fn room_for_copy(directory: &dyn Directory, generation: u64, copy: u8) -> Result<u64> {
    let available = directory.space().map_or(u64::MAX, |space| space.available);
    let there = kept_bytes(directory, &m::file_name(generation, copy))?;
    Ok(available.saturating_add(there) / 2 / PAGE_BYTES as u64 * PAGE_BYTES as u64)
}

/// Returns the bytes of a file, or 0 if it does not exist.
pub(super) fn kept_bytes(directory: &dyn Directory, name: &str) -> Result<u64> {
    match directory.open_file(name, Access::ReadWrite) {
        Ok(file) => file.len(),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(0),
        Err(e) => Err(e),
    }
}

/// Returns how many bytes, in whole pages, each file may have so that all together have `limit` bytes. `kept` are their
/// present sizes, below which none shrinks.
fn share(limit: u64, mut kept: Vec<u64>) -> u64 {
    kept.sort_unstable();
    let mut left = limit;
    while let Some(longest) = kept.last() {
        let each = left / kept.len() as u64;
        if *longest <= each {
            return each / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        }
        left = left.saturating_sub(*longest);
        kept.pop();
    }
    0
}

/// Returns the bytes of each file of a generation, and whether all together exceed both `limit` and what they took
/// before.
///
/// Each file gets `wanted` bytes, reduced to its share of `limit` and of `half`, and at least `least`. A spare file
/// that is so large that another one could not get `least` is removed.
pub(super) fn sizes_of_copies(
    devices: &Devices,
    (copies, generation): (&[(DeviceIndex, u8)], u64),
    (wanted, least): (u64, u64),
    (limit, half): (u64, u64),
) -> Result<(u64, bool)> {
    let mut kept = Vec::new();
    for (device, copy) in copies {
        let (directory, name) = (&*devices.get(*device)?.directory, m::file_name(generation, *copy));
        kept.push((directory, kept_bytes(directory, &name)?, name));
    }
    let part = |all: u64| share(all, vec![0; kept.len()]);
    let takes = |kept: &[(_, u64, _)], wanted: u64| kept.iter().map(|(_, bytes, _)| wanted.max(*bytes)).sum::<u64>();
    let there = takes(&kept, 0);
    let (each, wanted) = (part(limit), wanted.min(part(half)));
    if takes(&kept, least) > limit && least <= each {
        for (directory, bytes, name) in kept.iter_mut().filter(|(_, bytes, _)| *bytes > each) {
            directory.remove_file(name)?;
            *bytes = 0;
        }
    }
    let wanted = wanted.min(share(limit, kept.iter().map(|(_, bytes, _)| *bytes).collect())).max(least);
    Ok((wanted, takes(&kept, wanted) > limit.max(there)))
}

/// Takes the spare file of this name, or creates it, with `wanted` bytes, or with `least` if there is no space for
/// more. Returns the file and its bytes.
pub(super) fn take_file(
    directory: &dyn Directory,
    name: &str,
    wanted: u64,
    least: u64,
) -> Result<(Arc<DeviceFile>, u64)> {
    let no_space = |e: &Error| e.kind() == ErrorKind::NoSpace;
    let file = match directory.open_file(name, Access::ReadWrite) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return match directory.create_file(name, wanted) {
                Err(e) if no_space(&e) && 0 < least && least < wanted => {
                    directory.create_file(name, least).map(|file| (file, least))
                }
                other => other.map(|file| (file, wanted)),
            };
        }
        other => other?,
    };
    let len = file.len()?;
    if len >= wanted {
        return Ok((file, len));
    }
    match directory.grow_file(&file, wanted) {
        Ok(()) => Ok((file, wanted)),
        Err(e) if no_space(&e) && len >= least => Ok((file, len)),
        Err(e) if no_space(&e) => directory.grow_file(&file, least).map(|()| (file, least)),
        Err(e) => Err(e),
    }
}

/// Takes the spare file of this name with `wanted` bytes. If its device has less, takes the file as it is, or creates
/// it with all that the device has. Returns the file and its bytes, or `None` if the device is full.
pub(super) fn take_spare(directory: &dyn Directory, name: &str, wanted: u64) -> Result<Option<(Arc<DeviceFile>, u64)>> {
    let if_space = |taken: Result<_>| match taken {
        Err(e) if e.kind() == ErrorKind::NoSpace => Ok(None),
        taken => taken.map(Some),
    };
    if let Some(taken) = if_space(take_file(directory, name, wanted, 0))? {
        return Ok(Some(taken));
    }
    // Segments would take this space, and the next checkpoint would find none.
    let bytes = directory.space().map_or(0, |space| space.available) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if bytes == 0 || bytes >= wanted {
        return Ok(None);
    }
    if_space(directory.create_file(name, bytes).map(|file| (file, bytes)))
}

/// Returns the pages that records take as batches of at most `batch_bytes` bytes of records.
pub(super) fn pages_of(records: &RecordBuffer, batch_bytes: usize) -> u64 {
    let header = size_of::<m::BatchHeader>();
    records.batches(batch_bytes).iter().map(|(bytes, _)| (header + bytes.len()).div_ceil(PAGE_BYTES) as u64).sum()
}
