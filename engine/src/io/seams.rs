//! What the engine takes from outside besides its devices: randomness, the clock, and a few sizes. With feature `sim` a
//! simulation replaces them on its own thread; everywhere else, and without the feature, these are the real ones.

use crate::error::{Error, ErrorKind, Result};

/// Sizes that a simulation makes small, so that its cases reach their limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes of a fresh manifest file. A full one ends in a checkpoint.
    pub(crate) manifest_bytes: u64,
    /// Zeros written at once over a fresh manifest file, so that a later sync has no extents to convert.
    pub(crate) zero_bytes: usize,
    /// The most bytes of records of a batch.
    pub(crate) batch_bytes: usize,
    /// Tokens that commits write one by one before one of them writes their groups.
    pub(crate) gather_tokens: u64,
    /// The least memory of a store whose commits gather groups: with less, a read may need all there is.
    pub(crate) gather_memory: usize,
}

const SIZES: Sizes = Sizes {
    manifest_bytes: 4 << 20,
    zero_bytes: 1 << 20,
    batch_bytes: stratakv_format::manifest::RECORDS_BYTES_MAX,
    gather_tokens: 64,
    gather_memory: 16 << 20,
};

pub(crate) fn sizes() -> Sizes {
    #[cfg(feature = "sim")]
    if let Some(sizes) = crate::io::sim::thread::sizes() {
        return sizes;
    }
    SIZES
}

/// Whether this thread simulates.
pub(crate) fn is_simulated() -> bool {
    #[cfg(feature = "sim")]
    return crate::io::sim::thread::sizes().is_some();
    #[cfg(not(feature = "sim"))]
    false
}

/// Random bytes for ids and nonces.
///
/// # Errors
/// The system has none to give.
pub(crate) fn random_u64() -> Result<u64> {
    #[cfg(feature = "sim")]
    if let Some(random) = crate::io::sim::thread::random() {
        return Ok(random);
    }
    getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("random numbers: {e}")))
}

/// Now, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(now) = crate::io::sim::thread::clock() {
        return now;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// What a simulation wants to have seen, so that a run which never got there fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub, dead_code, reason = "public with the simulation only"))]
pub enum Event {
    /// A segment that had been used was opened again.
    SegmentRecycled,
    /// A manifest ended in a new generation.
    Checkpoint,
    /// Recovery cut what stood behind the last valid batch.
    ManifestCut,
    /// Recovery met a batch that had landed in part.
    TornBatch,
    /// Records went into several batches.
    SplitBatches,
    /// Recovery cut a run of batches whose last one was missing.
    SplitCut,
    /// A copy that was damaged was made anew.
    ReplicaHealed,
    /// Cleaning moved a frame.
    FrameMoved,
    /// The state of the manifest takes more than the capacity leaves it.
    CapacityExceeded,
    /// A sequence was evicted.
    Evicted,
    /// A sequence expired.
    Expired,
    /// All that waited was made durable together: a state that a crash may leave ends here.
    GroupCommit,
    /// A sync was submitted while writes to its file were under way.
    SyncBesideWrites,
    /// The power went while requests were under way.
    CutUnderWay,
    /// A transfer moved fewer bytes than asked for, or was interrupted, and was continued.
    Continued,
    /// A commit wrote groups whose tokens small frames held, and let those go.
    Merged,
    /// A sequence was opened whose newest groups stood in small frames only.
    Regrouped,
    /// Summaries of a selector came back from a device.
    SummaryRestored,
    /// Files of free segments were given back.
    SegmentGivenBack,
}

/// Counts an event of this thread's simulation.
#[cfg_attr(not(feature = "sim"), allow(clippy::missing_const_for_fn))]
pub(crate) fn note(event: Event) {
    #[cfg(feature = "sim")]
    crate::io::sim::thread::note(event);
    #[cfg(not(feature = "sim"))]
    let _ = event;
}

/// Faults of the engine itself, switched on by the test that shows that the simulator finds them. Never outside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub, reason = "public with the simulation only"))]
pub enum Mutant {
    /// A commit does not sync its data.
    DataSyncSkipped,
    /// A commit does not sync the manifest.
    ManifestSyncSkipped,
    /// The manifest names frames before their data is synced.
    ManifestBeforeData,
    /// A manifest batch counts although its checksum is wrong.
    TornBatchAccepted,
    /// Recovery drops the last batch.
    TailBatchDropped,
    /// A durable deletion is only queued.
    DeleteNotDurable,
    /// A manifest that was cut is continued in the same generation.
    GenerationNotBumped,
    /// Damage below what is known durable is cut like a torn tail.
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
    /// A damaged copy is found, and nothing is done about it.
    ReplicaNotHealed,
    /// A commit syncs before its writes have ended.
    SyncBeforeCompletion,
    /// A transfer that moved fewer bytes than asked for counts as whole.
    ShortAccepted,
    /// Payload checksums cover the first half only.
    ChecksumOfHalf,
    /// A segment is used again before it is durable that nothing in it is needed.
    ReuseBeforeFlush,
    /// A block that fails its check is not read again.
    NotReadAgain,
    /// Small frames are let go before the one that takes their place is durable.
    ReleasedFirst,
    /// A deletion frees frames that a fork still refers to.
    ForkFreedWithParent,
    /// A segment is used again while a reader, a view or a fork holds it.
    PinsIgnored,
    /// An eviction is told before it is durable.
    EvictionNotDurable,
    /// An eviction takes two commits.
    EvictedByHalves,
    /// The sequences that should be evicted last go first.
    EvictionOrderIgnored,
    /// A sequence expires when half of its time is over.
    ExpiredEarly,
    /// Segments are made beyond the capacity.
    CapacityIgnored,
    /// An import is committed before it has been read to its end.
    ImportVisible,
}

/// Whether this fault of the engine is switched on.
#[inline]
pub(crate) fn mutated(mutant: Mutant) -> bool {
    #[cfg(feature = "sim")]
    let on = crate::io::sim::thread::mutated(mutant);
    #[cfg(not(feature = "sim"))]
    let on = {
        let _ = mutant;
        false
    };
    on
}

/// The part of a plane that its checksum covers: all of it.
#[inline]
pub(crate) fn covered(plane: &[u8]) -> &[u8] {
    &plane[..covered_bytes(plane.len())]
}

/// How many of a plane's bytes that are.
pub(crate) fn covered_bytes(bytes: usize) -> usize {
    if mutated(Mutant::ChecksumOfHalf) { bytes / 2 } else { bytes }
}
