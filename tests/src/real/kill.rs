//! Kills processes on the real driver at any moment.
//!
//! After a kill, kvfsck may check the store, and an open may compare it with the ledger. The next worker then continues
//! with the same store.

use super::worker;
use super::{Job, LedgerEntry, WorkerReport, apply_report, catch_panic, check_store};
use crate::disk::{check, device_dirs};
use crate::rng::Rng;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A new store replaces the old one after this many cycles, so that histories stay short.
const CYCLES_PER_STORE: u64 = 40;

/// The settings of a kill run.
#[derive(Clone, Debug)]
pub struct KillPlan {
    /// The number of kills.
    pub cycles: u64,
    /// The directory for the stores. They are deleted at the end.
    pub dir: PathBuf,
    /// The first seed.
    pub seed: u64,
    /// The number of processes at a time.
    pub jobs: usize,
    /// The program that runs a worker as `PROGRAM worker SEED NEXT DEVICES DIR [limited]`.
    pub program: PathBuf,
}

/// The result of a kill run.
#[derive(Clone, Debug, Default)]
pub struct KillReport {
    /// The kills after which the store held everything acknowledged.
    pub passed: u64,
    /// The failures, each with its seed and the last reports.
    pub failures: Vec<String>,
    /// The acknowledged durable commits.
    pub commits: u64,
    /// The kills before the store was open.
    pub early: u64,
}

/// Runs one worker. It reports on standard output until it is killed.
///
/// # Errors
/// An operation of the store fails; the error is its text.
pub fn worker(job: &Job) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let mut report = |line: WorkerReport| {
        // The parent process is gone, so the worker exits.
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            std::process::exit(3);
        }
    };
    super::work(job, || false, &mut report).map_err(|e| e.to_string())
}

/// Kills and checks until all cycles are done, a check fails, or `stop` is set.
#[must_use]
pub fn run(plan: &KillPlan, stop: &AtomicBool) -> KillReport {
    let next = AtomicU64::new(0);
    let total = Mutex::new(KillReport::default());
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

fn one_store(plan: &KillPlan, seed: u64, cycles: u64, stop: &AtomicBool) -> KillReport {
    let mut outcome = KillReport::default();
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
    let limited = rng.below(3) == 0;
    // The store is created before the first kill, so that every kill meets a store.
    if let Err(e) = worker::open(&dirs, limited) {
        outcome.failures.push(format!("seed {seed}: create: {e:?}"));
        return outcome;
    }
    let mut known = BTreeMap::new();
    for cycle in 0..cycles {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let next = known.keys().max().map_or(1, |name| name + 100);
        let ended = cut_short(plan, root.path(), (devices, limited), &mut rng, next);
        let checked = ended.and_then(|lines| {
            outcome.early += u64::from(!lines.contains(&WorkerReport::Ready));
            outcome.commits += lines.iter().filter(|line| matches!(line, WorkerReport::Committed(..))).count() as u64;
            lines.iter().for_each(|line| apply_report(&mut known, *line));
            verify((&dirs, limited), &mut known, &mut rng).map_err(|e| {
                let last: Vec<String> = lines.iter().rev().take(12).rev().map(ToString::to_string).collect();
                format!("{e}\n    {}", last.join("\n    "))
            })
        });
        match checked {
            Ok(()) => outcome.passed += 1,
            Err(e) => {
                let kind = if limited { "with a capacity" } else { "without a capacity" };
                outcome.failures.push(format!("seed {seed}, cycle {cycle} on {devices} devices {kind}: {e}"));
                break;
            }
        }
    }
    outcome
}

/// Runs a worker and kills it: four times in five during its work, otherwise while it may still open the store.
fn cut_short(
    plan: &KillPlan,
    root: &Path,
    (devices, limited): (usize, bool),
    rng: &mut Rng,
    next: u64,
) -> Result<Vec<WorkerReport>, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", plan.program.display());
    let mut child = Command::new(&plan.program)
        .args(["worker", &rng.next_u64().to_string(), &next.to_string(), &devices.to_string()])
        .arg(root)
        .args(limited.then_some("limited"))
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
            // The line is `Ready`, or the output ends because the worker failed.
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

fn verify(
    (dirs, limited): (&[PathBuf], bool),
    known: &mut BTreeMap<u64, LedgerEntry>,
    rng: &mut Rng,
) -> Result<(), String> {
    let clean = |when: &str| {
        let report = catch_panic(|| check(dirs))?;
        if report.clean { Ok(()) } else { Err(format!("kvfsck {when}:\n{}", report.to_text())) }
    };
    if rng.below(4) == 0 {
        clean("after the kill")?;
    }
    // One time in four the check is skipped, so that the next worker recovers the store itself.
    if rng.below(4) > 0 {
        let store = worker::open(dirs, limited).map_err(|e| format!("open: {e:?}"))?;
        catch_panic(|| check_store(&store, known, limited))?;
        drop(store);
        if rng.below(8) == 0 {
            clean("after it was opened again")?;
        }
    }
    Ok(())
}
