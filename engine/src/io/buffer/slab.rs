//! One slab: 2 MiB of anonymous memory, in huge pages where the system gives them.

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
use crate::metrics::Reservation;

/// Bytes of one slab, and of a huge page.
pub(crate) const SLAB_BYTES: usize = 2 << 20;

/// Which pages stand behind I/O buffers. Explicit and transparent huge pages are equally fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum PageBacking {
    /// 4 KiB pages: reads of 16 KiB and more are up to a third slower.
    Plain,
    /// Transparent huge pages.
    Transparent,
    /// Huge pages reserved by the operator (`vm.nr_hugepages`).
    Explicit,
}

/// Slabs given up since the process began: rings look for them when it has moved.
static RETIRED: AtomicU64 = AtomicU64::new(0);

/// What keeps a slab's memory.
enum Mapping {
    Own(NonNull<u8>, usize),
    /// The embedder's, mapped as long as this lives.
    Lent {
        _owner: Arc<dyn Any + Send + Sync>,
    },
}

/// A mapped slab. Owned by the arena, by every extent in it, and by the rings that have registered it.
pub(crate) struct Slab {
    start: NonNull<u8>,
    /// The mapping as it was made, the unused parts around the slab included.
    map: Mapping,
    backing: PageBacking,
    retired: AtomicBool,
    account: Option<Reservation>,
}

// SAFETY: a slab is a range of memory without thread affinity; who may touch which bytes is decided by the extents over it.
unsafe impl Send for Slab {}
// SAFETY: as above; the shared methods only read fields that never change and an atomic.
unsafe impl Sync for Slab {}

impl Slab {
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
        // Twice the size, of which the aligned part is opened up. The closed rest costs no memory, keeps neighbouring slabs
        // from merging into one mapping (so that the kernel reports huge pages per slab) and catches overruns.
        let failed = |e: Errno| Error::io("cannot map an I/O buffer slab", e.into());
        let len = 2 * SLAB_BYTES;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let raw = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
        }
        .map_err(failed)?;
        let raw = NonNull::new(raw.cast::<u8>()).ok_or_else(|| failed(Errno::NOMEM))?;
        let skip = raw.as_ptr().align_offset(SLAB_BYTES);
        // SAFETY: skip < SLAB_BYTES, so the result lies inside the mapping of twice that size.
        let start = unsafe { raw.add(skip) };
        let mut slab = unprepared(start, (raw, len), PageBacking::Plain, account);
        // SAFETY: the range lies inside the mapping just made, which nobody else knows.
        unsafe {
            mprotect(slab.address(), SLAB_BYTES, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)
                .map_err(failed)?;
            // Refused where transparent huge pages are not built in or forbidden: plain pages do.
            let _ = madvise(slab.address(), SLAB_BYTES, Advice::LinuxHugepage);
        }
        slab.prepare().map_err(failed)?;
        if pages::is_huge(slab.start.as_ptr().addr(), SLAB_BYTES) {
            slab.backing = PageBacking::Transparent;
        }
        Ok(slab)
    }

    /// A slab in memory of the embedder.
    ///
    /// # Safety
    /// [`SLAB_BYTES`] bytes from `start` are mapped, readable, writable and initialised as long as `owner` lives, and nobody but
    /// the extents of this slab writes them.
    pub(in crate::io) unsafe fn lent(start: NonNull<u8>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        let backing = match pages::is_huge(start.as_ptr().addr(), SLAB_BYTES) {
            true => PageBacking::Transparent,
            false => PageBacking::Plain,
        };
        let map = Mapping::Lent { _owner: owner };
        Self { start, map, backing, retired: AtomicBool::new(false), account: None }
    }

    /// Faults all pages in, so that the first read does not, and keeps the contents out of core dumps.
    fn prepare(&self) -> Result<(), Errno> {
        // SAFETY: the slab is mapped readable and writable, and not shared yet. DONTDUMP changes no bytes; populating
        // writes none that are there.
        unsafe {
            let _ = madvise(self.address(), SLAB_BYTES, Advice::LinuxDontDump);
            match madvise(self.address(), SLAB_BYTES, Advice::LinuxPopulateWrite) {
                // Before Linux 5.14: by hand.
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

    /// Marks that the arena has let go: rings unregister it when they next look.
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
            // SAFETY: the mapping is ours, and every extent, token and ring that could touch it holds an Arc of this slab.
            let unmapped = unsafe { munmap(start.as_ptr().cast(), len) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

fn map_explicit() -> Option<NonNull<u8>> {
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
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
