//! Crash tests for hours: every layer in turn with seeds that no run had before, until the time is over.
//!
//! 1. Each layer does a share of work of about a minute with its next seeds: simulated cases, kills, replayed images,
//!    and histories against the model.
//! 2. A failure is written to a directory with the command that repeats it. The run goes on with the next share.
//! 3. The run ends when the time is over, with the share that is under way, or on an interrupt.

use crate::real::{kill, replay};
use crate::sim::{Case, Coverage, History, minimise, run_many};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Simulated cases of a share, per thread.
const CASES: u64 = 20_000;
/// Failed cases after which a share ends.
const FAILURES_MAX: usize = 5;
/// Kills of a share.
const KILLS: u64 = 400;
/// Replayed images of a share: a recording under each file system.
const IMAGES: u64 = 500;
/// Histories of a share that are held against the model.
const HISTORIES: u64 = 2_000;

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How long.
    pub time: Duration,
    /// First seed of every layer.
    pub seed: u64,
    /// Directory for what fails; made when something does.
    pub keep: PathBuf,
    /// Directory for the stores of killed processes.
    pub dir: PathBuf,
    /// Threads of the simulator.
    pub jobs: usize,
    /// This program, which runs the workers that are killed.
    pub program: PathBuf,
}

/// What one layer did.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Cases, kills, images or histories that passed.
    pub passed: u64,
    /// Shares or cases that failed.
    pub failed: u64,
    /// Seconds of wall time.
    pub seconds: f64,
}

/// How the run went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// By name of the layer.
    pub layers: BTreeMap<&'static str, Done>,
    /// Layers that cannot run here, with the reason.
    pub skipped: BTreeMap<&'static str, String>,
    /// Files with what failed.
    pub kept: Vec<PathBuf>,
    /// What the simulator saw.
    pub coverage: Coverage,
}

/// What a share brought: how many passed, and each failure with the file name and the text that keep it.
type Share = (u64, Vec<(String, String)>);

/// Runs all layers in turn until the time is over or `stop` is set. Calls `progress` with a line after every share.
#[must_use]
pub fn run(plan: &Plan, stop: &AtomicBool, mut progress: impl FnMut(&str)) -> Outcome {
    let mut outcome = Outcome::default();
    let file_systems = replay::possible();
    if let Err(why) = &file_systems {
        outcome.skipped.insert("replay", why.clone());
    }
    let workspace = workspace();
    if let Err(why) = &workspace {
        outcome.skipped.insert("model", why.clone());
    }
    outcome.skipped.iter().for_each(|(layer, why)| progress(&format!("{layer}: skipped: {why}")));
    let layers = ["sim", "kill", "replay", "model"].into_iter();
    let layers: Vec<_> = layers.filter(|layer| !outcome.skipped.contains_key(layer)).collect();
    let start = Instant::now();
    let mut seed = plan.seed;
    'time: loop {
        for layer in layers.iter().copied() {
            if start.elapsed() >= plan.time || stop.load(Ordering::Relaxed) {
                break 'time;
            }
            let begin = Instant::now();
            let (passed, failures) = match (layer, &file_systems, &workspace) {
                ("sim", ..) => simulate(seed, plan.jobs, &mut outcome.coverage),
                ("kill", ..) => kill_processes(plan, seed, stop),
                ("replay", Ok(file_systems), _) => replay_images(file_systems.clone(), seed, stop),
                (_, _, Ok(workspace)) => hold_against_model(workspace, seed, stop),
                _ => continue,
            };
            let done = outcome.layers.entry(layer).or_default();
            done.passed += passed;
            done.failed += failures.len() as u64;
            done.seconds += begin.elapsed().as_secs_f64();
            let (minutes, passed, failed) = (start.elapsed().as_secs() / 60, done.passed, done.failed);
            progress(&format!("{minutes} min: {layer} from seed {seed}: {passed} passed, {failed} failed so far"));
            for (name, text) in failures {
                match keep(&plan.keep, &name, &text) {
                    Ok(file) => {
                        progress(&format!("FAILED {layer}, kept in {}", file.display()));
                        outcome.kept.push(file);
                    }
                    Err(e) => progress(&format!("FAILED {layer}, not kept, {}: {e}\n{text}", plan.keep.display())),
                }
            }
        }
        // Every layer takes fewer seeds than this in a share.
        seed = seed.wrapping_add(CASES * plan.jobs.max(1) as u64);
    }
    outcome
}

/// The root of this workspace, where the test binary of the model is built.
fn workspace() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if !root.join("Cargo.toml").exists() {
        return Err(format!("the sources are not at {}", root.display()));
    }
    match Command::new("cargo").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(root),
        _ => Err("there is no cargo".into()),
    }
}

fn keep(directory: &Path, name: &str, text: &str) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(directory)?;
    let file = directory.join(name);
    std::fs::write(&file, text)?;
    Ok(file)
}

fn simulate(seed: u64, jobs: usize, coverage: &mut Coverage) -> Share {
    let (passed, failures) = run_many(seed, CASES * jobs.max(1) as u64, coverage, FAILURES_MAX, jobs);
    let mut kept = Vec::new();
    for failure in failures {
        let why = failure.what.lines().next().unwrap_or_default().to_owned();
        // A case that fails only once is kept as it was generated.
        let case =
            minimise(&Case::generate(failure.seed)).map_or_else(|| Case::generate(failure.seed), |(case, _)| case);
        kept.push((format!("seed-{}.json", failure.seed), History { why, mutant: None, case }.text()));
    }
    (passed, kept)
}

/// The text of failures, with the command that repeats them.
fn repeatable(layer: &str, seed: u64, command: &str, failures: &[String]) -> Vec<(String, String)> {
    let text = || format!("repeat with: {command}\n{}\n", failures.join("\n"));
    if failures.is_empty() { Vec::new() } else { vec![(format!("{layer}-{seed}.txt"), text())] }
}

fn kill_processes(plan: &Plan, seed: u64, stop: &AtomicBool) -> Share {
    let Plan { dir, program, jobs, .. } = plan.clone();
    let outcome = kill::run(&kill::Plan { cycles: KILLS, dir, seed, jobs: 2 * jobs, program }, stop);
    let command = format!("crash kill --cycles {KILLS} --seed {seed}");
    (outcome.passed, repeatable("kill", seed, &command, &outcome.failures))
}

fn replay_images(file_systems: Vec<String>, seed: u64, stop: &AtomicBool) -> Share {
    let outcome = replay::run(&replay::Plan { images: IMAGES, seed, file_systems, mutant: None }, stop);
    let command = format!("crash replay --images {IMAGES} --seed {seed}");
    (outcome.passed, repeatable("replay", seed, &command, &outcome.failures))
}

fn hold_against_model(workspace: &Path, seed: u64, stop: &AtomicBool) -> Share {
    let arguments = ["test", "--release", "--quiet", "-p", "stratakv-tests", "--test", "model"];
    let variables = [("STRATAKV_TEST_HISTORIES", HISTORIES), ("STRATAKV_TEST_SEED", seed)];
    let ran = Command::new("cargo")
        .args(arguments)
        .envs(variables.map(|(name, value)| (name, value.to_string())))
        .current_dir(workspace)
        .output();
    let failure = match ran {
        Ok(output) if output.status.success() => return (HISTORIES, Vec::new()),
        // An interrupt reaches the tests as well.
        Ok(_) if stop.load(Ordering::Relaxed) => return (0, Vec::new()),
        Ok(output) => {
            let [out, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            format!("cargo: {}\n{out}{errors}", output.status)
        }
        Err(e) => format!("cargo: {e}"),
    };
    let [histories, seed_is] = variables.map(|(name, value)| format!("{name}={value}"));
    let command = format!("{histories} {seed_is} cargo {}", arguments.join(" "));
    (0, repeatable("model", seed, &command, &[failure]))
}
