//! The command line of the crash tests.
//!
//! - `crash sim` runs crash cases on simulated devices.
//! - `crash mutants` plants faults in the engine; the simulator must find each.
//! - `crash kill` kills processes that use the real driver.
//! - `crash replay` cuts the power of a block device under real file systems.
//! - `crash soak` runs all of them for hours.
//! - `crash history` runs histories that are kept as files.
//!
//! A panic is a failure of its case. The process exits with a failure if any case fails.

use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv_tests::disk::device_dirs;
use stratakv_tests::real::{Job, kill, replay};
use stratakv_tests::sim::{
    Case, Coverage, Failure, History, MutantOutcome, minimise, mutants, named, run_many, with_mutant,
};
use stratakv_tests::soak;

/// Crash tests of stratakv.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs random histories on simulated devices, cuts each by power failures, and compares it with a model.
    Sim {
        /// Number of cases; one seed is one case.
        #[arg(long, default_value_t = 10_000)]
        cases: u64,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Number of failures after which to stop.
        #[arg(long, default_value_t = 5)]
        failures: usize,
        /// Threads; 0 for one per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
        /// Ends with one line of JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Plants faults in the engine; the simulator must find each.
    #[command(after_help = "Example: crash mutants --seed 7 --only CopyNotHealed,EvictedByHalves")]
    Mutants {
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Writes the smallest history that finds each fault into this directory.
        #[arg(long)]
        record: Option<PathBuf>,
        /// The names of the faults to plant, separated by commas; all if left out.
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
    },
    /// Kills processes on the real driver at any moment, then checks, opens and compares their stores.
    Kill {
        /// Number of kills.
        #[arg(long, default_value_t = 500)]
        cycles: u64,
        /// Directory for the stores; they are deleted at the end.
        #[arg(long, default_value = "/tmp")]
        dir: PathBuf,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Number of processes at a time; 0 for two per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
    },
    /// Cuts the power of a block device under ext4 and xfs. Mounts, checks, opens and compares images that the device
    /// may have kept. Needs root.
    Replay {
        /// Number of images.
        #[arg(long, default_value_t = 500)]
        images: u64,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// A fault to plant in the engine, by its name in `mutants`; the run must fail.
        #[arg(long)]
        mutant: Option<String>,
    },
    /// Runs sim, kill, replay (if root) and the model tests one after another for hours, with seeds from the clock.
    ///
    /// Each failure is kept as a file. A simulated case is kept as a history for `crash history`, any other failure
    /// with its seed and the command that repeats it. Ctrl-C ends the run early.
    #[command(after_help = "Example: crash soak --hours 8 --keep found --dir /mnt/scratch --json")]
    Soak {
        /// Hours, as a decimal number. The run finishes the share of work during which the time ends.
        #[arg(long)]
        hours: f64,
        /// Directory for failures.
        #[arg(long, default_value = "soak")]
        keep: PathBuf,
        /// Directory for the stores of killed processes; they are deleted at the end.
        #[arg(long, default_value = "/tmp")]
        dir: PathBuf,
        /// First seed; from the clock if left out.
        #[arg(long)]
        seed: Option<u64>,
        /// Threads; 0 for one per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
        /// Ends with one line of JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Works on a store until `kill` kills this process.
    #[command(hide = true)]
    Worker {
        /// Seed of everything the worker does.
        seed: u64,
        /// First name for new sequences.
        next: u64,
        /// Number of devices.
        devices: usize,
        /// Parent directory of the devices.
        dir: PathBuf,
        /// `limited` if the store has a capacity.
        limited: Option<String>,
    },
    /// Runs histories that are kept as files, each on devices that behave in many ways.
    History {
        /// Files to run.
        files: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    // A panic is reported with the failure of its case.
    std::panic::set_hook(Box::new(|_| {}));
    let good = match Arguments::parse().command {
        Command::Sim { cases, seed, failures, jobs, json } => simulate(cases, seed, failures, cores(jobs), json),
        Command::Mutants { seed, record, only } => plant(seed, record.as_deref(), &only),
        Command::History { files } => histories(&files),
        Command::Kill { cycles, dir, seed, jobs } => kill_processes(cycles, dir, seed, jobs),
        Command::Replay { images, seed, mutant } => replay_images(images, seed, mutant.as_deref()),
        Command::Soak { hours, keep, dir, seed, jobs, json } => soak_for(hours, keep, dir, seed, cores(jobs), json),
        Command::Worker { seed, next, devices, dir, limited } => {
            let job = Job { dirs: device_dirs(&dir, devices), seed, next, limited: limited.is_some() };
            kill::worker(&job).inspect_err(|e| eprintln!("{e}")).is_ok()
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cores(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Returns the CPU seconds that this process has used.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn simulate(cases: u64, seed: u64, failures_max: usize, jobs: usize, json: bool) -> bool {
    let (start, before) = (Instant::now(), cpu_seconds());
    let mut coverage = Coverage::default();
    let (passed, failures) = run_many(seed, cases, &mut coverage, failures_max, jobs);
    let seconds = start.elapsed().as_secs_f64();
    let cpu = cpu_seconds() - before;
    let per_core = coverage.cases as f64 * 60.0 / cpu;
    let missing = coverage.missing();
    let per_minute = coverage.cases as f64 * 60.0 / seconds;
    for failure in &failures {
        match minimise(&Case::generate(failure.seed)) {
            Some((case, smallest)) => {
                let steps: usize = case.rounds.iter().map(|round| round.operations.len()).sum();
                let (rounds, layout) = (case.rounds.len(), case.layout);
                eprintln!(
                    "FAILED {failure}\n  minimised to {steps} steps in {rounds} rounds, {:?}, layout {layout:?}, \
                     {} segment pages, {:?}:\n  {smallest}",
                    case.regime, case.segment_pages, case.geometry
                );
                let why = failure.what.lines().next().unwrap_or_default().to_owned();
                eprintln!("  to keep it: {}", History { why, mutant: None, case }.text());
            }
            None => eprintln!("FAILED {failure}\n  and did not fail again: the seed does not decide everything"),
        }
    }
    if json {
        let report = serde_json::json!({
            "passed": passed, "failed": failures.len(), "first_seed": seed, "seconds": seconds, "cpu_seconds": cpu,
            "cases_per_minute": per_minute, "cases_per_minute_of_one_core": per_core, "jobs": jobs,
            "failed_seeds": failures.iter().map(|failure| failure.seed).collect::<Vec<_>>(),
            "operations": coverage.operations, "crashes": coverage.crashes,
            "trace": format!("{:016x}", coverage.traces), "longest": coverage.longest,
            "seen": coverage.seen, "never_seen": missing,
        });
        println!("{report}");
    } else {
        println!("{coverage}");
        if !missing.is_empty() {
            println!("never seen: {}", missing.join(", "));
        }
        println!(
            "{seconds:.1} s, {per_minute:.0} cases a minute on {jobs} threads, {per_core:.0} a minute of CPU time\n\
             {passed} passed, {} failed",
            failures.len()
        );
    }
    failures.is_empty() && missing.is_empty()
}

/// True after Ctrl-C. The work in progress ends and cleans up.
static STOP: AtomicBool = AtomicBool::new(false);

fn end_on_interrupt() {
    if let Err(e) = ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed)) {
        eprintln!("an interrupt will not clean up: {e}");
    }
}

fn kill_processes(cycles: u64, dir: PathBuf, seed: u64, jobs: usize) -> bool {
    end_on_interrupt();
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(e) => {
            eprintln!("this program: {e}");
            return false;
        }
    };
    let start = Instant::now();
    let jobs = if jobs > 0 { jobs } else { 2 * cores(0) };
    let outcome = kill::run(&kill::KillPlan { cycles, dir, seed, jobs, program }, &STOP);
    let seconds = start.elapsed().as_secs_f64();
    outcome.failures.iter().for_each(|failure| println!("FAILED {failure}"));
    println!(
        "{} durable commits acknowledged, {} kills while the store opened\n{seconds:.1} s, {:.0} kills a minute",
        outcome.commits,
        outcome.early,
        outcome.passed as f64 * 60.0 / seconds
    );
    println!("{} passed, {} failed", outcome.passed, outcome.failures.len());
    outcome.failures.is_empty() && outcome.passed == cycles
}

/// Returns a first seed from the clock, in microseconds, so that consecutive runs share no seed.
fn seed_from_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64
}

fn totals_json(soak::LayerTotals { passed, failed, seconds }: &soak::LayerTotals) -> serde_json::Value {
    serde_json::json!({ "passed": passed, "failed": failed, "seconds": seconds })
}

fn soak_for(hours: f64, keep: PathBuf, dir: PathBuf, seed: Option<u64>, jobs: usize, json: bool) -> bool {
    let time = match Duration::try_from_secs_f64(hours * 3600.0) {
        Ok(time) => time,
        Err(e) => {
            eprintln!("--hours {hours}: {e}");
            return false;
        }
    };
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(e) => {
            eprintln!("this program: {e}");
            return false;
        }
    };
    end_on_interrupt();
    let seed = seed.unwrap_or_else(seed_from_clock);
    eprintln!("first seed {seed}");
    let outcome =
        soak::run(&soak::SoakPlan { time, seed, keep, dir, jobs, program }, &STOP, |line| eprintln!("{line}"));
    let failed: u64 = outcome.layers.values().map(|done| done.failed).sum();
    let missing = outcome.coverage.missing();
    if json {
        let layers: serde_json::Map<_, _> =
            outcome.layers.iter().map(|(name, totals)| ((*name).to_owned(), totals_json(totals))).collect();
        let report = serde_json::json!({
            "hours": hours, "first_seed": seed, "jobs": jobs, "layers": layers, "skipped": outcome.skipped,
            "failed": failed, "kept": outcome.kept, "never_seen": missing,
        });
        println!("{report}");
    } else {
        for (name, soak::LayerTotals { passed, failed, seconds }) in &outcome.layers {
            println!("{name}: {passed} passed, {failed} failed, {seconds:.0} s");
        }
        if !missing.is_empty() {
            println!("never seen: {}", missing.join(", "));
        }
        let passed: u64 = outcome.layers.values().map(|done| done.passed).sum();
        println!("{passed} passed, {failed} failed");
    }
    failed == 0 && missing.is_empty()
}

fn replay_images(images: u64, seed: u64, mutant: Option<&str>) -> bool {
    let mutant = match mutant.map(|name| named(name).ok_or(name)).transpose() {
        Ok(mutant) => mutant,
        Err(name) => {
            eprintln!("replay: no planted fault is named {name}");
            return false;
        }
    };
    let file_systems = match replay::possible() {
        Ok(file_systems) => file_systems,
        Err(why) => {
            println!("skipped: {why}");
            return true;
        }
    };
    for missing in ["ext4", "xfs"].iter().filter(|fs| !file_systems.iter().any(|found| found == *fs)) {
        println!("skipped: {missing}, because mkfs.{missing} is missing");
    }
    end_on_interrupt();
    let start = Instant::now();
    let outcome = replay::run(&replay::ReplayPlan { images, seed, file_systems, mutant }, &STOP);
    let seconds = start.elapsed().as_secs_f64();
    outcome.failures.iter().for_each(|failure| println!("FAILED {failure}"));
    outcome.by_file_system.iter().for_each(|(name, count)| println!("{name}: {count} images"));
    println!(
        "{} recordings of {} requests, {} with a failed write or flush; {} images that the file system \
         refused\n{seconds:.1} s, {:.0} images a minute",
        outcome.recordings.0,
        outcome.entries,
        outcome.recordings.1,
        outcome.unmountable,
        outcome.passed as f64 * 60.0 / seconds
    );
    println!("{} passed, {} failed", outcome.passed, outcome.failures.len());
    outcome.failures.is_empty() && outcome.passed == images
}

fn histories(files: &[PathBuf]) -> bool {
    let mut failed = 0;
    for file in files {
        if let Err(e) = History::read(file).and_then(|history| history.check()) {
            failed += 1;
            println!("{}: {e}", file.display());
        }
    }
    println!("{} passed, {failed} failed", files.len() - failed);
    failed == 0
}

fn record(directory: &Path, outcome: &MutantOutcome, failure: &Failure) {
    let smallest = with_mutant(outcome.mutant, || minimise(&Case::generate(failure.seed)));
    let Some((case, smallest)) = smallest else { return };
    let why = smallest.what.lines().next().unwrap_or_default().to_owned();
    let name = format!("{:?}", outcome.mutant);
    let history = History { why, mutant: Some(name.clone()), case };
    let file = directory.join(format!("{name}.json"));
    if let Err(e) = std::fs::write(&file, history.text()) {
        println!("{}: {e}", file.display());
    }
}

fn plant(seed: u64, directory: Option<&Path>, names: &[String]) -> bool {
    if let Some(name) = names.iter().find(|name| named(name).is_none()) {
        eprintln!("mutants: no planted fault is named {name}");
        return false;
    }
    let outcomes = mutants(seed, names);
    for outcome in &outcomes {
        match &outcome.found {
            Some((cases, failure)) => {
                if let Some(directory) = directory {
                    record(directory, outcome, failure);
                }
                let what = failure.what.lines().next().unwrap_or_default();
                println!(
                    "{:?}: found in case {cases} of {}: seed {}: {what}",
                    outcome.mutant, outcome.budget, failure.seed
                );
            }
            None => println!("{:?}: NOT FOUND in {} cases", outcome.mutant, outcome.budget),
        }
    }
    let found = outcomes.iter().filter(|outcome| outcome.found.is_some()).count();
    println!("{found} passed, {} failed", outcomes.len() - found);
    found == outcomes.len()
}
