//! A device directory of the operating system: its lock, its files, and its small blocking reads and writes.
//!
//! To open a directory:
//! 1. Open the root without following a symbolic link. Create it if the options say so.
//! 2. Check that it belongs to this user, and that no other user may write it.
//! 3. Lock it: exclusively for writing, shared for reading.
//! 4. Probe whether direct I/O works, and whether the file system overwrites in place.
//!
//! Invariants:
//! - Everything below the root is opened relative to the root's descriptor and never through a symbolic link.
//! - Files have mode 0600 and directories 0700, whatever the umask is.
//! - The lock belongs to the open file description, which the rings of the device share. It ends with the last write.
//! - A failed sync poisons the device.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::aligned::AlignedBuf;
use crate::io::file::device_file::DeviceFile;
use crate::io::file::directory::{Access, Directory, DirectoryEntry, DirectoryIdentity, DiskSpace, SMALL_BYTES_MAX};
use crate::io::file::open_beneath;
use crate::io::file::open_roots::OpenRoots;
use crate::io::file::poison::Poison;
use crate::io::file::probe::{self, DirectIo};
use crate::io::signals::ignore_file_size_signal;

/// The options of [`OsDirectory::open`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct OsDirectoryOptions {
    pub(crate) access: Access,
    /// True if a missing directory is created. Its parent must exist.
    pub(crate) create: bool,
    /// How long to wait for a lock that another process holds. A killed process keeps the lock until the kernel has
    /// closed its ring and its last writes have completed. Without writes that takes about 70 ms after it was reaped.
    pub(crate) lock_wait: Duration,
}

/// How long to wait for the lock of a directory that a store of this process has open. A device that has just left that
/// store frees its lock within this time.
const OWN_LOCK_WAIT: Duration = Duration::from_millis(100);

/// A directory of the operating system.
pub(crate) struct OsDirectory {
    root: OwnedFd,
    path: PathBuf,
    access: Access,
    identity: DirectoryIdentity,
    direct: DirectIo,
    /// The answer of [`Directory::sync_covers_overwrites`].
    in_place: bool,
    /// True if an overwrite needs new blocks, so that reserved blocks do not last.
    copies_on_write: bool,
    poison: Arc<Poison>,
}

fn configuration(path: &Path, text: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("open: device directory {} {text}", path.display()))
}

impl OsDirectory {
    /// Opens and locks a device directory.
    ///
    /// # Errors
    /// `Configuration`: the path is missing, not a directory, or a symbolic link. Or the directory belongs to another
    /// user or is writable by others. `InUse`: another process or store holds the lock.
    pub(crate) fn open(path: &Path, options: OsDirectoryOptions) -> Result<Arc<Self>> {
        ignore_file_size_signal();
        // This also drops a trailing slash, which would follow a symbolic link.
        let path: PathBuf = path.components().collect();
        let root = match open_root(&path) {
            Err(Errno::NOENT) if options.create => {
                make_root(&path)?;
                open_root(&path)
            }
            other => other,
        };
        let root = root.map_err(|e| match e {
            Errno::NOENT => configuration(&path, "does not exist"),
            Errno::NOTDIR | Errno::LOOP if path.is_symlink() => {
                configuration(&path, "is a symbolic link; name the directory itself")
            }
            Errno::NOTDIR => configuration(&path, "is not a directory"),
            e => Error::io(format!("open device directory {}", path.display()), e.into())
                .with_kind(ErrorKind::Configuration),
        })?;
        let stat = rustix::fs::fstat(&root).map_err(|e| Error::io(format!("stat {}", path.display()), e.into()))?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(configuration(&path, "belongs to another user"));
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(configuration(&path, "is writable by its group or by everyone; run chmod go-w on it"));
        }
        let identity = DirectoryIdentity { device: stat.st_dev, inode: stat.st_ino };
        acquire(&root, &path, identity, options)?;
        let direct = match options.access {
            Access::ReadWrite => probe::probe(root.as_fd(), None),
            Access::ReadOnly => probe::probe(root.as_fd(), Some("superblock")),
        };
        let in_place = direct.is_direct() && writes_in_place(&root);
        let (copies_on_write, poison) = (copies_on_write(&root), Arc::default());
        Ok(Arc::new(Self { root, path, access: options.access, identity, direct, in_place, copies_on_write, poison }))
    }

    fn unlink(&self, path: &str) -> Result<(), Errno> {
        let (dir, name) = open_beneath::parent(self.root.as_fd(), path)?;
        rustix::fs::unlinkat(&dir, name, AtFlags::empty())
    }

    /// Returns the error of an operation on a path below the root.
    fn error(&self, doing: &str, path: &str, e: Errno) -> Error {
        let error = Error::io(format!("{doing} {}", self.path.join(path).display()), e.into());
        match e {
            Errno::NOENT => error.with_kind(ErrorKind::NotFound),
            Errno::EXIST => error.with_kind(ErrorKind::AlreadyExists),
            Errno::INVAL => error.with_kind(ErrorKind::InvalidArgument),
            _ => error,
        }
    }

    fn check_writable(&self) -> Result<()> {
        if self.access == Access::ReadOnly {
            let text = format!("write: device directory {} is open for reading only", self.path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.poison.check()
    }

    /// Opens a file and switches it to direct I/O if that works. Returns whether it did.
    fn open_fd(&self, path: &str, flags: OFlags) -> Result<(OwnedFd, bool), Errno> {
        let fd = open_beneath::open(self.root.as_fd(), path, flags | OFlags::NONBLOCK, Mode::RUSR | Mode::WUSR)?;
        // NONBLOCK keeps a FIFO in place of the file from blocking the open.
        if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let access = OFlags::from_bits_retain(rustix::fs::fcntl_getfl(&fd)?.bits()).difference(OFlags::NONBLOCK);
        let direct = self.direct.is_direct() && rustix::fs::fcntl_setfl(&fd, access | OFlags::DIRECT).is_ok();
        if !direct {
            rustix::fs::fcntl_setfl(&fd, access)?;
        }
        Ok((fd, direct))
    }
}

fn open_root(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Returns whether the file system is known to overwrite in place and to flush the device in every fdatasync, as ext4
/// and XFS do.
fn writes_in_place(root: &OwnedFd) -> bool {
    const EXT4: rustix::fs::FsWord = 0xef53;
    const XFS: rustix::fs::FsWord = 0x5846_5342;
    rustix::fs::fstatfs(root).is_ok_and(|stat| stat.f_type == EXT4 || stat.f_type == XFS)
}

/// Returns whether the file system is known to write each overwrite elsewhere: btrfs, bcachefs or ZFS.
fn copies_on_write(root: &OwnedFd) -> bool {
    const BTRFS: rustix::fs::FsWord = 0x9123_683e;
    const BCACHEFS: rustix::fs::FsWord = 0xca45_1a4e;
    const ZFS: rustix::fs::FsWord = 0x2fc1_2fc1;
    rustix::fs::fstatfs(root).is_ok_and(|stat| [BTRFS, BCACHEFS, ZFS].contains(&stat.f_type))
}

fn make_root(path: &Path) -> Result<()> {
    let mode = fs::Permissions::from_mode(0o700);
    let made = fs::DirBuilder::new().mode(0o700).create(path).and_then(|()| fs::set_permissions(path, mode));
    made.map_err(|e| {
        Error::io(format!("create device directory {}", path.display()), e).with_kind(ErrorKind::Configuration)
    })
}

/// Locks the directory itself.
fn acquire(root: &OwnedFd, path: &Path, identity: DirectoryIdentity, options: OsDirectoryOptions) -> Result<()> {
    let operation = match options.access {
        Access::ReadWrite => FlockOperation::NonBlockingLockExclusive,
        Access::ReadOnly => FlockOperation::NonBlockingLockShared,
    };
    let start = Instant::now();
    loop {
        match rustix::fs::flock(root, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                let is_own = OpenRoots::contain(identity);
                let wait = if is_own { options.lock_wait.min(OWN_LOCK_WAIT) } else { options.lock_wait };
                if start.elapsed() >= wait {
                    let user = if is_own {
                        "a store of this process; use or drop that store"
                    } else {
                        "another process or store"
                    };
                    let text = format!("open: device directory {} is in use by {user}", path.display());
                    return Err(Error::new(ErrorKind::InUse, text));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(Error::io(format!("lock device directory {}", path.display()), e.into())),
        }
    }
}

impl Directory for OsDirectory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn identity(&self) -> DirectoryIdentity {
        self.identity
    }

    fn direct_io(&self) -> &DirectIo {
        &self.direct
    }

    fn poison(&self) -> &Arc<Poison> {
        &self.poison
    }

    fn access(&self) -> Access {
        self.access
    }

    fn lock_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.root.as_fd())
    }

    fn sync_covers_overwrites(&self) -> bool {
        self.in_place
    }

    fn create_file(&self, path: &str, len: u64) -> Result<Arc<DeviceFile>> {
        self.check_writable()?;
        let failed = |e| self.error("create", path, e);
        let (fd, direct) = self.open_fd(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).map_err(failed)?;
        let sized = rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).and_then(|()| preallocate(&fd, len));
        match sized {
            Ok(reserved) => Ok(Arc::new(DeviceFile::new(fd, path, direct, reserved && !self.copies_on_write))),
            Err(e) => {
                let _ = self.unlink(path);
                Err(failed(e))
            }
        }
    }

    fn open_file(&self, path: &str, access: Access) -> Result<Arc<DeviceFile>> {
        let flags = match access {
            Access::ReadOnly => OFlags::RDONLY,
            Access::ReadWrite => {
                self.check_writable()?;
                OFlags::RDWR
            }
        };
        let (fd, direct) = self.open_fd(path, flags).map_err(|e| self.error("open", path, e))?;
        Ok(Arc::new(DeviceFile::new(fd, path, direct, false)))
    }

    fn grow_file(&self, file: &DeviceFile, len: u64) -> Result<()> {
        self.check_writable()?;
        let before = file.len()?;
        preallocate(&file.fd(), len).map(|_| ()).map_err(|e| {
            // Gives back the blocks that were reserved before the space ran out.
            let _ = rustix::fs::ftruncate(file.fd(), before);
            self.error("grow", file.path(), e)
        })
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.check_writable()?;
        let renamed = open_beneath::parent(self.root.as_fd(), from).and_then(|(from_dir, from_name)| {
            let (to_dir, to_name) = open_beneath::parent(self.root.as_fd(), to)?;
            rustix::fs::renameat(&from_dir, from_name, &to_dir, to_name)
        });
        renamed.map_err(|e| self.error(&format!("rename to {to}:"), from, e))
    }

    fn remove_file(&self, path: &str) -> Result<()> {
        self.check_writable()?;
        self.unlink(path).map_err(|e| self.error("remove", path, e))
    }

    fn list(&self, path: &str) -> Result<Vec<DirectoryEntry>> {
        let failed = |e| self.error("list", path, e);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = open_beneath::open(self.root.as_fd(), path, flags, Mode::empty()).map_err(failed)?;
        let mut entries = Vec::new();
        for item in rustix::fs::Dir::read_from(&fd).map_err(failed)? {
            let item = item.map_err(failed)?;
            let Ok(name) = item.file_name().to_str() else {
                return Err(self.error("list", path, Errno::ILSEQ));
            };
            if matches!(name, "." | "..") {
                continue;
            }
            let stat = rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
            let is_dir = match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => true,
                FileType::RegularFile => false,
                _ => {
                    let text = format!(
                        "list {}/{path}: {name} is neither a file nor a directory; move it elsewhere",
                        self.path.display()
                    );
                    return Err(Error::new(ErrorKind::Configuration, text));
                }
            };
            let len = if is_dir { 0 } else { u64::try_from(stat.st_size).unwrap_or(0) };
            entries.push(DirectoryEntry { name: name.to_owned(), is_dir, len });
        }
        entries.sort_unstable();
        Ok(entries)
    }

    fn mkdir(&self, path: &str) -> Result<()> {
        self.check_writable()?;
        let made = open_beneath::parent(self.root.as_fd(), path).and_then(|(dir, name)| {
            match rustix::fs::mkdirat(&dir, name, Mode::RWXU) {
                // The umask may have removed bits that the owner needs.
                Ok(()) => rustix::fs::chmodat(&dir, name, Mode::RWXU, AtFlags::empty()),
                Err(Errno::EXIST) => {
                    open_beneath::open(dir.as_fd(), name, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).map(drop)
                }
                Err(e) => Err(e),
            }
        });
        made.map_err(|e| self.error("make directory", path, e))
    }

    fn sync_dir(&self, path: &str) -> Result<()> {
        self.check_writable()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = open_beneath::open(self.root.as_fd(), path, flags, Mode::empty())
            .map_err(|e| self.error("sync directory", path, e))?;
        rustix::fs::fsync(&fd).map_err(|e| {
            let error = Error::io(format!("sync directory {}", self.path.join(path).display()), e.into());
            self.poison.set(&error);
            error
        })
    }

    fn read_small(&self, file: &DeviceFile, offset: u64, len: usize) -> Result<Vec<u8>> {
        if len > SMALL_BYTES_MAX || !offset.is_multiple_of(PAGE_BYTES as u64) {
            let text = format!(
                "read {len} bytes at {offset} of {}: the offset must be whole pages and the length at most \
                 {SMALL_BYTES_MAX}",
                file.path()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut buf = AlignedBuf::zeroed(len);
        let mut reached = 0;
        // A direct file needs page offsets, so a short read continues at the last whole page. The loop ends when a read
        // moves no further, at the end of the file.
        while reached < buf.bytes().len() {
            let from = if file.is_direct() { reached - reached % PAGE_BYTES } else { reached };
            let got = retry(|| rustix::io::pread(file.fd(), &mut buf.bytes_mut()[from..], offset + from as u64))
                .map_err(|e| Error::io(format!("read {len} bytes at {offset} of {}", file.path()), e.into()))?;
            if from + got <= reached {
                break;
            }
            reached = from + got;
        }
        Ok(buf.bytes()[..reached.min(len)].to_vec())
    }

    fn write_small(&self, file: &DeviceFile, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check_writable()?;
        let doing = || format!("write {} bytes at {offset} of {}", bytes.len(), file.path());
        if !offset.is_multiple_of(PAGE_BYTES as u64) || !bytes.len().is_multiple_of(PAGE_BYTES) {
            let text = format!("{}: offset and length must be whole pages", doing());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.bytes_mut().copy_from_slice(bytes);
        let mut reached = 0;
        while reached < bytes.len() {
            let from = if file.is_direct() { reached - reached % PAGE_BYTES } else { reached };
            let put = retry(|| rustix::io::pwrite(file.fd(), &buf.bytes()[from..], offset + from as u64))
                .map_err(|e| Error::io(doing(), e.into()))?;
            if from + put <= reached {
                let source =
                    std::io::Error::new(std::io::ErrorKind::WriteZero, format!("the system took only {reached} bytes"));
                return Err(Error::io(doing(), source));
            }
            reached = from + put;
        }
        Ok(())
    }

    fn sync_small(&self, file: &DeviceFile) -> Result<()> {
        self.check_writable()?;
        rustix::fs::fdatasync(file.fd()).map_err(|e| {
            let error = Error::io(format!("sync {}", file.path()), e.into());
            self.poison.set(&error);
            error
        })
    }

    fn space(&self) -> Result<DiskSpace> {
        let stat = rustix::fs::fstatvfs(&self.root).map_err(|e| self.error("free space of", ".", e))?;
        Ok(DiskSpace {
            total: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }
}

/// Reserves the blocks of `len` bytes. If the file system cannot, sets the length only. Returns whether it reserved.
fn preallocate(fd: &impl AsFd, len: u64) -> Result<bool, Errno> {
    if len == 0 {
        return Ok(false);
    }
    match retry(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len)) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(fd, len).map(|()| false),
        Err(e) => Err(e),
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
