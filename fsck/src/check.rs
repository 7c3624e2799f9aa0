//! The check of a whole store: runs the steps in order and collects their findings into one [`Report`].
//!
//! A step runs only if the steps before it found something to read. A damaged store therefore still gives a report.
//! `complete` is false if segments and frames could not be checked.

use crate::devices::{self, Devices};
use crate::error::{CheckError, EXIT_CLEAN};
use crate::finding::{Code, Finding, Findings, Sink};
use crate::frames::{Checker, FrameInfo, ReadContext};
use crate::manifest::{self, Generation, Manifest};
use crate::options::{Depth, Options};
use crate::pool_map::PoolMap;
use crate::replay::{Replay, State, StoreLimits};
use crate::report::{CheckTotals, Counts, Progress, Report};
use crate::segments::SegmentJob;
use crate::stats::StoreStats;
use crate::{adapters, clusters, frames, lost_frames, segments, sequences};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;
use stratakv_format::PAGE_BYTES;
use stratakv_format::manifest::{Batch, BatchPlace};

/// Checks a store. `dirs` holds all of its device directories, in any order.
///
/// # Errors
/// Returns a [`CheckError`] if the store cannot be checked at all. Everything else is a finding of the report, missing
/// devices included.
pub fn check(dirs: &[PathBuf], options: &Options, progress: &dyn Progress) -> Result<Report, CheckError> {
    let started = Instant::now();
    let sink = Sink::new(options.findings_max);
    let mut totals = CheckTotals { headers_only: options.headers_only, ..CheckTotals::default() };
    let (mut state, mut pools, mut stats) = (State::default(), PoolMap::default(), StoreStats::default());
    if let Some(devices) = devices::open(dirs, &sink)? {
        totals.devices = devices.devices.len() as u64;
        let replayed = check_manifest(&devices, &mut totals, &sink);
        let has_left = |device| replayed.as_ref().is_some_and(|state| state.has_left(device));
        devices::report_missing(&devices, &has_left, &sink);
        if let Some(replayed) = replayed {
            state = replayed;
            totals.complete = true;
            let inputs = FrameInputs { devices: &devices, state: &state, options, progress };
            (pools, stats) = check_frames(&inputs, &mut totals, &sink);
        }
    }
    let mut findings = sink.into_findings();
    if options.show_keys {
        add_keys(&mut findings, &state);
    }
    let place = |f: &Finding| (f.device, f.path.clone(), f.file.clone(), f.offset, f.code, f.sequence, f.layer);
    findings.list.sort_by_cached_key(place);
    totals.seconds = started.elapsed().as_secs_f64();
    let exit_code = findings.exit_code();
    Ok(Report {
        clean: exit_code == EXIT_CLEAN,
        findings: findings.list,
        findings_left_out: findings.left_out,
        checked: totals,
        pools,
        stats,
        exit_code,
    })
}

/// Adds the key to each finding that names a sequence.
fn add_keys(findings: &mut Findings, state: &State) {
    for finding in &mut findings.list {
        let sequence = finding.sequence.and_then(|id| state.sequences().get(&id));
        finding.key = sequence.map(|sequence| sequence.key.escape_ascii().to_string());
    }
}

/// Checks the manifest generation in force, and follows each `Superseded` record to the next generation.
///
/// Returns `None` if the state of the store cannot be known.
fn check_manifest(devices: &Devices, totals: &mut CheckTotals, sink: &Sink) -> Option<State> {
    let mut generation = manifest::named_by_superblocks(devices, sink);
    let (mut in_force, mut previous) = (BTreeSet::new(), None);
    let state = loop {
        in_force.insert(generation.number);
        let Some(manifest) = manifest::walk(devices, generation, previous, sink) else { break None };
        let replay = replay_batches(devices, &manifest, sink);
        totals.manifest_batches += manifest.batches.len() as u64;
        totals.manifest_records += replay.state.records;
        totals.manifest_bytes += manifest.bytes;
        if !replay.has_checkpoint() {
            let text = format!("manifest generation {} has no complete checkpoint", generation.number);
            sink.push(Finding::damage(Code::ManifestBatch, text).in_file(&manifest.copies[0].place));
            break None;
        }
        match replay.state.superseded {
            Some((number, nonce)) if number > generation.number => {
                previous = Some(generation.number);
                generation = Generation { number, nonce };
            }
            _ => break manifest.complete.then_some(replay.state),
        }
    };
    manifest::report_leftovers(devices, &in_force, sink);
    state
}

/// Applies every batch of one generation that takes effect.
fn replay_batches<'a>(devices: &Devices, manifest: &Manifest, sink: &'a Sink) -> Replay<'a> {
    let generation = manifest.generation;
    let limits = StoreLimits {
        devices: devices.count,
        segment_pages: devices.slot().segment_bytes.get() / PAGE_BYTES as u64,
        generation: generation.number,
        replicas: manifest.replicas,
        codecs: manifest.codecs,
        pools: manifest.pools,
    };
    let mut replay = Replay::new(limits, sink);
    for (index, batch_ref) in manifest.batches.iter().enumerate() {
        let (file, bytes) = manifest.read(batch_ref, sink);
        let place = BatchPlace { generation: generation.number, nonce: generation.nonce, sequence: batch_ref.sequence };
        let length = bytes.len() as u64;
        match Batch::verify(&bytes, &place) {
            Ok(batch) => {
                let is_last = index + 1 == manifest.batches.len();
                replay.apply_batch(&batch, &file.place, batch_ref.offset, length, is_last);
            }
            // The walk has verified this batch before, so the device returned other bytes this time.
            Err(e) => sink.push(Finding::format(Code::ManifestBatch, &e).at(&file.place, batch_ref.offset, length)),
        }
    }
    replay
}

/// The inputs of [`check_frames`].
struct FrameInputs<'a> {
    devices: &'a Devices,
    state: &'a State,
    options: &'a Options,
    progress: &'a dyn Progress,
}

/// Checks segments and frames on several threads, then sequences, adapters and clusters on this one. Returns the map of
/// pools, and the statistics of the store.
fn check_frames(inputs: &FrameInputs<'_>, totals: &mut CheckTotals, sink: &Sink) -> (PoolMap, StoreStats) {
    let FrameInputs { devices, state, options, progress } = *inputs;
    let counts = Counts::default();
    let (checksum, depth) = (devices.slot().checksum(), options.depth());
    let context = ReadContext { checksum, depth, counts: &counts, sink, progress };
    let checker = Checker { store_id: devices.store_id, state, context };
    let jobs = segments::plan_jobs(devices, state, sink);
    segments::report_leftovers(devices, state, sink);
    let frames = jobs.iter().flat_map(|job| &job.frames);
    progress.start(frames.map(|(_, frame)| checker.read_bytes(frame)).sum());
    let infos = read_frames(devices, &checker, &jobs, options.threads);
    lost_frames::check(devices, state, sink);
    sequences::check(devices, state, &infos, sink);
    if depth > Depth::Headers {
        adapters::check(devices, state, &infos, sink);
    }
    let found = clusters::check(devices, state, &infos, depth, sink);
    totals.clusters = found.totals;
    totals.segments = jobs.len() as u64;
    let adapters = state.sequences().values().filter(|sequence| sequence.adapter.is_some()).count();
    totals.adapters = adapters as u64;
    totals.sequences = (state.sequences().len() - adapters) as u64;
    totals.frames = counts.frames.get();
    totals.planes = counts.planes.get();
    totals.summaries = counts.summaries.get();
    totals.payload_bytes = counts.payload_bytes.get();
    totals.bytes = counts.bytes.get();
    let pools = PoolMap::new(&jobs, &infos, &found.named, found.directories);
    let stats = StoreStats::new(devices, state, &jobs, &infos, &pools);
    (pools, stats)
}

/// Checks every frame of every job, and returns the content of each frame whose header is valid.
fn read_frames(
    devices: &Devices,
    checker: &Checker<'_>,
    jobs: &[SegmentJob<'_>],
    threads: usize,
) -> HashMap<u64, FrameInfo> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut infos = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(file) = job.open(devices, checker.context.sink) else { continue };
            for (id, frame) in &job.frames {
                infos.extend(checker.check(job, *id, frame, &file).map(|info| (*id, info)));
            }
        }
        infos
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.clamp(1, 64)).map(|_| scope.spawn(work)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Vec<_>>| match thread.join() {
            Ok(infos) => infos,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let copies = threads.into_iter().flat_map(join).collect();
        frames::merge(copies, devices, checker.state, checker.context.sink)
    })
}
