//! Which directories belong to which store.

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

/// How long to wait for the lock: the last writes of a killed process hold it until they land.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// The superblock of a store that is being created.
pub(crate) const SUPERBLOCK_NEW: &str = "superblock.new";

/// A directory with its superblock slots.
pub(crate) struct ProbedDirectory {
    pub(crate) directory: Arc<dyn Directory>,
    /// The newest valid slot; none in a directory that holds no store.
    pub(crate) slot: Option<Slot>,
    /// Every valid slot.
    pub(crate) slots: Vec<Slot>,
}

impl ProbedDirectory {
    /// Slots that are damaged, or older than the one before the newest: a write of them was lost.
    pub(crate) fn damaged_slots(&self) -> u64 {
        match self.slots.as_slice() {
            [one, other] => u64::from(one.sequence.get().abs_diff(other.sequence.get()) != 1),
            slots => (SLOTS - slots.len()) as u64,
        }
    }
}

/// What the directories hold.
pub(crate) enum ProbeResult {
    /// Nothing: a store can be created.
    Empty(Vec<ProbedDirectory>),
    /// A store, its devices by index.
    Store(Vec<ProbedDirectory>),
}

fn configuration(path: &Path, text: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("device directory {}: {text}", path.display()))
}

/// The error for a device that is given although the store has gone on without it.
pub(crate) fn stale_device(path: &Path, device: u16, from: u64, epoch: u64) -> Error {
    let text = format!(
        "device directory {}: device {device} left the store: it is as of epoch {from}, the store has come to {epoch} without it; leave it out, or add it anew",
        path.display()
    );
    Error::new(ErrorKind::StaleDevice, text)
}

/// Opens and locks the directories.
pub(crate) fn open_directories(paths: &[PathBuf], access: Access) -> Result<Vec<Arc<dyn Directory>>> {
    if paths.is_empty() {
        return Err(Error::new(ErrorKind::Configuration, "no device directory was given"));
    }
    if paths.len() > usize::from(superblock::DEVICES_MAX) {
        let text = format!("{} device directories; a store has at most {}", paths.len(), superblock::DEVICES_MAX);
        return Err(Error::new(ErrorKind::Configuration, text));
    }
    // The same directory twice would wait for its own lock: look before locking.
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

/// Reads the superblocks and sees that they make one whole store, or none at all.
///
/// Features that may be read but not written are no hindrance with `read_only`.
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

/// Whether a creation over several devices was cut short: those that have a superblock have the first one, and the manifest
/// names nothing. A store is used only once all its devices have one, so that nothing can be lost.
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

/// Takes the superblocks of a creation that was cut short away. The first device's goes last: it is the one that says so.
fn undo(mut found: Vec<ProbedDirectory>) -> Result<Vec<ProbedDirectory>> {
    found.sort_by_key(|f| std::cmp::Reverse(f.slot.map(|slot| slot.device_index.get())));
    for own in found.iter_mut().filter(|f| f.slot.is_some()) {
        own.directory.remove_file(superblock::FILE)?;
        own.directory.sync_dir(".")?;
        (own.slot, own.slots) = (None, Vec::new());
    }
    Ok(found)
}

/// The error where a store is to be written that this build can only read.
pub(crate) fn read_only_features(what: &str) -> Error {
    let text = format!("{what}: has features this build can read but not write; open it for reading only");
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
    // Slots are written in two rounds over all members: where one has both of an epoch, every member has at least one.
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

/// The newest valid slot of a directory, and all that are valid; none of a directory that may become one of a store.
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
        // A slot that cannot be read is one that is damaged: the other one counts.
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
            found: "slots of two".into(),
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

/// A directory without superblock may be used when it holds nothing but what a creation that was cut short left.
fn check_empty(directory: &dyn Directory) -> Result<()> {
    for entry in directory.list(".")? {
        let ours = matches!(entry.name.as_str(), manifest::DIRECTORY | segment::DIRECTORY | "lost+found");
        if !(ours && entry.is_dir || entry.name == SUPERBLOCK_NEW && !entry.is_dir) {
            let text = format!("holds no store and is not empty (there is {:?})", entry.name);
            return Err(configuration(directory.path(), &text));
        }
    }
    Ok(())
}
