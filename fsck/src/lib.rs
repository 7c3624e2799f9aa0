//! A second reader of the stratakv format: it shares the format crate with the engine, and nothing else.
//!
//! [`check`] reads every live byte of a store and says what is not as the format demands. It opens nothing for writing and
//! locks the device directories against writers while it reads.
//!
//! ```no_run
//! let report = kvfsck::check(&["/nvme0/kv".into(), "/nvme1/kv".into()], &kvfsck::Options::default(), &())?;
//! for finding in &report.findings {
//!     println!("{finding}");
//! }
//! # Ok::<(), kvfsck::CheckError>(())
//! ```
#![forbid(unsafe_code)]

mod adapters;
pub mod cli;
mod devices;
mod export;
mod finding;
mod frames;
mod io;
mod manifest;
mod overlay;
mod planes;
mod replay;
mod report;
mod segments;
mod sequences;
mod window;

pub use export::{ExportInfo, ExportReport, check_export, check_reader};
pub use finding::{Code, Finding, Severity};
pub use report::{
    Checked, EXIT_CLEAN, EXIT_DAMAGE, EXIT_IN_USE, EXIT_IO, EXIT_UNSUPPORTED, EXIT_USAGE, Progress, Report,
};

use devices::Devices;
use finding::Sink;
use frames::{Checker, FrameInfo};
use replay::{Bounds, Replay, State};
use report::Counts;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{fmt, thread};
use stratakv_format::PAGE_BYTES;
use stratakv_format::error::FormatError;
use stratakv_format::manifest::{Batch, BatchPlace};
use stratakv_format::manifest::{MEMBER_LOST, MEMBER_REMOVED, Member};

/// How to check.
#[derive(Clone, Debug)]
pub struct Options {
    /// Print the keys of sequences in findings. Keys are private: off by default.
    pub show_keys: bool,
    /// Findings kept; more are only counted.
    pub findings_max: usize,
    /// Threads that read segments, at least 1. They mostly wait for disks.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { show_keys: false, findings_max: 10_000, threads: 4 }
    }
}

/// Why a store could not be checked at all.
#[derive(Debug)]
pub enum CheckError {
    /// The directory does not exist, is none, or is no device directory of a store.
    NotAStore {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A writer has the store open.
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A superblock of a version, or with features, that this program does not know.
    Unsupported {
        /// The directory.
        path: PathBuf,
        /// The file in it.
        file: String,
        /// Offset of the slot.
        offset: u64,
        /// What is not known.
        error: FormatError,
    },
    /// The directory cannot be opened, locked or listed.
    Io {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl CheckError {
    /// The exit code of the program.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotAStore { .. } => EXIT_USAGE,
            Self::InUse { .. } => EXIT_IN_USE,
            Self::Unsupported { .. } => EXIT_UNSUPPORTED,
            Self::Io { .. } => EXIT_IO,
        }
    }

    /// A stable name: `not-a-store`, `in-use`, `unsupported`, `io-error`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotAStore { .. } => "not-a-store",
            Self::InUse { .. } => "in-use",
            Self::Unsupported { .. } => "unsupported",
            Self::Io { .. } => "io-error",
        }
    }
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAStore { path, reason } => write!(f, "{}: {reason}", path.display()),
            Self::InUse { path } => write!(f, "{}: the store is in use by a writer; close it first", path.display()),
            Self::Unsupported { path, file, offset, error } => {
                write!(f, "{}/{file} offset {offset}: {error}; a newer kvfsck may know it", path.display())
            }
            Self::Io { path, source } => write!(f, "{}: {source}", path.display()),
        }
    }
}

impl std::error::Error for CheckError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Unsupported { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// Checks the store whose device directories these are, all of them, in any order. Reads only.
///
/// # Errors
/// The store cannot be checked at all: see [`CheckError`]. Everything else, missing devices included, is a finding.
pub fn check(dirs: &[PathBuf], options: &Options, progress: &dyn Progress) -> Result<Report, CheckError> {
    let started = Instant::now();
    let sink = Sink::new(options.findings_max);
    let mut checked = Checked::default();
    let mut state = State::default();
    if let Some(devices) = devices::open(dirs, &sink)? {
        checked.devices = devices.devices.len() as u64;
        let replayed = check_manifest(&devices, &mut checked, &sink);
        let gone = |member: &Member| matches!(member.state, MEMBER_LOST | MEMBER_REMOVED);
        let left = |device| replayed.as_ref().and_then(|state| state.members.get(&device)).is_some_and(gone);
        devices::missing(&devices, &left, &sink);
        if let Some(replayed) = replayed {
            state = replayed;
            checked.complete = true;
            check_frames(&devices, &state, options, &mut checked, &sink, progress);
        }
    }
    let mut collected = sink.into_collected();
    if options.show_keys {
        for finding in &mut collected.findings {
            let sequence = finding.sequence.and_then(|id| state.sequences.get(&id));
            finding.key = sequence.map(|sequence| sequence.key.escape_ascii().to_string());
        }
    }
    let place = |f: &Finding| (f.device, f.path.clone(), f.file.clone(), f.offset, f.code, f.sequence, f.layer);
    collected.findings.sort_by_cached_key(place);
    checked.seconds = started.elapsed().as_secs_f64();
    let exit_code = Report::code(collected.damage, collected.unsupported, collected.io_errors);
    Ok(Report {
        clean: exit_code == EXIT_CLEAN,
        findings: collected.findings,
        findings_left_out: collected.left_out,
        checked,
        exit_code,
    })
}

/// Checks the generation in force and those that it names as successors. `None`: the state cannot be known.
fn check_manifest(devices: &Devices, checked: &mut Checked, sink: &Sink) -> Option<State> {
    let mut generation = manifest::named(devices, sink);
    let (mut in_force, mut previous) = (BTreeSet::new(), None);
    let state = loop {
        in_force.insert(generation.number);
        let Some(manifest) = manifest::walk(devices, generation, previous, sink) else { break None };
        let bounds = Bounds {
            devices: devices.count,
            segment_pages: devices.slot().segment_bytes.get() / PAGE_BYTES as u64,
            generation: generation.number,
            replicas: manifest.replicas,
            codecs: manifest.codecs,
        };
        let mut replay = Replay::new(bounds, sink);
        for (index, batch_ref) in manifest.batches.iter().enumerate() {
            let (file, bytes) = manifest.read(batch_ref, sink);
            let place =
                BatchPlace { generation: generation.number, nonce: generation.nonce, sequence: batch_ref.sequence };
            let length = bytes.len() as u64;
            match Batch::verify(&bytes, &place) {
                Ok(batch) => {
                    let last = index + 1 == manifest.batches.len();
                    replay.batch(&batch, &file.place, batch_ref.offset, length, last);
                }
                // It was good a moment ago.
                Err(e) => sink.push(Finding::format(Code::ManifestBatch, &e).at(&file.place, batch_ref.offset, length)),
            }
        }
        checked.manifest_batches += manifest.batches.len() as u64;
        checked.manifest_records += replay.state.records;
        checked.manifest_bytes += manifest.bytes;
        if !replay.has_checkpoint() {
            let text = format!("the checkpoint of manifest generation {} is not complete", generation.number);
            sink.push(Finding::damage(Code::ManifestBatch, text).in_file(&manifest.copies[0].place));
            break None;
        }
        match replay.state.superseded {
            Some((number, nonce)) if number > generation.number => {
                previous = Some(generation.number);
                generation = manifest::Generation { number, nonce };
            }
            _ => break manifest.complete.then_some(replay.state),
        }
    };
    manifest::leftovers(devices, &in_force, sink);
    state
}

/// Checks segments, frames and sequences.
fn check_frames(
    devices: &Devices,
    state: &State,
    options: &Options,
    checked: &mut Checked,
    sink: &Sink,
    progress: &dyn Progress,
) {
    let counts = Counts::default();
    let checker = Checker {
        store_id: devices.store_id,
        checksum: devices.slot().checksum(),
        state,
        counts: &counts,
        sink,
        progress,
    };
    let jobs = segments::jobs(devices, state, sink);
    segments::leftovers(devices, state, sink);
    let frames = jobs.iter().flat_map(|job| &job.frames);
    progress.start(frames.map(|(_, frame)| frame.location.bytes()).sum());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut infos = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(file) = job.open(devices, sink) else { continue };
            for (id, frame) in &job.frames {
                infos.extend(checker.check(job, *id, frame, &file).map(|info| (*id, info)));
            }
        }
        infos
    };
    let infos: HashMap<u64, FrameInfo> = thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads.clamp(1, 64)).map(|_| scope.spawn(work)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Vec<_>>| match thread.join() {
            Ok(infos) => infos,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut infos: HashMap<u64, FrameInfo> = HashMap::new();
        for (id, info) in threads.into_iter().flat_map(join) {
            // Of several copies one whose adapter is good.
            let better = infos.get(&id).is_none_or(|known| known.adapter.iter().any(|piece| !piece.good));
            if better {
                infos.insert(id, info);
            }
        }
        infos
    });
    sequences::check(devices, state, &infos, sink);
    adapters::check(devices, state, &infos, sink);
    checked.segments = jobs.len() as u64;
    let adapters = state.sequences.values().filter(|sequence| sequence.adapter.is_some()).count();
    checked.adapters = adapters as u64;
    checked.sequences = (state.sequences.len() - adapters) as u64;
    checked.frames = counts.frames.get();
    checked.planes = counts.planes.get();
    checked.payload_bytes = counts.payload_bytes.get();
    checked.bytes = counts.bytes.get();
}
