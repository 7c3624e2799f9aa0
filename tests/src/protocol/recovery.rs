//! What an open decides from the bytes, and the steps of its repair.

use super::disk::{Batch, Catalog, DEVICES, DeviceBytes, File, PAGES, Record, SEQUENCES, Slot};
use super::leader::{Process, Step};
use super::mistake::Mistake;

/// Why an open is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The store went on without this device.
    Stale(usize),
    /// No consistent generation was found.
    Damaged(&'static str),
}

/// The state that an open found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) catalog: Catalog,
    generation: u8,
    life: u8,
    /// Batches of the generation that count.
    batches: u8,
    epoch: u8,
    newest: [Slot; DEVICES],
    /// True if some valid slot names another generation.
    is_unsettled: bool,
    /// True if the generation cannot be continued.
    is_unclean: bool,
    /// True if devices were declared lost because they are missing.
    pub(super) has_lost: bool,
    /// True if a run without its last batch was cut.
    pub(super) has_cut: bool,
    /// True if a record named the generation and no slot did.
    pub(super) has_followed: bool,
}

/// One generation as its copies have it.
struct Replayed {
    catalog: Catalog,
    batches: u8,
    successor: Option<(u8, u8)>,
    has_cut: bool,
    differs: bool,
}

/// Decides which state the given devices hold.
pub(super) fn recover(
    devices: &[DeviceBytes; DEVICES],
    given: [bool; DEVICES],
    mistake: Option<Mistake>,
) -> Result<Found, Refusal> {
    let present = || (0..DEVICES).filter(|&device| given[device]);
    let mut newest = [Slot::default(); DEVICES];
    for device in present() {
        let valid = devices[device].slots.iter().flatten().max_by_key(|slot| slot.round);
        newest[device] = *valid.ok_or(Refusal::Damaged("no superblock slot is valid"))?;
    }
    let epoch = present().map(|device| newest[device].epoch).max().unwrap_or(0);
    let is_settled =
        |device: usize| devices[device].slots.iter().all(|slot| slot.is_some_and(|slot| slot.epoch == epoch));
    if present().any(is_settled)
        && let Some(stale) = present().find(|&device| newest[device].epoch < epoch)
    {
        return Err(Refusal::Stale(stale));
    }
    let slots: Vec<Slot> = present().flat_map(|device| devices[device].slots).flatten().collect();
    let named = present().map(|device| (newest[device].generation, newest[device].life)).max_by_key(|named| named.0);
    let (mut named, mut has_followed) = (named.unwrap_or((0, 0)), false);
    let mut replayed = loop {
        let copies: Vec<&File> = present()
            .filter_map(|device| devices[device].files[usize::from(named.0 % 2)].as_ref())
            .filter(|file| (file.generation, file.life) == named)
            .collect();
        let missing = copies.len() < present().count();
        let synced = slots.iter().filter(|slot| (slot.generation, slot.life) == named).map(|slot| slot.synced).max();
        let mut replayed = replay(&copies, synced.unwrap_or(0), mistake)?;
        replayed.differs |= missing;
        match replayed.successor {
            Some(next) => (named, has_followed) = (next, true),
            None => break replayed,
        }
    };
    let lost = present().find(|&device| replayed.catalog.lost_at[device] != 0);
    if let Some(lost) = lost.filter(|_| mistake != Some(Mistake::LostDeviceAccepted)) {
        return Err(Refusal::Stale(lost));
    }
    let epoch = epoch.max(replayed.catalog.lost_at.into_iter().max().unwrap_or(0));
    let missing: Vec<_> = (0..DEVICES).filter(|&d| !given[d] && replayed.catalog.lost_at[d] == 0).collect();
    missing.iter().for_each(|&device| replayed.catalog.lost_at[device] = epoch + 1);
    let adjacent = |device: &usize| match devices[*device].slots {
        [Some(one), Some(other)] => one.round.abs_diff(other.round) == 1,
        _ => false,
    };
    let is_closed = present().all(|device| newest[device].is_closed && adjacent(&device));
    Ok(Found {
        catalog: replayed.catalog,
        generation: named.0,
        life: named.1,
        batches: replayed.batches,
        epoch,
        newest,
        is_unsettled: slots.iter().any(|slot| slot.generation != named.0),
        is_unclean: !is_closed || replayed.has_cut || replayed.differs || has_followed || !missing.is_empty(),
        has_lost: !missing.is_empty(),
        has_cut: replayed.has_cut,
        has_followed,
    })
}

/// Reads the copies of one generation side by side. `synced` batches are durable according to superblocks.
fn replay(copies: &[&File], synced: u8, mistake: Option<Mistake>) -> Result<Replayed, Refusal> {
    let mut replayed =
        Replayed { catalog: Catalog::default(), batches: 0, successor: None, has_cut: false, differs: false };
    let mut run: Vec<Batch> = Vec::new();
    for page in 0..PAGES {
        let Some(batch) = copies.iter().find_map(|file| file.batches[page]) else {
            let later = copies.iter().flat_map(|file| &file.batches[page..]).flatten();
            if usize::from(synced) > page || later.into_iter().any(|later| usize::from(later.synced) > page) {
                return Err(Refusal::Damaged("a durable batch is missing"));
            }
            break;
        };
        replayed.differs |= copies.iter().any(|file| file.batches[page].is_none());
        replayed.batches += 1;
        run.push(batch);
        if !batch.has_more || mistake == Some(Mistake::HalfRunApplied) {
            for batch in run.drain(..) {
                apply(&mut replayed, page, &batch)?;
            }
        }
    }
    replayed.has_cut = !run.is_empty();
    match replayed.batches {
        0 => Err(Refusal::Damaged("no copy has a checkpoint")),
        _ => Ok(replayed),
    }
}

fn apply(replayed: &mut Replayed, page: usize, batch: &Batch) -> Result<(), Refusal> {
    let Replayed { catalog, successor, .. } = replayed;
    let mut lose = |lost_at: [u8; DEVICES]| {
        for device in (0..DEVICES).filter(|&device| lost_at[device] != 0) {
            catalog.lost_at[device] = lost_at[device];
        }
    };
    match batch.record {
        Record::Checkpoint(state) if page == 0 => *catalog = state,
        Record::Checkpoint(_) => return Err(Refusal::Damaged("a second checkpoint")),
        Record::Half { half, commits, lost_at } => {
            lose(lost_at);
            for sequence in (0..SEQUENCES).filter(|&sequence| commits[sequence] != 0) {
                let known = &mut catalog.halves[usize::from(half)][sequence];
                if number(commits[sequence]) != number(*known) + 1 {
                    return Err(Refusal::Damaged("records contradict each other"));
                }
                *known = commits[sequence];
            }
        }
        Record::Lost(lost_at) => lose(lost_at),
        Record::Superseded { generation, life } => *successor = Some((generation, life)),
    }
    Ok(())
}

/// Returns the number of a commit within its sequence. Its other bits tell apart commits of different lives.
pub(super) fn number(commit: u8) -> u8 {
    commit & 15
}

impl Found {
    /// Returns the process that repairs the store and opens it.
    pub(super) fn start(&self, given: [bool; DEVICES], (life, pages): (u8, u8), mistake: Option<Mistake>) -> Process {
        let mut process = Process {
            catalog: self.catalog,
            generation: self.generation,
            file_life: self.life,
            life,
            pages,
            next: self.batches,
            synced: self.batches,
            epoch: self.epoch,
            next_epoch: self.epoch,
            gone: [false; DEVICES],
            failed: [false; DEVICES],
            leaving: [0; DEVICES],
            given,
            slots: self.newest,
            queued: [0; SEQUENCES],
            group: [0; SEQUENCES],
            plan: std::collections::VecDeque::new(),
            is_broken: false,
            is_open: false,
        };
        let continues = mistake == Some(Mistake::GenerationNotBumped) && !self.has_lost;
        let steps = if self.is_unclean && !continues {
            process.next_epoch += u8::from(self.has_lost);
            self.repair(&process, mistake)
        } else if mistake == Some(Mistake::OpenMarkSkipped) {
            Vec::new()
        } else {
            process.written().flat_map(|device| [Step::WriteSlot(device), Step::SyncSlot(device)]).collect()
        };
        process.plan = steps.into_iter().chain([Step::Opened]).collect();
        process
    }

    /// Returns the steps that make the found state a new generation.
    fn repair(&self, process: &Process, mistake: Option<Mistake>) -> Vec<Step> {
        let put = |device: u8, slot: Slot| [Step::RepairSlot(device, slot), Step::SyncSlot(device)];
        let mut steps = Vec::new();
        let mut last = self.newest;
        for device in process.written() {
            if self.newest[usize::from(device)].epoch == self.epoch {
                continue;
            }
            last[usize::from(device)].epoch = self.epoch;
            steps.extend(put(device, last[usize::from(device)]));
        }
        let settles = self.is_unsettled && mistake != Some(Mistake::SettleSkipped);
        for device in (0..2).flat_map(|_| process.written()).filter(|_| settles) {
            let own = last[usize::from(device)];
            let synced = if own.generation == self.generation { own.synced } else { 0 };
            let slot = Slot { generation: self.generation, life: self.life, synced, is_closed: false, ..own };
            steps.extend(put(device, slot));
        }
        steps.push(Step::StartFile);
        steps.extend(process.written().map(|device| Step::SyncFile(device, (self.generation + 1) % 2)));
        steps.push(Step::Switch);
        if mistake != Some(Mistake::RepairNotNamed) {
            steps.extend(process.slot_rounds());
        }
        steps
    }
}
