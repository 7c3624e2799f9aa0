//! Counts of the events of a run. A long run passes only if it has seen every event.

use std::collections::BTreeMap;
use std::fmt;
use stratakv::sim::Event;

/// The number of cases from which a run must have seen every event.
const GATE_CASES: u64 = 10_000;

/// Names of events that the harness counts itself. [`Event`] names the events of the engine.
pub(super) const DOUBLE_CRASH: &str = "crash during recovery";
pub(super) const NO_SPACE: &str = "no space";
pub(super) const POISONED: &str = "poisoned by a failed sync";
pub(super) const WRITE_ERROR: &str = "write error";
pub(super) const NAME_ERROR: &str = "error of a file or its name";
pub(super) const READ_ERROR: &str = "read error";
pub(super) const ROT_FOUND: &str = "bit rot reported";
pub(super) const CHECKED: &str = "crash image checked by kvfsck";
pub(super) const CHECKED_CHANGED: &str = "store that disks left or joined checked by kvfsck";
pub(super) const MEMBERS_WITHIN: &str = "capacity held by the disks that are members";
pub(super) const LOST: &str = "unacknowledged commits lost";
pub(super) const LANDED: &str = "unacknowledged commits kept";

pub(super) const ASTRAY: &str = "write gone astray";
pub(super) const FLIPPED: &str = "wrong bit in a read";
pub(super) const FORKED: &str = "fork of what is committed";
pub(super) const FORKED_BETWEEN: &str = "fork between commits";
pub(super) const READ_BESIDE: &str = "reader read beside its writer";
pub(super) const READ_DELETED: &str = "reader read after the deletion";
pub(super) const CARRIED: &str = "sequence exported and imported";
pub(super) const CAPACITY: &str = "capacity changed";
pub(super) const ADAPTER: &str = "adapter stored";
pub(super) const ATTACHED: &str = "selector attached";
pub(super) const ENTRIES: &str = "entries chosen as by a fresh sequence";
pub(super) const CLUSTERS: &str = "clusters built as by a fresh sequence";
pub(super) const STORED: &str = "clusters stored";
pub(super) const SPLIT: &str = "clusters split between two stores of them";
pub(super) const PAGED: &str = "stored clusters read after a restart";
pub(super) const FORK_PAGED: &str = "stored clusters read by a fork";
pub(super) const CLUSTERS_CUT: &str = "stored clusters gone with a truncation";
pub(super) const CLUSTERS_WENT: &str = "sequence with stored clusters evicted or expired";
pub(super) const STATE_STORED: &str = "state of a method stored";
pub(super) const STATE_TAKEN: &str = "method restored from its state";
pub(super) const DIRECTORY_CHANGED: &str = "directory of clusters changed on the medium";
pub(super) const OPENED_TWICE: &str = "second open refused at once";
pub(super) const STREAMED: &str = "chosen by streamed records";
pub(super) const LOOKED: &str = "crash image opened for reading only";
pub(super) const HEALED: &str = "rotten copy read around and healed";
pub(super) const DISK_LOST: &str = "disk lost";
pub(super) const DISK_GIVEN_UP: &str = "disk given up after a failure";
pub(super) const DISK_REMOVED: &str = "disk removed";
pub(super) const NEIGHBOUR: &str = "second store unharmed";
pub(super) const NO_MEMORY: &str = "memory refused";
pub(super) const DISK_BACK: &str = "disk came back with an old state";

/// The events that the harness counts itself and that a long run must see.
const OWN: [&str; 43] = [
    DOUBLE_CRASH,
    NO_SPACE,
    POISONED,
    WRITE_ERROR,
    READ_ERROR,
    NAME_ERROR,
    ROT_FOUND,
    CHECKED,
    CHECKED_CHANGED,
    MEMBERS_WITHIN,
    LOST,
    LANDED,
    ASTRAY,
    FLIPPED,
    FORKED,
    FORKED_BETWEEN,
    READ_BESIDE,
    READ_DELETED,
    CARRIED,
    CAPACITY,
    ADAPTER,
    ATTACHED,
    ENTRIES,
    CLUSTERS,
    STORED,
    SPLIT,
    PAGED,
    FORK_PAGED,
    CLUSTERS_CUT,
    CLUSTERS_WENT,
    STATE_STORED,
    STATE_TAKEN,
    DIRECTORY_CHANGED,
    OPENED_TWICE,
    STREAMED,
    LOOKED,
    HEALED,
    DISK_LOST,
    DISK_GIVEN_UP,
    DISK_REMOVED,
    DISK_BACK,
    NO_MEMORY,
    NEIGHBOUR,
];

/// The counts of a run.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// The number of cases.
    pub cases: u64,
    /// The number of crashes.
    pub crashes: u64,
    /// The number of operations of the histories.
    pub operations: u64,
    /// The wrapping sum of the trace hashes of all cases, which does not depend on their order.
    pub traces: u64,
    /// The number of operations of the simulated devices in the case with the most of them.
    pub longest: u64,
    /// The count of each event by its name.
    pub seen: BTreeMap<&'static str, u64>,
}

impl Coverage {
    pub(super) fn add(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub(super) fn add_many(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            *self.seen.entry(what).or_default() += count;
        }
    }

    pub(super) fn add_events(&mut self) {
        for (event, count) in stratakv::sim::take_events() {
            *self.seen.entry(name(event)).or_default() += count;
        }
    }

    /// Adds the counts of another run.
    pub(super) fn merge(&mut self, other: Self) {
        self.cases += other.cases;
        self.crashes += other.crashes;
        self.operations += other.operations;
        self.traces = self.traces.wrapping_add(other.traces);
        self.longest = self.longest.max(other.longest);
        for (what, count) in other.seen {
            *self.seen.entry(what).or_default() += count;
        }
    }

    /// Returns the events that a long run must see but did not. Returns none for a short run.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        if self.cases < GATE_CASES {
            return Vec::new();
        }
        let events = [
            Event::SegmentRecycled,
            Event::SegmentGivenBack,
            Event::Checkpoint,
            Event::ManifestCut,
            Event::TornBatch,
            Event::SplitBatches,
            Event::SplitCut,
            Event::GroupCommit,
            Event::SyncBesideWrites,
            Event::CutUnderWay,
            Event::Continued,
            Event::FrameMoved,
            Event::Evicted,
            Event::Expired,
            Event::CopyHealed,
            Event::Merged,
            Event::Regrouped,
            Event::SummaryRestored,
            Event::DeviceHung,
            Event::TimePassed,
            Event::HandleStale,
            Event::ReadOnlyMidway,
            Event::ClockWentBack,
            Event::PageRebuilt,
            Event::ClustersDropped,
            Event::ClustersReleased,
            Event::ClustersLost,
            Event::ClustersGrown,
            Event::ClustersOverflowed,
            Event::ClustersCompacted,
            Event::ClusterStateTaken,
            Event::ClusterStateWritten,
        ];
        events.map(name).into_iter().chain(OWN).filter(|what| !self.seen.contains_key(what)).collect()
    }
}

fn name(event: Event) -> &'static str {
    match event {
        Event::SegmentRecycled => "segment recycled",
        Event::SegmentGivenBack => "free segments given back",
        Event::Checkpoint => "checkpoint",
        Event::ManifestCut => "manifest cut",
        Event::TornBatch => "torn batch",
        Event::SplitBatches => "split batches",
        Event::SplitCut => "split batches cut",
        Event::CopyHealed => "copy repaired",
        Event::GroupCommit => "group commit",
        Event::SyncBesideWrites => "sync beside writes to its file",
        Event::CutUnderWay => "power cut with requests under way",
        Event::Continued => "transfer continued",
        Event::FrameMoved => "frame moved by cleaning",
        Event::Merged => "small frames merged",
        Event::Regrouped => "groups put together from small frames",
        Event::SummaryRestored => "summaries came back",
        Event::CapacityExceeded => "manifest larger than the capacity leaves",
        Event::Evicted => "sequence evicted",
        Event::Expired => "sequence expired",
        Event::DeviceHung => "device hung and came back",
        Event::TimePassed => "time passed while a slow device worked",
        Event::HandleStale => "device went stale",
        Event::ReadOnlyMidway => "device went read-only",
        Event::ClockWentBack => "clock went back",
        Event::PageRebuilt => "page of clusters read from groups",
        Event::ClustersDropped => "directory of clusters dropped",
        Event::ClustersReleased => "clusters given up for space",
        Event::ClustersLost => "clusters lost with their disk",
        Event::ClustersGrown => "stored clusters grew and kept pages",
        Event::ClustersOverflowed => "members of grown clusters in shared pages",
        Event::ClustersCompacted => "sparse pages of clusters written once more",
        Event::ClusterStateTaken => "layer restored from the state of a method",
        Event::ClusterStateWritten => "state of a method written",
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cases, {} operations, {} crashes", self.cases, self.operations, self.crashes)?;
        write!(f, "\n  trace hash of all cases: {:016x}", self.traces)?;
        write!(f, "\n  device operations of the longest case: {}", self.longest)?;
        self.seen.iter().try_for_each(|(what, count)| write!(f, "\n  {what}: {count}"))
    }
}
