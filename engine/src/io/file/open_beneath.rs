//! Opens paths below a directory: never outside of it, and never through a symbolic link.
//!
//! `openat2` resolves the path in one call (Linux 5.6). Without it, each component is opened by itself.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::{Errno, Result};

/// Opens `path` below `root`. The path is relative, with plain names only, and `.` is the root itself.
pub(in crate::io) fn open(root: BorrowedFd<'_>, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    check(path)?;
    // openat2 refuses a mode if nothing is created.
    let mode = if flags.intersects(OFlags::CREATE | OFlags::TMPFILE) { mode } else { Mode::empty() };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    loop {
        match openat2(root, path, flags, mode, resolve) {
            // Before Linux 5.6, or in a sandbox that does not know openat2.
            Err(Errno::NOSYS | Errno::PERM) => return walk(root, path, flags, mode),
            // EAGAIN: a concurrent rename disturbed the resolution.
            Err(Errno::INTR | Errno::AGAIN) => {}
            other => return other,
        }
    }
}

/// Opens `path` below `root` component by component.
pub(in crate::io) fn walk(root: BorrowedFd<'_>, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    check(path)?;
    let Some((head, rest)) = path.split_once('/') else {
        return openat(root, path, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, mode);
    };
    let dir = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let below = openat(root, head, dir, Mode::empty())?;
    walk(std::os::fd::AsFd::as_fd(&below), rest, flags, mode)
}

/// Returns the directory that contains `path`, and the last name of the path.
pub(in crate::io) fn parent<'p>(root: BorrowedFd<'_>, path: &'p str) -> Result<(OwnedFd, &'p str)> {
    check(path)?;
    let (dir, name) = path.rsplit_once('/').unwrap_or((".", path));
    if name == "." {
        return Err(Errno::INVAL);
    }
    let fd = open(root, dir, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    Ok((fd, name))
}

fn check(path: &str) -> Result<()> {
    let plain = |name: &str| !matches!(name, "" | "." | "..") && !name.contains('\0');
    if path == "." || path.split('/').all(plain) { Ok(()) } else { Err(Errno::INVAL) }
}
