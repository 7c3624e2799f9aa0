//! Hedged reads: a late part is read from another copy as well, and the first good answer counts.
//!
//! 1. A part is late after the latency that few parts exceed, and after three times what its fastest device is expected
//!    to take.
//! 2. Its reads on late devices are repeated on other copies, into a buffer of their own.
//! 3. The first complete answer without errors wins. An answer with errors is replaced by one from yet another copy.
//!
//! A buffer returns to the arena only after its last read, so that the losing read may still write into it.
//! A part with failed reads is repeated in the same way if its frames have more than two copies.

use super::copy_fallback;
use super::progress::Progress;
use super::state::request;
use super::ticket::ReadTicket;
use crate::error::Error;
use crate::events::event;
use crate::io::buffer::lease::Lease;
use crate::io::scheduler::{Batch, Priority, Request, Sink};
use crate::log::Devices;
use crate::plan::{PlannedRead, ReadPart};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stratakv_format::DeviceIndex;

/// The least time after which a part is late.
const LATE_MIN: Duration = Duration::from_millis(2);
/// The factor on the expected time of the fastest device with a copy, after which a part is late.
const EXPECTED_TIMES: u32 = 3;
/// How long to wait for one device of a part while all of them are late. Most likely one is slow, and another can give
/// the answer.
const ALL_LATE: Duration = Duration::from_millis(100);
/// How often to check which of two answers has arrived.
const LOOK: Duration = Duration::from_micros(200);

impl ReadTicket {
    /// Returns whether a late part could be read from other copies.
    pub(super) fn may_hedge(&self) -> bool {
        self.devices.hedges() && self.parts.iter().flat_map(|part| &part.reads).any(|read| read.frame.copies() > 1)
    }

    /// Returns when a part is late, or none if there is no other copy.
    pub(super) fn hedge_at(&self, part: usize) -> Option<Instant> {
        if !self.parts[part].reads.iter().any(|read| read.frame.copies() > 1) {
            return None;
        }
        let late = self.late_after(part)?;
        self.progress.since().map(|start| start.max(Instant::now() - late) + late)
    }

    /// Returns how long after its submission a part is late, or none before enough parts were measured.
    fn late_after(&self, part: usize) -> Option<Duration> {
        let usual = self.devices.latencies.late()?;
        // By the fastest copy, so that a device that was slow before gets no extra time.
        let expected = |read: &PlannedRead| {
            let devices = (0..read.frame.copies()).map(|copy| read.of_copy(copy).0.key.0);
            let profiles = devices.filter_map(|device| self.devices.get(device).ok());
            profiles.map(|device| device.profile.expected()).min().unwrap_or_default()
        };
        let expected = self.parts[part].reads.iter().map(expected).max().unwrap_or_default();
        Some(usual.max(LATE_MIN).max(expected * EXPECTED_TIMES))
    }

    /// Reads a part from other copies as well, until an answer is complete or the deadline passes.
    pub(super) fn hedge(&mut self, index: usize, deadline: Option<Instant>) {
        let mut failed = BTreeSet::new();
        while let Some(late) = self.late_devices(index, deadline) {
            // An answer with errors does not count. Another copy may give one, also on a device that was late before,
            // and the first answer may still arrive.
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

    /// Reads a part with failed reads again from other devices, if each failed read has several other copies, one of
    /// which may be late. Returns whether the part has an answer now. Otherwise it is unchanged.
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
            for read in failed {
                copy_fallback::given_elsewhere(&self.devices, &read.frame, usize::from(read.copy));
            }
        }
        won
    }

    /// Returns the devices that a part waits for, once other devices can give all of it or the wait was long enough.
    /// Returns none if the part arrives meanwhile.
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

    /// Reads a part once more, avoiding these devices.
    ///
    /// Returns the devices that failed, or those that are late after `patience` and can be avoided. Returns none if it
    /// is over: an answer is complete, the deadline passed, or there was no buffer. Without `patience` the first answer
    /// may still arrive.
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
            selection: part.selection,
            groups: part.groups.clone(),
            pages: part.pages.clone(),
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
                    event!(debug, device = read.segment.key.0, "a late read is repeated on another device");
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
                self.hedges.set_won(index);
                if let Some(start) = self.progress.since() {
                    devices.latencies.add(start.elapsed());
                }
                return None;
            }
            if give_up.is_some_and(|give_up| Instant::now() >= give_up) {
                let reads = twins[0].reads.iter().enumerate();
                let owing = reads.filter(|(nth, _)| progress.is_waited_for(0, *nth));
                let owing: BTreeSet<DeviceIndex> = owing.map(|(_, read)| read.segment.key.0).collect();
                // If there is none, the read has just completed.
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

/// Submits the reads of one part.
fn submit(devices: &Devices, part: &[ReadPart; 1], buffer: &mut Lease, cancel: &Arc<AtomicBool>) -> Arc<Progress> {
    let progress = Progress::new(devices, part);
    progress.submitted();
    for (tag, read) in (0..).zip(&part[0].reads) {
        let submitted = request(devices, read, buffer).and_then(|(device, op)| {
            let sink = Arc::clone(&progress) as Arc<dyn Sink>;
            let requests = vec![Request { op, tag }];
            let batch = Batch { requests, priority: Priority::Demand, sink, cancel: Some(Arc::clone(cancel)) };
            devices.get(device).map(|device| device.shard.submit_wait(batch))
        });
        if let Err(e) = submitted {
            progress.complete(tag, Err(e));
        }
    }
    progress
}

/// Returns whether each of these reads avoids the late devices, or has a copy that does.
fn can_avoid(devices: &Devices, reads: &[PlannedRead], late: &BTreeSet<DeviceIndex>) -> bool {
    let is_timely = |read: &PlannedRead| !late.contains(&read.segment.key.0);
    reads.iter().all(|read| is_timely(read) || timely_copy(devices, read, late).is_some())
}

/// Returns the next copy on a device that is not late. A lost or failing device is used only if no other is left.
fn timely_copy(devices: &Devices, read: &PlannedRead, late: &BTreeSet<DeviceIndex>) -> Option<usize> {
    let (own, copies) = (usize::from(read.copy), read.frame.copies());
    let device = |copy: &usize| read.of_copy(*copy).0.key.0;
    let timely = || (1..copies).map(|next| (own + next) % copies).filter(|copy| !late.contains(&device(copy)));
    let is_well = |copy: &usize| devices.get(device(copy)).is_ok_and(|d| !d.is_lost() && !d.profile.load().3);
    timely().find(is_well).or_else(|| timely().next())
}

/// Returns the read of the same bytes from another copy, if its device is late. A read from a device that is not late
/// stays.
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
