//! The actions of the world on a store, and what must hold after each open.

use super::disk::{Batch, Catalog, DEVICES, DeviceBytes, Disk, File, PAGES, Record, SEQUENCES, Slot, Write};
use super::leader::{Outcome, Process, Step};
use super::mistake::Mistake;
use super::normal::normalise;
use super::recovery::{Found, Refusal, number, recover};
use std::collections::BTreeMap;
use std::fmt;

/// What may happen within one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// Copies of each frame: 1, or 2 as there are devices.
    pub copies: usize,
    /// Commits of all sequences together.
    pub commits: u8,
    /// Power failures.
    pub crashes: u8,
    /// Devices that fail a sync, are missing at an open, or are declared lost.
    pub losses: u8,
    /// Batches of a manifest file: 5 for one group commit, 7 for two.
    pub pages: u8,
    /// Checkpoints besides those of full files.
    pub checkpoints: u8,
    /// Clean closes.
    pub closes: u8,
}

/// What must hold after each open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Property {
    /// Each sequence is at its last acknowledged commit, or at the one that was in progress, and its frame is readable.
    CommitsPresent,
    /// Recovery finds a consistent generation.
    GenerationFound,
    /// Both halves of the records of a commit are there, or none.
    CommitsWhole,
    /// A device that was given up is not accepted.
    LostDeviceRefused,
    /// A device that was not given up is not refused.
    MemberAccepted,
}

/// What an open met. The search counts each, so that a test can require it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// The store opened.
    Opened,
    /// A commit that was cut by a power failure is there.
    CommitKept,
    /// A commit that was cut by a power failure is not there.
    CommitDropped,
    /// A run of batches without its last one was cut.
    RunCut,
    /// The last record named a successor that no superblock named.
    SuccessorFollowed,
    /// A missing device was given up.
    OpenedWithout,
    /// A device that was given up was refused.
    StaleRefused,
    /// The store was closed before.
    OpenedClean,
}

/// One action.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// A sequence writes the frame of its next commit.
    WriteFrame {
        sequence: usize,
    },
    /// A leader commits all queued commits.
    Lead,
    Checkpoint,
    DeclareLost {
        device: usize,
    },
    Close,
    /// The next sync succeeds.
    Sync(Step),
    SyncFails(Step),
    /// The power fails. The number names one of the disks that it may leave.
    Crash {
        outcome: usize,
    },
    Open {
        given: [bool; DEVICES],
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteFrame { sequence } => write!(f, "sequence {sequence} writes a frame"),
            Self::Lead => write!(f, "a leader commits all frames"),
            Self::Checkpoint => write!(f, "a checkpoint begins"),
            Self::DeclareLost { device } => write!(f, "device {device} is declared lost"),
            Self::Close => write!(f, "the store is closed"),
            Self::Sync(step) => write!(f, "{step:?}"),
            Self::SyncFails(step) => write!(f, "{step:?} fails"),
            Self::Crash { outcome } => write!(f, "the power fails, and outcome {outcome} is left"),
            Self::Open { given } => write!(f, "the store is opened with devices {given:?}"),
        }
    }
}

/// What was promised to the callers of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Promises {
    acknowledged: [u8; SEQUENCES],
    /// Commits that were begun and not acknowledged. 0 is none.
    in_progress: [u8; SEQUENCES],
    given_up: [bool; DEVICES],
    /// Devices whose loss was begun.
    suspected: [bool; DEVICES],
}

/// A store, its devices, and what was promised.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    disk: Disk,
    process: Option<Process>,
    promises: Promises,
    left: Scope,
    life: u8,
    is_closed: bool,
}

impl State {
    /// Brings a closed store to its normal form.
    fn normalise(&mut self) {
        let Promises { acknowledged: [a, b], in_progress: [c, d], .. } = self.promises;
        let mut promised = [a, b, c, d];
        self.life = normalise(&mut self.disk.durable, &mut promised);
        let [a, b, c, d] = promised;
        (self.promises.acknowledged, self.promises.in_progress) = ([a, b], [c, d]);
    }
}

/// The protocol within a scope, perhaps with a mistake.
#[derive(Clone, Copy, Debug)]
pub struct ProtocolModel {
    /// What may happen.
    pub scope: Scope,
    /// The mistake that is planted.
    pub mistake: Option<Mistake>,
}

type Next = Vec<(Action, State)>;
type Events = BTreeMap<Event, usize>;

impl ProtocolModel {
    /// Returns a new store, closed.
    pub(super) fn initial(&self) -> State {
        let mut batches = [None; PAGES];
        let record = Record::Checkpoint(Catalog::default());
        batches[0] = Some(Batch { record, has_more: false, synced: 0 });
        let file = Some(File { generation: 0, life: 0, batches });
        let slot = |round| Some(Slot { round, synced: 1, is_closed: true, ..Slot::default() });
        let device = DeviceBytes { slots: [slot(0), slot(1)], files: [file, None], ..DeviceBytes::default() };
        let disk = Disk::new([device; DEVICES]);
        let promises = Promises::default();
        State { disk, process: None, promises, left: self.scope, life: 0, is_closed: true }
    }

    /// Adds every state that follows.
    ///
    /// # Errors
    /// A property that the next action breaks.
    pub(super) fn next(&self, state: &State, next: &mut Next, events: &mut Events) -> Result<(), (Property, Action)> {
        let Some(process) = &state.process else { return self.open(state, next, events) };
        if let Some(&step) = process.plan.front() {
            next.push((Action::Sync(step), self.sync(state, step)));
            let may_fail = matches!(step, Step::SyncFrames(..) | Step::SyncBatches(_));
            if may_fail && (state.left.losses > 0 || self.scope.copies < DEVICES) {
                next.push((Action::SyncFails(step), self.fail(state, step)));
            }
        }
        if process.is_idle() {
            self.begin(state, process, next);
        }
        if process.is_open && !process.is_broken && state.left.commits > 0 {
            // With a copy on each device sequences are equal, so the first commit may be that of the first one.
            let is_first = state.left.commits == self.scope.commits && self.scope.copies == DEVICES;
            let others = if is_first { 1 } else { SEQUENCES };
            let free = (0..others).filter(|&sequence| process.queued[sequence] == 0);
            next.extend(free.map(|sequence| (Action::WriteFrame { sequence }, self.write(state, sequence))));
        }
        if state.left.crashes > 0 {
            for (outcome, disk) in state.disk.after_crash().into_iter().enumerate() {
                let promises = state.promises.clone();
                let mut after = State { disk, process: None, promises, is_closed: false, ..*state };
                after.left.crashes -= 1;
                after.normalise();
                next.push((Action::Crash { outcome }, after));
            }
        }
        Ok(())
    }

    /// Adds what an idle store may begin.
    fn begin(&self, state: &State, process: &Process, next: &mut Next) {
        let mut add = |action, begin: &dyn Fn(&mut State)| {
            let mut after = state.clone();
            begin(&mut after);
            self.run(&mut after);
            next.push((action, after));
        };
        let is_queued = process.queued.iter().any(|commit| *commit != 0);
        if is_queued {
            add(Action::Lead, &|after| {
                let Some(process) = &mut after.process else { return };
                process.lead(self.scope.copies, self.mistake);
                after.promises.in_progress = process.group;
            });
        }
        if state.left.checkpoints > 0 {
            add(Action::Checkpoint, &|after| {
                after.left.checkpoints -= 1;
                let Some(process) = &mut after.process else { return };
                process.plan = process.checkpoint(true, self.mistake).into();
            });
        }
        let may_lose = state.left.losses > 0 && self.scope.copies == DEVICES && process.written().count() == DEVICES;
        for device in (0..DEVICES).filter(|_| may_lose) {
            add(Action::DeclareLost { device }, &|after| {
                after.left.losses -= 1;
                after.promises.suspected[device] = true;
                after.process.iter_mut().for_each(|process| process.declare_lost(device));
            });
        }
        if state.left.closes > 0 && !is_queued {
            add(Action::Close, &|after| {
                after.left.closes -= 1;
                after.process.iter_mut().for_each(Process::close);
            });
        }
    }

    /// Runs steps up to the next sync, and takes note of what they promise.
    fn run(&self, state: &mut State) {
        let Some(process) = &mut state.process else { return };
        let promises = &mut state.promises;
        match process.run(&mut state.disk, self.mistake) {
            Outcome::Nothing => {}
            Outcome::Acknowledged => {
                for sequence in (0..SEQUENCES).filter(|&sequence| process.group[sequence] != 0) {
                    promises.acknowledged[sequence] = process.group[sequence];
                    process.queued[sequence] = 0;
                }
                promises.in_progress = [0; SEQUENCES];
                process.group = [0; SEQUENCES];
                for device in 0..DEVICES {
                    promises.given_up[device] |= process.gone[device] || process.catalog.lost_at[device] != 0;
                }
            }
            Outcome::Opened => {
                promises.acknowledged = process.catalog.halves[0];
                promises.in_progress = [0; SEQUENCES];
                for device in 0..DEVICES {
                    promises.given_up[device] |= process.catalog.lost_at[device] != 0;
                }
            }
            Outcome::Closed => {
                (state.process, state.is_closed, state.life) = (None, true, state.life + 1);
                if state.disk.is_durable() {
                    state.normalise();
                }
            }
        }
    }

    fn write(&self, state: &State, sequence: usize) -> State {
        let mut after = state.clone();
        after.left.commits -= 1;
        if let Some(process) = &mut after.process {
            let number = number(process.catalog.halves[0][sequence]) + 1;
            let commit = state.life << 4 | number;
            let place = if self.mistake == Some(Mistake::FrameReusedEarly) { 0 } else { number % 2 };
            for device in process.holders(sequence, self.scope.copies) {
                after.disk.write(device, Write::Frame { sequence: sequence as u8, place, commit });
            }
            process.queued[sequence] = commit;
        }
        after
    }

    fn sync(&self, state: &State, step: Step) -> State {
        let mut after = state.clone();
        if let Some(process) = &mut after.process {
            process.plan.pop_front();
            if let Some((device, target)) = process.covered(step) {
                after.disk.sync(device, target);
            }
        }
        self.run(&mut after);
        after
    }

    fn fail(&self, state: &State, step: Step) -> State {
        let mut after = state.clone();
        if let Some(process) = &mut after.process
            && let Some((device, target)) = process.covered(step)
        {
            process.plan.pop_front();
            after.disk.lose(device, target);
            after.left.losses = after.left.losses.saturating_sub(1);
            if self.mistake != Some(Mistake::SyncRetried) {
                after.promises.suspected[usize::from(device)] = true;
                process.fail(device, self.scope.copies, self.mistake);
            }
        }
        self.run(&mut after);
        after
    }

    /// Adds an open with each set of devices that may be given.
    fn open(&self, state: &State, next: &mut Next, events: &mut Events) -> Result<(), (Property, Action)> {
        let devices = state.disk.seen();
        let given_up = state.promises.given_up;
        for given in [[true, true], [true, false], [false, true]] {
            let action = Action::Open { given };
            let missing = given.iter().position(|is_given| !is_given);
            let is_member = (0..DEVICES).any(|device| given[device] && !given_up[device]);
            let is_loss = missing.is_some_and(|device| !given_up[device]);
            if !is_member || is_loss && (state.left.losses == 0 || self.scope.copies < DEVICES) {
                continue;
            }
            let (found, given) = match recover(&devices, given, self.mistake) {
                Err(Refusal::Stale(stale)) if missing.is_none() => {
                    if !given_up[stale] && !state.promises.suspected[stale] {
                        return Err((Property::MemberAccepted, action));
                    }
                    *events.entry(Event::StaleRefused).or_default() += 1;
                    let mut rest = given;
                    rest[stale] = false;
                    (recover(&devices, rest, self.mistake), rest)
                }
                other => (other, given),
            };
            let found = found.map_err(|refusal| match refusal {
                Refusal::Stale(_) => (Property::MemberAccepted, action),
                Refusal::Damaged(_) => (Property::GenerationFound, action),
            })?;
            self.check(state, &devices, &found, given).map_err(|property| (property, action))?;
            note(state, &found, events);
            let mut after = state.clone();
            if let Some(device) = missing.filter(|_| is_loss) {
                after.left.losses -= 1;
                after.promises.suspected[device] = true;
            }
            after.process = Some(found.start(given, (state.life, self.scope.pages), self.mistake));
            self.run(&mut after);
            next.push((action, after));
        }
        Ok(())
    }

    /// Checks what an open found against what was promised.
    fn check(
        &self,
        state: &State,
        devices: &[DeviceBytes; DEVICES],
        found: &Found,
        given: [bool; DEVICES],
    ) -> Result<(), Property> {
        let Promises { acknowledged, in_progress, given_up, .. } = &state.promises;
        if (0..DEVICES).any(|device| given[device] && given_up[device]) {
            return Err(Property::LostDeviceRefused);
        }
        if found.catalog.halves[0] != found.catalog.halves[1] {
            return Err(Property::CommitsWhole);
        }
        for sequence in 0..SEQUENCES {
            let commit = found.catalog.halves[0][sequence];
            let is_legal = commit == acknowledged[sequence] || commit != 0 && commit == in_progress[sequence];
            let early = self.mistake == Some(Mistake::FrameReusedEarly);
            let place = if early { 0 } else { usize::from(number(commit) % 2) };
            let holds = |device: usize| given[device] && devices[device].frames[sequence][place] == commit;
            if !is_legal || commit != 0 && !(0..DEVICES).any(holds) {
                return Err(Property::CommitsPresent);
            }
        }
        Ok(())
    }
}

/// Counts what an open met.
fn note(state: &State, found: &Found, events: &mut Events) {
    let Promises { in_progress, .. } = &state.promises;
    let cut = |kept: bool| {
        (0..SEQUENCES).any(|s| in_progress[s] != 0 && (found.catalog.halves[0][s] == in_progress[s]) == kept)
    };
    let met = [
        (Event::Opened, true),
        (Event::CommitKept, cut(true)),
        (Event::CommitDropped, cut(false)),
        (Event::RunCut, found.has_cut),
        (Event::SuccessorFollowed, found.has_followed),
        (Event::OpenedWithout, found.has_lost),
        (Event::OpenedClean, state.is_closed),
    ];
    met.into_iter().filter(|(_, is_met)| *is_met).for_each(|(event, _)| *events.entry(event).or_default() += 1);
}
