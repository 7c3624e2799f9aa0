//! The accounts of a store: memory against `memory_limit`, counters of devices, events for an observer.
//!
//! Invariants:
//! - `MemoryBudget::used` is the sum of all live reservations. It never exceeds the limit.
//! - No lock is held while an observer runs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) use crate::sync::{EventCount, lock};
use serde::Serialize;

/// A use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum Category {
    /// Slabs of I/O buffers.
    Arena,
    /// Tails of sequences: tokens that do not fill a group yet.
    Tails,
    /// Key summaries in memory.
    Summaries,
    /// Sequence, frame and segment tables.
    Index,
    /// Resident blocks, at the capacity of their caches.
    Cache,
    /// Everything else.
    Other,
}

impl Category {
    /// Every category, in the order of [`MemoryUsage::categories`].
    pub const ALL: [Self; 6] = [Self::Arena, Self::Tails, Self::Summaries, Self::Index, Self::Cache, Self::Other];
}

/// A level with its peak.
#[derive(Default)]
struct Gauge {
    used: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn usage(&self, category: Category) -> CategoryUsage {
        CategoryUsage {
            category,
            used_bytes: self.used.load(Ordering::Relaxed),
            peak_bytes: self.peak.load(Ordering::Relaxed),
        }
    }
}

/// The account of memory. Every large allocation needs a [`Reservation`] from it.
pub(crate) struct MemoryBudget {
    limit: usize,
    total: Gauge,
    categories: [Gauge; Category::ALL.len()],
    returned: Arc<EventCount>,
}

impl MemoryBudget {
    pub(crate) fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: limit_bytes,
            total: Gauge::default(),
            categories: Default::default(),
            returned: Arc::default(),
        })
    }

    /// Reserves `bytes`, or returns none if they do not fit now.
    pub(crate) fn try_reserve(self: &Arc<Self>, bytes: usize, category: Category) -> Option<Reservation> {
        let held = || HeldBytes { budget: Arc::clone(self), bytes: AtomicUsize::new(bytes), category };
        self.take(bytes, category).then(|| Reservation { held: Arc::new(held()) })
    }

    fn take(&self, bytes: usize, category: Category) -> bool {
        if refusal::strikes() {
            return false;
        }
        let within = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        let Ok(before) = self.total.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within) else {
            return false;
        };
        self.total.peak.fetch_max(before + bytes, Ordering::Relaxed);
        self.categories[category as usize].add(bytes);
        true
    }

    fn give(&self, bytes: usize, category: Category) {
        if bytes > 0 {
            self.categories[category as usize].sub(bytes);
            self.total.sub(bytes);
            self.returned.notify();
        }
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn used(&self) -> usize {
        self.total.used.load(Ordering::Relaxed)
    }

    pub(crate) fn peak(&self) -> usize {
        self.total.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn usage(&self) -> MemoryUsage {
        MemoryUsage {
            limit_bytes: self.limit,
            used_bytes: self.used(),
            peak_bytes: self.peak(),
            categories: Category::ALL.map(|c| self.categories[c as usize].usage(c)),
        }
    }

    /// Returns the event that is notified when memory comes back: a reservation shrinks or ends, or an arena lease
    /// returns.
    pub(crate) fn returned(&self) -> &Arc<EventCount> {
        &self.returned
    }
}

/// Refusals of memory that a simulation asks for, on its thread.
#[cfg(feature = "sim")]
pub(crate) mod refusal {
    use std::cell::Cell;

    thread_local! {
        /// Reservations that still succeed, and then reservations that are refused.
        static TO_COME: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
        static REFUSED: Cell<u64> = const { Cell::new(0) };
    }

    /// Refuses some reservations of this thread, after others have succeeded.
    pub(crate) fn set(to_come: Option<(u64, u64)>) {
        TO_COME.set(to_come);
    }

    /// Returns how many reservations were refused since the last call.
    pub(crate) fn take_refused() -> u64 {
        REFUSED.take()
    }

    /// Returns whether this reservation is refused.
    pub(crate) fn strikes() -> bool {
        let Some((before, refused)) = TO_COME.get() else { return false };
        let strikes = before == 0 && refused > 0;
        TO_COME.set(if before > 0 { Some((before - 1, refused)) } else { Some((0, refused.saturating_sub(1))) });
        REFUSED.set(REFUSED.get() + u64::from(strikes));
        strikes
    }
}

#[cfg(not(feature = "sim"))]
pub(crate) mod refusal {
    /// Returns false, because only a simulation refuses memory that is there.
    pub(crate) const fn strikes() -> bool {
        false
    }
}

/// A part of the budget. It ends when this and all that [share](Self::share) it are dropped.
pub(crate) struct Reservation {
    held: Arc<HeldBytes>,
}

struct HeldBytes {
    budget: Arc<MemoryBudget>,
    bytes: AtomicUsize,
    category: Category,
}

impl Reservation {
    pub(crate) fn bytes(&self) -> usize {
        self.held.bytes.load(Ordering::Relaxed)
    }

    /// Returns the same part again, for another user of the memory.
    pub(crate) fn share(&self) -> Self {
        Self { held: Arc::clone(&self.held) }
    }

    /// Returns whether others share it.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.held) > 1
    }

    /// Grows or shrinks to `bytes`. Returns false if the growth does not fit; nothing changed then.
    ///
    /// It never shrinks while others share it. One user resizes at a time.
    pub(crate) fn resize(&mut self, bytes: usize) -> bool {
        let held = self.bytes();
        if bytes > held {
            if !self.held.budget.take(bytes - held, self.held.category) {
                return false;
            }
        } else if self.is_shared() {
            return true;
        } else {
            self.held.budget.give(held - bytes, self.held.category);
        }
        self.held.bytes.store(bytes, Ordering::Relaxed);
        true
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.budget.give(*self.bytes.get_mut(), self.category);
    }
}

/// The memory of a store in bytes: now and at its peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// The limit.
    pub limit_bytes: usize,
    /// Held now.
    pub used_bytes: usize,
    /// Held at most.
    pub peak_bytes: usize,
    /// The same by category. Peaks may be of different moments.
    pub categories: [CategoryUsage; Category::ALL.len()],
}

/// The part of a category in [`MemoryUsage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryUsage {
    /// The category.
    pub category: Category,
    /// Held now, in bytes.
    pub used_bytes: usize,
    /// Held at most, in bytes.
    pub peak_bytes: usize,
}

macro_rules! device_counters {
    ($($(#[$doc:meta])+ $name:ident),+ $(,)?) => {
        /// The counters of one device, counted at completions.
        #[derive(Default)]
        pub(crate) struct DeviceCounters {
            $(pub(crate) $name: Counter,)+
        }

        impl DeviceCounters {
            pub(crate) fn snapshot(&self) -> DeviceSnapshot {
                DeviceSnapshot { $($name: self.$name.get(),)+ }
            }
        }

        /// The counters of one device since the store was opened, counted at completions.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct DeviceSnapshot {
            $($(#[$doc])+ pub $name: u64,)+
        }
    };
}

device_counters! {
    /// Read requests completed.
    reads,
    /// Bytes read.
    read_bytes,
    /// Write requests completed.
    writes,
    /// Bytes written.
    write_bytes,
    /// Syncs completed.
    syncs,
    /// Requests and other operations that failed, of every kind.
    errors,
    /// Completions with fewer bytes than requested.
    short_completions,
    /// Batches of demand reads that the device's thread served.
    demand_batches,
    /// Microseconds from the submission of these batches until their last request reached the driver, summed.
    demand_queue_us,
    /// Batches of reads ahead, writes and syncs.
    other_batches,
    /// Microseconds that these batches waited, summed likewise.
    other_queue_us,
    /// System calls made to submit or to wait.
    submissions,
    /// Attempts repeated after EINTR or EAGAIN.
    retries,
    /// Blocks or reads of this device that a copy on another device gave, because the copy here failed or was damaged.
    other_copies,
    /// Late parts of reads that were read from other copies as well.
    hedged,
    /// Reads that failed.
    read_errors,
    /// Writes and file creations or extensions that failed for lack of space: ENOSPC, EDQUOT, EFBIG.
    no_space,
    /// Writes that failed for other reasons.
    write_errors,
    /// Syncs that failed. The first one ends all writing to the device.
    failed_syncs,
    /// Files that could not be created, opened, extended, renamed, removed or listed for other reasons.
    name_errors,
    /// Blocks, frame headers and small pieces with a wrong checksum. Each read counts.
    checksum_failures,
    /// Blocks that were read again because of a wrong checksum.
    rereads,
    /// Pages of stored clusters that failed or had a wrong checksum, and were read from groups.
    rebuilt_pages,
    /// Superblock slots and manifest copies that were damaged, missing or unreadable at open while others were intact.
    /// An opening for writing repairs them.
    damaged_metadata,
}

impl DeviceCounters {
    /// Counts a batch and how long it waited until all of it reached the driver.
    pub(crate) fn queued(&self, demand: bool, waited: Duration) {
        let (batches, total_us) = match demand {
            true => (&self.demand_batches, &self.demand_queue_us),
            false => (&self.other_batches, &self.other_queue_us),
        };
        batches.add(1);
        total_us.add(u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts a failed request by its kind.
    pub(crate) fn failed(&self, op: OpKind, no_space: bool) {
        self.errors.add(1);
        match op {
            OpKind::Read => &self.read_errors,
            OpKind::Write | OpKind::Names if no_space => &self.no_space,
            OpKind::Write => &self.write_errors,
            OpKind::Sync => &self.failed_syncs,
            OpKind::Names => &self.name_errors,
        }
        .add(1);
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    Read,
    Write,
    Sync,
    /// An operation on a whole file, or on names.
    Names,
}

/// Why the store deleted a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum EvictionReason {
    /// Its time to live ended.
    Expired,
    /// Space was short, and it was evictable.
    Space,
}

/// A sequence that the store deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evicted {
    /// The id.
    pub id: u64,
    /// The key, or empty.
    pub key: String,
    /// Committed tokens.
    pub tokens: u64,
    /// Bytes of frames that no other sequence refers to.
    pub bytes: u64,
    /// The reason.
    pub reason: EvictionReason,
}

type Observer = Arc<dyn Fn(&Evicted) + Send + Sync>;

/// Events that are kept until an observer is set, at most.
const EVENTS_MAX: usize = 1024;

/// The observer of deleted sequences, and events that wait for it.
#[derive(Default)]
pub(crate) struct Observers {
    told: Mutex<ObserverState>,
    /// Events of deletions that are queued and not durable yet.
    kept: Mutex<Vec<Evicted>>,
    pub(crate) lost: Counter,
}

/// The observer and its waiting events, under one lock so that no event is missed while an observer is set.
#[derive(Default)]
struct ObserverState {
    observer: Option<Observer>,
    waiting: std::collections::VecDeque<Evicted>,
    /// The number of callers that hold a lock which an observer may want.
    deferring: usize,
}

/// Events wait while this lives, because its owner holds a lock. They are told when it drops.
pub(crate) struct DeferredEvents<'a>(&'a Observers);

impl Drop for DeferredEvents<'_> {
    fn drop(&mut self) {
        lock(&self.0.told).deferring -= 1;
        loop {
            let (observer, waiting) = {
                let mut told = lock(&self.0.told);
                match told.observer.clone() {
                    Some(observer) if told.deferring == 0 && !told.waiting.is_empty() => {
                        (observer, std::mem::take(&mut told.waiting))
                    }
                    _ => return,
                }
            };
            waiting.iter().for_each(|event| observer(event));
        }
    }
}

impl Observers {
    /// Lets events wait until the guard drops. Declare it before the guard of the lock, so that it drops after it.
    pub(crate) fn defer(&self) -> DeferredEvents<'_> {
        lock(&self.told).deferring += 1;
        DeferredEvents(self)
    }

    pub(crate) fn tell(&self, event: Evicted) {
        let mut told = lock(&self.told);
        match told.observer.clone() {
            Some(observer) if told.deferring == 0 => {
                drop(told);
                observer(&event);
            }
            _ => {
                if told.waiting.len() == EVENTS_MAX {
                    told.waiting.pop_front();
                    self.lost.add(1);
                }
                told.waiting.push_back(event);
            }
        }
    }

    /// Keeps events until their deletion is durable.
    pub(crate) fn keep(&self, events: Vec<Evicted>) {
        lock(&self.kept).extend(events);
    }

    pub(crate) fn take_kept(&self) -> Vec<Evicted> {
        std::mem::take(&mut *lock(&self.kept))
    }

    /// Sets the observer. It gets the waiting events first.
    pub(crate) fn set(&self, observer: Observer) {
        loop {
            let waiting = {
                let mut told = lock(&self.told);
                if told.waiting.is_empty() {
                    told.observer = Some(observer);
                    return;
                }
                std::mem::take(&mut told.waiting)
            };
            waiting.iter().for_each(|event| observer(event));
        }
    }
}

/// The counters of a store since it was opened.
#[derive(Default)]
pub(crate) struct StoreCounters {
    pub(crate) evictions: Counter,
    pub(crate) expirations: Counter,
    pub(crate) cleaned_segments: Counter,
    pub(crate) moved_bytes: Counter,
    pub(crate) no_space: Counter,
    pub(crate) dropped_clusters: Counter,
    pub(crate) restored_layers: Counter,
}

/// A counter that any thread may raise.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;
    use std::time::{Duration, Instant};

    #[test]
    fn deferred_events_are_told_in_order_once_the_guard_drops() {
        let event = |id| Evicted { id, key: String::new(), tokens: 0, bytes: 0, reason: EvictionReason::Space };
        let (observers, told) = (Observers::default(), Arc::new(Mutex::new(Vec::new())));
        let heard = Arc::clone(&told);
        observers.set(Arc::new(move |event| lock(&heard).push(event.id)));
        observers.tell(event(1));
        let (outer, inner) = (observers.defer(), observers.defer());
        observers.tell(event(2));
        drop(inner);
        observers.tell(event(3));
        assert_eq!(*lock(&told), [1]);
        drop(outer);
        observers.tell(event(4));
        assert_eq!(*lock(&told), [1, 2, 3, 4]);
    }

    #[test]
    fn budget_never_exceeds_its_limit() {
        let budget = MemoryBudget::new(100);
        let mut a = budget.try_reserve(60, Category::Tails).expect("fits");
        assert!(budget.try_reserve(41, Category::Index).is_none());
        let b = budget.try_reserve(40, Category::Index).expect("fits exactly");
        assert!(!a.resize(61));
        assert_eq!((a.bytes(), budget.used(), budget.peak()), (60, 100, 100));
        drop(b);
        assert!(a.resize(100) && a.resize(1));
        assert!(budget.try_reserve(usize::MAX, Category::Other).is_none());
        drop(a);
        let usage = budget.usage();
        assert_eq!((usage.used_bytes, usage.peak_bytes), (0, 100));
        let peak = |c| usage.categories.iter().find(|u| u.category == c).map(|u| u.peak_bytes);
        assert_eq!(
            (peak(Category::Tails), peak(Category::Index), peak(Category::Arena)),
            (Some(100), Some(40), Some(0))
        );
    }

    #[test]
    fn waiters_learn_of_returned_memory() {
        let budget = MemoryBudget::new(10);
        let held = budget.try_reserve(10, Category::Other).expect("fits");
        let seen = budget.returned().epoch();
        assert!(budget.try_reserve(1, Category::Other).is_none());
        assert!(!budget.returned().wait_past(seen, Some(Instant::now() + Duration::from_millis(5))));
        let waiter = {
            let budget = Arc::clone(&budget);
            std::thread::spawn(move || {
                budget.returned().wait_past(seen, Some(Instant::now() + Duration::from_secs(20)))
            })
        };
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        assert!(waiter.join().expect("no panic"));
        // A clone of a clone has the same table. Unoptimised, the first clone has a table of its own.
        let noop = &Waker::noop().clone();
        assert!(!budget.returned().wake_past(seen, noop));
        assert!(budget.returned().wake_past(budget.returned().epoch(), noop));
        // A task that is polled again is registered once.
        assert!(budget.returned().wake_past(budget.returned().epoch(), noop));
        assert_eq!(budget.returned().waiters(), 1);
        budget.returned().notify();
        assert_eq!(budget.returned().waiters(), 0);
    }

    fn event(id: u64) -> Evicted {
        Evicted { id, key: String::new(), tokens: 1, bytes: 1, reason: EvictionReason::Space }
    }

    #[test]
    fn observers_hear_of_everything_once_and_in_order() {
        let observers = Arc::new(Observers::default());
        (0..3).for_each(|id| observers.tell(event(id)));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let observer = {
            let (observers, heard) = (Arc::clone(&observers), Arc::clone(&heard));
            move |event: &Evicted| {
                lock(&heard).push(event.id);
                if event.id == 0 {
                    // This event happens while the observer handles the first ones.
                    observers.tell(self::event(3));
                }
            }
        };
        observers.set(Arc::new(observer));
        observers.tell(event(4));
        assert_eq!(*lock(&heard), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn no_event_is_put_by_for_an_observer_that_has_come() {
        for _ in 0..2000 {
            let observers = Arc::new(Observers::default());
            let heard = Arc::new(AtomicU64::new(0));
            let telling = {
                let observers = Arc::clone(&observers);
                std::thread::spawn(move || observers.tell(event(1)))
            };
            let counted = Arc::clone(&heard);
            observers.set(Arc::new(move |_| {
                counted.fetch_add(1, Ordering::Relaxed);
            }));
            telling.join().expect("no panic");
            assert_eq!(heard.load(Ordering::Relaxed), 1);
        }
    }
}
