//! `crash sim`: crash cases on simulated devices. `crash mutants`: faults planted in the engine, which `sim` must find.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use std::time::Instant;
use stratakv_tests::sim::{Case, Coverage, minimise, mutants, run_many};

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
    },
}

fn main() -> ExitCode {
    // What panics is a failure of its case and reported with it.
    std::panic::set_hook(Box::new(|_| {}));
    let good = match Arguments::parse().command {
        Command::Sim { cases, seed, failures, jobs, json } => simulate(cases, seed, failures, cores(jobs), json),
        Command::Mutants { seed } => plant(seed),
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cores(jobs: usize) -> usize {
    if jobs > 0 { jobs } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

fn simulate(cases: u64, seed: u64, failures_max: usize, jobs: usize, json: bool) -> bool {
    let start = Instant::now();
    let mut coverage = Coverage::default();
    let (passed, failures) = run_many(seed, cases, &mut coverage, failures_max, jobs);
    let seconds = start.elapsed().as_secs_f64();
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
            }
            None => eprintln!("FAILED {failure}\n  and did not fail again: something is not decided by the seed"),
        }
    }
    if json {
        let report = serde_json::json!({
            "passed": passed, "failed": failures.len(), "first_seed": seed, "seconds": seconds, "cases_per_minute": per_minute, "jobs": jobs,
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

fn plant(seed: u64) -> bool {
    let outcomes = mutants(seed);
    for outcome in &outcomes {
        match &outcome.found {
            Some((cases, failure)) => {
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
