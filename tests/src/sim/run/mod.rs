//! Running a case: operations, crash, recovery, comparison, and on.

mod adapters;
mod disks;
mod lives;
mod recovery;
mod space;
mod summaries;
mod write;

use super::case::{Case, Regime, Round, SLOTS};
use super::content::Shape;
use super::coverage::{self, Coverage};
use super::model::{Model, Version};
use super::operation::Operation;
use std::fmt;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use stratakv::sim::{Event, Rng, Simulation, events};
use stratakv::{ByteSize, Error, ErrorKind, Evicted, Sequence, SequenceReader, Store, StoreOptions};

/// How a case ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything was as the model has it.
    Passed,
    /// Damage of the medium was reported.
    Reported,
}

/// A case that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed.
    pub seed: u64,
    /// Round and step.
    pub place: (usize, usize),
    /// What is wrong.
    pub what: String,
    /// What happened before, where asked for.
    pub history: Vec<String>,
    /// Hash over all device operations.
    pub trace: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (round, step) = self.place;
        write!(f, "seed {}, round {round}, step {step}: {}", self.seed, self.what)?;
        self.history.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// Why a round ends early.
enum Stop {
    /// The power is gone.
    Down,
    /// The store is read-only after a fault.
    Broken,
    /// Damage of the medium was reported.
    Reported,
    /// The case failed.
    Failed(String),
}

type Stopped<T = ()> = Result<T, Stop>;

fn failed<T>(what: impl Into<String>) -> Stopped<T> {
    Err(Stop::Failed(what.into()))
}

struct Runner<'c> {
    case: &'c Case,
    coverage: &'c mut Coverage,
    shape: Shape,
    simulation: Simulation,
    model: Model,
    store: Option<Store>,
    handles: [Option<(u64, Sequence)>; SLOTS],
    /// The sequence whose handle is given back.
    closing: Option<u64>,
    /// With what each must go on seeing.
    readers: Vec<(SequenceReader, Version)>,
    adapters: adapters::Adapters,
    salts: Rng,
    rotten: bool,
    history: Option<Vec<String>>,
    place: (usize, usize),
    /// Group commits before the operation under way.
    commits: u64,
    /// Sequences that the store said went, and that the model does not know about yet.
    gone: Arc<Mutex<Vec<Evicted>>>,
    /// When the store was opened, from and to.
    opened: RangeInclusive<u64>,
    /// The most bytes of all files, as the open store was told.
    capacity: Option<u64>,
    /// The bytes of all files when they were last above it.
    above: u64,
    /// A capacity was set at some time.
    limited: bool,
    /// How often a manifest took more than the capacity leaves, as it must where the state alone does.
    exceeded: u64,
    /// Disks of the store, as far as is known.
    disks: Vec<usize>,
    /// Once disks left or joined: those that are members and not lost, and the bytes of their files when that was
    /// looked at.
    held: (Vec<usize>, u64),
    /// Operations of devices that had failed when the store was opened.
    failed: u64,
    /// Disks left or joined: not everything has all its copies for sure.
    changed: bool,
    /// A copy was made to rot.
    flipped: bool,
}

/// Runs a case.
///
/// # Errors
/// What is not as it must be.
pub fn run(case: &Case, coverage: &mut Coverage) -> Result<Verdict, Failure> {
    run_with(case, coverage, false).1
}

/// Runs a case and keeps its history. The trace hash comes along.
///
/// # Errors
/// What is not as it must be.
pub fn run_verbose(case: &Case, coverage: &mut Coverage) -> (u64, Result<Verdict, Failure>) {
    run_with(case, coverage, true)
}

fn run_with(case: &Case, coverage: &mut Coverage, verbose: bool) -> (u64, Result<Verdict, Failure>) {
    coverage.cases += 1;
    let failure = |what| Failure { seed: case.seed, place: (0, 0), what, history: Vec::new(), trace: 0 };
    let shape = match Shape::new(case) {
        Ok(shape) => shape,
        Err(e) => return (0, Err(failure(e))),
    };
    let mut runner = Runner {
        case,
        coverage,
        shape,
        simulation: Simulation::new(&case.geometry, case.seed),
        model: Model::default(),
        store: None,
        handles: [const { None }; SLOTS],
        closing: None,
        readers: Vec::new(),
        adapters: adapters::Adapters::new(),
        salts: Rng::new(case.seed ^ 0x5a17),
        rotten: false,
        history: verbose.then(Vec::new),
        place: (0, 0),
        commits: 0,
        gone: Arc::default(),
        opened: 0..=0,
        capacity: None,
        above: 0,
        exceeded: 0,
        disks: (0..case.geometry.devices).collect(),
        held: (Vec::new(), 0),
        failed: 0,
        changed: false,
        flipped: false,
        limited: case.regime == Regime::Tight || case.capacity.is_some(),
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| runner.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        failed(format!("panic: {}", text.unwrap_or_default()))
    });
    runner.coverage.add_events();
    runner.coverage.add_many(coverage::ASTRAY, runner.simulation.astray_hit());
    runner.coverage.add_many(coverage::FLIPPED, runner.simulation.flips_hit());
    runner.simulation.crash();
    runner.let_go();
    let trace = runner.simulation.trace();
    runner.coverage.traces = runner.coverage.traces.wrapping_add(trace);
    let outcome = match outcome {
        Ok(()) => Ok(Verdict::Passed),
        Err(Stop::Reported) => Ok(Verdict::Reported),
        Err(Stop::Down) => Err("the power is gone although nobody cut it".into()),
        Err(Stop::Broken) => Err("the store is read-only although nothing failed".into()),
        Err(Stop::Failed(what)) => Err(what),
    };
    let outcome = outcome.map_err(|what: String| Failure {
        seed: case.seed,
        place: runner.place,
        what,
        history: runner.history.take().unwrap_or_default(),
        trace,
    });
    (trace, outcome)
}

/// Keys short and long: with long ones a batch of the manifest goes over several sectors.
fn key(slot: usize) -> String {
    format!("s{slot}{}", "-".repeat(slot % 2 * 450))
}

impl Runner<'_> {
    fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(format!("[{:4}] {}", self.simulation.operations(), line()));
        }
    }

    fn store(&self) -> Stopped<&Store> {
        self.store.as_ref().ok_or_else(|| Stop::Failed("no store is open".into()))
    }

    /// Drops the store and all that it gave.
    fn let_go(&mut self) {
        self.readers.clear();
        self.handles = [const { None }; SLOTS];
        self.store = None;
    }

    /// Ids of the sequences that have a handle.
    fn open_ids(&self) -> Vec<u64> {
        self.handles.iter().flatten().map(|(id, _)| *id).chain(self.closing).collect()
    }

    /// Bytes of a capacity in segments: beside these the files of two manifest generations.
    fn capacity_bytes(&self, segments: u64) -> u64 {
        let devices = self.case.geometry.devices;
        let copies = if devices == 1 { 2 } else { devices.min(3) } as u64;
        let metadata = 2 * copies * (self.case.geometry.manifest_pages + 16) * 4096;
        segments * self.case.segment_pages * 4096 + metadata
    }

    fn options(&self) -> StoreOptions {
        let segment = self.case.segment_pages * 4096;
        let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(segment));
        let options = StoreOptions { shard_threads: self.case.shards, ..options.frame_bytes(ByteSize::kib(64)) };
        match self.case.capacity {
            Some(segments) => options.capacity(ByteSize(self.capacity_bytes(segments))),
            None => options,
        }
    }

    /// Whether an error may be: why the round goes on or ends.
    fn fault(&mut self, doing: &str, e: &Error) -> Stopped {
        self.note(|| format!("{doing}: {e:?}"));
        if self.simulation.is_down() {
            return Err(Stop::Down);
        }
        let hit = self.simulation.faults_hit() > 0;
        match e.kind() {
            ErrorKind::NoSpace if self.limited || hit => {
                self.coverage.add(coverage::NO_SPACE);
                Ok(())
            }
            ErrorKind::Io if hit => {
                let text = e.to_string();
                let of_names =
                    ["create ", "grow ", "open segments/", "open manifest/", "open superblock", "list ", "change "];
                let what = match text.contains("read") {
                    true => coverage::READ_ERROR,
                    false if of_names.iter().any(|doing| text.contains(doing)) => coverage::NAME_ERROR,
                    false => coverage::WRITE_ERROR,
                };
                self.coverage.add(what);
                Ok(())
            }
            ErrorKind::Poisoned | ErrorKind::Indeterminate if hit || self.limited => {
                if e.to_string().contains("sync") {
                    self.coverage.add(coverage::POISONED);
                }
                Err(Stop::Broken)
            }
            ErrorKind::Corruption if self.rotten || self.simulation.astray_hit() > 0 => {
                self.coverage.add(coverage::ROT_FOUND);
                Err(Stop::Reported)
            }
            _ => failed(format!("{doing}: unexpected error {e:?}")),
        }
    }

    fn run(&mut self) -> Stopped {
        let case = self.case;
        if let Some(first) = case.rounds.first().filter(|_| case.geometry.devices == 1) {
            self.crash_while_opening(&first.again)?;
        }
        match self.open() {
            Err(Stop::Broken) => return failed("the store could not be created"),
            other => other?,
        }
        for (index, round) in case.rounds.iter().enumerate() {
            self.place = (index, 0);
            let outcome = self.round(round);
            match outcome {
                Ok(()) | Err(Stop::Down | Stop::Broken) => {}
                Err(other) => return Err(other),
            }
            self.crash(round)?;
        }
        Ok(())
    }

    fn round(&mut self, round: &Round) -> Stopped {
        for (step, operation) in round.operations.iter().enumerate() {
            self.place.1 = step;
            self.coverage.operations += 1;
            self.model.step += 1;
            if let Some((_, faults)) = round.faults.filter(|(at, _)| *at == step) {
                self.note(|| format!("faults to come: {faults:?}"));
                self.simulation.set_faults(faults);
            }
            if round.crash.0 == step && round.rot.as_ref().is_none_or(|(_, copies, _)| *copies == 1) {
                self.note(|| format!("power goes in {} device operations", round.crash.1));
                self.simulation.crash_in(round.crash.1);
            }
            self.note(|| format!("{operation:?}"));
            self.mark_commits();
            let outcome = self.step(*operation);
            self.counted()?;
            outcome?;
            self.within_capacity()?;
        }
        Ok(())
    }

    /// Every operation of a device that failed since the store was opened shows in the counters of its device.
    fn counted(&mut self) -> Stopped {
        let Some(store) = self.store.as_ref().filter(|_| !self.changed && !self.simulation.is_down()) else {
            return Ok(());
        };
        let counted: u64 = store.health().devices.iter().map(|device| device.errors).sum();
        let struck = self.simulation.refused() - self.failed;
        if counted < struck {
            return failed(format!("{struck} operations failed, and the counters say {counted}"));
        }
        Ok(())
    }

    fn step(&mut self, operation: Operation) -> Stopped {
        match operation {
            Operation::Append { slot, tokens, layers } => self.append(slot, tokens, layers),
            Operation::Decode { slot, tokens, durability } => {
                for _ in 0..tokens {
                    self.append(slot, 1, u8::MAX)?;
                    self.push_ids(slot, 1)?;
                    self.commit(slot, durability, None)?;
                }
                Ok(())
            }
            Operation::Keep { slot, tokens, durability } => {
                self.append(slot, tokens, u8::MAX)?;
                self.commit(slot, durability, None)?;
                self.close(slot)
            }
            Operation::Ids { slot, count } => self.push_ids(slot, count),
            Operation::Commit { slot, durability, state } => self.commit(slot, durability, state),
            Operation::Truncate { slot, back } => self.truncate(slot, back),
            Operation::Fork { slot, to } => self.fork(slot, to),
            Operation::Delete { slot, durability } => self.delete(slot, durability),
            Operation::Check { slot } => self.check(slot),
            Operation::Close { slot } => self.close(slot),
            Operation::Reader { slot } => self.reader(slot),
            Operation::CheckReaders => self.check_readers(),
            Operation::DropReaders => {
                self.readers.clear();
                Ok(())
            }
            Operation::Carry { slot, to, part } => self.carry(slot, to, part),
            Operation::Attach { slot, landmarks } => self.attach(slot, landmarks),
            Operation::Adapter { version, put: true } => self.put_adapter(version),
            Operation::Adapter { version, put: false } => self.delete_adapter(version),
            Operation::Flush => {
                let flushed = self.store()?.flush();
                self.model.attempted(flushed.is_ok());
                flushed.or_else(|e| self.fault("flush", &e))
            }
            Operation::Clean => self.clean(),
            Operation::Tend => self.run_maintenance(),
            Operation::Capacity { segments } => self.set_capacity(segments),
            Operation::Wait { milliseconds } => {
                self.simulation.advance(milliseconds);
                Ok(())
            }
            Operation::Heal { slot } => self.heal(slot),
            Operation::Lose { disk } => self.lose(disk),
            Operation::Remove { disk } => self.remove(disk),
            Operation::Add { disk } => self.add(disk),
            Operation::Reopen => {
                self.close_store()?;
                self.open()?;
                self.verify()
            }
        }
    }

    fn mark_commits(&mut self) {
        self.commits = events(Event::GroupCommit);
    }
}
