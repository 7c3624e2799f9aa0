//! A slab: 2 MiB of anonymous memory, on a huge page if the system gives one.
//!
//! Invariants:
//! - The mapping stays while anything refers to the slab: the arena, a lease, an operation in flight, or a ring that
//!   has it registered.
//! - A slab does not decide who may touch which bytes. The leases over it do.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::io::buffer::pages;
use crate::io::buffer::sizes::SLAB_BYTES;
use crate::metrics::Reservation;

/// The kind of pages under I/O buffers. Explicit and transparent huge pages are equally fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum PageBacking {
    /// 4 KiB pages. Reads of 16 KiB and more are up to a third slower.
    Plain,
    /// Transparent huge pages.
    Transparent,
    /// Huge pages that the operator reserved (`vm.nr_hugepages`).
    Explicit,
}

/// Slabs retired since the process started. A ring looks for retired slabs after this number has changed.
static RETIRED: AtomicU64 = AtomicU64::new(0);

/// The owner of a slab's memory.
enum Mapping {
    Own(NonNull<u8>, usize),
    /// The embedder's memory, mapped as long as the owner lives.
    Lent {
        _owner: Arc<dyn Any + Send + Sync>,
    },
}

/// A mapped slab. The arena, every range leased from it, and the rings that have registered it share it.
pub(crate) struct Slab {
    start: NonNull<u8>,
    /// The whole mapping, including the unused parts around the slab.
    map: Mapping,
    backing: PageBacking,
    retired: AtomicBool,
    account: Option<Reservation>,
}

// SAFETY: a slab is a range of memory without thread affinity. The leases over it decide who may touch which bytes.
unsafe impl Send for Slab {}
// SAFETY: as above. The shared methods only read fields that never change and an atomic.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps a slab and faults its pages in.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub(crate) fn map(account: Reservation) -> Result<Self> {
        let unprepared = |start, map: (NonNull<u8>, usize), backing, account| Self {
            start,
            map: Mapping::Own(map.0, map.1),
            backing,
            retired: AtomicBool::new(false),
            account: Some(account),
        };
        let mut account = account;
        if let Some(start) = map_explicit() {
            let mut slab = unprepared(start, (start, SLAB_BYTES), PageBacking::Explicit, account);
            match (slab.prepare(), slab.account.take()) {
                (Err(_), Some(returned)) => account = returned,
                (_, account) => {
                    slab.account = account;
                    return Ok(slab);
                }
            }
        }
        // The mapping has twice the size, and only its aligned part is accessible. The rest costs no memory and catches
        // overruns. It also keeps neighbouring slabs from merging into one mapping, so the kernel reports huge pages
        // per slab.
        let failed = |e: Errno| Error::io("map a slab of I/O buffers", e.into());
        let len = 2 * SLAB_BYTES;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let raw = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
        }
        .map_err(failed)?;
        let raw = NonNull::new(raw.cast::<u8>()).ok_or_else(|| failed(Errno::NOMEM))?;
        let skip = raw.as_ptr().align_offset(SLAB_BYTES);
        // SAFETY: skip < SLAB_BYTES, so the result lies inside the mapping of twice that size.
        let start = unsafe { raw.add(skip) };
        let mut slab = unprepared(start, (raw, len), PageBacking::Plain, account);
        // SAFETY: the range is inside the mapping just made, which no other code knows.
        unsafe {
            mprotect(slab.address(), SLAB_BYTES, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)
                .map_err(failed)?;
            // The kernel refuses if transparent huge pages are not built in or forbidden. Plain pages are used then.
            let _ = madvise(slab.address(), SLAB_BYTES, Advice::LinuxHugepage);
        }
        slab.prepare().map_err(failed)?;
        if pages::is_huge(slab.start.as_ptr().addr(), SLAB_BYTES) {
            slab.backing = PageBacking::Transparent;
        }
        Ok(slab)
    }

    /// Returns a slab in memory of the embedder.
    ///
    /// # Safety
    /// [`SLAB_BYTES`] bytes from `start` are mapped, readable, writable and initialised as long as `owner` lives, and
    /// only leases of this slab write them.
    pub(in crate::io) unsafe fn lent(start: NonNull<u8>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        let backing = match pages::is_huge(start.as_ptr().addr(), SLAB_BYTES) {
            true => PageBacking::Transparent,
            false => PageBacking::Plain,
        };
        let map = Mapping::Lent { _owner: owner };
        Self { start, map, backing, retired: AtomicBool::new(false), account: None }
    }

    /// Faults all pages in, so that the first read does not have to, and keeps the contents out of core dumps.
    fn prepare(&self) -> Result<(), Errno> {
        // SAFETY: the slab is mapped readable and writable, and not shared yet. Neither advice changes bytes.
        unsafe {
            let _ = madvise(self.address(), SLAB_BYTES, Advice::LinuxDontDump);
            match madvise(self.address(), SLAB_BYTES, Advice::LinuxPopulateWrite) {
                // Before Linux 5.14 a write to each page faults it in.
                Err(Errno::INVAL) => {
                    for at in (0..SLAB_BYTES).step_by(4096) {
                        self.start.add(at).write_volatile(0);
                    }
                    Ok(())
                }
                other => other,
            }
        }
    }

    fn address(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn backing(&self) -> PageBacking {
        self.backing
    }

    /// Marks that the arena has released the slab. Rings unregister it at their next sweep.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        RETIRED.fetch_add(1, Ordering::Release);
    }

    pub(in crate::io) fn retired_count() -> u64 {
        RETIRED.load(Ordering::Acquire)
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Mapping::Own(start, len) = self.map {
            // SAFETY: this slab made the mapping, and every lease, operation and ring that could touch it holds the
            // slab.
            let unmapped = unsafe { munmap(start.as_ptr().cast(), len) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

/// Maps a slab on a huge page that the operator reserved, or returns none.
fn map_explicit() -> Option<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
    let map = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            SLAB_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
        )
    };
    map.ok().and_then(|p| NonNull::new(p.cast()))
}
