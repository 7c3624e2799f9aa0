//! A bare io_uring loop: the rate that the device and the kernel reach without the engine.
//!
//! One thread drives one ring with a registered file and registered buffers in huge pages, by one system call per
//! batch.
//!
//! Invariants that the unsafe code rests on:
//! - The buffers belong to [`BareReader`]. They are registered with its ring and unmapped only after the ring is
//!   closed.
//! - A ring that breaks with reads in flight keeps its registered pages pinned until the kernel has finished those
//!   reads. A late read therefore never reaches memory that was mapped again.
//! - No Rust reference to a block exists while its read is in flight. [`BareReader`] lends a block after its own
//!   completion and until the next batch, and a reader whose batch failed is not used again.

use crate::support::interrupt::check_interrupt;
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

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Page-aligned memory in explicit huge pages if some are free, else in transparent ones if the kernel has them.
pub(crate) struct Pages {
    map: *mut c_void,
    map_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and only `&mut self` reaches its bytes.
unsafe impl Send for Pages {}
// SAFETY: as above. `&self` reaches no byte.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `len` bytes, rounded up to whole huge pages.
    ///
    /// # Errors
    /// The kernel has no memory for the mapping.
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
        let map = unsafe { mmap_anonymous(std::ptr::null_mut(), map_len, access, flags) }
            .with_context(|| format!("map {map_len} bytes"))?;
        let skip = map.cast::<u8>().align_offset(HUGE);
        // SAFETY: skip < HUGE, so `len` bytes from the start are inside the mapping just made.
        let start = unsafe { map.cast::<u8>().add(skip) };
        let pages = Self { map, map_len, start, len };
        // SAFETY: the range is inside the mapping, which only this function knows. The advice changes no bytes.
        unsafe {
            // A kernel without transparent huge pages refuses the advice; plain pages serve as well.
            let _ = madvise(start.cast(), len, Advice::LinuxHugepage);
            std::ptr::write_bytes(start, 0, len);
        }
        Ok(pages)
    }

    /// Returns the bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped, initialised, and borrowed exclusively. A reader that gives the address to the
        // kernel owns these pages and lends them only between batches.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value. A ring that registered it was dropped before: see `BareReader`.
        let _ = unsafe { munmap(self.map, self.map_len) };
    }
}

/// Writes `bytes` of random finite f16 elements to a new, preallocated file, with direct I/O if the file system has it.
///
/// # Errors
/// The file cannot be made or written, or the run was interrupted.
pub(crate) fn write_file(path: &Path, bytes: u64) -> Result<()> {
    let context = || format!("write {}", path.display());
    let file = open_direct(path, true)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).with_context(context)?;
    let mut pages = Pages::new(8 << 20)?;
    let buffer = pages.bytes_mut();
    let mut random = fastrand::Rng::with_seed(11);
    random.fill(buffer);
    // As f16, every element is finite and below 2, because the highest bit of its exponent is not set.
    buffer.iter_mut().skip(1).step_by(2).for_each(|high| *high &= 0xbf);
    let mut offset = 0;
    while offset < bytes {
        check_interrupt()?;
        // A different stretch of the pattern for every write.
        let start = random.usize(..buffer.len() / 8192) * 4096;
        let len = (buffer.len() - start).min(usize::try_from(bytes - offset).unwrap_or(usize::MAX));
        file.write_all_at(&buffer[start..start + len], offset).with_context(context)?;
        offset += len as u64;
    }
    file.sync_all().with_context(context)
}

/// Opens a file with O_DIRECT, or without if the file system refuses it.
///
/// # Errors
/// The file cannot be opened either way.
pub(crate) fn open_direct(path: &Path, create: bool) -> Result<File> {
    let open = |flags: OFlags| {
        let mut options = File::options();
        options.read(true).write(true).create(create).mode(0o600).custom_flags(flags.bits() as i32).open(path)
    };
    let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()));
    file.with_context(|| format!("open {}", path.display()))
}

/// A reader of batches of random blocks of one file.
pub(crate) struct BareReader {
    // Fields drop in this order: the ring before the buffers that it has registered.
    ring: IoUring,
    _file: File,
    buffers: Pages,
    block: usize,
    batch: usize,
    blocks: u64,
    random: fastrand::Rng,
}

impl BareReader {
    /// Opens `path` and registers the file and buffers for `batch` blocks of `block` bytes.
    ///
    /// # Errors
    /// The file is shorter than a block, or the kernel refuses the ring or a registration.
    pub(crate) fn new(path: &Path, block: usize, batch: usize) -> Result<Self> {
        let file = open_direct(path, false)?;
        let blocks = file.metadata()?.len() / block as u64;
        if blocks == 0 {
            bail!("read {}: the file is shorter than a block of {block} bytes", path.display());
        }
        let buffers = Pages::new(block * batch)?;
        let entries = (batch as u32).next_power_of_two();
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
        let ring = ring.or_else(|_| IoUring::new(entries)).context("set up an io_uring")?;
        ring.submitter().register_files(&[file.as_raw_fd()]).context("register the file with the ring")?;
        let vector = iovec(&buffers);
        // SAFETY: the range stays mapped while the ring exists: see the order of the fields.
        unsafe { ring.submitter().register_buffers(&[vector]) }
            .context("register the buffers with the ring; raise the limit of locked memory (ulimit -l)")?;
        Ok(Self { ring, _file: file, buffers, block, batch, blocks, random: fastrand::Rng::with_seed(3) })
    }

    /// Returns the blocks of the last batch. No read is in flight between batches.
    pub(crate) fn blocks(&mut self) -> &mut [u8] {
        let bytes = self.block * self.batch;
        &mut self.buffers.bytes_mut()[..bytes]
    }

    /// Reads one batch of random blocks with one submission and one wait. Returns the blocks.
    ///
    /// # Errors
    /// A read fails or is short. The reader must not be used again.
    pub(crate) fn batch(&mut self) -> Result<&[u8]> {
        self.batch_in_waves(self.batch, |_| Ok(()))?;
        Ok(self.blocks())
    }

    /// Reads one batch of random blocks with one submission. Waits for `wave` blocks at a time, and gives those that
    /// have arrived to `consume` while the others are in flight.
    ///
    /// # Errors
    /// A read fails or is short, or `consume` fails. The reader must not be used again.
    pub(crate) fn batch_in_waves(&mut self, wave: usize, consume: impl FnMut(&[&[u8]]) -> Result<()>) -> Result<()> {
        for at in 0..self.batch {
            let number = self.random.u64(..self.blocks);
            self.push(at, number)?;
        }
        self.complete(self.batch, wave, consume)
    }

    /// Reads these blocks of the file, at most a batch, with one submission and one wait.
    ///
    /// # Errors
    /// More than a batch is asked for, or a read fails or is short. The reader must not be used again.
    pub(crate) fn read(&mut self, numbers: &[u64]) -> Result<()> {
        if numbers.len() > self.batch || numbers.iter().any(|number| *number >= self.blocks) {
            bail!("read {} blocks: at most {} of {} fit into a batch", numbers.len(), self.batch, self.blocks);
        }
        for (at, number) in numbers.iter().enumerate() {
            self.push(at, *number)?;
        }
        self.complete(numbers.len(), numbers.len(), |_| Ok(()))
    }

    /// Queues the read of a block into place `at` of the buffers.
    fn push(&mut self, at: usize, number: u64) -> Result<()> {
        assert!(at < self.batch, "the buffers hold a batch");
        // SAFETY: at < batch, and the buffers hold batch blocks.
        let to = unsafe { self.buffers.start.add(at * self.block) };
        let offset = number * self.block as u64;
        let read = opcode::ReadFixed::new(Fixed(0), to, self.block as u32, 0).offset(offset).build();
        // SAFETY: the buffer stays mapped while the ring exists, and no reference to it exists.
        unsafe { self.ring.submission().push(&read.user_data(at as u64)) }
            .context("submit a read: the submission queue is full")
    }

    /// Submits the queued reads and waits for all of them, `wave` at a time.
    fn complete(&mut self, reads: usize, wave: usize, mut consume: impl FnMut(&[&[u8]]) -> Result<()>) -> Result<()> {
        let (start, block) = (self.buffers.start, self.block);
        let mut left = reads;
        let mut arrived: Vec<&[u8]> = Vec::with_capacity(reads);
        while left > 0 {
            match self.ring.submitter().submit_and_wait(wave.min(left)) {
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // Reads in flight complete into pinned pages: see the invariants at the top.
                Err(e) => return Err(e).context("wait for reads (io_uring_enter)"),
            }
            arrived.clear();
            for entry in self.ring.completion() {
                if entry.result() != block as i32 {
                    bail!("read of {block} bytes: the kernel returned {}", entry.result());
                }
                let at = entry.user_data() as usize * block;
                // SAFETY: the number of the read is below `batch`, so the block is in the buffers. Its read has
                // completed, no other read of this batch writes it, and the borrow ends before the next batch.
                arrived.push(unsafe { std::slice::from_raw_parts(start.add(at), block) });
            }
            left -= arrived.len();
            consume(&arrived)?;
        }
        Ok(())
    }
}

fn iovec(pages: &Pages) -> nix::libc::iovec {
    nix::libc::iovec { iov_base: pages.start.cast(), iov_len: pages.len }
}
