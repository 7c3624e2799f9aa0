//! Device directories and their superblocks (SPEC.md sections 4 and 5).
//!
//! 1. Open every directory and take a shared lock, which keeps writers out until the check ends.
//! 2. Read both superblock slots. The valid slot with the higher sequence number counts.
//! 3. Keep the directories that have the store id of the first one. Report every other directory.
//! 4. The slot with the highest epoch, then the highest device count, gives the number of devices.
//! 5. Compare the superblocks of the devices.

use crate::error::CheckError;
use crate::finding::{Code, FilePlace, Finding, Sink};
use crate::io;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::superblock::{FILE, SLOTS, Slot};
use stratakv_format::{PAGE_BYTES, Unverified, manifest, segment};

/// A device of the store. Its directory is locked against writers until this is dropped.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) path: Arc<Path>,
    pub(crate) directory: File,
    pub(crate) index: u16,
    /// The valid slots, the newest last.
    pub(crate) slots: Vec<Slot>,
    pub(crate) newest: Slot,
}

/// The devices that make up the store, ordered by index. There is at least one.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) devices: Vec<Device>,
    pub(crate) store_id: [u8; 16],
    /// The number of devices in the newest epoch, including devices that were not given.
    pub(crate) count: u16,
    pub(crate) epoch: u64,
}

impl Devices {
    pub(crate) fn get(&self, index: u16) -> Option<&Device> {
        self.devices.iter().find(|device| device.index == index)
    }

    /// Returns a superblock slot, for the fields that all devices of a store have in common.
    pub(crate) fn slot(&self) -> &Slot {
        &self.devices[0].newest
    }
}

/// Opens and locks all directories, and decides which of them are devices of one store.
///
/// Returns `None` if no superblock is usable.
pub(crate) fn open(paths: &[PathBuf], sink: &Sink) -> Result<Option<Devices>, CheckError> {
    if paths.is_empty() {
        return Err(CheckError::NotAStore { path: PathBuf::new(), reason: "no device directory was given".into() });
    }
    let mut candidates = Vec::new();
    for path in paths {
        candidates.extend(open_device(path, sink)?);
    }
    let Some(first) = candidates.first() else { return Ok(None) };
    let store_id = first.newest.store_id;
    let mut by_index: BTreeMap<u16, Device> = BTreeMap::new();
    let mut ids: BTreeMap<[u8; 16], PathBuf> = BTreeMap::new();
    for device in candidates {
        let at = |finding: Finding| finding.in_directory(Some(device.index), &device.path);
        if device.newest.store_id != store_id {
            sink.push(at(Finding::damage(
                Code::ForeignDevice,
                "the device belongs to another store than the first directory",
            )));
            continue;
        }
        if let Some(other) = ids.get(&device.newest.device_id) {
            let text = format!("the directory has the same device id as {}", other.display());
            sink.push(at(Finding::damage(Code::DoubledDevice, text)));
            continue;
        }
        if let Some(other) = by_index.get(&device.index) {
            let text = format!("{} has device index {} too", other.path.display(), device.index);
            sink.push(at(Finding::damage(Code::DoubledDevice, text)));
            continue;
        }
        ids.insert(device.newest.device_id, device.path.to_path_buf());
        by_index.insert(device.index, device);
    }
    let devices: Vec<_> = by_index.into_values().collect();
    let Some(newest) =
        devices.iter().map(|device| &device.newest).max_by_key(|slot| (slot.epoch.get(), slot.device_count.get()))
    else {
        return Ok(None);
    };
    let (count, epoch) = (newest.device_count.get(), newest.epoch.get());
    let devices = Devices { devices, store_id, count, epoch };
    compare_superblocks(&devices, sink);
    Ok(Some(devices))
}

fn open_device(path: &Path, sink: &Sink) -> Result<Option<Device>, CheckError> {
    let not_a_store = |reason: &str| CheckError::NotAStore { path: path.to_path_buf(), reason: reason.into() };
    let failed = |operation| move |source| CheckError::Io { operation, path: path.to_path_buf(), source };
    let directory = match File::open(path) {
        Ok(directory) => directory,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Err(not_a_store("no such directory"));
        }
        Err(e) => return Err(failed("open")(e)),
    };
    let metadata = directory.metadata().map_err(failed("open"))?;
    if !metadata.is_dir() {
        return Err(not_a_store("not a directory"));
    }
    match directory.try_lock_shared() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(CheckError::InUse { path: path.to_path_buf() }),
        Err(TryLockError::Error(e)) => return Err(failed("lock")(e)),
    }
    let names = io::names(&directory).map_err(failed("list"))?;
    let has = |name: &str| names.iter().any(|n| n == name);
    if !has(FILE) && !has(manifest::DIRECTORY) && !has(segment::DIRECTORY) {
        return Err(not_a_store("not a device directory of a store, because it has no superblock"));
    }
    if metadata.mode() & 0o022 != 0 {
        let text = format!("group or others may write to the directory: mode {:o}; use 700", metadata.mode() & 0o777);
        sink.push(Finding::damage(Code::Permissions, text).in_directory(None, path));
    }
    let path: Arc<Path> = Arc::from(path);
    for name in names {
        if ![FILE, manifest::DIRECTORY, segment::DIRECTORY, "lost+found"].contains(&name.as_str()) {
            let place = FilePlace { device: None, path: Arc::clone(&path), file: Arc::from(name) };
            sink.push(Finding::note(Code::Leftover, "the file is not part of the store").in_file(&place));
        }
    }
    read_superblock(path, directory, sink)
}

/// Reads both slots of a superblock. Returns `None` if neither is valid.
fn read_superblock(path: Arc<Path>, directory: File, sink: &Sink) -> Result<Option<Device>, CheckError> {
    let Some(file) = io::open(&directory, None, &path, FILE, sink) else { return Ok(None) };
    let mut pages = vec![0; SLOTS * PAGE_BYTES];
    let bad = file.read(0, &mut pages, sink);
    let mut slots: Vec<Slot> = Vec::new();
    let mut errors = Vec::new();
    for (index, page) in pages.chunks(PAGE_BYTES).enumerate() {
        let offset = (index * PAGE_BYTES) as u64;
        if bad.iter().any(|range| range.contains(&offset)) {
            continue;
        }
        match Unverified::<Slot>::at_front(page, "superblock").and_then(|slot| slot.verify(index)) {
            Ok(slot) => slots.push(slot.into_inner()),
            Err(error) if error.code == FormatErrorCode::Unsupported => {
                return Err(CheckError::Unsupported { path: path.to_path_buf(), file: FILE.into(), offset, error });
            }
            Err(error) => errors.push((offset, error)),
        }
    }
    slots.sort_by_key(|slot| slot.sequence.get());
    let newest = slots.last().copied();
    let mut place = file.place.clone();
    place.device = newest.map(|slot| slot.device_index.get());
    for (offset, error) in errors {
        sink.push(Finding::format(Code::SuperblockSlot, &error).at(&place, offset, PAGE_BYTES as u64));
    }
    let whole = (SLOTS * PAGE_BYTES) as u64;
    if file.bytes > whole {
        let text = "the superblock file extends past its two slots";
        sink.push(Finding::note(Code::Leftover, text).at(&place, whole, file.bytes - whole));
    }
    let Some(newest) = newest else { return Ok(None) };
    if !newest.features.writable() {
        sink.push(Finding::read_only_features(&place, (newest.sequence.get() % SLOTS as u64) * PAGE_BYTES as u64));
    }
    if let [old, new] = &slots[..] {
        compare_slots(old, new, &place, sink);
    }
    Ok(Some(Device { path, directory, index: newest.device_index.get(), slots, newest }))
}

/// Compares the two valid slots of a device.
fn compare_slots(old: &Slot, new: &Slot, place: &FilePlace, sink: &Sink) {
    let same = old.store_id == new.store_id
        && old.device_id == new.device_id
        && old.device_index == new.device_index
        && old.created_unix_s == new.created_unix_s
        && old.segment_bytes == new.segment_bytes
        && old.payload_checksum == new.payload_checksum;
    let grows = old.sequence.get().checked_add(1) == Some(new.sequence.get())
        && old.epoch.get() <= new.epoch.get()
        && old.manifest_generation.get() <= new.manifest_generation.get();
    let one_name = old.manifest_generation != new.manifest_generation || old.manifest_nonce == new.manifest_nonce;
    if same && grows && one_name {
        return;
    }
    let text = match (same, one_name) {
        (true, true) => "the older slot does not directly precede the newer one",
        (true, false) => "the slots name one manifest generation with two nonces",
        (false, _) => "the slots differ in the store, the device, the segment size or the checksum kind",
    };
    let finding = Finding::damage(Code::SuperblockSlot, text).at(place, 0, (SLOTS * PAGE_BYTES) as u64);
    sink.push(finding.values(new.sequence.get().wrapping_sub(1), old.sequence.get()));
}

/// Reports the devices that were not given. `has_left` tells whether the manifest records a device as lost or removed.
pub(crate) fn report_missing(devices: &Devices, has_left: &dyn Fn(u16) -> bool, sink: &Sink) {
    for index in 0..devices.count {
        if devices.get(index).is_none() && !has_left(index) {
            let text = format!("device {index} of {} was not given; name all device directories", devices.count);
            let mut finding = Finding::damage(Code::MissingDevice, text);
            finding.device = Some(index);
            sink.push(finding);
        }
    }
}

/// Compares the superblocks of the devices with each other.
fn compare_superblocks(devices: &Devices, sink: &Sink) {
    let first = devices.slot();
    // A writer writes one slot of every member, then the other. Hence if one device has the newest epoch in both slots,
    // every member has it in at least one.
    let has_both = |own: &Device| own.slots.len() == SLOTS && own.slots.iter().all(|s| s.epoch.get() == devices.epoch);
    let settled = devices.devices.iter().any(has_both);
    for device in &devices.devices {
        let slot = &device.newest;
        let at = |finding: Finding| finding.in_directory(Some(device.index), &device.path);
        if device.index >= devices.count {
            let text = format!("device index {} in a store of {} devices", device.index, devices.count);
            sink.push(at(Finding::damage(Code::SuperblockMismatch, text)));
        }
        if slot.segment_bytes != first.segment_bytes || slot.payload_checksum != first.payload_checksum {
            let text = "the segment size or the checksum kind differs from the first device";
            sink.push(at(Finding::damage(Code::SuperblockMismatch, text)));
        }
        if slot.epoch.get() < devices.epoch {
            let text = format!("membership epoch {}, but another device has epoch {}", slot.epoch, devices.epoch);
            let finding = if settled { Finding::damage } else { Finding::note };
            sink.push(at(finding(Code::StaleDevice, text)));
        }
    }
}
