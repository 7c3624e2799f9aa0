//! Device directories: opening, locking, superblocks, and which of them make up the store.

use crate::CheckError;
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

/// A device of the store, locked against writers as long as this lives.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) path: Arc<Path>,
    pub(crate) directory: File,
    pub(crate) index: u16,
    /// The valid slots, the newest last.
    pub(crate) slots: Vec<Slot>,
    pub(crate) newest: Slot,
}

/// The devices that make up the store, in the order of their index.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) devices: Vec<Device>,
    pub(crate) store_id: [u8; 16],
    /// Devices of the newest epoch, those not given included.
    pub(crate) count: u16,
    pub(crate) epoch: u64,
}

impl Devices {
    pub(crate) fn get(&self, index: u16) -> Option<&Device> {
        self.devices.iter().find(|device| device.index == index)
    }

    /// What every superblock of the store says alike.
    pub(crate) fn slot(&self) -> &Slot {
        &self.devices[0].newest
    }
}

/// Opens and locks all directories, and sorts out which are devices of one store. `None`: no superblock is usable.
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
                "this device belongs to another store than the first one",
            )));
            continue;
        }
        if let Some(other) = ids.get(&device.newest.device_id) {
            let text = format!("this is the same device as {}", other.display());
            sink.push(at(Finding::damage(Code::DoubledDevice, text)));
            continue;
        }
        if let Some(other) = by_index.get(&device.index) {
            let text = format!("device index {} is that of {} too", device.index, other.path.display());
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
    compare(&devices, sink);
    Ok(Some(devices))
}

fn open_device(path: &Path, sink: &Sink) -> Result<Option<Device>, CheckError> {
    let not_a_store = |reason: &str| CheckError::NotAStore { path: path.to_path_buf(), reason: reason.into() };
    let failed = |source: std::io::Error| CheckError::Io { path: path.to_path_buf(), source };
    let directory = match File::open(path) {
        Ok(directory) => directory,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Err(not_a_store("there is no such directory"));
        }
        Err(e) => return Err(failed(e)),
    };
    let metadata = directory.metadata().map_err(failed)?;
    if !metadata.is_dir() {
        return Err(not_a_store("not a directory"));
    }
    match directory.try_lock_shared() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(CheckError::InUse { path: path.to_path_buf() }),
        Err(TryLockError::Error(e)) => return Err(failed(e)),
    }
    let names = io::names(&directory).map_err(failed)?;
    let has = |name: &str| names.iter().any(|n| n == name);
    if !has(FILE) && !has(manifest::DIRECTORY) && !has(segment::DIRECTORY) {
        return Err(not_a_store("not a device directory of a store: it has no superblock"));
    }
    if metadata.mode() & 0o022 != 0 {
        let text = format!("others than the owner may write here: mode {:o}", metadata.mode() & 0o777);
        sink.push(Finding::note(Code::Permissions, text).in_directory(None, path));
    }
    let path: Arc<Path> = Arc::from(path);
    for name in names {
        if ![FILE, manifest::DIRECTORY, segment::DIRECTORY, "lost+found"].contains(&name.as_str()) {
            let place = FilePlace { device: None, path: Arc::clone(&path), file: Arc::from(name) };
            sink.push(Finding::note(Code::Leftover, "not a file of the store").in_file(&place));
        }
    }
    read_superblock(path, directory, sink)
}

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
        let text = "the superblock file is longer than its slots";
        sink.push(Finding::note(Code::Leftover, text).at(&place, whole, file.bytes - whole));
    }
    let Some(newest) = newest else { return Ok(None) };
    if !newest.features.writable() {
        sink.push(Finding::read_only_features(&place, (newest.sequence.get() % SLOTS as u64) * PAGE_BYTES as u64));
    }
    if let [old, new] = &slots[..] {
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
        if !same || !grows || !one_name {
            let text = match (same, one_name) {
                (true, true) => "the older slot is not the one before the newer",
                (true, false) => "the slots name one manifest generation with two nonces",
                (false, _) => "the slots contradict each other",
            };
            let finding = Finding::damage(Code::SuperblockSlot, text).at(&place, 0, whole);
            sink.push(finding.values(new.sequence.get().wrapping_sub(1), old.sequence.get()));
        }
    }
    Ok(Some(Device { path, directory, index: newest.device_index.get(), slots, newest }))
}

/// Finds the devices that were not given. `left`: those that the manifest says have left the store.
pub(crate) fn missing(devices: &Devices, left: &dyn Fn(u16) -> bool, sink: &Sink) {
    for index in 0..devices.count {
        if devices.get(index).is_none() && !left(index) {
            let mut finding =
                Finding::damage(Code::MissingDevice, format!("device {index} of {} was not given", devices.count));
            finding.device = Some(index);
            sink.push(finding);
        }
    }
}

/// Holds the superblocks of the devices against each other.
fn compare(devices: &Devices, sink: &Sink) {
    let first = devices.slot();
    // Slots are written in two rounds over all members: where one has both of an epoch, every member has at least one.
    let has_both = |own: &Device| own.slots.len() == SLOTS && own.slots.iter().all(|s| s.epoch.get() == devices.epoch);
    let settled = devices.devices.iter().any(has_both);
    for device in &devices.devices {
        let slot = &device.newest;
        let at = |finding: Finding| finding.in_directory(Some(device.index), &device.path);
        if device.index >= devices.count {
            let text = format!("the store has {} devices in its newest epoch", devices.count);
            sink.push(at(Finding::damage(Code::SuperblockMismatch, text)));
        }
        if slot.segment_bytes != first.segment_bytes || slot.payload_checksum != first.payload_checksum {
            let text = "segment size or payload checksum differ from the first device's";
            sink.push(at(Finding::damage(Code::SuperblockMismatch, text)));
        }
        if slot.epoch.get() < devices.epoch {
            let text = format!("epoch {} where another device has {}", slot.epoch.get(), devices.epoch);
            let finding = if settled { Finding::damage } else { Finding::note };
            sink.push(at(finding(Code::StaleDevice, text)));
        }
    }
}
