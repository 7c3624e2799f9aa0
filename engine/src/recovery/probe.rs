//! Probing: reads the superblocks of the given directories and checks that they form one store, or none.
//!
//! 1. Open and lock every directory. A directory that is given twice is refused before it is locked.
//! 2. Read both superblock slots of each. The newest valid slot counts.
//! 3. If no directory has a superblock, a store can be created.
//! 4. If only some have one and the store was never used, a creation was interrupted: remove their superblocks.
//! 5. Otherwise check store id, checksum, segment size, features, device ids and epochs against each other.
//!
//! Invariant: nothing is written unless an interrupted creation is undone, and that store never held data.

use crate::error::{Corruption, Error, ErrorKind, Result};
use crate::io::file::directory::{Access, Directory};
use crate::io::file::os_directory::{OsDirectory, OsDirectoryOptions};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stratakv_format::error::FormatErrorCode;
use stratakv_format::superblock::{self, SLOTS, STATE_OPEN, Slot};
use stratakv_format::{FormatError, PAGE_BYTES, Unverified, manifest, segment};

/// The maximum wait for the directory lock. A killed process holds it until its last writes complete.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// The name of the superblock file while a store is being created.
pub(crate) const SUPERBLOCK_NEW: &str = "superblock.new";

/// A directory with its superblock slots.
pub(crate) struct ProbedDirectory {
    pub(crate) directory: Arc<dyn Directory>,
    /// The newest valid slot, or `None` if the directory holds no store.
    pub(crate) slot: Option<Slot>,
    /// All valid slots.
    pub(crate) slots: Vec<Slot>,
}

impl ProbedDirectory {
    /// Returns the number of damaged slots. A slot that missed a write counts, which its sequence number shows.
    pub(crate) fn damaged_slots(&self) -> u64 {
        match self.slots.as_slice() {
            [one, other] => u64::from(one.sequence.get().abs_diff(other.sequence.get()) != 1),
            slots => (SLOTS - slots.len()) as u64,
        }
    }
}

/// The content of the given directories.
pub(crate) enum ProbeResult {
    /// No store. One can be created.
    Empty(Vec<ProbedDirectory>),
    /// A store, with its devices in order of index.
    Store(Vec<ProbedDirectory>),
}

fn configuration(path: &Path, text: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("device directory {}: {text}", path.display()))
}

/// Returns the error for a device that was given although the store continued without it.
pub(crate) fn stale_device(path: &Path, device: u16, from: u64, epoch: u64) -> Error {
    let text = format!(
        "device directory {}: device {device} left the store at epoch {from}, \
         and the store is at epoch {epoch}; leave it out, or add it again as a new device",
        path.display()
    );
    Error::new(ErrorKind::StaleDevice, text)
}

/// Opens and locks the directories.
///
/// # Errors
/// [`ErrorKind::Configuration`]: none, too many, or the same directory twice. Otherwise a directory cannot be locked.
pub(crate) fn open_directories(paths: &[PathBuf], access: Access) -> Result<Vec<Arc<dyn Directory>>> {
    if paths.is_empty() {
        return Err(Error::new(ErrorKind::Configuration, "open: no device directory was given"));
    }
    if paths.len() > usize::from(superblock::DEVICES_MAX) {
        let text =
            format!("open: {} device directories exceed the maximum of {}", paths.len(), superblock::DEVICES_MAX);
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    // A directory that is given twice would wait for its own lock, so duplicates are refused first.
    let mut canonical: HashMap<PathBuf, &Path> = HashMap::new();
    for path in paths {
        if let Ok(real) = path.canonicalize()
            && let Some(other) = canonical.insert(real, path)
        {
            let text = format!("is the same directory as {}; every device is given once", other.display());
            return Err(configuration(path, &text));
        }
    }
    let options = OsDirectoryOptions { access, create: false, lock_wait: LOCK_WAIT };
    let mut opened: Vec<Arc<dyn Directory>> = Vec::new();
    for path in paths {
        opened.push(OsDirectory::open(path, options)?);
    }
    Ok(opened)
}

/// Reads the superblocks and checks that they form one complete store, or none.
///
/// With `read_only`, features that this build can read but not write are accepted. `memory` bounds the bytes of the
/// manifest that are read to recognise an interrupted creation.
///
/// # Errors
/// The directories belong to different stores, or one is missing, stale, damaged or of another version.
pub(crate) fn read_devices(
    directories: Vec<Arc<dyn Directory>>,
    read_only: bool,
    memory: usize,
) -> Result<ProbeResult> {
    let mut found = Vec::new();
    for directory in directories {
        let (slot, slots) = read_superblock(&*directory)?;
        found.push(ProbedDirectory { directory, slot, slots });
    }
    let empty = found.iter().filter(|f| f.slot.is_none()).count();
    if empty == found.len() {
        return Ok(ProbeResult::Empty(found));
    }
    if empty > 0 && !read_only && is_cut_short(&found, memory) {
        return undo(found).map(ProbeResult::Empty);
    }
    if let Some(missing) = found.iter().find(|f| f.slot.is_none()) {
        let text = "holds no store, but another directory given does; is the right disk mounted there?";
        return Err(configuration(missing.directory.path(), text));
    }
    check_one_store(&found, read_only)?;
    found.sort_by_key(|f| f.slot.map(|s| s.device_index.get()));
    Ok(ProbeResult::Store(found))
}

/// Returns whether a creation over several devices was interrupted.
///
/// Then every superblock is the first of its device and the manifest is empty. A store is used only after all its
/// devices have a superblock, so undoing the creation loses no data.
fn is_cut_short(found: &[ProbedDirectory], memory: usize) -> bool {
    let Some(first) = found.iter().find_map(|f| f.slot) else { return false };
    let fresh = found.iter().flat_map(|f| &f.slots).all(|slot| {
        slot.store_id == first.store_id
            && slot.sequence.get() < SLOTS as u64
            && slot.manifest_generation.get() == 1
            && slot.epoch.get() == 1
            && slot.state == STATE_OPEN
            && usize::from(slot.device_count.get()) == found.len()
    });
    let unused = || {
        super::replay(found, first.store_id, memory).is_ok_and(|replayed| {
            let catalog = &replayed.catalog;
            catalog.sequences.is_empty() && catalog.segments.is_empty() && catalog.layouts.is_empty()
        })
    };
    fresh && unused()
}

/// Removes the superblocks of an interrupted creation. Device 0 is last, so that an interruption here is recognised
/// again.
fn undo(mut found: Vec<ProbedDirectory>) -> Result<Vec<ProbedDirectory>> {
    found.sort_by_key(|f| std::cmp::Reverse(f.slot.map(|slot| slot.device_index.get())));
    for own in found.iter_mut().filter(|f| f.slot.is_some()) {
        own.directory.remove_file(superblock::FILE)?;
        own.directory.sync_dir(".")?;
        (own.slot, own.slots) = (None, Vec::new());
    }
    Ok(found)
}

/// Returns the error for a store that this build can read but not write.
pub(crate) fn read_only_features(what: &str) -> Error {
    let text = format!("{what}: has features this build can read but not write; open it for reading only, or upgrade");
    Error::new(ErrorKind::Unsupported, text)
}

fn check_one_store(found: &[ProbedDirectory], read_only: bool) -> Result<()> {
    let slots: Vec<(&Path, &Slot)> =
        found.iter().filter_map(|f| f.slot.as_ref().map(|slot| (f.directory.path(), slot))).collect();
    let Some((first_path, first)) = slots.first() else { return Ok(()) };
    for (path, slot) in &slots {
        if slot.store_id != first.store_id {
            let text = format!("belongs to another store than {}", first_path.display());
            return Err(configuration(path, &text));
        }
        let same = (slot.payload_checksum, slot.segment_bytes) == (first.payload_checksum, first.segment_bytes);
        if !same {
            let text = format!(
                "has another checksum or segment size than {}: its superblock is damaged",
                first_path.display()
            );
            return Err(configuration(path, &text).with_kind(ErrorKind::Corruption));
        }
        if !read_only && !slot.features.writable() {
            return Err(read_only_features(&format!("device directory {}", path.display())));
        }
    }
    let mut seen: HashMap<u16, &Path> = HashMap::new();
    let mut ids: HashMap<[u8; 16], &Path> = HashMap::new();
    for (path, slot) in &slots {
        let doubled = ids.insert(slot.device_id, path).or_else(|| seen.insert(slot.device_index.get(), path));
        if let Some(other) = doubled {
            let text =
                format!("is a copy of the device in {}; give only the one that was written last", other.display());
            return Err(configuration(path, &text));
        }
    }
    let newest = slots.iter().map(|(_, slot)| slot);
    let newest = newest.max_by_key(|slot| (slot.epoch.get(), slot.device_count.get())).unwrap_or(first);
    // Each epoch is written in two rounds over all members. If one device has it in both slots, each has it in one.
    let settled = |f: &ProbedDirectory| f.slots.len() == SLOTS && f.slots.iter().all(|slot| slot.epoch == newest.epoch);
    if found.iter().any(settled)
        && let Some((path, stale)) = slots.iter().find(|(_, slot)| slot.epoch.get() < newest.epoch.get())
    {
        return Err(stale_device(path, stale.device_index.get(), stale.epoch.get(), newest.epoch.get()));
    }
    let count = newest.device_count.get();
    if let Some((index, path)) = seen.iter().find(|(index, _)| **index >= count) {
        return Err(configuration(path, &format!("is device {index}, but the store has {count}")));
    }
    Ok(())
}

/// Returns the newest valid slot of a directory and all valid slots, or none if the directory is empty.
///
/// # Errors
/// [`ErrorKind::Corruption`]: no slot is valid. [`ErrorKind::Configuration`]: a directory without superblock has
/// content.
pub(crate) fn read_superblock(directory: &dyn Directory) -> Result<(Option<Slot>, Vec<Slot>)> {
    let file = match directory.open_file(superblock::FILE, Access::ReadOnly) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            check_empty(directory)?;
            return Ok((None, Vec::new()));
        }
        Err(e) => return Err(e),
    };
    let bytes = match directory.read_small(&file, 0, SLOTS * PAGE_BYTES) {
        // A slot that cannot be read counts as damaged, so each is read alone.
        Err(e) if e.kind() == ErrorKind::Io => {
            let slot = |slot| directory.read_small(&file, (slot * PAGE_BYTES) as u64, PAGE_BYTES);
            let read: Vec<_> = (0..SLOTS).map(slot).collect();
            if read.iter().all(Result::is_err) {
                return Err(e);
            }
            read.into_iter().flat_map(|page| page.unwrap_or_else(|_| vec![0; PAGE_BYTES])).collect()
        }
        other => other?,
    };
    let newest = superblock::newest(&bytes).map_err(|e| superblock_error(directory, &e))?;
    let newest = newest.into_inner();
    let slots = bytes.chunks(PAGE_BYTES).enumerate().filter_map(|(index, page)| {
        let slot = Unverified::<Slot>::at_front(page, "superblock").and_then(|slot| slot.verify(index));
        slot.ok().map(stratakv_format::Verified::into_inner)
    });
    let slots: Vec<Slot> = slots.collect();
    if slots.iter().any(|slot| (slot.store_id, slot.device_id) != (newest.store_id, newest.device_id)) {
        let place = Corruption {
            code: "superblock-slot",
            device: newest.device_index.get(),
            file: superblock::FILE.into(),
            offset: 0,
            len: (SLOTS * PAGE_BYTES) as u64,
            expected: "two slots of one device".into(),
            found: "slots of two devices".into(),
        };
        return Err(Error::corrupt(place).during(format!("device directory {}", directory.path().display())));
    }
    Ok((Some(newest), slots))
}

fn superblock_error(directory: &dyn Directory, e: &FormatError) -> Error {
    if e.code == FormatErrorCode::Unsupported {
        let text = format!("device directory {}: written by another version: {e}", directory.path().display());
        return Error::new(ErrorKind::Unsupported, text);
    }
    let place = Corruption {
        code: "superblock-slot",
        device: 0,
        file: superblock::FILE.into(),
        offset: 0,
        len: (SLOTS * PAGE_BYTES) as u64,
        expected: "a valid slot".into(),
        found: e.to_string(),
    };
    let path = directory.path().display();
    Error::corrupt(place).during(format!("device directory {path}: no superblock slot is valid; see kvfsck check"))
}

/// Checks that a directory without superblock holds nothing but files of an interrupted creation.
fn check_empty(directory: &dyn Directory) -> Result<()> {
    for entry in directory.list(".")? {
        let ours = matches!(entry.name.as_str(), manifest::DIRECTORY | segment::DIRECTORY | "lost+found");
        if !(ours && entry.is_dir || entry.name == SUPERBLOCK_NEW && !entry.is_dir) {
            let text = format!("holds no store and is not empty (there is {:?}); give an empty directory", entry.name);
            return Err(configuration(directory.path(), &text));
        }
    }
    Ok(())
}
