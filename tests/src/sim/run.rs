//! Running a case: operations, crash, recovery, comparison, and on.

mod disks;

use super::case::{Case, Operation, Regime, Round, SLOTS};
use super::content::Shape;
use super::coverage::{self, Coverage};
use super::model::{Committed, Entry, Model, Version};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use stratakv::sim::{Event, Rng, Simulation, events};
use stratakv::{ByteSize, Durability, Error, ErrorKind, Sequence, SequenceOptions, Store, StoreOptions, Summary};

/// One crash image in this many cases goes through kvfsck.
const CHECK_EVERY: u64 = 32;

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

struct Runner<'c> {
    case: &'c Case,
    shape: Shape,
    simulation: Simulation,
    model: Model,
    store: Option<Store>,
    handles: [Option<(u64, Sequence)>; SLOTS],
    salts: Rng,
    rotten: bool,
    history: Option<Vec<String>>,
    place: (usize, usize),
    /// Group commits before the operation under way.
    commits: u64,
    /// Disks of the store, as far as is known.
    disks: Vec<usize>,
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
        shape,
        simulation: Simulation::new(&case.geometry, case.seed),
        model: Model::default(),
        store: None,
        handles: [const { None }; SLOTS],
        salts: Rng::new(case.seed ^ 0x5a17),
        rotten: false,
        history: verbose.then(Vec::new),
        place: (0, 0),
        commits: 0,
        disks: (0..case.geometry.devices).collect(),
        changed: false,
        flipped: false,
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| runner.run(coverage))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(Stop::Failed(format!("panic: {}", text.unwrap_or_default())))
    });
    coverage.add_events();
    coverage.add_many(coverage::ASTRAY, runner.simulation.astray_hit());
    coverage.add_many(coverage::FLIPPED, runner.simulation.flips_hit());
    runner.simulation.crash();
    runner.handles = [const { None }; SLOTS];
    runner.store = None;
    let trace = runner.simulation.trace();
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

fn key(slot: usize) -> String {
    format!("s{slot}")
}

impl Runner<'_> {
    fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(history) = &mut self.history {
            history.push(format!("[{:4}] {}", self.simulation.operations(), line()));
        }
    }

    fn store(&self) -> Result<&Store, Stop> {
        self.store.as_ref().ok_or_else(|| Stop::Failed("no store is open".into()))
    }

    fn options(&self) -> StoreOptions {
        let segment = self.case.segment_pages * 4096;
        let options = Store::options().memory_limit(ByteSize::mib(8)).segment_bytes(ByteSize(segment));
        let options = options.frame_bytes(ByteSize::kib(64));
        match self.case.capacity {
            Some(segments) => {
                // Beside the segments the files of two manifest generations.
                let copies = if self.case.geometry.devices == 1 { 2 } else { self.case.geometry.devices.min(3) } as u64;
                let metadata = 2 * copies * (self.case.geometry.manifest_pages + 16) * 4096;
                options.capacity(ByteSize(segments * segment + metadata))
            }
            None => options,
        }
    }

    /// Whether an error may be: why the round goes on or ends.
    fn fault(&mut self, doing: &str, e: &Error, coverage: &mut Coverage) -> Result<(), Stop> {
        self.note(|| format!("{doing}: {e:?}"));
        if self.simulation.is_down() {
            return Err(Stop::Down);
        }
        let hit = self.simulation.faults_hit() > 0;
        let tight = self.case.regime == Regime::Tight || self.case.capacity.is_some();
        match e.kind() {
            ErrorKind::NoSpace if tight || hit => {
                coverage.add(coverage::NO_SPACE);
                Ok(())
            }
            ErrorKind::Io if hit => {
                coverage.add(if e.to_string().contains("read") { coverage::READ_ERROR } else { coverage::WRITE_ERROR });
                Ok(())
            }
            ErrorKind::Poisoned | ErrorKind::Indeterminate if hit || tight => {
                if e.to_string().contains("sync") {
                    coverage.add(coverage::POISONED);
                }
                Err(Stop::Broken)
            }
            ErrorKind::Corruption if self.rotten || self.simulation.astray_hit() > 0 => {
                coverage.add(coverage::ROT_FOUND);
                Err(Stop::Reported)
            }
            _ => Err(Stop::Failed(format!("{doing}: unexpected error {e:?}"))),
        }
    }

    fn run(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        let case = self.case;
        if let Some(first) = case.rounds.first().filter(|_| case.geometry.devices == 1) {
            self.crash_while_opening(&first.again, coverage)?;
        }
        let store = self.simulation.open(self.options());
        self.store = Some(store.map_err(|e| Stop::Failed(format!("create: {e:?}")))?);
        for (index, round) in case.rounds.iter().enumerate() {
            self.place = (index, 0);
            let outcome = self.round(round, coverage);
            match outcome {
                Ok(()) | Err(Stop::Down | Stop::Broken) => {}
                Err(other) => return Err(other),
            }
            self.crash(round, coverage)?;
        }
        Ok(())
    }

    fn round(&mut self, round: &Round, coverage: &mut Coverage) -> Result<(), Stop> {
        for (step, operation) in round.operations.iter().enumerate() {
            self.place.1 = step;
            coverage.operations += 1;
            if let Some((_, faults)) = round.faults.filter(|(at, _)| *at == step) {
                self.note(|| format!("faults to come: {faults:?}"));
                self.simulation.set_faults(faults);
            }
            if round.crash.0 == step && round.rot.as_ref().is_none_or(|(_, copies, _)| *copies == 1) {
                self.note(|| format!("power goes in {} device operations", round.crash.1));
                self.simulation.crash_in(round.crash.1);
            }
            self.note(|| format!("{operation:?}"));
            self.step(*operation, coverage)?;
        }
        Ok(())
    }

    /// The power goes, the machine comes back, perhaps several times, and the store must be as the model has it.
    fn crash(&mut self, round: &Round, coverage: &mut Coverage) -> Result<(), Stop> {
        if round.rot.as_ref().is_some_and(|(_, copies, _)| *copies > 1) {
            // Damage of every copy is told from a torn tail only where a superblock says how far the manifest goes.
            match self.close_store(coverage) {
                Ok(()) | Err(Stop::Broken) => {}
                Err(other) => return Err(other),
            }
        }
        self.note_given_up(coverage);
        self.simulation.crash();
        self.note(|| "power cut".into());
        self.handles = [const { None }; SLOTS];
        self.store = None;
        coverage.crashes += 1;
        self.simulation.restart();
        if let Some((prefix, copies, below)) = &round.rot {
            self.note(|| format!("bit rot in {copies} files {prefix}"));
            self.rotten |= self.simulation.rot(prefix, *copies, *below);
        }
        if self.case.seed.is_multiple_of(CHECK_EVERY)
            && self.case.regime == Regime::Plain
            && !self.changed
            && !self.flipped
        {
            self.check_image(coverage)?;
        }
        self.crash_while_opening(&round.again, coverage)?;
        let lost = round.lost.filter(|disk| self.may_lose(*disk));
        let opened = match lost {
            Some(disk) => self.open_without(disk, coverage),
            None => self.open(coverage),
        };
        match opened {
            Ok(()) => {}
            Err(Stop::Broken) => return Err(Stop::Failed("the store does not open after a crash".into())),
            Err(other) => return Err(other),
        }
        self.verify(coverage)?;
        if lost.is_some() { self.repair_all(coverage) } else { Ok(()) }
    }

    fn crash_while_opening(&mut self, again: &[u64], coverage: &mut Coverage) -> Result<(), Stop> {
        for &operations in again {
            self.simulation.crash_in(operations);
            self.note(|| format!("power goes {operations} device operations into the recovery"));
            let opened = self.open_store();
            match opened {
                Ok(store) => {
                    self.simulation.crash();
                    drop(store);
                }
                Err(e) if self.simulation.is_down() => {
                    self.note(|| format!("open: {e:?}"));
                    coverage.add(coverage::DOUBLE_CRASH);
                }
                Err(e) => self.fault("open", &e, coverage)?,
            }
            self.simulation.crash();
            coverage.crashes += 1;
            self.simulation.restart();
        }
        Ok(())
    }

    /// Opens the store on the disks that it still has: one that left, or did not quite join, is refused by its name.
    fn open_store(&mut self) -> Result<Store, Error> {
        loop {
            let opened = self.simulation.open_on(self.options(), &self.disks);
            let left = self.changed || self.simulation.faults_hit() > 0;
            let refused = match &opened {
                Err(e) if left && matches!(e.kind(), ErrorKind::StaleDevice | ErrorKind::Configuration) => {
                    let named = |disk: &usize| e.to_string().contains(&format!("simulated-{disk}:"));
                    self.disks.iter().position(named)
                }
                _ => None,
            };
            match refused {
                Some(at) if self.disks.len() > 1 => {
                    let disk = self.disks.remove(at);
                    self.changed = true;
                    self.note(|| format!("disk {disk} has left: {:?}", opened.err()));
                }
                _ => return opened,
            }
        }
    }

    fn faulty(&self, e: &Error) -> bool {
        let text = e.to_string();
        let unreadable = e.kind() == ErrorKind::Io && text.contains("every copy of the manifest");
        let flipped = self.simulation.flips_hit() > 0 && text.contains("the manifest is damaged in every copy");
        !self.simulation.is_down() && (unreadable || flipped)
    }

    fn open(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        match self.open_store() {
            Ok(store) => {
                self.store = Some(store);
                self.note(|| "opened".into());
                Ok(())
            }
            // The one that is left has one copy of the manifest.
            Err(e) if self.changed && self.disks.len() == 1 && self.faulty(&e) => Err(Stop::Reported),
            Err(e) => {
                self.fault("open", &e, coverage)?;
                // A fault struck while it was opening: the next attempt must succeed.
                Err(Stop::Broken)
            }
        }
    }

    /// Reads the whole store and holds it against the model.
    fn verify(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        let mut found = Committed::new();
        for info in self.store()?.sequences() {
            let slot = info.key.strip_prefix('s').and_then(|slot| slot.parse::<usize>().ok()).filter(|s| *s < SLOTS);
            let Some(slot) = slot else { return Err(Stop::Failed(format!("a sequence with the key {:?}", info.key))) };
            let Some(life) = self.model.lives.get(&info.id) else {
                return Err(Stop::Failed(format!("sequence {} of slot {slot} is back", info.id)));
            };
            let sequence = match self.store()?.open_sequence(&info.key) {
                Ok(sequence) => sequence,
                Err(e) => {
                    return Err(self.unreadable("open a sequence after recovery", &e, coverage));
                }
            };
            let tokens = sequence.len() as usize;
            let ids = sequence.token_ids();
            if !life.ids.starts_with(ids) {
                return Err(Stop::Failed(format!(
                    "sequence {}: token ids {ids:?} are not a front of {:?}",
                    info.id, life.ids
                )));
            }
            let version = Version { tokens, ids: ids.len(), state: sequence.state().map(<[u8]>::to_vec) };
            found.insert(slot, (info.id, version));
            for (layer, salts) in life.layers.iter().enumerate() {
                let Some(salts) = salts.get(..tokens) else {
                    return Err(Stop::Failed(format!(
                        "sequence {}: {tokens} tokens, more than were appended",
                        info.id
                    )));
                };
                match self.shape.check(self.store()?, &sequence, layer, salts) {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => {
                        return Err(self.unreadable("read after recovery", &e, coverage));
                    }
                    Err(e) => return Err(Stop::Failed(format!("sequence {}: {e}", info.id))),
                }
            }
        }
        let (kept, doubtful) = self.model.recovered(&found).map_err(Stop::Failed)?;
        if kept > 0 {
            coverage.add(coverage::LANDED);
        }
        if doubtful > kept {
            coverage.add(coverage::LOST);
        }
        Ok(())
    }

    /// An error of a read that can only come from the medium.
    fn unreadable(&mut self, doing: &str, e: &Error, coverage: &mut Coverage) -> Stop {
        match self.fault(doing, e, coverage) {
            Err(stop) => stop,
            Ok(()) if e.kind() == ErrorKind::Io => Stop::Reported,
            Ok(()) => Stop::Failed(format!("{doing}: {e:?}")),
        }
    }

    fn check_image(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        let failed = |e: std::io::Error| Stop::Failed(format!("dump of the image: {e}"));
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let dir = tempfile::tempdir_in(place).map_err(failed)?;
        self.simulation.dump(dir.path()).map_err(failed)?;
        let devices: Vec<PathBuf> = (0..self.case.geometry.devices).map(|d| dir.path().join(d.to_string())).collect();
        let options = kvfsck::Options { threads: 1, ..kvfsck::Options::default() };
        let report = kvfsck::check(&devices, &options, &());
        let report = report.map_err(|e| Stop::Failed(format!("kvfsck: {e:?}")))?;
        coverage.add(coverage::CHECKED);
        match report.findings.iter().find(|finding| finding.severity == kvfsck::Severity::Damage) {
            None => Ok(()),
            Some(finding) => Err(Stop::Failed(format!("kvfsck finds damage after a crash: {finding}"))),
        }
    }

    fn ids(&mut self, slot: usize, count: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        let Some(id) = self.handle(slot, coverage)? else { return Ok(()) };
        let ids: Vec<u32> = (0..count).map(|_| self.salts.next_u64() as u32).collect();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        if let Err(e) = sequence.push_token_ids(&ids) {
            return self.fault("token ids", &e, coverage);
        }
        self.model.lives.entry(id).or_default().ids.extend(ids);
        Ok(())
    }

    fn step(&mut self, operation: Operation, coverage: &mut Coverage) -> Result<(), Stop> {
        match operation {
            Operation::Append { slot, tokens, layers } => self.append(slot, tokens, layers, coverage),
            Operation::Decode { slot, tokens, durability } => {
                for _ in 0..tokens {
                    self.append(slot, 1, u8::MAX, coverage)?;
                    self.ids(slot, 1, coverage)?;
                    self.commit(slot, durability, None, coverage)?;
                }
                Ok(())
            }
            Operation::Ids { slot, count } => self.ids(slot, count, coverage),
            Operation::Commit { slot, durability, state } => self.commit(slot, durability, state, coverage),
            Operation::Delete { slot, durability } => self.delete(slot, durability, coverage),
            Operation::Check { slot } => self.check(slot, coverage),
            Operation::Close { slot } => self.close(slot, coverage),
            Operation::Flush => {
                let flushed = self.store()?.flush();
                self.model.attempted(flushed.is_ok());
                flushed.or_else(|e| self.fault("flush", &e, coverage))
            }
            Operation::Clean => {
                let cleaned = self.store()?.clean();
                self.model.attempted(cleaned.is_ok());
                cleaned.map(drop).or_else(|e| self.fault("clean", &e, coverage))
            }
            Operation::Heal { slot } => self.heal(slot, coverage),
            Operation::Lose { disk } => self.lose(disk, coverage),
            Operation::Remove { disk } => self.remove(disk, coverage),
            Operation::Add { disk } => self.add(disk, coverage),
            Operation::Reopen => {
                self.close_store(coverage)?;
                self.open(coverage)?;
                self.verify(coverage)
            }
        }
    }

    /// The id behind the open handle of a slot; opens or creates the sequence. None when that failed as it may.
    fn handle(&mut self, slot: usize, coverage: &mut Coverage) -> Result<Option<u64>, Stop> {
        if let Some((id, _)) = &self.handles[slot] {
            return Ok(Some(*id));
        }
        let known = self.model.visible().get(&slot).map(|(id, version)| (*id, version.clone()));
        let made = match &known {
            Some(_) => self.store()?.open_sequence(&key(slot)),
            None => {
                let options = SequenceOptions::new().key(key(slot)).replicas(self.case.copies);
                let options = if self.case.summaries { options.summary(Summary::MinMax) } else { options };
                self.store()?.create_sequence(&self.shape.layout, options)
            }
        };
        self.model.attempted(made.is_ok());
        let sequence = match made {
            Ok(sequence) => sequence,
            Err(e) => {
                self.fault("open or create a sequence", &e, coverage)?;
                return Ok(None);
            }
        };
        let id = sequence.id().0;
        match known {
            None => self.model.born(id, slot, self.shape.layers).map_err(Stop::Failed)?,
            Some((known, version)) => {
                let Some(life) = self.model.lives.get_mut(&known) else {
                    return Err(Stop::Failed(format!("the model has no sequence {known}")));
                };
                life.back_to(&version);
                let found = Version {
                    tokens: sequence.len() as usize,
                    ids: sequence.token_ids().len(),
                    state: sequence.state().map(<[u8]>::to_vec),
                };
                if known != id || found != version || life.ids != sequence.token_ids() {
                    return Err(Stop::Failed(format!(
                        "slot {slot}: opened {id} {found:?}, committed {known} {version:?}"
                    )));
                }
            }
        }
        self.handles[slot] = Some((id, sequence));
        Ok(Some(id))
    }

    fn mark_commits(&mut self) {
        self.commits = events(Event::GroupCommit);
    }

    /// Out of space, an operation commits what waits before its own, to have segments freed: a crash may leave that state,
    /// but only if it did. `own`: commits of the operation itself.
    fn made_space(&mut self, own: u64) {
        if events(Event::GroupCommit) > self.commits + own {
            self.model.attempted(false);
        }
    }

    fn append(&mut self, slot: usize, tokens: usize, layers: u8, coverage: &mut Coverage) -> Result<(), Stop> {
        let Some(id) = self.handle(slot, coverage)? else { return Ok(()) };
        for layer in (0..self.shape.layers).filter(|layer| layers >> layer & 1 == 1) {
            let salts: Vec<u64> = (0..tokens).map(|_| self.salts.next_u64()).collect();
            self.mark_commits();
            let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
            let appended = self.shape.append(sequence, layer, &salts);
            let len = sequence.layer_len(layer).ok();
            self.made_space(0);
            let own = &mut self.model.lives.entry(id).or_default().layers[layer];
            if appended.is_ok() {
                own.extend(salts);
            }
            if len != Some(own.len() as u64) {
                let text = format!("layer {layer} has {len:?} tokens, not {}", own.len());
                return Err(Stop::Failed(format!("after append {appended:?}: {text}")));
            }
            if let Err(e) = appended {
                self.fault("append", &e, coverage)?;
            }
        }
        Ok(())
    }

    fn commit(
        &mut self,
        slot: usize,
        durability: Durability,
        state: Option<usize>,
        coverage: &mut Coverage,
    ) -> Result<(), Stop> {
        let Some(id) = self.handle(slot, coverage)? else { return Ok(()) };
        let state: Option<Vec<u8>> = state.map(|len| (0..len).map(|_| self.salts.next_u64() as u8).collect());
        self.mark_commits();
        let Some((_, sequence)) = &mut self.handles[slot] else { return Ok(()) };
        let committed = match &state {
            Some(state) => sequence.commit_with(state, durability),
            None => sequence.commit(durability),
        };
        let (state_now, tokens_now) = (sequence.state().map(<[u8]>::to_vec), sequence.committed());
        self.made_space(u64::from(durability == Durability::Sync && committed.is_ok()));
        let Some(life) = self.model.lives.get_mut(&id) else { return Ok(()) };
        let before = life.state.clone();
        if state.is_some() {
            life.state = state;
        }
        let version = life.now();
        // One that found no room for a checkpoint waits for the next commit, with its state.
        let made = committed.as_ref().err().is_none_or(Error::is_queued);
        if !made {
            life.state = before;
        }
        if state_now != life.state {
            let text = format!("after commit {committed:?} the handle's state is not that of the model");
            return Err(Stop::Failed(text));
        }
        if durability != Durability::None && made && tokens_now != version.tokens as u64 {
            let text = format!("after commit {committed:?}: {tokens_now} tokens, not {version:?}");
            return Err(Stop::Failed(text));
        }
        if durability == Durability::None {
            if committed.is_ok() {
                life.owed = Some(version);
            }
        } else {
            let down = self.simulation.is_down();
            let doubtful =
                |e: &Error| down || e.is_queued() || matches!(e.kind(), ErrorKind::Indeterminate | ErrorKind::Poisoned);
            let handed_over = match &committed {
                Ok(()) => true,
                Err(e) => durability == Durability::Sync && doubtful(e),
            };
            if handed_over {
                life.owed = None;
                self.model.push(Entry::Commit { id, version });
            }
            if durability == Durability::Sync && handed_over {
                self.model.attempted(committed.is_ok());
            }
        }
        committed.or_else(|e| self.fault("commit", &e, coverage))
    }

    fn delete(&mut self, slot: usize, durability: Durability, coverage: &mut Coverage) -> Result<(), Stop> {
        let Some(id) = self.handle(slot, coverage)? else { return Ok(()) };
        let Some((_, sequence)) = self.handles[slot].take() else { return Ok(()) };
        let deleted = sequence.delete(durability);
        if !self.model.is_committed(id) {
            self.model.lives.remove(&id);
        } else if deleted.is_ok() || durability == Durability::Sync {
            self.model.push(Entry::Delete { id });
            if durability == Durability::Sync {
                self.model.attempted(deleted.is_ok());
            }
        }
        deleted.or_else(|e| self.fault("delete", &e, coverage))
    }

    fn check(&mut self, slot: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        let Some(id) = self.handle(slot, coverage)? else { return Ok(()) };
        for layer in 0..self.shape.layers {
            let (Some((_, sequence)), Some(life)) = (&self.handles[slot], self.model.lives.get(&id)) else { break };
            match self.shape.check(self.store()?, sequence, layer, &life.layers[layer]) {
                Ok(Ok(())) => {}
                Ok(Err(e)) => self.fault("read", &e, coverage)?,
                Err(e) => return Err(Stop::Failed(format!("sequence {id}: {e}"))),
            }
        }
        Ok(())
    }

    fn close(&mut self, slot: usize, coverage: &mut Coverage) -> Result<(), Stop> {
        let Some((id, sequence)) = self.handles[slot].take() else { return Ok(()) };
        self.mark_commits();
        let closed = sequence.close();
        self.made_space(0);
        let owed = self.model.lives.get_mut(&id).and_then(|life| life.owed.take());
        if closed.is_ok()
            && let Some(version) = owed
        {
            self.model.push(Entry::Commit { id, version });
        }
        match self.model.visible().values().find(|(other, _)| *other == id) {
            Some((_, version)) => {
                if let Some(life) = self.model.lives.get_mut(&id) {
                    life.back_to(version);
                }
            }
            None => {
                self.model.lives.remove(&id);
            }
        }
        closed.or_else(|e| self.fault("close of a sequence", &e, coverage))
    }

    fn close_store(&mut self, coverage: &mut Coverage) -> Result<(), Stop> {
        for slot in 0..SLOTS {
            self.close(slot, coverage)?;
        }
        self.note_given_up(coverage);
        let Some(store) = self.store.take() else { return Ok(()) };
        let closed = store.close();
        self.model.attempted(closed.is_ok());
        if let Err(e) = closed {
            self.fault("close of the store", &e, coverage)?;
            // Not closed, so it goes down as it is.
            return Err(Stop::Broken);
        }
        Ok(())
    }
}
