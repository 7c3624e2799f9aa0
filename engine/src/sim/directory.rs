//! A simulated disk as a device directory: it implements [`Directory`] over a disk of the [`World`].
//!
//! A call that reads or changes names, or the length of a file, takes these steps:
//! 1. Check the poison, if the call changes something.
//! 2. Begin an operation of the simulated machine, which returns the operation's [`Fate`].
//! 3. Return an error if a fault strikes. Otherwise read or change the names and files of the disk.
//! 4. Return an error if the power failed meanwhile. The restart then decides whether the change is durable.
//!
//! Invariants:
//! - A change of a name is durable after a sync of the directory that contains the name.
//! - A failed sync poisons the directory.
//! - A handle is dead after a restart of the machine, because its epoch is over.
//!
//! Stores call it through the seam for files. It takes the world's lock and no other.

use super::disk::{DiskLock, NameNode, parent};
use super::disk_file::DiskFile;
use super::pages::PAGE;
use super::sim_file::SimFile;
use super::world::{Fate, OperationKind, World, errno, lost_power};
use crate::error::{Error, ErrorKind, Result};
use crate::io::file::device_file::{DeviceFile, ReplacedFile};
use crate::io::file::directory::{Access, Directory, DirectoryEntry, DirectoryIdentity, DiskSpace, SMALL_BYTES_MAX};
use crate::io::file::poison::Poison;
use crate::io::file::probe::DirectIo;
use crate::metrics::lock;
use crate::sync::Guard;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use stratakv_format::segment;

/// A simulated disk as an opened store sees it.
pub(super) struct SimDirectory {
    world: Arc<Mutex<World>>,
    disk: usize,
    epoch: u64,
    path: PathBuf,
    direct: DirectIo,
    poison: Arc<Poison>,
    _lock: Arc<DiskLock>,
}

/// Returns why a file cannot be created or made longer, if it cannot.
fn refusal(fate: Fate, full: bool) -> Option<Errno> {
    match fate {
        Fate::Failed(e) => Some(e),
        _ => full.then_some(Errno::NOSPC),
    }
}

impl SimDirectory {
    /// Opens and locks a disk.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`]: a store has it, and one of the two writes.
    pub(super) fn open(world: &Arc<Mutex<World>>, disk: usize, access: Access) -> Result<Arc<dyn Directory>> {
        let path = PathBuf::from(format!("simulated-{disk}"));
        let is_shared = access == Access::ReadOnly;
        let (epoch, held) = {
            let mut own = lock(world);
            let locks = &mut own.disks[disk].locks;
            locks.retain(|lock| lock.strong_count() > 0);
            if locks.iter().filter_map(Weak::upgrade).any(|lock| !is_shared || !lock.is_shared) {
                let text = format!("open: device directory {} is in use by a store of this process", path.display());
                return Err(Error::new(ErrorKind::InUse, text));
            }
            let held = Arc::new(DiskLock { is_shared });
            locks.push(Arc::downgrade(&held));
            (own.epoch, held)
        };
        Ok(Arc::new(Self {
            world: Arc::clone(world),
            disk,
            epoch,
            path,
            direct: DirectIo::Direct { alignment: PAGE },
            poison: Arc::default(),
            _lock: held,
        }))
    }

    fn file(&self, file: usize, path: &str, preallocated: bool) -> Arc<DeviceFile> {
        let in_segment = parent(path) == segment::DIRECTORY;
        let world = Arc::clone(&self.world);
        let file: Arc<dyn ReplacedFile> =
            Arc::new(SimFile { world, disk: self.disk, file, epoch: self.epoch, in_segment });
        Arc::new(DeviceFile::replaced(file.into(), path, preallocated))
    }

    fn begin(&self, kind: OperationKind, path: &str) -> Result<(Guard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let length = path.len() as u64;
        let fate = world.begin(self.epoch, kind, (self.disk, usize::MAX), (length, 0))?;
        Ok((world, fate))
    }

    /// Begins an operation that reads names.
    fn look(&self, doing: &str, path: &str) -> Result<Guard<'_, World>> {
        match self.begin(OperationKind::Names, path)? {
            (_, Fate::Caught) => Err(lost_power()),
            (_, Fate::Failed(e)) => Err(Self::failed(doing, path, e)),
            (world, _) => Ok(world),
        }
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(OperationKind::Change, path)?;
        if let Fate::Failed(e) = fate {
            return Err(Self::failed("change", path, e));
        }
        change(&mut world)?;
        if fate == Fate::Caught { Err(lost_power()) } else { Ok(()) }
    }

    fn failed(doing: &str, path: &str, e: Errno) -> Error {
        let kind = match e {
            Errno::NOENT => ErrorKind::NotFound,
            Errno::EXIST => ErrorKind::AlreadyExists,
            Errno::INVAL => ErrorKind::InvalidArgument,
            _ => return errno(format!("{doing} {path}"), e),
        };
        errno(format!("{doing} {path}"), e).with_kind(kind)
    }

    fn find(world: &World, disk: usize, doing: &str, path: &str) -> Result<NameNode> {
        world.disks[disk].names.get(path).copied().ok_or_else(|| Self::failed(doing, path, Errno::NOENT))
    }

    fn handle(file: &DeviceFile) -> Result<&SimFile> {
        let wrong =
            || Error::new(ErrorKind::InvalidArgument, format!("{}: not a file of a simulated disk", file.path()));
        file.as_replaced().ok_or_else(wrong)
    }
}

impl Directory for SimDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn identity(&self) -> DirectoryIdentity {
        DirectoryIdentity { device: self.disk as u64 + 1, inode: 2 }
    }

    fn direct_io(&self) -> &DirectIo {
        &self.direct
    }

    fn poison(&self) -> &Arc<Poison> {
        &self.poison
    }

    fn lock_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(OperationKind::Create, path)?;
        let (capacity, whole) = (world.capacity, world.whole);
        let disk = &mut world.disks[self.disk];
        if disk.names.contains_key(path) {
            return Err(Self::failed("create", path, Errno::EXIST));
        }
        if disk.names.get(parent(path)) != Some(&NameNode::Directory) {
            return Err(Self::failed("create", path, Errno::NOENT));
        }
        let full = match whole {
            true => disk.all_bytes() + len > capacity,
            false => parent(path) == segment::DIRECTORY && disk.used_bytes(segment::DIRECTORY) + len > capacity,
        };
        if let Some(e) = refusal(fate, full) {
            return Err(Self::failed("create", path, e));
        }
        let file = disk.files.len();
        disk.files.push(DiskFile::with_pages((len as usize).div_ceil(PAGE)));
        disk.put(path, NameNode::File(file));
        world.grew();
        drop(world);
        if fate == Fate::Caught { Err(lost_power()) } else { Ok(self.file(file, path, true)) }
    }

    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>> {
        if access == Access::ReadWrite {
            self.poison.check()?;
        }
        let world = self.look("open", path)?;
        match Self::find(&world, self.disk, "open", path)? {
            NameNode::File(file) => Ok(self.file(file, path, false)),
            NameNode::Directory => Err(Self::failed("open", path, Errno::INVAL)),
        }
    }

    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()> {
        self.poison.check()?;
        let own = Self::handle(file)?.file;
        let (mut world, fate) = self.begin(OperationKind::Create, file.path())?;
        let (capacity, whole) = (world.capacity, world.whole);
        let disk = &mut world.disks[self.disk];
        let before = disk.files.get(own).map_or(0, |file| file.len() as u64);
        let full = whole && disk.all_bytes() + len.saturating_sub(before) > capacity;
        if let Some(e) = refusal(fate, full) {
            return Err(Self::failed("grow", file.path(), e));
        }
        if let Some(file) = disk.files.get_mut(own) {
            file.grow((len as usize).div_ceil(PAGE));
        }
        world.grew();
        if fate == Fate::Caught { Err(lost_power()) } else { Ok(()) }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.change(from, |world| {
            let node = Self::find(world, self.disk, "rename", from)?;
            world.disks[self.disk].rename(from, to, node);
            Ok(())
        })
    }

    fn remove_file(&self, path: &str) -> Result<()> {
        self.change(path, |world| {
            Self::find(world, self.disk, "remove", path)?;
            world.disks[self.disk].remove(path);
            Ok(())
        })
    }

    fn list(&self, path: &str) -> Result<Vec<DirectoryEntry>> {
        let world = self.look("list", path)?;
        let disk = &world.disks[self.disk];
        Self::find(&world, self.disk, "list", path)?;
        let inside = disk.names.iter().filter(|(name, _)| name.as_str() != "." && parent(name) == path);
        let entry = |(name, node): (&String, &NameNode)| {
            let (is_dir, len) = match node {
                NameNode::Directory => (true, 0),
                NameNode::File(file) => (false, disk.files.get(*file).map_or(0, |file| file.len() as u64)),
            };
            let name = name.rsplit_once('/').map_or(name.as_str(), |(_, name)| name).to_owned();
            DirectoryEntry { name, is_dir, len }
        };
        let mut entries: Vec<_> = inside.map(entry).collect();
        entries.sort_unstable();
        Ok(entries)
    }

    fn mkdir(&self, path: &str) -> Result<()> {
        self.change(path, |world| {
            let disk = &mut world.disks[self.disk];
            match disk.names.get(path) {
                None => disk.put(path, NameNode::Directory),
                Some(NameNode::Directory) => {}
                Some(NameNode::File(_)) => return Err(Self::failed("make directory", path, Errno::EXIST)),
            }
            Ok(())
        })
    }

    fn sync_dir(&self, path: &str) -> Result<()> {
        self.poison.check()?;
        if lock(&self.world).refuses_directory() {
            // The directory could not be opened, so no sync was tried and none failed.
            return Err(Self::failed("sync directory", path, Errno::IO));
        }
        let (mut world, fate) = self.begin(OperationKind::Sync, path)?;
        match fate {
            Fate::Caught => Err(lost_power()),
            Fate::Failed(e) => {
                let error = errno(format!("sync directory {path}"), e);
                self.poison.set(&error);
                Err(error)
            }
            _ => {
                world.disks[self.disk].sync_names(path);
                Ok(())
            }
        }
    }

    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>> {
        if len > SMALL_BYTES_MAX || !offset.is_multiple_of(PAGE as u64) {
            let text = format!(
                "read {len} bytes at {offset} of {}: the offset must be whole pages and the length at most \
                 {SMALL_BYTES_MAX}",
                file.path()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut bytes = vec![0; len];
        let got = Self::handle(file)?.read_small(offset, &mut bytes)?;
        bytes.truncate(got);
        Ok(bytes)
    }

    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()> {
        self.poison.check()?;
        Self::handle(file)?.write_small(offset, bytes)
    }

    fn sync_small(&self, file: &DeviceFile) -> Result<()> {
        self.poison.check()?;
        let file = Self::handle(file)?;
        let moment = lock(&file.world).moment;
        let synced = file.sync(moment);
        if let Err(e) = &synced {
            self.poison.set(e);
        }
        synced
    }

    fn space(&self) -> Result<DiskSpace> {
        let world = lock(&self.world);
        let disk = &world.disks[self.disk];
        let used = if world.whole { disk.all_bytes() } else { disk.used_bytes(segment::DIRECTORY) };
        let available = world.capacity.saturating_sub(used);
        Ok(DiskSpace { total: world.capacity, available })
    }
}
