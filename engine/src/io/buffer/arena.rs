//! I/O buffers: leases of whole pages out of slabs that are mapped on demand.
//!
//! Soundness: an extent is a range of pages that one [`Lease`] hands out. Slices over it exist only through the lease:
//! `&[u8]` while no read into it is in flight, `&mut [u8]` while nothing is. A [`ReadTarget`] can only be made from
//! `&mut Lease`, so no slice is alive when the kernel starts to write. The tokens own the extent, so its pages return to the
//! arena only when the lease is gone and the driver has let go of the last token.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::slab::{PageBacking, SLAB_BYTES, Slab};
use crate::metrics::{Category, MemoryBudget, lock};
use crate::sync::atomic::{AtomicU32, Ordering};

/// Unit of alignment on disk and in memory.
pub(crate) const PAGE_BYTES: usize = 4096;
const PAGES: usize = SLAB_BYTES / PAGE_BYTES;
const WORDS: usize = PAGES / 64;

/// Why no lease could be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exhausted {
    /// The budget is used up at the moment: wait for [`Arena::returned`] and try again.
    Now,
    /// Longer than a slab, or the limit is below one slab: this can never succeed.
    Never,
    /// The system gave no memory although the budget allows it.
    System,
}

impl From<Exhausted> for Error {
    fn from(why: Exhausted) -> Self {
        match why {
            Exhausted::Now => Self::new(ErrorKind::Busy, "all I/O buffers are in use"),
            Exhausted::Never => Self::new(ErrorKind::MemoryLimit, "the buffer can never fit in the memory limit"),
            Exhausted::System => Self::new(ErrorKind::Busy, "the system refuses memory for I/O buffers"),
        }
    }
}

/// Pages in use of one slab.
struct SlabRange {
    slab: Arc<Slab>,
    taken: [u64; WORDS],
    used: usize,
    /// No free run is longer: slabs full of small gaps are passed over at a glance.
    longest: usize,
}

impl SlabRange {
    fn new(slab: Arc<Slab>) -> Self {
        Self { slab, taken: [0; WORDS], used: 0, longest: PAGES }
    }

    /// First fit: what was used last is used next, while it is in the processor's caches. A batch of reads that goes through
    /// memory in turn costs a third more.
    fn take(&mut self, pages: usize) -> Option<usize> {
        if self.longest < pages {
            return None;
        }
        let Some(first) = self.find(pages) else {
            self.longest = pages - 1;
            return None;
        };
        self.mark(first, pages, true);
        Some(first)
    }

    fn find(&self, pages: usize) -> Option<usize> {
        let mut first = self.next_page(0, false);
        while first + pages <= PAGES {
            let end = self.next_page(first, true);
            if end - first >= pages {
                return Some(first);
            }
            first = self.next_page(end, false);
        }
        None
    }

    /// The first page from `from` on that is taken, or that is free; [`PAGES`] for none.
    fn next_page(&self, from: usize, taken: bool) -> usize {
        let mut at = from;
        while at < PAGES {
            let word = if taken { self.taken[at / 64] } else { !self.taken[at / 64] };
            let rest = word >> (at % 64);
            if rest != 0 {
                return at + rest.trailing_zeros() as usize;
            }
            at = (at / 64 + 1) * 64;
        }
        PAGES
    }

    fn mark(&mut self, first: usize, pages: usize, taken: bool) {
        for page in first..first + pages {
            debug_assert_ne!(self.taken[page / 64] >> (page % 64) & 1 == 1, taken);
            self.taken[page / 64] ^= 1 << (page % 64);
        }
        self.used = if taken { self.used + pages } else { self.used - pages };
    }

    fn give(&mut self, first: usize, pages: usize) {
        self.mark(first, pages, false);
        // The run that it joins begins behind the last page taken in front of it.
        let (mut before, end) = (first, self.next_page(first, true));
        while before > 0 && self.taken[(before - 1) / 64] >> ((before - 1) % 64) & 1 == 0 {
            before -= 1;
        }
        self.longest = self.longest.max(end - before);
    }
}

#[derive(Default)]
struct SlabTable {
    /// A slab keeps its slot while it lives, so extents find it again in constant time.
    slots: Vec<Option<SlabRange>>,
}

/// Pages that were taken out of a slab for `len` bytes.
struct SlabSlot {
    slab: Arc<Slab>,
    slot: usize,
    first: usize,
    pages: usize,
    len: usize,
}

impl SlabTable {
    fn take(&mut self, len: usize) -> Option<SlabSlot> {
        let pages = len.div_ceil(PAGE_BYTES).max(1);
        self.slots.iter_mut().enumerate().find_map(|(slot, region)| {
            let region = region.as_mut()?;
            let first = region.take(pages)?;
            Some(SlabSlot { slab: Arc::clone(&region.slab), slot, first, pages, len })
        })
    }

    fn give(&mut self, slot: usize, first: usize, pages: usize) {
        if let Some(Some(region)) = self.slots.get_mut(slot) {
            region.give(first, pages);
        }
    }
}

struct ArenaState {
    budget: Arc<MemoryBudget>,
    limit: usize,
    regions: Mutex<SlabTable>,
    /// Held while a slab is mapped, in front of `regions`: one need makes one slab, and who needs none does not wait.
    growing: Mutex<()>,
}

/// Buffers for I/O, in slabs that are mapped when first needed and accounted to the budget.
#[derive(Clone)]
pub(crate) struct Arena(Arc<ArenaState>);

/// What an arena holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaUsage {
    pub(crate) slabs: usize,
    pub(crate) leased_bytes: usize,
    /// The worst backing among the slabs; none before the first lease.
    pub(crate) backing: Option<PageBacking>,
}

impl Arena {
    /// An empty arena that grows to at most `limit_bytes` of the budget.
    pub(crate) fn new(budget: Arc<MemoryBudget>, limit_bytes: usize) -> Self {
        let limit = limit_bytes.min(budget.limit());
        Self(Arc::new(ArenaState { budget, limit, regions: Mutex::default(), growing: Mutex::default() }))
    }

    /// An arena of these slabs and no others.
    pub(in crate::io) fn over(slabs: Vec<Slab>) -> Self {
        let limit = slabs.len() * SLAB_BYTES;
        let slots = slabs.into_iter().map(|slab| Some(SlabRange::new(Arc::new(slab)))).collect();
        let regions = Mutex::new(SlabTable { slots });
        Self(Arc::new(ArenaState { budget: MemoryBudget::new(limit), limit, regions, growing: Mutex::default() }))
    }

    /// The most slabs it can ever have.
    pub(crate) fn slabs_max(&self) -> usize {
        self.0.limit / SLAB_BYTES
    }

    /// `len` bytes in whole pages, page-aligned, contiguous; at most [`SLAB_BYTES`]. They hold old bytes: see
    /// [`Arena::lease_zeroed`].
    pub(crate) fn lease(&self, len: usize) -> Result<Lease, Exhausted> {
        self.check(len)?;
        self.grow_until(|| self.find(len))
    }

    /// Leases of all these lengths, or none: none is ever given back for want of another, which would tell those who wait for
    /// memory, the caller among them, of memory that is no news.
    pub(crate) fn lease_all(&self, lens: &[usize]) -> Result<Vec<Lease>, Exhausted> {
        lens.iter().try_for_each(|&len| self.check(len))?;
        self.grow_until(|| self.find_all(lens))
    }

    fn check(&self, len: usize) -> Result<(), Exhausted> {
        if len > SLAB_BYTES || self.slabs_max() == 0 { Err(Exhausted::Never) } else { Ok(()) }
    }

    /// Maps slabs until `find` is content or no more are to be had.
    fn grow_until<T>(&self, find: impl Fn() -> Option<T>) -> Result<T, Exhausted> {
        if let Some(found) = find() {
            return Ok(found);
        }
        let _growing = lock(&self.0.growing);
        loop {
            // Others may have grown it, or given something back, meanwhile.
            if let Some(found) = find() {
                return Ok(found);
            }
            self.grow()?;
        }
    }

    /// One slab more. The caller holds `growing`.
    fn grow(&self) -> Result<(), Exhausted> {
        if lock(&self.0.regions).slots.iter().flatten().count() >= self.slabs_max() {
            return Err(Exhausted::Now);
        }
        let account = self.0.budget.try_reserve(SLAB_BYTES, Category::Arena).ok_or(Exhausted::Now)?;
        // The kernel clears it, which takes up to a millisecond: the others go on meanwhile.
        let slab = Arc::new(Slab::map(account).map_err(|_| Exhausted::System)?);
        let mut regions = lock(&self.0.regions);
        let slot = match regions.slots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                regions.slots.push(None);
                regions.slots.len() - 1
            }
        };
        regions.slots[slot] = Some(SlabRange::new(slab));
        Ok(())
    }

    /// A lease out of the slabs there are.
    fn find(&self, len: usize) -> Option<Lease> {
        let place = lock(&self.0.regions).take(len)?;
        Some(self.extent(place))
    }

    /// The same for all of these, or none.
    fn find_all(&self, lens: &[usize]) -> Option<Vec<Lease>> {
        let mut places = Vec::with_capacity(lens.len());
        let mut regions = lock(&self.0.regions);
        for &len in lens {
            match regions.take(len) {
                Some(place) => places.push(place),
                None => {
                    for place in places {
                        regions.give(place.slot, place.first, place.pages);
                    }
                    return None;
                }
            }
        }
        drop(regions);
        Some(places.into_iter().map(|place| self.extent(place)).collect())
    }

    /// A lease whose bytes are all zero: for writers, whose padding must never show an old buffer's bytes.
    pub(crate) fn lease_zeroed(&self, len: usize) -> Result<Lease, Exhausted> {
        let mut lease = self.lease(len)?;
        if let Some(bytes) = lease.bytes_mut() {
            bytes.fill(0);
        }
        Ok(lease)
    }

    fn extent(&self, SlabSlot { slab, slot, first, pages, len }: SlabSlot) -> Lease {
        // SAFETY: the page lies inside the slab.
        let start = unsafe { slab.start().add(first * PAGE_BYTES) };
        let extent = PageRange {
            slab,
            slot,
            first,
            pages,
            start,
            reads: AtomicU32::new(0),
            writes: AtomicU32::new(0),
            arena: Arc::downgrade(&self.0),
        };
        Lease { extent: Arc::new(extent), len }
    }

    /// Gives fully idle slabs back to the system and the budget; returns how many. A ring that has one registered gives it
    /// up when it next wakes.
    pub(crate) fn trim(&self) -> usize {
        let mut regions = lock(&self.0.regions);
        let mut freed = Vec::new();
        for slot in &mut regions.slots {
            if slot.as_ref().is_some_and(|region| region.used == 0) {
                freed.extend(slot.take());
            }
        }
        while matches!(regions.slots.last(), Some(None)) {
            regions.slots.pop();
        }
        drop(regions);
        for region in &freed {
            region.slab.retire();
        }
        freed.len()
    }

    pub(crate) fn usage(&self) -> ArenaUsage {
        let regions = lock(&self.0.regions);
        regions.slots.iter().flatten().fold(ArenaUsage::default(), |sum, region| ArenaUsage {
            slabs: sum.slabs + 1,
            leased_bytes: sum.leased_bytes + region.used * PAGE_BYTES,
            backing: Some(sum.backing.map_or(region.slab.backing(), |b| b.min(region.slab.backing()))),
        })
    }

    /// Bytes that the budget behind it has given out, for slabs and everything else.
    #[cfg(test)]
    pub(crate) fn budget_used(&self) -> usize {
        self.0.budget.used()
    }

    /// Told when a lease or budget returns: after [`Exhausted::Now`] wait for it to pass the epoch read before the attempt.
    pub(crate) fn returned(&self) -> &Arc<crate::metrics::EventCount> {
        self.0.budget.returned()
    }
}

impl Drop for ArenaState {
    fn drop(&mut self) {
        for region in lock(&self.regions).slots.iter().flatten() {
            region.slab.retire();
        }
    }
}

/// A range of pages that is not in the arena's free map, and the I/O in flight on it.
struct PageRange {
    slab: Arc<Slab>,
    slot: usize,
    first: usize,
    pages: usize,
    start: NonNull<u8>,
    /// Read targets alive: the kernel may write here.
    reads: AtomicU32,
    /// Write sources alive: the kernel may read here.
    writes: AtomicU32,
    arena: Weak<ArenaState>,
}

// SAFETY: the pointer leads into the slab, which the extent keeps mapped; access follows the rules at the top of the file.
unsafe impl Send for PageRange {}
// SAFETY: as above; the counters are atomic.
unsafe impl Sync for PageRange {}

impl PageRange {
    fn reading(&self) -> bool {
        // Acquire pairs with the Release of the target's drop: what the kernel wrote before is visible after.
        self.reads.load(Ordering::Acquire) > 0
    }

    fn writing(&self) -> bool {
        self.writes.load(Ordering::Acquire) > 0
    }
}

impl Drop for PageRange {
    fn drop(&mut self) {
        // An extent outlives its arena without harm: the slab then goes with its last extent.
        let Some(arena) = self.arena.upgrade() else { return };
        lock(&arena.regions).give(self.slot, self.first, self.pages);
        arena.budget.returned().notify();
    }
}

/// Pages leased from an [`Arena`]. They return when the lease and all I/O on it are gone.
pub(crate) struct Lease {
    extent: Arc<PageRange>,
    len: usize,
}

impl Lease {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the pages leased: `len` rounded up.
    pub(crate) fn capacity(&self) -> usize {
        self.extent.pages * PAGE_BYTES
    }

    /// The bytes; none while a read into them is in flight.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        if self.extent.reading() {
            return None;
        }
        // SAFETY: the extent keeps `capacity >= len` initialised bytes mapped. No read is in flight, none can start while
        // the slice lives (that takes `&mut self`), and nobody else has this extent.
        Some(unsafe { std::slice::from_raw_parts(self.extent.start.as_ptr(), self.len) })
    }

    /// The bytes, to be changed; none while any I/O on them is in flight.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.extent.reading() || self.extent.writing() {
            return None;
        }
        // SAFETY: as in `bytes`; the exclusive borrow keeps I/O in either direction from starting while the slice lives.
        Some(unsafe { std::slice::from_raw_parts_mut(self.extent.start.as_ptr(), self.len) })
    }

    /// A token to read into these bytes of the lease. Several may be in flight; ranges should not overlap.
    ///
    /// # Errors
    /// `InvalidArgument` outside of the pages, `Busy` while a write from the lease is in flight.
    pub(crate) fn read_target(&mut self, range: Range<usize>) -> Result<ReadTarget> {
        self.check(&range)?;
        if self.extent.writing() {
            return Err(Error::new(ErrorKind::Busy, "read into a buffer that is being written"));
        }
        self.extent.reads.fetch_add(1, Ordering::AcqRel);
        Ok(ReadTarget { extent: Arc::clone(&self.extent), range })
    }

    /// A token to write these bytes of the lease.
    ///
    /// # Errors
    /// `InvalidArgument` outside of the pages, `Busy` while a read into the lease is in flight.
    pub(crate) fn write_source(&self, range: Range<usize>) -> Result<WriteSource> {
        self.check(&range)?;
        if self.extent.reading() {
            return Err(Error::new(ErrorKind::Busy, "write from a buffer that is being read into"));
        }
        self.extent.writes.fetch_add(1, Ordering::AcqRel);
        Ok(WriteSource { extent: Arc::clone(&self.extent), range })
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start > range.end || range.end > self.capacity() {
            let (start, end, capacity) = (range.start, range.end, self.capacity());
            let text = format!("bytes {start}..{end} of a buffer of {capacity}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(())
    }
}

/// IoMemory of one token, as drivers see it.
#[derive(Clone, Copy)]
pub(crate) struct IoMemory<'a> {
    pub(crate) address: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) slab: &'a Arc<Slab>,
}

impl PageRange {
    fn memory(&self, range: &Range<usize>) -> IoMemory<'_> {
        // SAFETY: `Lease::check` held the range inside the extent.
        let address = unsafe { self.start.add(range.start) };
        IoMemory { address, len: range.len(), slab: &self.slab }
    }
}

/// Permission for a driver to write into a part of a lease; in flight until dropped.
pub(crate) struct ReadTarget {
    extent: Arc<PageRange>,
    range: Range<usize>,
}

impl ReadTarget {
    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    pub(in crate::io) fn memory(&self) -> IoMemory<'_> {
        self.extent.memory(&self.range)
    }
}

impl Drop for ReadTarget {
    fn drop(&mut self) {
        self.extent.reads.fetch_sub(1, Ordering::Release);
    }
}

/// Permission for a driver to read from a part of a lease; in flight until dropped.
pub(crate) struct WriteSource {
    extent: Arc<PageRange>,
    range: Range<usize>,
}

impl WriteSource {
    pub(in crate::io) fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the extent, which is mapped and initialised. While a write source is alive no read into
        // the lease can start and no `&mut` slice over it can be had, so the bytes do not change.
        unsafe { std::slice::from_raw_parts(self.memory().address.as_ptr(), self.range.len()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    pub(in crate::io) fn memory(&self) -> IoMemory<'_> {
        self.extent.memory(&self.range)
    }
}

impl Drop for WriteSource {
    fn drop(&mut self) {
        self.extent.writes.fetch_sub(1, Ordering::Release);
    }
}
