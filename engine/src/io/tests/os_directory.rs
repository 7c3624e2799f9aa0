use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::PAGE_BYTES;
use crate::io::file::directory::{Access, Directory};
use crate::io::file::open_beneath;
use crate::io::file::os_directory::{OsDirectory, OsDirectoryOptions};
use crate::io::file::probe::DirectIo;

const CREATE: OsDirectoryOptions =
    OsDirectoryOptions { access: Access::ReadWrite, create: true, lock_wait: Duration::ZERO };
const OPEN: OsDirectoryOptions = OsDirectoryOptions { create: false, ..CREATE };
const READ: OsDirectoryOptions = OsDirectoryOptions { access: Access::ReadOnly, ..OPEN };

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|e| e.kind())
}

fn message<T>(result: Result<T>) -> String {
    result.err().map(|e: Error| e.to_string()).unwrap_or_default()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("exists").permissions().mode() & 0o7777
}

#[test]
fn one_writer_or_many_readers() {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let path = tmp.path().join("d");
    assert_eq!(kind(OsDirectory::open(&path, OPEN)), Some(ErrorKind::Configuration));
    assert!(message(OsDirectory::open(&path, OPEN)).contains("does not exist"));
    let writer = OsDirectory::open(&path, CREATE).expect("created");
    assert_eq!(mode(&path), 0o700);
    assert_eq!(kind(OsDirectory::open(&path, OPEN)), Some(ErrorKind::InUse));
    assert_eq!(kind(OsDirectory::open(&path, READ)), Some(ErrorKind::InUse));
    let identity = writer.identity();
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        drop(writer);
    });
    let patient = OsDirectoryOptions { lock_wait: Duration::from_secs(20), ..READ };
    let reader = OsDirectory::open(&path.join("."), patient).expect("free after a moment");
    later.join().expect("no panic");
    assert_eq!(reader.identity(), identity, "the same directory under another name");
    let _second = OsDirectory::open(&path, READ).expect("readers share");
    assert_eq!(kind(OsDirectory::open(&path, OPEN)), Some(ErrorKind::InUse));
    assert_eq!(kind(reader.create_file("x", 0)), Some(ErrorKind::InvalidArgument));
}

#[test]
fn unsafe_roots_are_refused() {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let real = tmp.path().join("real");
    fs::create_dir(&real).expect("made");
    let link = tmp.path().join("link");
    symlink(&real, &link).expect("linked");
    for path in [link.clone(), link.join("")] {
        assert_eq!(kind(OsDirectory::open(&path, CREATE)), Some(ErrorKind::Configuration));
        assert!(message(OsDirectory::open(&path, CREATE)).contains("symbolic link"));
    }
    for bad in [0o770, 0o702, 0o777] {
        fs::set_permissions(&real, fs::Permissions::from_mode(bad)).expect("set");
        assert!(message(OsDirectory::open(&real, OPEN)).contains("writable"), "{bad:o}");
    }
    fs::set_permissions(&real, fs::Permissions::from_mode(0o755)).expect("set");
    drop(OsDirectory::open(&real, OPEN).expect("readable by others is the owner's choice"));
    let file = tmp.path().join("file");
    fs::write(&file, b"").expect("written");
    assert!(message(OsDirectory::open(&file, CREATE)).contains("not a directory"));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&real, Some(12345), None).expect("chown");
        assert!(message(OsDirectory::open(&real, OPEN)).contains("another user"));
    } else {
        println!("skipped: another owner's directory (needs root)");
    }
}

#[test]
fn paths_stay_inside() {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let dir = OsDirectory::open(&tmp.path().join("d"), CREATE).expect("created");
    let outside = tmp.path().join("secret");
    fs::write(&outside, b"secret").expect("written");
    dir.mkdir("sub").expect("made");
    dir.mkdir("sub").expect("fine when it exists");
    symlink(&outside, tmp.path().join("d/sub/file")).expect("linked");
    symlink(tmp.path(), tmp.path().join("d/up")).expect("linked");
    for path in ["../secret", "/etc/passwd", "", "sub/../../secret", "sub//file", "sub/./file", "a\0b"] {
        assert_eq!(kind(dir.open_file(path, Access::ReadOnly)), Some(ErrorKind::InvalidArgument), "{path:?}");
        assert_eq!(kind(dir.remove_file(path)), Some(ErrorKind::InvalidArgument), "{path:?}");
    }
    for path in ["sub/file", "up/secret"] {
        assert!(dir.open_file(path, Access::ReadOnly).is_err(), "{path}");
    }
    assert_eq!(kind(dir.list("sub")), Some(ErrorKind::Configuration));
    assert!(dir.mkdir("up").is_err());
    assert!(dir.create_file("up/new", 0).is_err());
    // The way without openat2.
    use rustix::fs::{Mode, OFlags};
    let root = dir.lock_fd().expect("a descriptor");
    assert!(open_beneath::walk(root, "sub/file", OFlags::RDONLY, Mode::empty()).is_err());
    assert!(open_beneath::walk(root, "up/secret", OFlags::RDONLY, Mode::empty()).is_err());
    assert!(open_beneath::walk(root, "../secret", OFlags::RDONLY, Mode::empty()).is_err());
    fs::write(tmp.path().join("d/sub/plain"), b"x").expect("written");
    assert!(open_beneath::walk(root, "sub/plain", OFlags::RDONLY, Mode::empty()).is_ok());
    assert_eq!(fs::read(&outside).expect("still there"), b"secret");
}

#[test]
fn files_have_private_modes_their_length_and_their_name() {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let dir = OsDirectory::open(&tmp.path().join("d"), CREATE).expect("created");
    dir.mkdir("s").expect("made");
    let file = dir.create_file("s/a", 3 << 20).expect("made");
    assert_eq!(file.len().expect("stat"), 3 << 20);
    let on_disk = tmp.path().join("d/s/a");
    assert_eq!((mode(&on_disk), mode(&tmp.path().join("d/s"))), (0o600, 0o700));
    if file.is_preallocated() {
        use std::os::unix::fs::MetadataExt;
        assert!(fs::metadata(&on_disk).expect("stat").blocks() * 512 >= 3 << 20);
    }
    assert_eq!(kind(dir.create_file("s/a", 0)), Some(ErrorKind::AlreadyExists));
    assert_eq!(kind(dir.open_file("s/b", Access::ReadWrite)), Some(ErrorKind::NotFound));
    dir.rename("s/a", "s/b").expect("renamed");
    dir.sync_dir("s").expect("synced");
    let names: Vec<_> = dir.list("s").expect("listed").into_iter().map(|e| (e.name, e.is_dir, e.len)).collect();
    assert_eq!(names, [("b".to_owned(), false, 3 << 20)]);
    assert_eq!(dir.list(".").expect("listed").len(), 1);
    dir.remove_file("s/b").expect("removed");
    assert_eq!(dir.list("s").expect("listed"), []);
    let space = dir.space().expect("statvfs");
    assert!(space.available > 0 && space.available <= space.total);
    assert_eq!(kind(dir.create_file("s/huge", 1 << 60)), Some(ErrorKind::NoSpace));
    assert_eq!(dir.list("s").expect("listed"), [], "nothing is left behind");
}

#[test]
fn small_reads_and_writes() {
    let tmp = tempfile::tempdir().expect("temporary directory");
    let path = tmp.path().join("d");
    let dir: Arc<dyn Directory> = OsDirectory::open(&path, CREATE).expect("created");
    let file = dir.create_file("superblock", 0).expect("made");
    assert_eq!(file.is_direct(), dir.direct_io().is_direct());
    let pages: Vec<u8> = (0..3 * PAGE_BYTES).map(|i| (i / 7) as u8).collect();
    dir.write_small(&file, PAGE_BYTES as u64, &pages).expect("written");
    dir.sync_small(&file).expect("synced");
    assert_eq!(dir.read_small(&file, PAGE_BYTES as u64, pages.len()).expect("read"), pages);
    assert_eq!(dir.read_small(&file, PAGE_BYTES as u64, 100).expect("read"), pages[..100]);
    assert_eq!(dir.read_small(&file, 0, 1 << 20).expect("read").len(), 4 * PAGE_BYTES, "up to the end of the file");
    assert_eq!(dir.read_small(&file, 1 << 30, 10).expect("read"), []);
    assert_eq!(kind(dir.read_small(&file, 1, 10)), Some(ErrorKind::InvalidArgument));
    assert_eq!(kind(dir.read_small(&file, 0, usize::MAX)), Some(ErrorKind::InvalidArgument));
    assert_eq!(kind(dir.write_small(&file, 0, &[1])), Some(ErrorKind::InvalidArgument));
    // A file that ends inside a page.
    fs::write(path.join("odd"), &pages[..5000]).expect("written");
    let odd = dir.open_file("odd", Access::ReadWrite).expect("opened");
    assert_eq!(dir.read_small(&odd, 0, 9000).expect("read"), pages[..5000]);
    // A failed sync makes the directory read-only.
    dir.poison().set(&Error::new(ErrorKind::Io, "sync of x: Input/output error"));
    assert_eq!(kind(dir.write_small(&file, 0, &pages)), Some(ErrorKind::Poisoned));
    assert_eq!(kind(dir.sync_small(&file)), Some(ErrorKind::Poisoned));
    assert_eq!(kind(dir.create_file("new", 0)), Some(ErrorKind::Poisoned));
    assert!(dir.read_small(&file, 0, 10).is_ok());
    drop(dir);
    let reader = OsDirectory::open(&path, READ).expect("reopened");
    println!("direct I/O: {:?}", reader.direct_io());
}

#[test]
fn memory_file_systems_are_not_called_direct() {
    let Ok(tmp) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm");
        return;
    };
    let dir = OsDirectory::open(&tmp.path().join("d"), CREATE).expect("created");
    match dir.direct_io() {
        DirectIo::Buffered { why } => assert!(why.contains("tmpfs"), "{why}"),
        direct => panic!("{direct:?}"),
    }
    assert!(!dir.create_file("f", 8192).expect("made").is_direct());
}
