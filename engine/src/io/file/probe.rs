//! The probe for direct I/O: it writes and reads a page and reports whether that bypassed the page cache.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstatfs, statx};
use rustix::io::{Errno, pread, pwrite};

use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::aligned::AlignedBuf;
use crate::io::file::open_beneath;

/// The kind of I/O that a directory supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DirectIo {
    /// Reads and writes bypass the page cache, in multiples of `alignment` bytes.
    Direct { alignment: usize },
    /// Reads and writes use the page cache. `why` is the reason.
    Buffered { why: String },
}

impl DirectIo {
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self, Self::Direct { .. })
    }

    /// Returns the unit of reads, in bytes: the alignment of direct I/O, or a page through the page cache.
    pub(crate) fn read_unit(&self) -> usize {
        match self {
            Self::Direct { alignment } if PAGE_BYTES.is_multiple_of(*alignment) => *alignment,
            _ => PAGE_BYTES,
        }
    }

    fn buffered(why: impl Into<String>) -> Self {
        Self::Buffered { why: why.into() }
    }
}

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Tries a direct write and read in a file without a name. If nothing may be created, tries a read of `existing`.
pub(in crate::io) fn probe(root: BorrowedFd<'_>, existing: Option<&str>) -> DirectIo {
    if let Ok(fs) = fstatfs(root)
        && matches!(fs.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC)
    {
        return DirectIo::buffered("the directory is on tmpfs, whose files are memory");
    }
    let attempt = match existing {
        None => scratch(root).and_then(|fd| exercise(fd.as_fd(), true)),
        Some(path) => open_beneath::open(root, path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())
            .and_then(|fd| exercise(fd.as_fd(), false)),
    };
    judge(attempt)
}

/// Judges an attempt at direct I/O, which worked with an alignment or failed.
fn judge(attempt: rustix::io::Result<usize>) -> DirectIo {
    match attempt {
        // A page was moved, but through the page cache.
        Ok(0) => DirectIo::buffered("the file system accepts O_DIRECT but reads through the page cache"),
        Ok(alignment) if alignment <= PAGE_BYTES => DirectIo::Direct { alignment },
        Ok(alignment) => {
            DirectIo::buffered(format!("the device needs blocks of {alignment} bytes, which is more than a page"))
        }
        Err(Errno::INVAL | Errno::OPNOTSUPP) => DirectIo::buffered("the file system refuses O_DIRECT"),
        Err(e) => DirectIo::buffered(format!("a direct read failed: {e}")),
    }
}

/// Opens a file that is deleted when it is closed.
fn scratch(root: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    match open_beneath::open(root, ".", OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
        other => return other,
    }
    let name = format!(".probe-{}", std::process::id());
    let fd = open_beneath::open(root, &name, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::DIRECT, mode);
    // Removed even if the open failed, because some file systems create the file before they refuse O_DIRECT.
    let _ = rustix::fs::unlinkat(root, &name, AtFlags::empty());
    fd
}

/// Moves one page. Returns the alignment of the file's I/O, or 0 if the system reports that it is not direct.
fn exercise(fd: BorrowedFd<'_>, write: bool) -> rustix::io::Result<usize> {
    let mut page = AlignedBuf::zeroed(PAGE_BYTES);
    if write {
        page.bytes_mut().fill(0x5a);
        if pwrite(fd, page.bytes(), 0)? != PAGE_BYTES {
            return Err(Errno::IO);
        }
        page.bytes_mut().fill(0);
    }
    let got = pread(fd, page.bytes_mut(), 0)?;
    if write && (got != PAGE_BYTES || page.bytes().iter().any(|&b| b != 0x5a)) {
        return Err(Errno::IO);
    }
    let stat = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let told = stat.ok().filter(|s| StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::DIOALIGN));
    Ok(told.map_or(PAGE_BYTES, |s| s.stx_dio_offset_align.max(s.stx_dio_mem_align) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_believes_what_the_system_reports() {
        assert_eq!(judge(Ok(512)), DirectIo::Direct { alignment: 512 });
        assert_eq!(judge(Ok(PAGE_BYTES)).read_unit(), PAGE_BYTES);
        for refused in [Ok(0), Ok(2 * PAGE_BYTES), Err(Errno::INVAL), Err(Errno::IO)] {
            assert!(!judge(refused).is_direct(), "{refused:?}");
            assert_eq!(judge(refused).read_unit(), PAGE_BYTES);
        }
    }
}
