//! A simulated disk as a device directory, and the operations that shards hand to it.

use super::disk::{Node, parent};
use super::file::File;
use super::pages::PAGE;
use super::thread::choose;
use super::world::{Fate, Kind, World, errno, lost_power};
use crate::error::{Error, ErrorKind, Result};
use crate::io::driver::interface::Op;
use crate::io::driver::progress::InFlight;
use crate::io::file::device_file::{DeviceFile, Poison};
use crate::io::file::directory::{Access, Directory, Entry, Identity, SMALL_BYTES_MAX, Space};
use crate::io::file::probe::DirectIo;
use crate::metrics::lock;
use crate::sync::Guard;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use stratakv_format::segment;

/// What stands behind a [`DeviceFile`] of a simulated disk.
#[derive(Clone)]
pub(crate) struct SimFile {
    world: Arc<Mutex<World>>,
    disk: usize,
    file: usize,
    epoch: u64,
    in_segment: bool,
}

/// A queued operation at its disk.
pub(super) struct Arrival {
    file: Option<SimFile>,
    /// Completions before it.
    moment: u64,
    /// Its number, for a write that met a device with power.
    write: Option<u64>,
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
        Ok(world.disks[self.disk].files.get(self.file).map_or(0, |file| file.len() as u64))
    }

    fn place(&self) -> (usize, usize) {
        (self.disk, self.file)
    }

    fn begin(&self, kind: Kind, offset: u64, len: usize) -> Result<(Guard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let fate = world.begin(self.epoch, kind, self.place(), (offset, len as u64))?;
        Ok((world, fate))
    }

    fn is_aligned(offset: u64, len: usize) -> bool {
        offset.is_multiple_of(PAGE as u64) && len.is_multiple_of(PAGE)
    }

    /// What reads see from `offset` on, as far as the file goes.
    fn copy(&self, world: &World, offset: u64, into: &mut [u8]) -> usize {
        let Some(file) = world.disks[self.disk].files.get(self.file) else { return 0 };
        let first = offset as usize / PAGE;
        let mut count = 0;
        for (index, to) in into.chunks_mut(PAGE).enumerate() {
            let Some(page) = file.page(first + index) else { break };
            to.copy_from_slice(&world.pages.get(page)[..to.len()]);
            count += to.len();
        }
        count
    }

    fn read_small(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let doing = || format!("simulated read of {} bytes at {offset}", into.len());
        let (world, fate) = self.begin(Kind::Read, offset, into.len())?;
        match fate {
            Fate::Caught => return Err(lost_power()),
            Fate::Failed(e) => return Err(errno(doing(), e)),
            _ if world.is_unreadable(self.place(), offset, offset + into.len() as u64) => {
                return Err(errno(doing(), Errno::IO));
            }
            _ => {}
        }
        let count = self.copy(&world, offset, into);
        flip(fate, &mut into[..count]);
        Ok(count)
    }

    fn write_small(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let doing = || format!("simulated write of {} bytes at {offset}", bytes.len());
        if !Self::is_aligned(offset, bytes.len()) {
            return Err(errno(doing(), Errno::INVAL));
        }
        let write = lock(&self.world).arrive(self.epoch, self.place(), offset, bytes).ok_or_else(lost_power)?;
        let (mut world, fate) = self.begin(Kind::Write, offset, bytes.len())?;
        match fate {
            Fate::Caught => Err(lost_power()),
            Fate::Failed(e) => {
                world.fail(self.place(), write, e);
                Err(errno(doing(), e))
            }
            _ => {
                world.complete(self.place(), write, offset, bytes.len(), 0);
                Ok(())
            }
        }
    }

    /// Makes durable what had completed by `moment`.
    fn sync(&self, moment: u64) -> Result<()> {
        let (mut world, fate) = self.begin(Kind::Sync, 0, 0)?;
        let file = world.disks[self.disk].files.get_mut(self.file).ok_or_else(lost_power)?;
        match fate {
            Fate::Caught => Err(lost_power()),
            Fate::Failed(e) => {
                file.doom();
                Err(errno("simulated sync".into(), e))
            }
            _ => {
                file.sync(moment);
                Ok(())
            }
        }
    }
}

/// Why a file is not made, or made longer.
fn refusal(fate: Fate, full: bool) -> Option<Errno> {
    match fate {
        Fate::Failed(e) => Some(e),
        _ => full.then_some(Errno::NOSPC),
    }
}

/// A wrong bit in what a read brings.
fn flip(fate: Fate, bytes: &mut [u8]) {
    if let Fate::Flipped(bit) = fate
        && let Some(byte) = bytes.get_mut(bit as usize / 8)
    {
        *byte ^= 1 << (bit % 8);
    }
}

/// What the driver of an operating system would have got for an error of the simulation.
fn negative(e: Errno) -> i32 {
    -e.raw_os_error()
}

impl Arrival {
    /// Lets what is left of an operation arrive.
    pub(super) fn of(flight: &InFlight) -> Self {
        let Some(file) = flight.op().file().as_simulated() else {
            return Self { file: None, moment: 0, write: None };
        };
        let mut world = lock(&file.world);
        let write = match (flight.op(), flight.rest()) {
            (Op::Write { .. }, Some((offset, memory))) => {
                // SAFETY: the write source keeps these bytes mapped and unchanged while it lives.
                let bytes = unsafe { std::slice::from_raw_parts(memory.address.as_ptr(), memory.len) };
                world.arrive(file.epoch, file.place(), offset, bytes)
            }
            _ => None,
        };
        Self { moment: world.moment, write, file: Some(file.clone()) }
    }

    /// Whether its device is slow and others go first this time.
    pub(super) fn is_held_back(&self) -> bool {
        let Some(file) = &self.file else { return false };
        let slow = lock(&file.world).faults.slow == Some(file.disk);
        slow && choose(8) > 0
    }

    /// Whether the power went.
    pub(super) fn was_cut(&self) -> bool {
        self.file.as_ref().is_some_and(|file| lock(&file.world).down)
    }

    /// It ends: bytes moved, or a negative error number.
    pub(super) fn complete(&self, flight: &InFlight) -> i32 {
        let Some(file) = &self.file else { return negative(Errno::BADF) };
        let Some((offset, memory)) = flight.rest() else {
            return match file.sync(self.moment) {
                Ok(()) => 0,
                Err(_) => negative(Errno::IO),
            };
        };
        let read = flight.op().is_read();
        let kind = if read { Kind::Read } else { Kind::Write };
        if !SimFile::is_aligned(offset, memory.len) {
            return negative(Errno::INVAL);
        }
        let Ok((mut world, mut fate)) = file.begin(kind, offset, memory.len) else { return negative(Errno::IO) };
        if fate == Fate::Done {
            fate = world.disturb(kind, file.place(), offset, memory.len, file.in_segment);
        }
        if fate == Fate::Caught {
            return negative(Errno::IO);
        }
        if read {
            match fate {
                Fate::Failed(e) => return negative(e),
                _ if world.is_unreadable(file.place(), offset, offset + memory.len as u64) => {
                    return negative(Errno::IO);
                }
                _ => {}
            }
            // SAFETY: the read target allows the device, and nobody else, to write these bytes while it lives.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address.as_ptr(), memory.len) };
            let moved = if let Fate::Short(sectors) = fate { sectors * 512 } else { bytes.len() };
            let count = file.copy(&world, offset, &mut bytes[..moved]);
            flip(fate, &mut bytes[..count]);
            return count as i32;
        }
        let Some(write) = self.write else { return negative(Errno::IO) };
        let (moved, shift) = match fate {
            Fate::Failed(e) => {
                world.fail(file.place(), write, e);
                return negative(e);
            }
            Fate::Phantom => {
                world.forget(file.place(), write);
                return memory.len as i32;
            }
            Fate::Short(sectors) => (sectors * 512, 0),
            Fate::Misdirected(pages) => (memory.len, pages),
            _ => (memory.len, 0),
        };
        world.complete(file.place(), write, offset, moved, shift);
        moved as i32
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
            direct: DirectIo::Direct { alignment: PAGE },
            poison: Arc::default(),
        })
    }

    fn file(&self, file: usize, path: &str, preallocated: bool) -> Arc<DeviceFile> {
        let in_segment = parent(path) == segment::DIRECTORY;
        let handle = SimFile { world: Arc::clone(&self.world), disk: self.disk, file, epoch: self.epoch, in_segment };
        Arc::new(DeviceFile::simulated(handle, path, preallocated))
    }

    fn begin(&self, kind: Kind, path: &str) -> Result<(Guard<'_, World>, Fate)> {
        let mut world = lock(&self.world);
        let length = path.len() as u64;
        let fate = world.begin(self.epoch, kind, (self.disk, usize::MAX), (length, 0))?;
        Ok((world, fate))
    }

    /// Begins to look at names.
    fn look(&self, doing: &str, path: &str) -> Result<Guard<'_, World>> {
        match self.begin(Kind::Names, path)? {
            (_, Fate::Caught) => Err(lost_power()),
            (_, Fate::Failed(e)) => Err(Self::failed(doing, path, e)),
            (world, _) => Ok(world),
        }
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
        self.poison.check()?;
        let (mut world, fate) = self.begin(Kind::Change, path)?;
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
        if let Some(e) = refusal(fate, full) {
            return Err(Self::failed("create", path, e));
        }
        let file = disk.files.len();
        disk.files.push(File::with_pages((len as usize).div_ceil(PAGE)));
        disk.put(path, Node::File(file));
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

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let world = self.look("list", path)?;
        let disk = &world.disks[self.disk];
        Self::find(&world, self.disk, "list", path)?;
        let inside = disk.names.iter().filter(|(name, _)| name.as_str() != "." && parent(name) == path);
        let entry = |(name, node): (&String, &Node)| {
            let (is_dir, len) = match node {
                Node::Directory => (true, 0),
                Node::File(file) => (false, disk.files.get(*file).map_or(0, |file| file.len() as u64)),
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
        if lock(&self.world).refuses_directory() {
            // Nothing was synced, and nothing is lost by that.
            return Err(Self::failed("sync directory", path, Errno::IO));
        }
        let (mut world, fate) = self.begin(Kind::Sync, path)?;
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
            let text = format!("small read of {len} bytes at {offset} of {}", file.path());
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

    fn space(&self) -> Result<Space> {
        let world = lock(&self.world);
        let disk = &world.disks[self.disk];
        let used = if world.whole { disk.all_bytes() } else { disk.used_bytes(segment::DIRECTORY) };
        let available = world.capacity.saturating_sub(used);
        Ok(Space { total: world.capacity, available })
    }
}
