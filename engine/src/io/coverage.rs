//! Coverage marks: rare states of the engine that simulated runs must reach.
//!
//! A simulation counts the marks of its own thread. A run of many cases fails if no case reached a mark, because the
//! checks of that state then checked nothing. Without the feature `sim`, [`coverage!`] compiles to nothing.

#[cfg(feature = "sim")]
pub use counts::{events, take_events};
#[cfg(feature = "sim")]
pub(crate) use counts::{mark, start, stop};

/// Counts a coverage mark of the simulation on this thread: `coverage!(Checkpoint)`, or `coverage!(TornBatch,
/// condition)` to count it if the condition holds. Without the feature `sim` the condition is not evaluated.
macro_rules! count_coverage {
    ($mark:ident) => {
        $crate::io::coverage::coverage!($mark, true)
    };
    ($mark:ident, $condition:expr) => {
        if cfg!(feature = "sim") && $condition {
            $crate::io::coverage::mark($crate::io::coverage::CoverageMark::$mark);
        }
    };
}
// Renamed because `use coverage` would be ambiguous with the built-in attribute of that name.
pub(crate) use count_coverage as coverage;

/// A state of the engine that simulated runs must reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub, dead_code, reason = "public with the simulator only"))]
pub enum CoverageMark {
    /// A used segment was opened again.
    SegmentRecycled,
    /// A manifest ended in a new generation.
    Checkpoint,
    /// Recovery cut the bytes after the last valid batch.
    ManifestCut,
    /// Recovery met a batch of which only a part had landed.
    TornBatch,
    /// Records were written as several batches.
    SplitBatches,
    /// Recovery cut a series of batches because its last batch was missing.
    SplitCut,
    /// A damaged copy was written again from another one.
    CopyHealed,
    /// Cleaning moved a frame.
    FrameMoved,
    /// The manifest's state takes more bytes than the capacity leaves it.
    CapacityExceeded,
    /// A sequence was evicted.
    Evicted,
    /// A sequence expired.
    Expired,
    /// The commit leader made all queued commits durable. A crash after this point may leave no older state.
    GroupCommit,
    /// A sync was submitted while writes to its file were in flight.
    SyncBesideWrites,
    /// The power failed while requests were in flight.
    CutUnderWay,
    /// A transfer was continued after it moved fewer bytes than requested or was interrupted.
    Continued,
    /// A commit wrote groups whose tokens were in small frames, and released those frames.
    Merged,
    /// A sequence was opened whose newest groups were stored in small frames only.
    Regrouped,
    /// A selector's summaries were read back from a device.
    SummaryRestored,
    /// The files of free segments were removed.
    SegmentGivenBack,
    /// A device that had hung completed an operation again.
    DeviceHung,
    /// Time passed while an operation of a slow device waited.
    TimePassed,
    /// A device returned ESTALE.
    HandleStale,
    /// A device returned EROFS.
    ReadOnlyMidway,
    /// The clock was set back.
    ClockWentBack,
    /// A page of stored clusters failed, and groups gave its entries.
    PageRebuilt,
    /// A directory or a state of stored clusters did not verify.
    ClustersDropped,
    /// A store without space gave up stored clusters.
    ClustersReleased,
    /// Stored clusters went with their device.
    ClustersLost,
    /// Stored clusters grew: pages of an earlier directory stayed.
    ClustersGrown,
    /// Stored clusters grew, and members of a cluster went to pages that it shares with others.
    ClustersOverflowed,
    /// Stored clusters grew, and a page or a frame of which little was in use was written once more.
    ClustersCompacted,
    /// The state of a method was written.
    ClusterStateWritten,
    /// A layer was restored from the state of its method.
    ClusterStateTaken,
}

/// Does nothing, because marks are counted with the feature `sim` only.
#[cfg(not(feature = "sim"))]
pub(crate) const fn mark(_mark: CoverageMark) {}

#[cfg(feature = "sim")]
mod counts {
    use super::CoverageMark;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    thread_local! {
        /// The simulations that run on this thread.
        static COUNTING: Cell<u32> = const { Cell::new(0) };
        static COUNTS: RefCell<BTreeMap<CoverageMark, u64>> = const { RefCell::new(BTreeMap::new()) };
    }

    /// Counts the marks of this thread from now on.
    pub(crate) fn start() {
        COUNTING.set(COUNTING.get() + 1);
    }

    /// Ends a simulation. Without one, no marks of this thread are counted. The counts stay.
    pub(crate) fn stop() {
        COUNTING.set(COUNTING.get().saturating_sub(1));
    }

    pub(crate) fn mark(mark: CoverageMark) {
        if COUNTING.get() > 0 {
            COUNTS.with_borrow_mut(|counts| *counts.entry(mark).or_default() += 1);
        }
    }

    /// Returns the counts of this thread since the last call, and clears them.
    #[must_use]
    pub fn take_events() -> BTreeMap<CoverageMark, u64> {
        COUNTS.take()
    }

    /// Returns how often this thread reached a mark since [`take_events`].
    #[must_use]
    pub fn events(mark: CoverageMark) -> u64 {
        COUNTS.with_borrow(|counts| counts.get(&mark).copied().unwrap_or(0))
    }
}
