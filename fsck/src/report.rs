//! The report of a check: findings, totals and exit code.

use crate::finding::{Code, Finding, Severity};
use crate::pool_map::PoolMap;
use crate::stats::StoreStats;
use serde::Serialize;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// The receiver of a check's progress. Several threads call it.
pub trait Progress: Sync {
    /// Announces that the check starts to read frames, `bytes` in all.
    fn start(&self, bytes: u64) {
        let _ = bytes;
    }
    /// Announces that the check has read `bytes` more.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
}

impl Progress for () {}

/// The amounts of what a check has read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckTotals {
    /// Devices that were given and belong to the store.
    pub devices: u64,
    /// Batches of the manifest, each counted once for all copies.
    pub manifest_batches: u64,
    /// Records in these batches.
    pub manifest_records: u64,
    /// Bytes of all copies of the manifest.
    pub manifest_bytes: u64,
    /// Segments that are not free.
    pub segments: u64,
    /// Live frames. Each copy of a frame counts.
    pub frames: u64,
    /// Planes whose checksum was computed.
    pub planes: u64,
    /// Summary records that were compared with the keys of their groups. 0 unless [`Options::full`](crate::Options).
    pub summaries: u64,
    /// Bytes of these planes.
    pub payload_bytes: u64,
    /// Bytes of live frames that were read: headers, planes and padding.
    pub bytes: u64,
    /// Sequences that hold no adapter.
    pub sequences: u64,
    /// Adapters.
    pub adapters: u64,
    /// Clusters.
    pub clusters: ClusterTotals,
    /// False if damage left no usable superblock or manifest, so that segments and frames were not checked.
    pub complete: bool,
    /// True if only headers and directories of clusters were read, because
    /// [`Options::headers_only`](crate::Options::headers_only) was set.
    pub headers_only: bool,
    /// The duration of the check, in seconds.
    pub seconds: f64,
}

/// The amounts of clusters in derived frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClusterTotals {
    /// Live derived frames whose header is valid.
    pub frames: u64,
    /// Directories in force: one per set, layer and head.
    pub directories: u64,
    /// Clusters of these directories.
    pub clusters: u64,
    /// Pages that these directories name.
    pub pages: u64,
    /// Runs of these pages.
    pub runs: u64,
    /// Pages of all pools, whether a directory names them or not.
    pub pool_pages: u64,
    /// States of methods whose bytes are all there: one per layer.
    pub states: u64,
    /// Bytes of these states.
    pub state_bytes: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// True if everything could be read and understood, and no damage was found.
    pub clean: bool,
    /// The findings, ordered by device, file and offset.
    pub findings: Vec<Finding>,
    /// The number of findings past the limit. `findings` does not hold them.
    pub findings_left_out: u64,
    /// The amounts of what was read.
    pub checked: CheckTotals,
    /// Pools and clusters. Empty if `checked.complete` is false.
    pub pools: PoolMap,
    /// Sequences, bytes and clusters. Empty if `checked.complete` is false.
    pub stats: StoreStats,
    /// The exit code of the program.
    pub exit_code: u8,
}

impl Report {
    /// Returns whether a finding has this code.
    #[must_use]
    pub fn has(&self, code: Code) -> bool {
        self.findings.iter().any(|finding| finding.code == code)
    }

    /// Returns the report for a person: a line per finding, the totals, and the verdict as the last line.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{finding}");
        }
        if self.findings_left_out > 0 {
            let _ = writeln!(text, "{} more findings; raise --max-findings to see them", self.findings_left_out);
        }
        let c = &self.checked;
        let _ = writeln!(
            text,
            "checked {} devices, {} manifest batches ({} records), {} segments, {} frames, {} planes, {} sequences; \
             {:.1} MiB in {:.2} s",
            c.devices,
            c.manifest_batches,
            c.manifest_records,
            c.segments,
            c.frames,
            c.planes,
            c.sequences,
            (c.bytes + c.manifest_bytes) as f64 / f64::from(1 << 20),
            c.seconds,
        );
        let ClusterTotals { frames, directories, clusters, pages, runs, pool_pages, states, state_bytes } = c.clusters;
        if c.summaries > 0 {
            let _ = writeln!(text, "{} summary records compared with the keys of their groups", c.summaries);
        }
        if frames > 0 {
            let _ = writeln!(
                text,
                "clusters: {clusters} in {directories} directories of {frames} derived frames, {pages} of {pool_pages} \
                 pages in {runs} runs"
            );
        }
        if states > 0 {
            let _ = writeln!(text, "states of methods: {states} layers, {state_bytes} bytes");
        }
        if c.headers_only {
            let _ = writeln!(text, "only headers and directories were read; `kvfsck check` reads everything");
        }
        if !c.complete {
            let _ =
                writeln!(text, "incomplete: no usable superblock or manifest, so segments and frames were not checked");
        }
        let damage = self.findings.iter().filter(|finding| finding.severity == Severity::Damage).count() as u64;
        let _ = match (self.clean, self.findings.len() as u64 - damage) {
            (true, 0) => writeln!(text, "clean"),
            (true, notes) => writeln!(text, "clean ({notes} notes)"),
            (false, _) => writeln!(text, "not clean: {damage} damage findings listed"),
        };
        text
    }
}

/// A counter that several threads add to.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of the threads that read frames.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) frames: Counter,
    pub(crate) planes: Counter,
    pub(crate) summaries: Counter,
    pub(crate) payload_bytes: Counter,
    pub(crate) bytes: Counter,
}
