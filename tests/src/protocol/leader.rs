//! The steps of an open store: group commits, checkpoints, changes of members, and a close.
//!
//! A plan is a list of steps. Steps up to the next sync run at once, because only a sync makes a difference after a
//! crash.

use super::disk::{Batch, Catalog, DEVICES, Disk, File, PAGES, Record, SEQUENCES, Slot, Target, Write};
use super::mistake::Mistake;
use std::collections::VecDeque;

/// One step. Numbers are devices, and then sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    SyncFrames(u8, u8),
    AppendGroup,
    AppendLost,
    SyncBatches(u8),
    /// All batches so far are durable on every copy that is left.
    Recorded,
    StartFile,
    /// Syncs the file at one of the two places.
    SyncFile(u8, u8),
    AppendSuperseded,
    SyncLast(u8),
    /// The next generation is in force.
    Switch,
    WriteSlot(u8),
    WriteClosedSlot(u8),
    /// Writes a slot that a repair decided on.
    RepairSlot(u8, Slot),
    SyncSlot(u8),
    Acknowledge,
    Opened,
    Closed,
}

/// An open store, or one that is being opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Process {
    pub(super) catalog: Catalog,
    pub(super) generation: u8,
    /// The nonce of the generation in force.
    pub(super) file_life: u8,
    /// The nonce of generations to come.
    pub(super) life: u8,
    /// Batches of a file, at most.
    pub(super) pages: u8,
    /// The place of the next batch.
    pub(super) next: u8,
    pub(super) synced: u8,
    pub(super) epoch: u8,
    pub(super) next_epoch: u8,
    /// Devices that failed or leave. Nothing is written to them.
    pub(super) gone: [bool; DEVICES],
    /// Devices that failed and that no batch names yet.
    pub(super) failed: [bool; DEVICES],
    /// Epochs of lost devices that are recorded, but not in superblocks.
    pub(super) leaving: [u8; DEVICES],
    /// The devices that were given to the open.
    pub(super) given: [bool; DEVICES],
    /// The last slot of each device.
    pub(super) slots: [Slot; DEVICES],
    /// Commits whose frames are written, by sequence. 0 is none.
    pub(super) queued: [u8; SEQUENCES],
    /// The commits of the group under way.
    pub(super) group: [u8; SEQUENCES],
    pub(super) plan: VecDeque<Step>,
    /// True if a sync failed that the store cannot do without: it is read-only.
    pub(super) is_broken: bool,
    pub(super) is_open: bool,
}

/// What a step makes known to the caller of the store.
pub(super) enum Outcome {
    Nothing,
    Acknowledged,
    Opened,
    Closed,
}

impl Process {
    /// Returns the devices that are written to.
    pub(super) fn written(&self) -> impl Iterator<Item = u8> + use<'_> {
        let is_written = |d: usize| self.given[d] && !self.gone[d] && self.catalog.lost_at[d] == 0;
        (0..DEVICES).filter(move |&device| is_written(device)).map(|device| device as u8)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.is_open && !self.is_broken && self.plan.is_empty()
    }

    /// Returns the devices that get the frames of a sequence.
    pub(super) fn holders(&self, sequence: usize, copies: usize) -> Vec<u8> {
        let is_holder = |device: &u8| copies == DEVICES || usize::from(*device) == sequence % DEVICES;
        self.written().filter(is_holder).collect()
    }

    /// Begins a group commit of all queued commits.
    pub(super) fn lead(&mut self, copies: usize, mistake: Option<Mistake>) {
        self.group = self.queued;
        let mut plan = Vec::new();
        for sequence in (0..SEQUENCES).filter(|&sequence| self.group[sequence] != 0) {
            plan.extend(
                self.holders(sequence, copies).into_iter().map(|device| Step::SyncFrames(device, sequence as u8)),
            );
        }
        if mistake == Some(Mistake::FrameSyncSkipped) {
            plan.clear();
        }
        match mistake {
            Some(Mistake::BatchBeforeFrames) => plan.insert(0, Step::AppendGroup),
            _ => plan.push(Step::AppendGroup),
        }
        match mistake {
            Some(Mistake::ManifestSyncSkipped) => {}
            Some(Mistake::OneCopySynced) => plan.extend(self.written().take(1).map(Step::SyncBatches)),
            _ => plan.extend(self.written().map(Step::SyncBatches)),
        }
        plan.extend([Step::Recorded, Step::Acknowledge]);
        self.plan = plan.into();
    }

    /// Begins to give up a device, because a caller declares it lost.
    pub(super) fn declare_lost(&mut self, device: usize) {
        (self.gone[device], self.failed[device]) = (true, true);
        self.plan.push_back(Step::AppendLost);
        let syncs: Vec<_> = self.written().map(Step::SyncBatches).collect();
        self.plan.extend(syncs);
        self.plan.extend([Step::Recorded, Step::Acknowledge]);
    }

    /// Returns the steps of a checkpoint. Without `is_named` no superblock names it.
    pub(super) fn checkpoint(&self, is_named: bool, mistake: Option<Mistake>) -> Vec<Step> {
        let file: Vec<_> = self.written().map(|device| Step::SyncFile(device, (self.generation + 1) % 2)).collect();
        let mut superseded = vec![Step::AppendSuperseded];
        superseded.extend(self.written().map(Step::SyncLast));
        let is_named = is_named && mistake != Some(Mistake::SuperblockSkipped);
        let slots = if is_named { self.slot_rounds() } else { Vec::new() };
        let mut steps = vec![Step::StartFile];
        match mistake {
            Some(Mistake::SuperblockBeforeCheckpoint) => {
                steps.extend(superseded);
                steps.push(Step::Switch);
                steps.extend(slots.into_iter().chain(file));
                return steps;
            }
            Some(Mistake::SupersededBeforeCheckpoint) => steps.extend(superseded.into_iter().chain(file)),
            _ => steps.extend(file.into_iter().chain(superseded)),
        }
        steps.push(Step::Switch);
        steps.extend(slots);
        steps
    }

    /// Returns the steps that write both slots of each device.
    pub(super) fn slot_rounds(&self) -> Vec<Step> {
        let round = || self.written().flat_map(|device| [Step::WriteSlot(device), Step::SyncSlot(device)]);
        round().chain(round()).collect()
    }

    /// Begins to close the store.
    pub(super) fn close(&mut self) {
        let steps: Vec<_> =
            self.written().flat_map(|device| [Step::WriteClosedSlot(device), Step::SyncSlot(device)]).collect();
        self.plan.extend(steps);
        self.plan.push_back(Step::Closed);
    }

    fn insert(&mut self, steps: impl IntoIterator<Item = Step>) {
        let rest = std::mem::take(&mut self.plan);
        self.plan = steps.into_iter().chain(rest).collect();
    }

    /// Runs the steps before the next sync.
    pub(super) fn run(&mut self, disk: &mut Disk, mistake: Option<Mistake>) -> Outcome {
        let mut outcome = Outcome::Nothing;
        while let Some(step) = self.plan.front().copied().filter(|step| Self::target(*step).is_none()) {
            self.plan.pop_front();
            match step {
                Step::Acknowledge => outcome = Outcome::Acknowledged,
                Step::Closed => outcome = Outcome::Closed,
                Step::Opened => {
                    self.is_open = true;
                    outcome = Outcome::Opened;
                }
                step => self.perform(step, disk, mistake),
            }
        }
        outcome
    }

    /// Returns the device that a step syncs, or `None` for another step.
    pub(super) fn target(step: Step) -> Option<u8> {
        match step {
            Step::SyncFrames(device, _)
            | Step::SyncBatches(device)
            | Step::SyncFile(device, _)
            | Step::SyncLast(device)
            | Step::SyncSlot(device) => Some(device),
            _ => None,
        }
    }

    /// Returns what a step that syncs covers.
    pub(super) fn covered(&self, step: Step) -> Option<(u8, Target)> {
        let target = match step {
            Step::SyncFrames(_, sequence) => Target::Frames(sequence),
            Step::SyncBatches(_) | Step::SyncLast(_) => Target::Manifest(self.generation % 2),
            Step::SyncFile(_, place) => Target::Manifest(place),
            Step::SyncSlot(_) => Target::Superblock,
            _ => return None,
        };
        Self::target(step).map(|device| (device, target))
    }

    /// Takes note that a sync failed. A device is given up if everything has a copy on another one.
    pub(super) fn fail(&mut self, device: u8, copies: usize, mistake: Option<Mistake>) {
        let has_other = self.written().any(|other| other != device);
        if copies < DEVICES || !has_other {
            self.is_broken = true;
            self.plan.clear();
            return;
        }
        self.gone[usize::from(device)] = true;
        self.failed[usize::from(device)] = mistake != Some(Mistake::LostDeviceNotRecorded);
        self.plan.retain(|step| Self::target(*step) != Some(device));
    }

    fn perform(&mut self, step: Step, disk: &mut Disk, mistake: Option<Mistake>) {
        match step {
            Step::AppendGroup | Step::AppendLost => self.append(step, disk, mistake),
            Step::Recorded => {
                self.synced = self.next;
                self.record_members(mistake);
            }
            Step::StartFile => {
                let mut batches = [None; PAGES];
                batches[0] = Some(Batch { record: Record::Checkpoint(self.catalog), has_more: false, synced: 0 });
                let file = File { generation: self.generation + 1, life: self.life, batches };
                self.written().for_each(|device| disk.write(device, Write::File(file)));
            }
            Step::AppendSuperseded => {
                let record = Record::Superseded { generation: self.generation + 1, life: self.life };
                self.push(disk, record, false);
            }
            Step::Switch => {
                (self.generation, self.file_life) = (self.generation + 1, self.life);
                (self.next, self.synced, self.epoch) = (1, 1, self.next_epoch);
            }
            Step::WriteSlot(device) => self.write_slot(disk, device, self.slot(false), mistake),
            Step::WriteClosedSlot(device) => self.write_slot(disk, device, self.slot(true), mistake),
            Step::RepairSlot(device, slot) => self.write_slot(disk, device, slot, mistake),
            _ => {}
        }
    }

    /// Appends the records of the group, or of lost devices, after a checkpoint if the file is full.
    fn append(&mut self, step: Step, disk: &mut Disk, mistake: Option<Mistake>) {
        let pages = if step == Step::AppendGroup { 2 } else { 1 };
        if usize::from(self.next) + pages + 2 > usize::from(self.pages) {
            let mut steps = self.checkpoint(true, mistake);
            steps.push(step);
            self.insert(steps);
            return;
        }
        let mut lost_at = [0; DEVICES];
        for device in (0..DEVICES).filter(|&device| self.failed[device]) {
            lost_at[device] = self.next_epoch + 1;
            self.leaving[device] = lost_at[device];
            self.catalog.lost_at[device] = lost_at[device];
        }
        self.failed = [false; DEVICES];
        if step == Step::AppendLost {
            return self.push(disk, Record::Lost(lost_at), false);
        }
        for half in 0..2 {
            let record = Record::Half { half, commits: self.group, lost_at: if half == 1 { lost_at } else { [0; 2] } };
            self.push(disk, record, half == 0);
        }
        for sequence in (0..SEQUENCES).filter(|&sequence| self.group[sequence] != 0) {
            self.catalog.halves.iter_mut().for_each(|half| half[sequence] = self.group[sequence]);
        }
    }

    fn push(&mut self, disk: &mut Disk, record: Record, has_more: bool) {
        let batch = Batch { record, has_more, synced: self.synced };
        let write = Write::Batch { generation: self.generation, life: self.file_life, page: self.next, batch };
        self.written().for_each(|device| disk.write(device, write));
        self.next += 1;
    }

    /// Records devices that failed. If they are recorded, the others get the next generation and its epoch.
    fn record_members(&mut self, mistake: Option<Mistake>) {
        if self.failed.contains(&true) {
            let syncs = self.written().map(Step::SyncBatches);
            let steps: Vec<_> = std::iter::once(Step::AppendLost).chain(syncs).chain([Step::Recorded]).collect();
            return self.insert(steps);
        }
        let epoch = self.leaving.into_iter().max().unwrap_or(0);
        if epoch > 0 {
            self.next_epoch = epoch;
            (self.leaving, self.gone) = ([0; DEVICES], [false; DEVICES]);
            let steps = self.checkpoint(mistake != Some(Mistake::MembersWithoutSuperblock), mistake);
            self.insert(steps);
        }
    }

    fn slot(&self, is_closed: bool) -> Slot {
        let Self { epoch, generation, file_life, synced, .. } = *self;
        Slot { round: 0, epoch, generation, life: file_life, synced, is_closed }
    }

    fn write_slot(&mut self, disk: &mut Disk, device: u8, slot: Slot, mistake: Option<Mistake>) {
        let slot = Slot { round: self.slots[usize::from(device)].round + 1, ..slot };
        let index = if mistake == Some(Mistake::OneSlotUsed) { 0 } else { slot.round % 2 };
        disk.write(device, Write::Slot(index, slot));
        self.slots[usize::from(device)] = slot;
    }
}
