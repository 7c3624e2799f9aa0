//! A simulated disk as a device directory, and the operations that shards hand to it.

use super::disk::{File, Node, parent};
use super::world::{Fate, Kind, World, errno, lost_power};
use crate::device::arena::PAGE_BYTES;
use crate::device::directory::{Access, Directory, Entry, Identity, SMALL_BYTES_MAX, Space};
use crate::device::driver::Op;
use crate::device::file::{DeviceFile, Poison};
use crate::device::probe::DirectIo;
use crate::error::{Error, ErrorKind, Result};
use crate::metrics::lock;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use stratakv_format::segment;

/// What stands behind a [`DeviceFile`] of a simulated disk.
#[derive(Clone)]
pub(crate) struct SimFile {
    world: Arc<Mutex<World>>,
    disk: usize,
    file: usize,
    epoch: u64,
}

/// A simulated disk as an opened store sees it.
pub(crate) struct SimDirectory {
    world: Arc<Mutex<World>>,
    disk: usize,
    epoch: u64,
    path: PathBuf,
    direct: DirectIo,
    poison: Arc<Poison>,
}

impl SimFile {
    pub(crate) fn len(&self) -> Result<u64> {
        let world = lock(&self.world);
        if world.down || world.epoch != self.epoch {
            return Err(lost_power());
        }
        Ok(world.disks[self.disk].files.get(self.file).map_or(0, |file| file.live.len() as u64))
    }

    fn begin(&self, kind: Kind, offset: u64, len: usize) -> Result<(MutexGuard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let fate = world.begin(self.epoch, kind, (self.disk, self.file), (offset, len as u64))?;
        Ok((world, fate))
    }

    fn aligned(what: &str, offset: u64, len: usize) -> Result<()> {
        if offset.is_multiple_of(PAGE_BYTES as u64) && len.is_multiple_of(PAGE_BYTES) {
            return Ok(());
        }
        Err(errno(format!("{what} of {len} bytes at {offset}, not in whole pages"), Errno::INVAL))
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let doing = || format!("simulated read of {} bytes at {offset}", into.len());
        let (world, fate) = self.begin(Kind::Read, offset, into.len())?;
        let end = offset + into.len() as u64;
        match fate {
            Fate::Caught => return Err(lost_power()),
            Fate::Failed => return Err(errno(doing(), Errno::IO)),
            Fate::Done if world.is_unreadable(self.disk, self.file, offset, end) => {
                return Err(errno(doing(), Errno::IO));
            }
            Fate::Done => {}
        }
        let file = world.disks[self.disk].files.get(self.file).ok_or_else(lost_power)?;
        let bytes = file.live.get(offset as usize..).unwrap_or_default();
        let count = bytes.len().min(into.len());
        into[..count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        Self::aligned("write", offset, bytes.len())?;
        let (mut world, fate) = self.begin(Kind::Write, offset, bytes.len())?;
        if fate == Fate::Failed {
            world.write_in_part(self.disk, self.file, offset as usize, bytes);
            return Err(errno(format!("simulated write of {} bytes at {offset}", bytes.len()), Errno::IO));
        }
        world.heal(self.disk, self.file, offset, offset + bytes.len() as u64);
        let file = world.disks[self.disk].files.get_mut(self.file).ok_or_else(lost_power)?;
        file.write(offset as usize, bytes);
        if fate == Fate::Caught { Err(lost_power()) } else { Ok(()) }
    }

    fn sync(&self) -> Result<()> {
        let (mut world, fate) = self.begin(Kind::Sync, 0, 0)?;
        let file = world.disks[self.disk].files.get_mut(self.file).ok_or_else(lost_power)?;
        match fate {
            Fate::Done => {
                file.sync();
                Ok(())
            }
            Fate::Failed => {
                file.doom();
                Err(errno("simulated sync".into(), Errno::IO))
            }
            Fate::Caught => Err(lost_power()),
        }
    }

    /// Executes one operation of a shard.
    pub(crate) fn execute(&self, op: &Op) -> Result<()> {
        match op {
            Op::Read { offset, into, .. } => {
                let memory = into.memory();
                Self::aligned("read", *offset, memory.len)?;
                // SAFETY: the read target allows the device, and nobody else, to write these bytes while it lives.
                let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address.as_ptr(), memory.len) };
                let got = self.read(*offset, bytes)?;
                if got == memory.len {
                    return Ok(());
                }
                let source = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, format!("{got} bytes were there"));
                Err(Error::io(op.describe(), source))
            }
            Op::Write { offset, from, .. } => {
                let memory = from.memory();
                // SAFETY: the write source keeps these bytes mapped and unchanged while it lives.
                self.write(*offset, unsafe { std::slice::from_raw_parts(memory.address.as_ptr(), memory.len) })
            }
            Op::Sync { .. } => self.sync(),
        }
    }
}

impl SimDirectory {
    pub(super) fn open(world: &Arc<Mutex<World>>, disk: usize) -> Arc<dyn Directory> {
        let epoch = lock(world).epoch;
        Arc::new(Self {
            world: Arc::clone(world),
            disk,
            epoch,
            path: PathBuf::from(format!("simulated-{disk}")),
            direct: DirectIo::Direct { alignment: PAGE_BYTES },
            poison: Arc::default(),
        })
    }

    fn file(&self, file: usize, path: &str, preallocated: bool) -> Arc<DeviceFile> {
        let handle = SimFile { world: Arc::clone(&self.world), disk: self.disk, file, epoch: self.epoch };
        Arc::new(DeviceFile::simulated(handle, path, preallocated))
    }

    fn begin(&self, kind: Kind, path: &str) -> Result<(MutexGuard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let length = path.len() as u64;
        let fate = world.begin(self.epoch, kind, (self.disk, usize::MAX), (length, 0))?;
        Ok((world, fate))
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(Kind::Names, path)?;
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

    fn find(world: &World, disk: usize, doing: &str, path: &str) -> Result<Node> {
        world.disks[disk].names.get(path).copied().ok_or_else(|| Self::failed(doing, path, Errno::NOENT))
    }

    fn handle(file: &DeviceFile) -> Result<&SimFile> {
        let wrong = || Error::new(ErrorKind::InvalidArgument, "a file of another device");
        file.as_simulated().ok_or_else(wrong)
    }
}

impl Directory for SimDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn identity(&self) -> Identity {
        Identity { device: self.disk as u64 + 1, inode: 2 }
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

    fn is_simulated(&self) -> bool {
        true
    }

    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(Kind::Create, path)?;
        let (capacity, whole) = (world.capacity, world.whole);
        let disk = &mut world.disks[self.disk];
        if disk.names.contains_key(path) {
            return Err(Self::failed("create", path, Errno::EXIST));
        }
        if disk.names.get(parent(path)) != Some(&Node::Directory) {
            return Err(Self::failed("create", path, Errno::NOENT));
        }
        let full = match whole {
            true => disk.all_bytes() + len > capacity,
            false => parent(path) == segment::DIRECTORY && disk.used_bytes(segment::DIRECTORY) + len > capacity,
        };
        if fate == Fate::Failed || full {
            return Err(Self::failed("create", path, Errno::NOSPC));
        }
        let file = disk.files.len();
        disk.files.push(File::with_length(len as usize));
        disk.put(path, Node::File(file));
        drop(world);
        if fate == Fate::Caught { Err(lost_power()) } else { Ok(self.file(file, path, true)) }
    }

    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>> {
        if access == Access::ReadWrite {
            self.poison.check()?;
        }
        let (world, fate) = self.begin(Kind::Names, path)?;
        if fate == Fate::Caught {
            return Err(lost_power());
        }
        match Self::find(&world, self.disk, "open", path)? {
            Node::File(file) => Ok(self.file(file, path, false)),
            Node::Directory => Err(Self::failed("open", path, Errno::INVAL)),
        }
    }

    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()> {
        self.poison.check()?;
        let own = Self::handle(file)?.file;
        let (mut world, fate) = self.begin(Kind::Create, file.path())?;
        let (capacity, whole) = (world.capacity, world.whole);
        let disk = &mut world.disks[self.disk];
        let before = disk.files.get(own).map_or(0, |file| file.live.len() as u64);
        let full = whole && disk.all_bytes() + len.saturating_sub(before) > capacity;
        if fate == Fate::Failed || full {
            return Err(Self::failed("grow", file.path(), Errno::NOSPC));
        }
        if let Some(file) = disk.files.get_mut(own) {
            file.grow(len as usize);
        }
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

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let (world, fate) = self.begin(Kind::Names, path)?;
        if fate == Fate::Caught {
            return Err(lost_power());
        }
        let disk = &world.disks[self.disk];
        Self::find(&world, self.disk, "list", path)?;
        let inside = disk.names.iter().filter(|(name, _)| name.as_str() != "." && parent(name) == path);
        let entry = |(name, node): (&String, &Node)| {
            let (is_dir, len) = match node {
                Node::Directory => (true, 0),
                Node::File(file) => (false, disk.files.get(*file).map_or(0, |file| file.live.len() as u64)),
            };
            let name = name.rsplit_once('/').map_or(name.as_str(), |(_, name)| name).to_owned();
            Entry { name, is_dir, len }
        };
        let mut entries: Vec<_> = inside.map(entry).collect();
        entries.sort_unstable();
        Ok(entries)
    }

    fn mkdir(&self, path: &str) -> Result<()> {
        self.change(path, |world| {
            let disk = &mut world.disks[self.disk];
            match disk.names.get(path) {
                None => disk.put(path, Node::Directory),
                Some(Node::Directory) => {}
                Some(Node::File(_)) => return Err(Self::failed("make directory", path, Errno::EXIST)),
            }
            Ok(())
        })
    }

    fn sync_dir(&self, path: &str) -> Result<()> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(Kind::Sync, path)?;
        match fate {
            Fate::Done => {
                world.disks[self.disk].sync_names(path);
                Ok(())
            }
            Fate::Caught => Err(lost_power()),
            Fate::Failed => {
                let error = errno(format!("sync directory {path}"), Errno::IO);
                self.poison.set(&error);
                Err(error)
            }
        }
    }

    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>> {
        if len > SMALL_BYTES_MAX || !offset.is_multiple_of(PAGE_BYTES as u64) {
            let text = format!("small read of {len} bytes at {offset} of {}", file.path());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut bytes = vec![0; len];
        let got = Self::handle(file)?.read(offset, &mut bytes)?;
        bytes.truncate(got);
        Ok(bytes)
    }

    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()> {
        self.poison.check()?;
        Self::handle(file)?.write(offset, bytes)
    }

    fn sync_small(&self, file: &DeviceFile) -> Result<()> {
        self.poison.check()?;
        let synced = Self::handle(file)?.sync();
        if let Err(e) = &synced {
            self.poison.set(e);
        }
        synced
    }

    fn space(&self) -> Result<Space> {
        let world = lock(&self.world);
        let available = world.capacity.saturating_sub(world.disks[self.disk].used_bytes(segment::DIRECTORY));
        Ok(Space { total: world.capacity, available })
    }
}
