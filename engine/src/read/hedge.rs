//! Reads that are late are retried on another copy: the part is read into a buffer of its own, and the first good answer counts. The
//! loser may still land in the other buffer, which goes back to the arena only then.

use super::progress::Progress;
use super::ticket::{ReadTicket, request};
use crate::plan::{Part, PlannedRead};
use crate::shard::{Batch, Priority, Request, Sink};
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
        let reads = &self.parts[part].reads;
        if !reads.iter().any(|read| read.frame.copies() > 1) {
            return None;
        }
        let usual = self.devices.latencies.late()?;
        // By the copy that takes least: a device that was slow before is not waited for because it was.
        let expected = |read: &PlannedRead| {
            let devices = (0..read.frame.copies()).map(|copy| read.of_copy(copy).0.key.0);
            let profiles = devices.filter_map(|device| self.devices.get(device).ok());
            profiles.map(|device| device.profile.expected()).min().unwrap_or_default()
        };
        let expected = reads.iter().map(expected).max().unwrap_or_default();
        let late = usual.max(LATE_MIN).max(expected * EXPECTED_TIMES);
        self.progress.since().map(|start| start.max(Instant::now() - late) + late)
    }

    /// Reads a part from other copies as well, until either answer is there or the deadline.
    pub(super) fn hedge(&mut self, index: usize, deadline: Option<Instant>) {
        let patience = Instant::now() + ALL_LATE;
        let patience = deadline.map_or(patience, |deadline| deadline.min(patience));
        let late = loop {
            let reads = &self.parts[index].reads;
            let owing = || reads.iter().enumerate().filter(|(nth, _)| self.progress.is_waited_for(index, *nth));
            let late: BTreeSet<DeviceIndex> = owing().map(|(_, read)| read.segment.key.0).collect();
            let now = Instant::now();
            if now >= patience || owing().all(|(_, read)| timely_copy(read, &late).is_some()) {
                break late;
            }
            if self.arrives(index, Some(patience.min(now + LOOK))) {
                return;
            }
        };
        let part = &self.parts[index];
        let devices = Arc::clone(&self.devices);
        let reads: Vec<PlannedRead> = part.reads.iter().map(|read| twin_of(read, &late)).collect();
        let twin = Part {
            view: part.view,
            units: part.units.clone(),
            blocks: part.blocks.clone(),
            resident: Vec::new(),
            reads,
            buffer_bytes: part.buffer_bytes,
        };
        // Without a free buffer there is no second attempt.
        let Ok(mut buffer) = self.arena.lease(twin.buffer_bytes) else { return };
        let twins = [twin];
        let progress = Progress::new(&devices, &twins);
        let cancel = Arc::<AtomicBool>::default();
        progress.submitted();
        for (tag, read) in (0..).zip(&twins[0].reads) {
            let submitted = request(&devices, read, &mut buffer).and_then(|op| {
                let sink = Arc::clone(&progress) as Arc<dyn Sink>;
                let requests = vec![Request { op, tag }];
                let batch = Batch { requests, priority: Priority::Demand, sink, cancel: Some(Arc::clone(&cancel)) };
                devices.get(read.segment.key.0).map(|device| device.shard.submit_wait(batch))
            });
            if let Err(e) = submitted {
                progress.complete(tag, Err(e));
            }
        }
        for read in &part.reads {
            if late.contains(&read.segment.key.0)
                && let Ok(device) = devices.get(read.segment.key.0)
            {
                device.counters.hedged.add(1);
            }
        }
        loop {
            if self.arrives(index, Some(Instant::now())) {
                break;
            }
            if progress.is_done(0) {
                // An answer with errors is none: the first one may still come.
                if !progress.take_errors(0).is_empty() {
                    return;
                }
                let [twin] = twins;
                let resident = std::mem::take(&mut self.parts[index].resident);
                self.parts[index] = Part { resident, ..twin };
                self.buffers[index] = Some(buffer);
                self.hedges.0.insert(index);
                return;
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
    }
}

/// The next copy of what is read that lies on a device that is not late.
fn timely_copy(read: &PlannedRead, late: &BTreeSet<DeviceIndex>) -> Option<usize> {
    let (own, copies) = (usize::from(read.copy), read.frame.copies());
    (1..copies).map(|next| (own + next) % copies).find(|copy| !late.contains(&read.of_copy(*copy).0.key.0))
}

/// The same bytes, of another copy where its device is late: of one on a device that is not, if there is one. A read from a device
/// that is not late stays there, or the late one would be waited for again.
fn twin_of(read: &PlannedRead, late: &BTreeSet<DeviceIndex>) -> PlannedRead {
    let (own, copies) = (usize::from(read.copy), read.frame.copies());
    let copy = match late.contains(&read.segment.key.0) {
        true => timely_copy(read, late).unwrap_or((own + 1) % copies),
        false => own,
    };
    let (segment, offset) = read.of_copy(copy);
    let (segment, frame) = (Arc::clone(segment), Arc::clone(&read.frame));
    PlannedRead { segment, offset, frame, copy: copy as u8, ..*read }
}
