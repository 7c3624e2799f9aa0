//! Reads that are late are retried on another copy: the part is read into a buffer of its own, and the first good answer counts. The
//! loser may still land in the other buffer, which goes back to the arena only then. So are reads that failed where one of several
//! other copies may be late in turn.

use super::copy_fallback;
use super::progress::Progress;
use super::ticket::{ReadTicket, request};
use crate::error::Error;
use crate::io::buffer::arena::Lease;
use crate::io::scheduler::{Batch, Priority, Request, Sink};
use crate::log::Devices;
use crate::plan::{PlannedRead, ReadPart};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv_format::DeviceIndex;

/// No part counts as late before.
const LATE_MIN: Duration = Duration::from_millis(2);
/// How many times the time that the fastest device with a copy is expected to take a part may take before it counts as late.
const EXPECTED_TIMES: u32 = 3;
/// How long to wait for one of the devices of a part while all of them are late: most likely only one of them is slow, and the
/// other one is to give the second answer.
const ALL_LATE: Duration = Duration::from_millis(100);
/// How often to look which of two answers has come.
const LOOK: Duration = Duration::from_micros(200);

/// Parts that another copy has given.
#[derive(Default)]
pub(super) struct Hedges(BTreeSet<usize>);

impl Hedges {
    pub(super) fn won(&self, part: usize) -> bool {
        self.0.contains(&part)
    }
}

impl ReadTicket {
    /// Whether a part could be read from other copies when it is late.
    pub(super) fn may_hedge(&self) -> bool {
        self.devices.hedges() && self.parts.iter().flat_map(|part| &part.reads).any(|read| read.frame.copies() > 1)
    }

    /// When a part counts as late; none when no other copies can give it.
    pub(super) fn hedge_at(&self, part: usize) -> Option<Instant> {
        if !self.parts[part].reads.iter().any(|read| read.frame.copies() > 1) {
            return None;
        }
        let late = self.late_after(part)?;
        self.progress.since().map(|start| start.max(Instant::now() - late) + late)
    }

    /// How long after it was asked for a part counts as late; none before enough of them were seen.
    fn late_after(&self, part: usize) -> Option<Duration> {
        let usual = self.devices.latencies.late()?;
        // By the copy that takes least: a device that was slow before is not waited for because it was.
        let expected = |read: &PlannedRead| {
            let devices = (0..read.frame.copies()).map(|copy| read.of_copy(copy).0.key.0);
            let profiles = devices.filter_map(|device| self.devices.get(device).ok());
            profiles.map(|device| device.profile.expected()).min().unwrap_or_default()
        };
        let expected = self.parts[part].reads.iter().map(expected).max().unwrap_or_default();
        Some(usual.max(LATE_MIN).max(expected * EXPECTED_TIMES))
    }

    /// Reads a part from other copies as well, until either answer is there or the deadline.
    pub(super) fn hedge(&mut self, index: usize, deadline: Option<Instant>) {
        let mut failed = BTreeSet::new();
        while let Some(late) = self.late_devices(index, deadline) {
            // An answer with errors is none: yet another copy may give one, if only of a device that was late a moment ago, and the
            // first answer may still come.
            let avoided = &late | &failed;
            if failed.is_empty() || can_avoid(&self.devices, &self.parts[index].reads, &avoided) {
                let Some(more) = self.second_answer(index, &avoided, None, deadline) else { return };
                failed.extend(more);
            } else {
                let look = Instant::now() + LOOK;
                let arrived = self.arrives(index, Some(deadline.map_or(look, |deadline| deadline.min(look))));
                if arrived || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return;
                }
            }
        }
    }

    /// Reads a part anew that arrived with failed reads, from other devices than these, where each of them has several other copies: the
    /// first one of these may be late. Whether the part has an answer now; else it is as it was.
    pub(super) fn around(&mut self, index: usize, failed: &[(usize, Error)], deadline: Option<Instant>) -> bool {
        let Some(patience) = self.late_after(index).filter(|_| self.devices.hedges()) else { return false };
        let reads = &self.parts[index].reads;
        let failed: Vec<PlannedRead> = failed.iter().filter_map(|(nth, _)| reads.get(*nth).cloned()).collect();
        if !failed.iter().all(|read| read.frame.copies() > 2) {
            return false;
        }
        let mut avoided: BTreeSet<DeviceIndex> = failed.iter().map(|read| read.segment.key.0).collect();
        while can_avoid(&self.devices, &self.parts[index].reads, &avoided)
            && let Some(more) = self.second_answer(index, &avoided, Some(patience), deadline)
        {
            avoided.extend(more);
        }
        let won = self.hedges.won(index);
        if won {
            failed.iter().for_each(|read| copy_fallback::given_elsewhere(&self.devices, read));
        }
        won
    }

    /// The devices that a part waits for, once all that they owe can be had elsewhere or it has been waited for long enough; none when
    /// the part arrives meanwhile.
    fn late_devices(&self, index: usize, deadline: Option<Instant>) -> Option<BTreeSet<DeviceIndex>> {
        let patience = Instant::now() + ALL_LATE;
        let patience = deadline.map_or(patience, |deadline| deadline.min(patience));
        loop {
            let reads = &self.parts[index].reads;
            let owing = || reads.iter().enumerate().filter(|(nth, _)| self.progress.is_waited_for(index, *nth));
            let late: BTreeSet<DeviceIndex> = owing().map(|(_, read)| read.segment.key.0).collect();
            let now = Instant::now();
            if now >= patience || owing().all(|(_, read)| timely_copy(&self.devices, read, &late).is_some()) {
                return Some(late);
            }
            if self.arrives(index, Some(patience.min(now + LOOK))) {
                return None;
            }
        }
    }

    /// One more attempt at a part, around these devices. The devices that failed in it, or that it waits for when `patience` has passed
    /// and it can be had without them; none when it is over: an answer is there, the deadline has passed, or there was no buffer.
    /// Without patience the first answer may still come.
    fn second_answer(
        &mut self,
        index: usize,
        late: &BTreeSet<DeviceIndex>,
        patience: Option<Duration>,
        deadline: Option<Instant>,
    ) -> Option<BTreeSet<DeviceIndex>> {
        let part = &self.parts[index];
        let devices = Arc::clone(&self.devices);
        let reads: Vec<PlannedRead> = part.reads.iter().map(|read| twin_of(&devices, read, late)).collect();
        let twin = ReadPart {
            view: part.view,
            units: part.units.clone(),
            blocks: part.blocks.clone(),
            resident: Vec::new(),
            shared: Vec::new(),
            reads,
            buffer_bytes: part.buffer_bytes,
            records: part.records.clone(),
        };
        let mut buffer = self.arena.lease(twin.buffer_bytes).ok()?;
        let twins = [twin];
        let cancel = Arc::<AtomicBool>::default();
        let progress = submit(&devices, &twins, &mut buffer, &cancel);
        let give_up = patience.map(|patience| Instant::now() + patience);
        if patience.is_none() {
            for read in part.reads.iter().filter(|read| late.contains(&read.segment.key.0)) {
                if let Ok(device) = devices.get(read.segment.key.0) {
                    device.counters.hedged.add(1);
                }
            }
        }
        loop {
            if patience.is_none() && self.arrives(index, Some(Instant::now())) {
                break;
            }
            if progress.is_done(0) {
                let [twin] = twins;
                let failed = progress.take_errors(0);
                if !failed.is_empty() {
                    let device = |(nth, _): &(usize, _)| twin.reads.get(*nth).map(|read| read.segment.key.0);
                    return Some(failed.iter().filter_map(device).collect());
                }
                let late = &mut self.parts[index];
                let (resident, shared) = (std::mem::take(&mut late.resident), std::mem::take(&mut late.shared));
                self.parts[index] = ReadPart { resident, shared, ..twin };
                self.buffers[index] = Some(Arc::new(buffer));
                self.hedges.0.insert(index);
                if let Some(start) = self.progress.since() {
                    devices.latencies.add(start.elapsed());
                }
                return None;
            }
            if give_up.is_some_and(|give_up| Instant::now() >= give_up) {
                let reads = twins[0].reads.iter().enumerate();
                let owing = reads.filter(|(nth, _)| progress.is_waited_for(0, *nth));
                let owing: BTreeSet<DeviceIndex> = owing.map(|(_, read)| read.segment.key.0).collect();
                // With none it has just ended.
                if !owing.is_empty() && can_avoid(&devices, &part.reads, &(&owing | late)) {
                    cancel.store(true, Ordering::Relaxed);
                    return Some(owing);
                }
            }
            let look = Instant::now() + LOOK;
            let until = deadline.map_or(look, |deadline| deadline.min(look));
            let seen = progress.changed.epoch();
            if !progress.is_done(0) {
                progress.changed.wait_past(seen, Some(until));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        cancel.store(true, Ordering::Relaxed);
        None
    }
}

/// Hands over the reads of a single part.
fn submit(devices: &Devices, part: &[ReadPart; 1], buffer: &mut Lease, cancel: &Arc<AtomicBool>) -> Arc<Progress> {
    let progress = Progress::new(devices, part);
    progress.submitted();
    for (tag, read) in (0..).zip(&part[0].reads) {
        let submitted = request(devices, read, buffer).and_then(|op| {
            let sink = Arc::clone(&progress) as Arc<dyn Sink>;
            let requests = vec![Request { op, tag }];
            let batch = Batch { requests, priority: Priority::Demand, sink, cancel: Some(Arc::clone(cancel)) };
            devices.get(read.segment.key.0).map(|device| device.shard.submit_wait(batch))
        });
        if let Err(e) = submitted {
            progress.complete(tag, Err(e));
        }
    }
    progress
}

/// Whether each of these reads is of another device than these, or has a copy on one.
fn can_avoid(devices: &Devices, reads: &[PlannedRead], late: &BTreeSet<DeviceIndex>) -> bool {
    let is_timely = |read: &PlannedRead| !late.contains(&read.segment.key.0);
    reads.iter().all(|read| is_timely(read) || timely_copy(devices, read, late).is_some())
}

/// The next copy of what is read that lies on a device that is not late; one that is lost or fails of late only where no other is left.
fn timely_copy(devices: &Devices, read: &PlannedRead, late: &BTreeSet<DeviceIndex>) -> Option<usize> {
    let (own, copies) = (usize::from(read.copy), read.frame.copies());
    let device = |copy: &usize| read.of_copy(*copy).0.key.0;
    let timely = || (1..copies).map(|next| (own + next) % copies).filter(|copy| !late.contains(&device(copy)));
    let is_well = |copy: &usize| devices.get(device(copy)).is_ok_and(|d| !d.is_lost() && !d.profile.load().3);
    timely().find(is_well).or_else(|| timely().next())
}

/// The same bytes, of another copy where its device is late: of one on a device that is not, if there is one. A read from a device
/// that is not late stays there, or the late one would be waited for again.
fn twin_of(devices: &Devices, read: &PlannedRead, late: &BTreeSet<DeviceIndex>) -> PlannedRead {
    let (own, copies) = (usize::from(read.copy), read.frame.copies());
    let copy = match late.contains(&read.segment.key.0) {
        true => timely_copy(devices, read, late).unwrap_or((own + 1) % copies),
        false => own,
    };
    let (segment, offset) = read.of_copy(copy);
    let (segment, frame) = (Arc::clone(segment), Arc::clone(&read.frame));
    PlannedRead { segment, offset, frame, copy: copy as u8, ..*read }
}
