//! `crash sim`: crash cases on simulated devices. `crash mutants`: faults planted in the engine, which `sim` must find.

use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use stratakv_tests::sim::{Case, Coverage, Failure, History, MutantOutcome, minimise, mutants, run_many, with_mutant};

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
            "operations": coverage.operations, "crashes": coverage.crashes, "seen": coverage.seen, "never_seen": missing,
        });
        println!("{report}");
    } else {
        println!("{coverage}");
        if !missing.is_empty() {
            println!("never seen: {}", missing.join(", "));
        }
        println!(
            "{seconds:.1} s, {per_minute:.0} cases a minute on {jobs} threads\n{passed} passed, {} failed",
            failures.len()
        );
    }
    failures.is_empty() && missing.is_empty()
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
