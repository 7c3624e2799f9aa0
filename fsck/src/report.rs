//! What a check gives: findings, what was checked, the exit code.

use crate::finding::{Code, Finding, Severity};
use serde::Serialize;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Exit code: clean (notes are no damage).
pub const EXIT_CLEAN: u8 = 0;
/// Exit code: damage.
pub const EXIT_DAMAGE: u8 = 1;
/// Exit code: wrong use, or a directory that is no device of a store.
pub const EXIT_USAGE: u8 = 2;
/// Exit code: a version, feature or kind that this program does not know.
pub const EXIT_UNSUPPORTED: u8 = 4;
/// Exit code: the operating system failed to read something.
pub const EXIT_IO: u8 = 5;
/// Exit code: a writer has the store open.
pub const EXIT_IN_USE: u8 = 6;

/// Told how far a check is; called from several threads.
pub trait Progress: Sync {
    /// The frames begin: `bytes` in all.
    fn start(&self, bytes: u64) {
        let _ = bytes;
    }
    /// `bytes` more were read.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
}

impl Progress for () {}

/// What was checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// Devices that were given and belong to the store.
    pub devices: u64,
    /// Batches of the manifest, each counted once.
    pub manifest_batches: u64,
    /// Records in them.
    pub manifest_records: u64,
    /// Bytes of all copies of the manifest.
    pub manifest_bytes: u64,
    /// Segments that are not free.
    pub segments: u64,
    /// Live frames.
    pub frames: u64,
    /// Planes whose checksum was computed.
    pub planes: u64,
    /// Bytes of those planes.
    pub payload_bytes: u64,
    /// Bytes of live frames read: headers, planes, padding.
    pub bytes: u64,
    /// Sequences.
    pub sequences: u64,
    /// Adapters.
    pub adapters: u64,
    /// False where damage kept a part from being checked: no usable superblock or manifest.
    pub complete: bool,
    /// Seconds it took.
    pub seconds: f64,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// No damage was found, everything could be read and understood.
    pub clean: bool,
    /// The findings, by device, file and place.
    pub findings: Vec<Finding>,
    /// Findings beyond the limit, which are not in `findings`.
    pub findings_left_out: u64,
    /// What was checked.
    pub checked: Checked,
    /// The exit code of the program.
    pub exit_code: u8,
}

impl Report {
    /// `0`, or the first of these that applies: `4` something is not known here, `5` something could not be read, `1`
    /// damage.
    pub(crate) fn code(damage: u64, unsupported: u64, io_errors: u64) -> u8 {
        match (unsupported, io_errors, damage) {
            (1.., _, _) => EXIT_UNSUPPORTED,
            (0, 1.., _) => EXIT_IO,
            (0, 0, 1..) => EXIT_DAMAGE,
            _ => EXIT_CLEAN,
        }
    }

    /// Whether a finding of this code is among them.
    #[must_use]
    pub fn has(&self, code: Code) -> bool {
        self.findings.iter().any(|finding| finding.code == code)
    }

    /// The report for a person: a line per finding and a summary.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{finding}");
        }
        if self.findings_left_out > 0 {
            let _ = writeln!(text, "... and {} more", self.findings_left_out);
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
        if !c.complete {
            let _ = writeln!(text, "not everything could be checked");
        }
        let damage = self.findings.iter().filter(|finding| finding.severity == Severity::Damage).count() as u64;
        let _ = match (self.clean, self.findings.len() as u64 - damage) {
            (true, 0) => writeln!(text, "clean"),
            (true, notes) => writeln!(text, "clean ({notes} notes)"),
            (false, _) => writeln!(text, "not clean: {} findings of damage", damage + self.findings_left_out),
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

/// What the threads count.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) frames: Counter,
    pub(crate) planes: Counter,
    pub(crate) payload_bytes: Counter,
    pub(crate) bytes: Counter,
}
