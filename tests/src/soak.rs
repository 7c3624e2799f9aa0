//! Runs all crash tests for hours, with new seeds in every share of work.
//!
//! 1. Each layer does a share of about a minute with its next seeds. The layers are simulated cases, kills, replayed
//!    images, and histories compared with the model.
//! 2. A failure is written to a directory with the command that repeats it. The run continues with the next share.
//! 3. The run ends on an interrupt, or after the share during which its time ran out.

use crate::real::{kill, replay};
use crate::sim::{Case, Coverage, History, minimise, run_many};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The simulated cases of a share, per thread.
const CASES: u64 = 20_000;
/// Failed cases after which a share ends.
const FAILURES_MAX: usize = 5;
/// The kills of a share.
const KILLS: u64 = 400;
/// The replayed images of a share: one recording under each file system.
const IMAGES: u64 = 500;
/// The histories of a share that are compared with the model.
const HISTORIES: u64 = 2_000;

/// The settings of a soak run.
#[derive(Clone, Debug)]
pub struct SoakPlan {
    /// The duration of the run.
    pub time: Duration,
    /// The first seed of every layer.
    pub seed: u64,
    /// The directory for failures. The first failure creates it.
    pub keep: PathBuf,
    /// The directory for the stores of killed processes.
    pub dir: PathBuf,
    /// The threads of the simulator.
    pub jobs: usize,
    /// This program, which runs the workers that are killed.
    pub program: PathBuf,
}

/// The counts of one layer.
#[derive(Clone, Debug, Default)]
pub struct LayerTotals {
    /// The cases, kills, images or histories that passed.
    pub passed: u64,
    /// The shares or cases that failed.
    pub failed: u64,
    /// The wall time in seconds.
    pub seconds: f64,
}

/// The result of a soak run.
#[derive(Clone, Debug, Default)]
pub struct SoakReport {
    /// The counts by name of the layer.
    pub layers: BTreeMap<&'static str, LayerTotals>,
    /// The layers that cannot run here, with the reason.
    pub skipped: BTreeMap<&'static str, String>,
    /// The files that hold the failures.
    pub kept: Vec<PathBuf>,
    /// The events that the simulator counted.
    pub coverage: Coverage,
}

/// The result of a share: the number that passed, and the file name and text of each failure.
type Share = (u64, Vec<(String, String)>);

/// Runs one share of each layer after another until the time is over or `stop` is set. Calls `progress` with a line
/// after every share.
#[must_use]
pub fn run(plan: &SoakPlan, stop: &AtomicBool, mut progress: impl FnMut(&str)) -> SoakReport {
    let mut outcome = SoakReport::default();
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

/// Returns the root of this workspace, where the test binary of the model is built.
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
        // A case that does not fail a second time is kept as generated.
        let case =
            minimise(&Case::generate(failure.seed)).map_or_else(|| Case::generate(failure.seed), |(case, _)| case);
        kept.push((format!("seed-{}.json", failure.seed), History { why, mutant: None, case }.text()));
    }
    (passed, kept)
}

/// Formats failures with the command that repeats them.
fn repeatable(layer: &str, seed: u64, command: &str, failures: &[String]) -> Vec<(String, String)> {
    let text = || format!("repeat with: {command}\n{}\n", failures.join("\n"));
    if failures.is_empty() { Vec::new() } else { vec![(format!("{layer}-{seed}.txt"), text())] }
}

fn kill_processes(plan: &SoakPlan, seed: u64, stop: &AtomicBool) -> Share {
    let SoakPlan { dir, program, jobs, .. } = plan.clone();
    let outcome = kill::run(&kill::KillPlan { cycles: KILLS, dir, seed, jobs: 2 * jobs, program }, stop);
    let command = format!("crash kill --cycles {KILLS} --seed {seed}");
    (outcome.passed, repeatable("kill", seed, &command, &outcome.failures))
}

fn replay_images(file_systems: Vec<String>, seed: u64, stop: &AtomicBool) -> Share {
    let outcome = replay::run(&replay::ReplayPlan { images: IMAGES, seed, file_systems, mutant: None }, stop);
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
