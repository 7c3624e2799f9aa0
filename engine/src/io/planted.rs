//! Planted faults: deliberate bugs of the engine that show whether the simulator would find a real one.
//!
//! `crash mutants` switches one fault on at a time and expects a failed case. A fault is switched on for one thread.
//! Without the feature `sim`, [`planted!`] is the constant `false`.

#[cfg(feature = "sim")]
pub(crate) use switch::is_planted;
#[cfg(feature = "sim")]
pub use switch::set_mutant;

/// Expands to true if a planted fault is switched on: `planted!(SyncRetried)`. It is the constant `false` without the
/// feature `sim`.
macro_rules! planted {
    ($fault:ident) => {
        (cfg!(feature = "sim") && $crate::io::planted::is_planted($crate::io::planted::Mutant::$fault))
    };
}
pub(crate) use planted;

/// A fault of the engine that a test can switch on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub, reason = "public with the simulator only"))]
pub enum Mutant {
    /// A commit does not sync its data.
    DataSyncSkipped,
    /// A sealed segment counts as synced before a commit, without a sync.
    EarlySyncSkipped,
    /// A commit does not sync the manifest.
    ManifestSyncSkipped,
    /// The manifest names frames before their data is synced.
    ManifestBeforeData,
    /// Recovery accepts a manifest batch whose checksum is wrong.
    TornBatchAccepted,
    /// Recovery drops the last batch.
    TailBatchDropped,
    /// A durable deletion is only queued.
    DeleteNotDurable,
    /// A manifest that recovery cut is continued in the same generation.
    GenerationNotBumped,
    /// Recovery cuts damage below the synced position as if it were a torn tail.
    SyncedThroughIgnored,
    /// The superblock names a checkpoint that is not synced.
    CheckpointNotSynced,
    /// A failed sync is tried again.
    SyncRetried,
    /// Batches that belong together take effect one by one.
    SplitNotAtomic,
    /// Payload checksums are not compared.
    PayloadChecksumIgnored,
    /// The name of a new segment is not synced.
    SegmentNameNotSynced,
    /// A damaged copy is found but not written again.
    CopyNotHealed,
    /// A commit syncs before its writes have completed.
    SyncBeforeCompletion,
    /// A transfer that moved fewer bytes than requested counts as complete.
    ShortAccepted,
    /// Payload checksums cover only the first half of a plane.
    ChecksumOfHalf,
    /// A segment is used again before the manifest durably frees it.
    ReuseBeforeFlush,
    /// A block that fails its check is not read again.
    NotReadAgain,
    /// Small frames are released before the frame that replaces them is durable.
    ReleasedFirst,
    /// A deletion frees frames that a fork still refers to.
    ForkFreedWithParent,
    /// A segment is used again while a reader, a selection or a fork pins it.
    PinsIgnored,
    /// The observer hears of an eviction before the eviction is durable.
    EvictionNotDurable,
    /// An eviction takes two commits.
    EvictedByHalves,
    /// The sequences that should be evicted last are evicted first.
    EvictionOrderIgnored,
    /// A sequence expires after half of its time to live.
    ExpiredEarly,
    /// Segments are created beyond the capacity.
    CapacityIgnored,
    /// An import is committed before it has been read to its end.
    ImportVisible,
    /// Recovery takes a token that was cut off the tail instead of the committed token.
    StaleTail,
    /// Pages and directories of clusters are committed before they are synced.
    PoolsNotSynced,
    /// A directory of clusters names the pages of its set in the reverse order.
    PagesExchanged,
    /// A cut keeps the stored clusters that reach beyond it.
    StaleClustersKept,
    /// The place of a page of clusters is no part of its checksum.
    PageIdentityIgnored,
    /// A page of clusters that fails is filled with the elements of the next token.
    PageRebuiltWrong,
    /// A segment with pages of clusters is free for use while directories name its pages.
    PoolFreedEarly,
    /// A full store evicts sequences before it gives up clusters.
    EvictedBeforeClusters,
    /// The checksums of directories of clusters are not compared.
    DirectoryChecksumIgnored,
    /// Clusters on a device that was lost or removed stay in the manifest.
    LostClustersKept,
    /// A directory of grown clusters names the entries of a page that stayed in the reverse order.
    KeptEntriesExchanged,
    /// Grown clusters leave out entries that are in no page yet.
    LooseEntriesLost,
    /// The state of a method is used although it belongs to other clusters, or to tokens that were cut off.
    StaleStateKept,
    /// The state of a method is stored before its tokens are committed.
    UncommittedStateStored,
    /// A cluster begins in the page of the cluster before it, and overwrites entries.
    PageFilledTwice,
    /// A head attends to an entry once for each page that holds it.
    ReplicaCountedTwice,
    /// An open counts derived frames among the frames that hold the tokens of a sequence.
    DerivedFrameCounted,
}

/// Returns `false`, because faults are planted with the feature `sim` only.
#[cfg(not(feature = "sim"))]
pub(crate) const fn is_planted(_fault: Mutant) -> bool {
    false
}

/// Returns the part of a plane that its checksum covers, which is all of it.
#[inline]
pub(crate) fn covered(plane: &[u8]) -> &[u8] {
    &plane[..covered_bytes(plane.len())]
}

/// Returns how many bytes of a plane of `bytes` bytes its checksum covers.
#[inline]
pub(crate) fn covered_bytes(bytes: usize) -> usize {
    if planted!(ChecksumOfHalf) { bytes / 2 } else { bytes }
}

/// Returns the place and the valid entries of a page of clusters, as its checksum has them.
#[inline]
pub(crate) fn page_place(page: u32, valid: u32) -> (u32, u32) {
    if planted!(PageIdentityIgnored) { (0, 0) } else { (page, valid) }
}

#[cfg(feature = "sim")]
mod switch {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Switches one fault of the engine on for this thread. `None` switches all faults off.
    pub fn set_mutant(mutant: Option<Mutant>) {
        PLANTED.set(mutant);
    }

    pub(crate) fn is_planted(fault: Mutant) -> bool {
        PLANTED.get() == Some(fault)
    }
}
