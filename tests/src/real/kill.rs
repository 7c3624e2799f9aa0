//! Processes on the real driver, killed at any moment: kvfsck, open, compare, and on with the same store.

use super::worker;
use super::{Job, Known, Line, check_store, learn, told};
use crate::disk::{check, device_dirs};
use crate::rng::Rng;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A store is left for a fresh one after this many cycles, so that histories stay short.
const CYCLES_PER_STORE: u64 = 40;

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Kills in all.
    pub cycles: u64,
    /// Where the stores lie; they go at the end.
    pub dir: PathBuf,
    /// First seed.
    pub seed: u64,
    /// Processes at a time.
    pub jobs: usize,
    /// The program that runs a worker as `PROGRAM worker SEED NEXT DEVICES DIR`.
    pub program: PathBuf,
}

/// How it went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Kills after which everything was as acknowledged.
    pub passed: u64,
    /// What was not, each with its seed and the last reports.
    pub failures: Vec<String>,
    /// Durable commits acknowledged.
    pub commits: u64,
    /// Kills before the store was open.
    pub early: u64,
}

/// The program of one worker: reports on standard output until it is killed.
///
/// # Errors
/// Those of the store, as text.
pub fn worker(job: &Job) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let mut report = |line: Line| {
        // The one that listens is gone: nobody is left to work for.
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            std::process::exit(3);
        }
    };
    super::work(job, || false, &mut report).map_err(|e| e.to_string())
}

/// Kills and checks until all is done, something fails, or `stop` is set.
#[must_use]
pub fn run(plan: &Plan, stop: &AtomicBool) -> Outcome {
    let next = AtomicU64::new(0);
    let total = Mutex::new(Outcome::default());
    let stores = plan.cycles.div_ceil(CYCLES_PER_STORE);
    let work = || loop {
        let store = next.fetch_add(1, Ordering::Relaxed);
        let failed = || !total.lock().unwrap_or_else(PoisonError::into_inner).failures.is_empty();
        if store >= stores || stop.load(Ordering::Relaxed) || failed() {
            return;
        }
        let cycles = CYCLES_PER_STORE.min(plan.cycles - store * CYCLES_PER_STORE);
        let own = one_store(plan, plan.seed.wrapping_add(store), cycles, stop);
        let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
        total.passed += own.passed;
        total.commits += own.commits;
        total.early += own.early;
        total.failures.extend(own.failures);
    };
    std::thread::scope(|scope| (0..plan.jobs.max(1)).for_each(|_| drop(scope.spawn(work))));
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn one_store(plan: &Plan, seed: u64, cycles: u64, stop: &AtomicBool) -> Outcome {
    let mut outcome = Outcome::default();
    let root = match tempfile::Builder::new().prefix("stratakv-kill-").tempdir_in(&plan.dir) {
        Ok(root) => root,
        Err(e) => {
            outcome.failures.push(format!("{}: {e}", plan.dir.display()));
            return outcome;
        }
    };
    let mut rng = Rng(seed);
    let devices = 1 + rng.below(2);
    let dirs = device_dirs(root.path(), devices);
    // The store exists: a creation over several devices that is cut short must be emptied by hand.
    if let Err(e) = worker::open(&dirs) {
        outcome.failures.push(format!("seed {seed}: create: {e:?}"));
        return outcome;
    }
    let mut known = BTreeMap::new();
    for cycle in 0..cycles {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let next = known.keys().max().map_or(1, |name| name + 100);
        let ended = cut_short(plan, root.path(), devices, &mut rng, next);
        let checked = ended.and_then(|lines| {
            outcome.early += u64::from(!lines.contains(&Line::Ready));
            outcome.commits += lines.iter().filter(|line| matches!(line, Line::Committed(..))).count() as u64;
            lines.iter().for_each(|line| learn(&mut known, *line));
            verify(&dirs, &mut known, &mut rng).map_err(|e| {
                let last: Vec<String> = lines.iter().rev().take(12).rev().map(ToString::to_string).collect();
                format!("{e}\n    {}", last.join("\n    "))
            })
        });
        match checked {
            Ok(()) => outcome.passed += 1,
            Err(e) => {
                outcome.failures.push(format!("seed {seed}, cycle {cycle} on {devices} devices: {e}"));
                break;
            }
        }
    }
    outcome
}

/// Runs a worker and kills it at any moment: mostly in its work, sometimes while it opens the store.
fn cut_short(plan: &Plan, root: &Path, devices: usize, rng: &mut Rng, next: u64) -> Result<Vec<Line>, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", plan.program.display());
    let mut child = Command::new(&plan.program)
        .args(["worker", &rng.next_u64().to_string(), &next.to_string(), &devices.to_string()])
        .arg(root)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let (early, wait) = (rng.below(5) == 0, rng.below(40_000) as u64);
    let mut text = String::new();
    if let Some(out) = child.stdout.take() {
        let mut out = BufReader::new(out);
        if early {
            std::thread::sleep(Duration::from_micros(wait / 2));
        } else {
            // Ready, or the end of one that failed.
            let _ = out.read_line(&mut text);
            std::thread::sleep(Duration::from_micros(wait));
        }
        let ended = child.try_wait().map_err(failed)?;
        child.kill().map_err(failed)?;
        child.wait().map_err(failed)?;
        let mut rest = Vec::new();
        let _ = out.read_to_end(&mut rest);
        text.push_str(&String::from_utf8_lossy(&rest));
        if let Some(status) = ended {
            let mut errors = String::new();
            let _ = child.stderr.take().map(|mut e| e.read_to_string(&mut errors));
            return Err(format!("the worker ended by itself, {status}: {errors}"));
        }
    }
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

fn verify(dirs: &[PathBuf], known: &mut BTreeMap<u64, Known>, rng: &mut Rng) -> Result<(), String> {
    let clean = |when: &str| {
        let report = told(|| check(dirs))?;
        if report.clean { Ok(()) } else { Err(format!("kvfsck {when}:\n{}", report.to_text())) }
    };
    if rng.below(4) == 0 {
        clean("after the kill")?;
    }
    // Sometimes the next worker finds what the last one left.
    if rng.below(4) > 0 {
        let store = worker::open(dirs).map_err(|e| format!("open: {e:?}"))?;
        told(|| check_store(&store, known))?;
        drop(store);
        if rng.below(8) == 0 {
            clean("after it was opened again")?;
        }
    }
    Ok(())
}
