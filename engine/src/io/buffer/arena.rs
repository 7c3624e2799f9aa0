//! The arena: leases of whole pages out of slabs that are mapped on demand.
//!
//! To lease pages:
//! 1. Find a free run of pages in the mapped slabs.
//! 2. If there is none, map one more slab as far as the limit and the memory budget allow, and try again.
//! 3. If no slab can be mapped, return [`LeaseError`]. The caller waits for [`Arena::returned`].
//!
//! Invariants:
//! - A lease has pages of its own. See `lease.rs` for the soundness of slices over them.
//! - The slabs are accounted to the memory budget until they are unmapped.
//!
//! Lock order: `growing`, then `table`. Mapping a slab holds only `growing`, so threads that find free pages do not
//! wait.

use std::sync::{Arc, Mutex};

use super::lease::Lease;
use super::sizes::{PAGE_BYTES, SLAB_BYTES};
use super::slab::{PageBacking, Slab};
use super::slab_table::{ArenaState, SlabRange, SlabTable};
use crate::error::{Error, ErrorKind};
use crate::metrics::{Category, EventCount, MemoryBudget, lock, refusal};

/// The reason why the arena gave no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseError {
    /// The budget is used up now. Wait for [`Arena::returned`] and try again.
    Now,
    /// The length exceeds a slab, or the limit is below one slab. This can never succeed.
    Never,
    /// The system refused memory although the budget allows it.
    System,
}

impl From<LeaseError> for Error {
    fn from(why: LeaseError) -> Self {
        match why {
            LeaseError::Now => Self::new(ErrorKind::Busy, "I/O buffers: all of them are in use; try again later"),
            LeaseError::Never => {
                Self::new(ErrorKind::MemoryLimit, "I/O buffers: the request exceeds memory_limit; raise it")
            }
            LeaseError::System => Self::new(
                ErrorKind::Busy,
                "I/O buffers: the system refuses memory that memory_limit allows; free memory or lower it",
            ),
        }
    }
}

/// Buffers for I/O, in slabs that are mapped when first needed and accounted to the memory budget.
#[derive(Clone)]
pub(crate) struct Arena(Arc<ArenaState>);

/// The usage of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaUsage {
    pub(crate) slabs: usize,
    pub(crate) leased_bytes: usize,
    /// The slowest kind of pages among the slabs, or none before the first lease.
    pub(crate) backing: Option<PageBacking>,
}

impl Arena {
    /// Returns an empty arena that grows to at most `limit_bytes` of the budget.
    pub(crate) fn new(budget: Arc<MemoryBudget>, limit_bytes: usize) -> Self {
        let limit = limit_bytes.min(budget.limit());
        Self(Arc::new(ArenaState { budget, limit, table: Mutex::default(), growing: Mutex::default() }))
    }

    /// Returns an arena of these slabs only.
    pub(super) fn over(slabs: Vec<Slab>) -> Self {
        let limit = slabs.len() * SLAB_BYTES;
        let slots = slabs.into_iter().map(|slab| Some(SlabRange::new(Arc::new(slab)))).collect();
        let table = Mutex::new(SlabTable { slots });
        Self(Arc::new(ArenaState { budget: MemoryBudget::new(limit), limit, table, growing: Mutex::default() }))
    }

    /// Returns the number of slabs that the arena can ever have.
    pub(crate) fn slabs_max(&self) -> usize {
        self.0.limit / SLAB_BYTES
    }

    /// Leases `len` contiguous bytes in whole pages, at most [`SLAB_BYTES`]. They hold old bytes: see
    /// [`Arena::lease_zeroed`].
    pub(crate) fn lease(&self, len: usize) -> Result<Lease, LeaseError> {
        self.check(len)?;
        self.grow_until(|| self.find(len))
    }

    /// Leases all these lengths, or none.
    ///
    /// No lease is given back because another one failed. That would notify the threads that wait for memory, this
    /// caller among them, although no memory became free.
    pub(crate) fn lease_all(&self, lens: &[usize]) -> Result<Vec<Lease>, LeaseError> {
        lens.iter().try_for_each(|&len| self.check(len))?;
        self.grow_until(|| self.find_all(lens))
    }

    fn check(&self, len: usize) -> Result<(), LeaseError> {
        if len > SLAB_BYTES || self.slabs_max() == 0 { Err(LeaseError::Never) } else { Ok(()) }
    }

    /// Maps slabs until `find` succeeds or no more can be mapped.
    fn grow_until<T>(&self, find: impl Fn() -> Option<T>) -> Result<T, LeaseError> {
        if refusal::strikes() {
            return Err(LeaseError::Now);
        }
        if let Some(found) = find() {
            return Ok(found);
        }
        let _growing = lock(&self.0.growing);
        loop {
            // Meanwhile another thread may have mapped a slab or returned a lease.
            if let Some(found) = find() {
                return Ok(found);
            }
            self.grow()?;
        }
    }

    /// Maps one more slab. The caller holds `growing`.
    fn grow(&self) -> Result<(), LeaseError> {
        if lock(&self.0.table).slots.iter().flatten().count() >= self.slabs_max() {
            return Err(LeaseError::Now);
        }
        let account = self.0.budget.try_reserve(SLAB_BYTES, Category::Arena).ok_or(LeaseError::Now)?;
        // The table's lock is not held, because the kernel takes up to a millisecond to clear the memory.
        let slab = Arc::new(Slab::map(account).map_err(|_| LeaseError::System)?);
        lock(&self.0.table).add(slab);
        Ok(())
    }

    /// Leases pages of the slabs that are mapped.
    fn find(&self, len: usize) -> Option<Lease> {
        let taken = lock(&self.0.table).take(len)?;
        Some(Lease::new(&self.0, taken))
    }

    /// Leases all of these lengths in the slabs that are mapped, or none.
    fn find_all(&self, lens: &[usize]) -> Option<Vec<Lease>> {
        let mut all = Vec::with_capacity(lens.len());
        let mut table = lock(&self.0.table);
        for &len in lens {
            match table.take(len) {
                Some(taken) => all.push(taken),
                None => {
                    for taken in all {
                        table.give(taken.slot, taken.first, taken.pages);
                    }
                    return None;
                }
            }
        }
        drop(table);
        Some(all.into_iter().map(|taken| Lease::new(&self.0, taken)).collect())
    }

    /// Leases bytes that are all zero, for writers whose padding must never contain bytes of an old buffer.
    pub(crate) fn lease_zeroed(&self, len: usize) -> Result<Lease, LeaseError> {
        let mut lease = self.lease(len)?;
        if let Some(bytes) = lease.bytes_mut() {
            bytes.fill(0);
        }
        Ok(lease)
    }

    /// Returns idle slabs to the system and the budget. Returns how many.
    ///
    /// A ring that has an idle slab registered keeps it until the ring next wakes.
    pub(crate) fn trim(&self) -> usize {
        let mut table = lock(&self.0.table);
        let mut freed = Vec::new();
        for slot in &mut table.slots {
            if slot.as_ref().is_some_and(|range| range.used == 0) {
                freed.extend(slot.take());
            }
        }
        while matches!(table.slots.last(), Some(None)) {
            table.slots.pop();
        }
        drop(table);
        for range in &freed {
            range.slab.retire();
        }
        freed.len()
    }

    pub(crate) fn usage(&self) -> ArenaUsage {
        let table = lock(&self.0.table);
        table.slots.iter().flatten().fold(ArenaUsage::default(), |sum, range| ArenaUsage {
            slabs: sum.slabs + 1,
            leased_bytes: sum.leased_bytes + range.used * PAGE_BYTES,
            backing: Some(sum.backing.map_or(range.slab.backing(), |b| b.min(range.slab.backing()))),
        })
    }

    /// Returns the bytes that the budget has given out, for slabs and everything else.
    #[cfg(test)]
    pub(crate) fn budget_used(&self) -> usize {
        self.0.budget.used()
    }

    /// Returns the event that is notified when a lease or budget returns.
    ///
    /// After [`LeaseError::Now`], wait until the event passes the epoch that was read before the attempt.
    pub(crate) fn returned(&self) -> &Arc<EventCount> {
        self.0.budget.returned()
    }
}
