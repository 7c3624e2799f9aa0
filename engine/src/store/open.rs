//! The opening of a store that exists.
//!
//! 1. Replay the manifest that the superblocks name ([`replay`]).
//! 2. Match the directories with the members that the manifest knows.
//! 3. Declare missing members lost, if the options allow it.
//! 4. Start the devices.
//! 5. After a clean close, append to the manifest. Otherwise start a new generation, which repairs every copy of the
//!    metadata.
//! 6. Remove files that belong to nothing, and put the store together.

use super::capacity::check_capacity;
use super::components::start;
use super::start::{MemberDevice, start_devices};
use crate::catalog::Catalog;
use crate::error::{Error, ErrorKind, Result};
use crate::events::event;
use crate::io::planted;
use crate::io::seams::Environment;
use crate::log::{Devices, GenerationStart, ManifestLog, StoreIdentity, StoreInner, with_heirs};
use crate::maintenance::{level_epochs, remove_leftovers, settle_generation};
use crate::options::StoreOptions;
use crate::recovery::{ManifestState, ProbedDirectory, read_only_features, replay, stale_device};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use stratakv_format::features::{INCOMPAT_CODECS, INCOMPAT_POOLS, INCOMPAT_REPLICAS};
use stratakv_format::ids::NUMBER_MAX;
use stratakv_format::manifest as m;
use stratakv_format::segment::KIND_POOL;
use stratakv_format::superblock::{SLOTS, STATE_CLOSED, STATE_OPEN, Slot};
use stratakv_format::{DeviceIndex, PAGE_BYTES};
use zerocopy::little_endian::U64;

/// Frame and sequence ids that are skipped after a crash, because some may have been used and not recorded.
const IDS_SKIPPED: u64 = 1 << 20;

/// How far below their limit numbers must be before a store is opened for writing. They grow by much less in its life.
const NUMBERS_LEFT: u64 = 1 << 50;

/// Opens the store in these directories.
///
/// # Errors
/// The errors of [`StoreOptions::open`](crate::StoreOptions::open).
pub(super) fn open_existing(
    options: &StoreOptions,
    environment: Environment,
    memory: usize,
    found: Vec<ProbedDirectory>,
) -> Result<Arc<StoreInner>> {
    let slots: Vec<Slot> = found.iter().filter_map(|f| f.slot).collect();
    let Some(first) = slots.first() else {
        return Err(Error::new(ErrorKind::Configuration, "open: no device directory holds a store"));
    };
    let identity = StoreIdentity {
        store_id: first.store_id,
        checksum: first.checksum(),
        segment_pages: (first.segment_bytes.get() / PAGE_BYTES as u64) as u32,
        instance: environment.random_u64()?,
    };
    let every_slot: Vec<Slot> = found.iter().flat_map(|f| f.slots.iter().copied()).collect();
    // Writing both slots again repairs these.
    let damaged_slots: Vec<u64> = found.iter().map(ProbedDirectory::damaged_slots).collect();
    let mut replayed = replay(&found, identity.store_id, memory)?;
    if !options.read_only && !replayed.writable {
        return Err(read_only_features(&format!("manifest generation {}", replayed.place.generation)));
    }
    let mut known = match_members(found, &slots, &replayed.catalog)?;
    let (epoch, changed) = declare_missing(options, &mut replayed, &slots, &mut known)?;
    if !options.read_only {
        check_numbers(&replayed, &every_slot, epoch)?;
        check_capacity(options, &replayed.catalog, first.segment_bytes.get(), &environment.sizes(), "open")?;
    }
    let members = replayed.catalog.members.keys().map(|device| usize::from(device.0) + 1).max().unwrap_or(1);
    let is_unclean = replayed.dirty
        || damaged_slots.iter().any(|slots| *slots > 0)
        || changed
        || slots.iter().any(|slot| slot.state != STATE_CLOSED);
    let is_unclean = is_unclean && !planted!(GenerationNotBumped);
    let devices = start_devices(options, environment, memory, identity, known, members)?;
    for (slot, damaged) in slots.iter().zip(damaged_slots) {
        let index = DeviceIndex(slot.device_index.get());
        let copies = replayed.damaged.get(&index).copied().unwrap_or(0);
        devices.get(index)?.counters.damaged_metadata.add(damaged + copies);
        if damaged + copies > 0 {
            event!(warn, device = index, count = damaged + copies, "metadata is damaged; an intact copy was used");
        }
    }
    devices.incompat.fetch_or(used_features(&replayed.catalog), Ordering::Relaxed);
    let account = replayed.catalog.memory_bytes();
    if options.read_only {
        check_account(account, memory)?;
        // The changes of recovery are kept in memory only. Every opening makes them again.
        let manifest = ManifestLog::read_only(replayed.place, replayed.epoch, devices.environment.sizes().batch_bytes);
        return start(options, devices, replayed.catalog, manifest);
    }
    let manifest = if is_unclean {
        let epochs = (epoch, if changed { epoch.saturating_add(1) } else { epoch });
        start_generation(options, &devices, &mut replayed, &every_slot, epochs)?
    } else {
        let manifest = ManifestLog::resume(&devices, replayed.place, epoch)?;
        manifest.mark(&devices, STATE_OPEN)?;
        manifest
    };
    for device in devices.list.iter() {
        remove_leftovers(&*device.directory, device.index, manifest.place().generation, &replayed.catalog)?;
    }
    check_account(account, memory)?;
    start(options, devices, replayed.catalog, manifest)
}

/// Pairs each directory with the member that the manifest knows it as.
///
/// # Errors
/// [`ErrorKind::Configuration`]: a directory is not the device that the manifest knows.
fn match_members(found: Vec<ProbedDirectory>, slots: &[Slot], catalog: &Catalog) -> Result<Vec<MemberDevice>> {
    let mut known = Vec::new();
    for (found, slot) in found.into_iter().zip(slots) {
        match catalog.members.get(&DeviceIndex(slot.device_index.get())) {
            Some(member) if member.device_id == slot.device_id => {
                known.push(MemberDevice { directory: found.directory, slot: *slot, member: *member });
            }
            _ => {
                let path = found.directory.path().display().to_string();
                let text = format!("open: device directory {path}: it is not the device that the store knows");
                return Err(Error::new(ErrorKind::Configuration, text));
            }
        }
    }
    Ok(known)
}

/// Declares members lost whose devices are not given, in the catalog. Returns the newest epoch, and whether a member
/// changed.
///
/// # Errors
/// The errors of [`missing_members`].
fn declare_missing(
    options: &StoreOptions,
    replayed: &mut ManifestState,
    slots: &[Slot],
    known: &mut [MemberDevice],
) -> Result<(u64, bool)> {
    let active: Vec<_> = known.iter().map(|k| k.member).filter(|member| member.state == m::MEMBER_ACTIVE).collect();
    let changed = with_heirs(missing_members(options, &replayed.catalog, known)?, &active);
    let recorded = replayed.catalog.members.values().map(|member| member.epoch.get());
    let epoch = slots.iter().map(|slot| slot.epoch.get()).chain(recorded).max().unwrap_or(1).max(replayed.epoch);
    for mut member in changed.iter().copied() {
        member.epoch = U64::new(epoch.saturating_add(1));
        replayed.catalog.members.insert(DeviceIndex(member.device.get()), member);
        known.iter_mut().filter(|k| k.member.device == member.device).for_each(|k| k.member = member);
    }
    Ok((epoch, !changed.is_empty()))
}

/// Returns the incompatible features that a catalog uses.
fn used_features(catalog: &Catalog) -> u64 {
    let copies = catalog.frames.values().any(|frame| frame.copies() > 1)
        || catalog.sequences.values().any(|sequence| sequence.copies > 1);
    let codecs = catalog.layouts.values().any(|layout| layout.raw().is_encoded());
    // A free segment keeps its kind in the manifest until it is opened again.
    let pools = catalog.segments.values().any(|segment| segment.kind == KIND_POOL);
    let features = [(copies, INCOMPAT_REPLICAS), (codecs, INCOMPAT_CODECS), (pools, INCOMPAT_POOLS)];
    features.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit)
}

/// Starts a new generation after an unclean end. `epochs` are the replayed one and the one from now on.
fn start_generation(
    options: &StoreOptions,
    devices: &Devices,
    replayed: &mut ManifestState,
    every_slot: &[Slot],
    (epoch, next_epoch): (u64, u64),
) -> Result<ManifestLog> {
    let counters = &mut replayed.catalog.counters;
    counters.frame = counters.frame.saturating_add(IDS_SKIPPED);
    counters.sequence = counters.sequence.saturating_add(IDS_SKIPPED);
    counters.lsn = counters.lsn.saturating_add(IDS_SKIPPED);
    let place = replayed.place;
    level_epochs(devices)?;
    settle_generation(devices, every_slot, (place.generation, place.nonce), &replayed.held)?;
    // A recovery that was interrupted left files of both generations. On a full device the new one needs their space.
    for device in devices.list.iter() {
        remove_leftovers(&*device.directory, device.index, place.generation, &replayed.catalog)?;
    }
    // The numbers of batches that were cut off are skipped too.
    let first_batch = place.next_batch.saturating_add(IDS_SKIPPED);
    let state = replayed.catalog.checkpoint();
    let generation = place.generation.saturating_add(1);
    let released = ManifestLog::bytes_at(devices, &place)?;
    // All files except the spare ones, which this generation takes.
    let segment_bytes = u64::from(devices.identity.segment_pages) * PAGE_BYTES as u64;
    let files = replayed.catalog.segments.len() as u64 * segment_bytes
        + devices.list.len() as u64 * (SLOTS * PAGE_BYTES) as u64
        + released;
    let limit = options.capacity.map_or(u64::MAX, |capacity| capacity.bytes().saturating_sub(files));
    let start = GenerationStart {
        generation,
        previous: place.generation,
        first_batch,
        epoch,
        room: 0,
        limit,
        beyond: true,
        released,
        gone: BTreeSet::new(),
    };
    let mut next = ManifestLog::create(devices, &start, &state)?;
    next.set_epoch(next_epoch);
    next.name_in_superblocks(devices, STATE_OPEN)?;
    // On a full device, segments would take the space of removed files before new ones are kept.
    if next.file_bytes() <= limit {
        next.keep_files_of(devices, place.generation)?;
    }
    Ok(next)
}

/// Returns the members whose devices are not given, as lost members.
///
/// # Errors
/// [`ErrorKind::Configuration`]: a member is missing and the options do not allow it. [`ErrorKind::StaleDevice`]: a
/// device that left the store is given.
fn missing_members(options: &StoreOptions, catalog: &Catalog, known: &[MemberDevice]) -> Result<Vec<m::Member>> {
    let left = |known: &&MemberDevice| matches!(known.member.state, m::MEMBER_LOST | m::MEMBER_REMOVED);
    if let Some(known) = known.iter().find(left) {
        let (device, from, epoch) = (known.member.device.get(), known.slot.epoch.get(), known.member.epoch.get());
        return Err(stale_device(known.directory.path(), device, from, epoch));
    }
    let is_there = |member: &m::Member| known.iter().any(|known| known.member.device == member.device);
    let needed = |member: &&m::Member| matches!(member.state, m::MEMBER_ACTIVE | m::MEMBER_DRAINING);
    let missing: Vec<_> = catalog.members.values().filter(needed).filter(|member| !is_there(member)).copied().collect();
    if let Some(first) = missing.first().filter(|_| !options.allow_degraded) {
        let given: Vec<_> = known.iter().map(|known| known.directory.path().display().to_string()).collect();
        let text = format!(
            "open: device {} of {} is missing; given are {}; allow_degraded opens the store without it",
            first.device.get(),
            catalog.members.len(),
            given.join(", ")
        );
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    Ok(missing.into_iter().map(|member| m::Member { state: m::MEMBER_LOST, ..member }).collect())
}

/// Checks that the numbers which only grow are far from their limit. Readers then accept what is written from now on.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: one is near its limit, as in no store that this engine wrote.
fn check_numbers(replayed: &ManifestState, slots: &[Slot], epoch: u64) -> Result<()> {
    let (counters, place) = (&replayed.catalog.counters, &replayed.place);
    let slot = slots.iter().map(|slot| slot.sequence.get()).max().unwrap_or(0);
    let numbers = [
        ("frame", counters.frame),
        ("sequence", counters.sequence),
        ("LSN", counters.lsn),
        ("written bytes", counters.lifetime_bytes),
        ("manifest generation", place.generation),
        ("manifest batch", place.next_batch),
        ("membership epoch", epoch),
        ("superblock slot", slot),
    ];
    let Some((name, number)) = numbers.into_iter().find(|(_, number)| *number > NUMBER_MAX - NUMBERS_LEFT) else {
        return Ok(());
    };
    let text =
        format!("open: the next number is {number} ({name}), too near to its limit {NUMBER_MAX}; open read-only");
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// Checks that the catalog takes at most half of the memory.
fn check_account(bytes: usize, memory: usize) -> Result<()> {
    if bytes <= memory / 2 {
        return Ok(());
    }
    let text = format!("open: the catalog takes {bytes} bytes, over half of memory_limit {memory}; raise memory_limit");
    Err(Error::new(ErrorKind::MemoryLimit, text))
}
