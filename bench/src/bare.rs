//! A bare io_uring loop: what the device and the kernel can do with nothing around them. One thread, one ring, registered
//! file, registered buffers in huge pages, one system call per batch.
//!
//! Soundness: the buffers belong to [`BareReader`], are registered with its ring, and are unmapped only after the ring is
//! gone. A ring that breaks with reads in flight keeps the registered pages pinned until the kernel is done with them, so a
//! late read never reaches memory of somebody else. Nobody reads or writes the mapping through Rust references meanwhile:
//! [`BareReader::blocks`] lends it out between batches, and a batch that failed ends the use of its reader.

use crate::work::check_interrupt;
use anyhow::{Context, Result, bail};
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const HUGE: usize = 2 << 20;

/// Page-aligned memory in huge pages where the system gives them: explicit ones, else transparent.
pub(crate) struct Pages {
    map: *mut c_void,
    map_len: usize,
    start: *mut u8,
    len: usize,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let len = len.next_multiple_of(HUGE).max(HUGE);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE;
        let explicit = flags | MapFlags::HUGETLB | MapFlags::HUGE_2MB | MapFlags::POPULATE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        if let Ok(map) = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, explicit) } {
            return Ok(Self { map, map_len: len, start: map.cast(), len });
        }
        let map_len = len + HUGE;
        // SAFETY: as above.
        let map = unsafe { mmap_anonymous(std::ptr::null_mut(), map_len, access, flags) }.context("mmap")?;
        let skip = map.cast::<u8>().align_offset(HUGE);
        // SAFETY: skip < HUGE, so the start and `len` bytes behind it lie inside the mapping just made.
        let start = unsafe { map.cast::<u8>().add(skip) };
        let pages = Self { map, map_len, start, len };
        // SAFETY: the range lies inside the mapping, which nobody else knows; the advice changes no bytes that are there.
        unsafe {
            // Refused where there are no transparent huge pages: plain ones do.
            let _ = madvise(start.cast(), len, Advice::LinuxHugepage);
            std::ptr::write_bytes(start, 0, len);
        }
        Ok(pages)
    }

    /// The bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped, initialised by the kernel, and borrowed exclusively. A reader that hands the address
        // to the kernel keeps the value to itself.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and rings that had it registered are gone: they are dropped before their pages.
        let _ = unsafe { munmap(self.map, self.map_len) };
    }
}

/// Writes `bytes` random bytes to a new file, preallocated, around the page cache where that is possible.
pub(crate) fn write_file(path: &Path, bytes: u64) -> Result<()> {
    let place = || format!("write {}", path.display());
    let file = open_direct(path, true)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).with_context(place)?;
    let mut pages = Pages::new(8 << 20)?;
    let buffer = pages.bytes_mut();
    let mut random = fastrand::Rng::with_seed(11);
    random.fill(buffer);
    let mut offset = 0;
    while offset < bytes {
        check_interrupt()?;
        // Another stretch of the pattern each time.
        let start = random.usize(..buffer.len() / 8192) * 4096;
        let len = (buffer.len() - start).min(usize::try_from(bytes - offset).unwrap_or(usize::MAX));
        file.write_all_at(&buffer[start..start + len], offset).with_context(place)?;
        offset += len as u64;
    }
    file.sync_all().with_context(place)
}

/// Opens a file with O_DIRECT, and without where the file system has none.
pub(crate) fn open_direct(path: &Path, create: bool) -> Result<File> {
    let open = |flags: OFlags| {
        let mut options = File::options();
        options.read(true).write(true).create(create).mode(0o600).custom_flags(flags.bits() as i32).open(path)
    };
    let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()));
    file.with_context(|| format!("open {}", path.display()))
}

/// Reads batches of blocks from one file.
pub(crate) struct BareReader {
    // Dropped before the buffers it has registered.
    ring: IoUring,
    _file: File,
    buffers: Pages,
    block: usize,
    batch: usize,
    blocks: u64,
    random: fastrand::Rng,
}

impl BareReader {
    pub(crate) fn new(path: &Path, block: usize, batch: usize) -> Result<Self> {
        let file = open_direct(path, false)?;
        let blocks = file.metadata()?.len() / block as u64;
        if blocks == 0 {
            bail!("{} is shorter than a block", path.display());
        }
        let buffers = Pages::new(block * batch)?;
        let entries = (batch as u32).next_power_of_two();
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let ring = ring.or_else(|_| IoUring::new(entries)).context("io_uring")?;
        ring.submitter().register_files(&[file.as_raw_fd()]).context("register the file")?;
        let vector = iovec(&buffers);
        // SAFETY: the range is mapped for as long as the ring lives: see the order of the fields.
        unsafe { ring.submitter().register_buffers(&[vector]) }.context("register the buffers (ulimit -l?)")?;
        Ok(Self { ring, _file: file, buffers, block, batch, blocks, random: fastrand::Rng::with_seed(3) })
    }

    /// The blocks of the last batch.
    pub(crate) fn blocks(&mut self) -> &mut [u8] {
        // Nothing is in flight between batches.
        let bytes = self.block * self.batch;
        &mut self.buffers.bytes_mut()[..bytes]
    }

    /// Reads one batch of random blocks: one submission, one wait.
    pub(crate) fn batch(&mut self) -> Result<()> {
        for at in 0..self.batch {
            // SAFETY: at < batch, and the buffers hold batch blocks.
            let to = unsafe { self.buffers.start.add(at * self.block) };
            let offset = self.random.u64(..self.blocks) * self.block as u64;
            let read = opcode::ReadFixed::new(Fixed(0), to, self.block as u32, 0).offset(offset).build();
            // SAFETY: the buffer stays mapped for as long as the ring, and no reference to it exists.
            unsafe { self.ring.submission().push(&read) }.context("the submission ring is full")?;
        }
        let mut ended = 0;
        let mut failed = None;
        while ended < self.batch {
            match self.ring.submitter().submit_and_wait(self.batch - ended) {
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // What is in flight ends in pinned pages: see the top of the file.
                Err(e) => return Err(e).context("io_uring_enter"),
            }
            for entry in self.ring.completion() {
                ended += 1;
                if entry.result() != self.block as i32 {
                    failed = Some(entry.result());
                }
            }
        }
        match failed {
            None => Ok(()),
            Some(result) => bail!("a read of {} bytes gave {result}", self.block),
        }
    }
}

fn iovec(pages: &Pages) -> libc::iovec {
    libc::iovec { iov_base: pages.start.cast(), iov_len: pages.len }
}
