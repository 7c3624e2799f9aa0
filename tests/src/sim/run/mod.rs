//! Runs a case.
//!
//! 1. The runner creates the store, and on one device first interrupts the creation.
//! 2. For each round, it executes the operations with the engine and notes them in the model.
//! 3. It cuts the power, applies bit rot and lost disks, and interrupts the recovery.
//! 4. It opens the store, reads all of it, and finds the state of the model that holds exactly that.
//!
//! Invariants checked after each operation:
//! - An error has a cause: a fault, a power failure, or a limit.
//! - Every failed device operation shows in the counters of its device.
//! - The files do not exceed the capacity.
//!
//! A step ends early with a [`Stop`]. [`Runner::fault`] decides what an error of the store means.

mod adapters;
mod clusters;
mod directories;
mod disks;
mod entries;
mod lives;
mod neighbour;
mod recovery;
mod space;
mod states;
mod summaries;
mod write;

use super::case::{Case, Regime, Round, SLOTS};
use super::content::CaseShape;
use super::coverage::{self, Coverage};
use super::model::{Model, Version};
use super::operation::Operation;
use std::fmt;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use stratakv::metrics::Evicted;
use stratakv::sim::{Event, Rng, Simulation, events};
use stratakv::{ByteSize, Error, ErrorKind, Sequence, SequenceReader, Store, StoreOptions};

/// The end of a case that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The store agreed with the model.
    Passed,
    /// The store reported damage of the medium.
    Reported,
}

/// A case that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The round and the step.
    pub place: (usize, usize),
    /// The failed check.
    pub what: String,
    /// The events before, if the run kept them.
    pub history: Vec<String>,
    /// The hash over all device operations.
    pub trace: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (round, step) = self.place;
        write!(f, "seed {}, round {round}, step {step}: {}", self.seed, self.what)?;
        self.history.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// The reason why a round ends early.
enum Stop {
    /// The power is cut.
    Down,
    /// The store is read-only after a fault.
    Broken,
    /// The store reported damage of the medium.
    Reported,
    /// The case failed.
    Failed(String),
}

type StepResult<T = ()> = Result<T, Stop>;

fn failed<T>(what: impl Into<String>) -> StepResult<T> {
    Err(Stop::Failed(what.into()))
}

struct Runner<'c> {
    case: &'c Case,
    coverage: &'c mut Coverage,
    shape: CaseShape,
    simulation: Simulation,
    model: Model,
    store: Option<Store>,
    handles: [Option<(u64, Sequence)>; SLOTS],
    /// The sequence whose handle is being closed.
    closing: Option<u64>,
    /// The readers, each with the content that it must keep showing.
    readers: Vec<(SequenceReader, Version)>,
    adapters: adapters::Adapters,
    salts: Rng,
    rotten: bool,
    history: Option<Vec<String>>,
    place: (usize, usize),
    /// The group commits before the current operation.
    commits: u64,
    /// The sequences that the store reported as gone and the model does not know yet.
    gone: Arc<Mutex<Vec<Evicted>>>,
    /// The simulated times before and after the open.
    opened: RangeInclusive<u64>,
    /// The capacity of the open store in bytes.
    capacity: Option<u64>,
    /// The bytes of all files when they were last above the capacity.
    above: u64,
    /// True if a capacity was ever set.
    limited: bool,
    /// How often a manifest exceeded the capacity, which it may if its state alone does.
    exceeded: u64,
    /// The disks of the store that the runner knows of.
    disks: Vec<usize>,
    /// After a disk left or joined: the disks that are members and not lost, and the bytes of their files at the last
    /// check.
    held: (Vec<usize>, u64),
    /// The device operations that had failed when the store was opened.
    failed: u64,
    /// True after a disk left or joined. Some frames may then lack copies.
    changed: bool,
    /// True after the runner damaged a disk.
    flipped: bool,
    stored: clusters::StoredSets,
    states: states::NotedStates,
    /// The second store of the process, if the case has one.
    beside: Option<neighbour::Neighbour>,
}

/// Runs a case.
///
/// # Errors
/// The failed check.
pub fn run(case: &Case, coverage: &mut Coverage) -> Result<Verdict, Failure> {
    run_with(case, coverage, false).1
}

/// Runs a case and keeps its history. Also returns the trace hash.
///
/// # Errors
/// The failed check.
pub fn run_verbose(case: &Case, coverage: &mut Coverage) -> (u64, Result<Verdict, Failure>) {
    run_with(case, coverage, true)
}

/// Device operations after which a case counts as endless. The longest of 20,000 cases took 2,732.
const OPERATIONS_MAX: u64 = 100_000;

fn run_with(case: &Case, coverage: &mut Coverage, verbose: bool) -> (u64, Result<Verdict, Failure>) {
    coverage.cases += 1;
    let failure = |what| Failure { seed: case.seed, place: (0, 0), what, history: Vec::new(), trace: 0 };
    let shape = match CaseShape::new(case) {
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
        stored: clusters::StoredSets::default(),
        states: states::NotedStates::default(),
        beside: None,
        limited: case.regime == Regime::Tight || case.capacity.is_some(),
    };
    runner.simulation.limit_operations(OPERATIONS_MAX);
    let outcome = catch_unwind(AssertUnwindSafe(|| runner.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        failed(format!("panic: {}", text.unwrap_or_default()))
    });
    let endless = runner.simulation.is_endless();
    runner.coverage.longest = runner.coverage.longest.max(runner.simulation.operations());
    runner.coverage.add_events();
    runner.coverage.add_many(coverage::ASTRAY, runner.simulation.astray_hit());
    runner.coverage.add_many(coverage::FLIPPED, runner.simulation.flips_hit());
    runner.simulation.crash();
    runner.drop_store();
    runner.beside = None;
    let trace = runner.simulation.trace();
    runner.coverage.traces = runner.coverage.traces.wrapping_add(trace);
    let outcome = match outcome {
        _ if endless => Err(format!("endless: more than {OPERATIONS_MAX} operations of the devices")),
        Ok(()) => Ok(Verdict::Passed),
        Err(Stop::Reported) => Ok(Verdict::Reported),
        Err(Stop::Down) => Err("the power is off although the case did not cut it".into()),
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

/// Returns the key of a slot, long for odd slots. Long keys make a manifest batch span several sectors.
fn key(slot: usize) -> String {
    format!("s{slot}{}", "-".repeat(slot % 2 * 450))
}

impl Runner<'_> {
    fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(format!("[{:4}] {}", self.simulation.operations(), line()));
        }
    }

    fn store(&self) -> StepResult<&Store> {
        self.store.as_ref().ok_or_else(|| Stop::Failed("no store is open".into()))
    }

    /// Drops the store with all its handles and readers.
    fn drop_store(&mut self) {
        self.readers.clear();
        self.handles = [const { None }; SLOTS];
        self.stored.all_detached();
        self.store = None;
    }

    /// Returns the ids of the sequences that have a handle.
    fn open_ids(&self) -> Vec<u64> {
        self.handles.iter().flatten().map(|(id, _)| *id).chain(self.closing).collect()
    }

    /// Returns the bytes of a capacity in segments: the segments and the files of two manifest generations.
    fn capacity_bytes(&self, segments: u64) -> u64 {
        let devices = self.case.geometry.devices;
        let copies = if devices == 1 { 2 } else { devices.min(3) } as u64;
        let metadata = 2 * copies * (self.case.geometry.manifest_pages + 16) * 4096;
        segments * self.case.segment_pages * 4096 + metadata
    }

    /// Returns the capacity that the store is opened with, in bytes: at least what a store without segments needs.
    fn opened_capacity(&self) -> Option<u64> {
        let devices = self.case.geometry.devices as u64;
        let copies = if devices == 1 { 2 } else { devices.min(3) };
        // The checkpoint of a new store takes up to four pages. A file has twice as many beside its own pages.
        let pages = self.case.geometry.manifest_pages;
        let file = (pages - pages / 16 + 8).next_multiple_of(pages);
        let least = 2 * copies * file + devices * (2 + 3 * self.case.segment_pages);
        self.case.capacity.map(|segments| self.capacity_bytes(segments).max(least * 4096))
    }

    fn options(&self) -> StoreOptions {
        let segment = self.case.segment_pages * 4096;
        let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(segment));
        let options = options.frame_bytes(ByteSize::kib(64)).shard_threads(self.case.shards);
        options.capacity(self.opened_capacity().map(ByteSize))
    }

    /// Decides whether an error has a cause. Returns `Ok` if the round continues after it.
    fn fault(&mut self, doing: &str, e: &Error) -> StepResult {
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
            ErrorKind::MemoryLimit | ErrorKind::Busy if self.simulation.memory_refused() > 0 => {
                self.coverage.add(coverage::NO_MEMORY);
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

    fn run(&mut self) -> StepResult {
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
        self.leave_neighbour()
    }

    fn round(&mut self, round: &Round) -> StepResult {
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

    /// Checks that the counters of the devices show every device operation that failed since the open.
    fn counted(&mut self) -> StepResult {
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

    fn step(&mut self, operation: Operation) -> StepResult {
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
            Operation::StoreClusters { slot, keep } => self.store_clusters(slot, keep),
            Operation::StoreAttached { slot } => self.store_attached(slot),
            Operation::DropClusters { slot } => self.drop_clusters(slot),
            Operation::SpoilPools { slot, way } => self.spoil_pools(slot, way),
            Operation::SpoilDirectories { slot } => self.spoil_directories(slot),
            Operation::OpenTwice => self.open_twice(),
            Operation::Flush => {
                let flushed = self.store()?.flush();
                self.model.sync_attempted(flushed.is_ok());
                flushed.or_else(|e| self.fault("flush", &e))
            }
            Operation::Clean => self.clean(),
            Operation::Tend => self.run_maintenance(),
            Operation::Capacity { segments } => self.set_capacity(segments),
            Operation::Wait { milliseconds } => {
                self.simulation.advance(milliseconds);
                Ok(())
            }
            Operation::Neighbour { tokens } => self.neighbour(tokens),
            Operation::Clock { milliseconds } => {
                self.simulation.set_clock(milliseconds);
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
