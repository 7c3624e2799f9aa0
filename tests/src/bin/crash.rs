//! `crash sim`: crash cases on simulated devices. `crash mutants`: faults planted in the engine, which `sim` must find.
//! `crash soak`: all layers in turn, for hours. `crash kill`: processes killed on the real driver. `crash replay`:
//! power failures under real file systems.

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
    /// Random histories on simulated devices, each cut by power failures and compared with a model.
    Sim {
        /// Cases; one seed is one case.
        #[arg(long, default_value_t = 10_000)]
        cases: u64,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Failures after which to stop.
        #[arg(long, default_value_t = 5)]
        failures: usize,
        /// Threads; 0 for one per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
        /// One line of JSON at the end instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Faults planted in the engine: each must be found.
    Mutants {
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Writes the smallest history that finds each into this directory.
        #[arg(long)]
        record: Option<PathBuf>,
    },
    /// Processes on the real driver, killed at any moment; their stores checked, opened and compared.
    Kill {
        /// Kills.
        #[arg(long, default_value_t = 500)]
        cycles: u64,
        /// Where the stores lie; they go at the end.
        #[arg(long, default_value = "/tmp")]
        dir: PathBuf,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Processes at a time; 0 for two per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
    },
    /// Power failures of a block device under ext4 and xfs: what it may have kept is mounted, checked, opened and
    /// compared. Takes root.
    Replay {
        /// Images.
        #[arg(long, default_value_t = 500)]
        images: u64,
        /// First seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// A fault planted in the engine, by its name in `mutants`: the run must fail.
        #[arg(long)]
        mutant: Option<String>,
    },
    /// Every layer in turn with seeds from the clock, for as long as asked: sim, kill, replay (where root) and the
    /// model.
    ///
    /// What fails is kept as a file: a simulated case as a history for `crash history`, everything else with its seed
    /// and the command that repeats it. Ctrl-C ends the run early.
    #[command(after_help = "Example: crash soak --hours 8 --keep found --dir /mnt/scratch --json")]
    Soak {
        /// Hours, as a decimal number. The share of work that is under way at the end is finished.
        #[arg(long)]
        hours: f64,
        /// Directory for what fails.
        #[arg(long, default_value = "soak")]
        keep: PathBuf,
        /// Directory for the stores of killed processes; they go at the end.
        #[arg(long, default_value = "/tmp")]
        dir: PathBuf,
        /// First seed; from the clock when left out.
        #[arg(long)]
        seed: Option<u64>,
        /// Threads; 0 for one per core.
        #[arg(long, default_value_t = 0)]
        jobs: usize,
        /// Ends with one line of JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// The process that `kill` kills.
    #[command(hide = true)]
    Worker {
        /// Decides what it does.
        seed: u64,
        /// First new name.
        next: u64,
        /// Devices.
        devices: usize,
        /// Their parent.
        dir: PathBuf,
    },
    /// Histories kept as files, each run on devices that behave in many ways.
    History {
        /// Files.
        files: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    // What panics is a failure of its case and reported with it.
    std::panic::set_hook(Box::new(|_| {}));
    let good = match Arguments::parse().command {
        Command::Sim { cases, seed, failures, jobs, json } => simulate(cases, seed, failures, cores(jobs), json),
        Command::Mutants { seed, record } => plant(seed, record.as_deref()),
        Command::History { files } => histories(&files),
        Command::Kill { cycles, dir, seed, jobs } => kill_processes(cycles, dir, seed, jobs),
        Command::Replay { images, seed, mutant } => replay_images(images, seed, mutant.as_deref()),
        Command::Soak { hours, keep, dir, seed, jobs, json } => soak_for(hours, keep, dir, seed, cores(jobs), json),
        Command::Worker { seed, next, devices, dir } => {
            let job = Job { dirs: device_dirs(&dir, devices), seed, next };
            kill::worker(&job).inspect_err(|e| eprintln!("{e}")).is_ok()
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cores(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Seconds of computing that this process has used.
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
                    "FAILED {failure}\n  minimised to {steps} steps in {rounds} rounds, {:?}, layout {layout:?}, {} segment pages, {:?}:\n  {smallest}",
                    case.regime, case.segment_pages, case.geometry
                );
                let why = failure.what.lines().next().unwrap_or_default().to_owned();
                eprintln!("  to keep it: {}", History { why, mutant: None, case }.text());
            }
            None => eprintln!("FAILED {failure}\n  and did not fail again: something is not decided by the seed"),
        }
    }
    if json {
        let report = serde_json::json!({
            "passed": passed, "failed": failures.len(), "first_seed": seed, "seconds": seconds, "cpu_seconds": cpu, "cases_per_minute": per_minute, "cases_per_minute_of_one_core": per_core, "jobs": jobs,
            "failed_seeds": failures.iter().map(|failure| failure.seed).collect::<Vec<_>>(),
            "operations": coverage.operations, "crashes": coverage.crashes, "trace": format!("{:016x}", coverage.traces), "seen": coverage.seen, "never_seen": missing,
        });
        println!("{report}");
    } else {
        println!("{coverage}");
        if !missing.is_empty() {
            println!("never seen: {}", missing.join(", "));
        }
        println!(
            "{seconds:.1} s, {per_minute:.0} cases a minute on {jobs} threads, {per_core:.0} a minute of computing\n{passed} passed, {} failed",
            failures.len()
        );
    }
    failures.is_empty() && missing.is_empty()
}

/// Set by Ctrl-C: what is under way ends, and everything is put away.
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
    let outcome = kill::run(&kill::Plan { cycles, dir, seed, jobs, program }, &STOP);
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

/// A first seed from the clock: microseconds, so that runs that follow each other share none.
fn seed_from_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64
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
    let outcome = soak::run(&soak::Plan { time, seed, keep, dir, jobs, program }, &STOP, |line| eprintln!("{line}"));
    let failed: u64 = outcome.layers.values().map(|done| done.failed).sum();
    let missing = outcome.coverage.missing();
    if json {
        let layer = |done: &soak::Done| serde_json::json!({ "passed": done.passed, "failed": done.failed, "seconds": done.seconds });
        let layers: serde_json::Map<_, _> =
            outcome.layers.iter().map(|(name, done)| ((*name).to_owned(), layer(done))).collect();
        let report = serde_json::json!({
            "hours": hours, "first_seed": seed, "jobs": jobs, "layers": layers, "skipped": outcome.skipped, "failed": failed,
            "kept": outcome.kept, "never_seen": missing,
        });
        println!("{report}");
    } else {
        for (name, soak::Done { passed, failed, seconds }) in &outcome.layers {
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
            eprintln!("there is no planted fault {name}");
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
        println!("skipped: {missing}, there is no mkfs.{missing}");
    }
    end_on_interrupt();
    let start = Instant::now();
    let outcome = replay::run(&replay::Plan { images, seed, file_systems, mutant }, &STOP);
    let seconds = start.elapsed().as_secs_f64();
    outcome.failures.iter().for_each(|failure| println!("FAILED {failure}"));
    outcome.by_file_system.iter().for_each(|(name, count)| println!("{name}: {count} images"));
    println!(
        "{} recordings of {} requests, {} with a failed write or flush; {} images that the file system refused after it\n{seconds:.1} s, {:.0} images a minute",
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

fn plant(seed: u64, directory: Option<&Path>) -> bool {
    let outcomes = mutants(seed);
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
