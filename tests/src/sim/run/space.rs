//! What a store does to keep in shape, asked or by itself.

use super::{Runner, Stopped, failed};
use crate::sim::coverage;
use std::sync::{MutexGuard, PoisonError};
use stratakv::sim::{Event, events};
use stratakv::{ByteSize, Evicted, EvictionReason};

impl Runner<'_> {
    pub(super) fn gone_now(&self) -> MutexGuard<'_, Vec<Evicted>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of what the store did by itself in an operation, before the operation's own entries. Out of space, it
    /// commits what waits, to have segments freed, and evicts: a crash may leave either, but only if that happened.
    /// `own`: commits of the operation itself. `whole`: nothing failed.
    pub(super) fn by_itself(&mut self, own: u64, whole: bool) -> Stopped {
        self.note_gone()?;
        if events(Event::GroupCommit) > self.commits + own {
            self.model.attempted(false);
            if !whole && self.is_short() {
                self.model.may_have_evicted(&self.open_ids());
            }
        }
        Ok(())
    }

    /// Whether space may be short: there is a limit, or a device said so.
    fn is_short(&self) -> bool {
        self.limited || self.simulation.faults_hit() > 0
    }

    /// Takes note of sequences that went.
    fn note_gone(&mut self) -> Stopped {
        let events = std::mem::take(&mut *self.gone_now());
        let gone: Vec<(u64, bool, u64)> =
            events.iter().map(|event| (event.id, event.reason == EvictionReason::Expired, event.tokens)).collect();
        if let Some(event) = events.iter().find(|event| event.reason == EvictionReason::Space && !self.is_short()) {
            return failed(format!("evicted although there is space: {event:?}"));
        }
        self.note(|| format!("went: {gone:?}"));
        let open = self.open_ids();
        self.model.went(&gone, &open, self.simulation.now()).or_else(failed)
    }

    pub(super) fn clean(&mut self) -> Stopped {
        let cleaned = self.store()?.clean();
        self.model.attempted(cleaned.is_ok());
        match cleaned {
            Ok(_) => self.account(),
            Err(e) => self.fault("clean", &e),
        }
    }

    pub(super) fn run_maintenance(&mut self) -> Stopped {
        let start = self.simulation.now();
        let tended = self.store()?.run_maintenance();
        self.by_itself(0, tended.is_ok())?;
        match tended {
            Ok(_) => match self.model.overdue(&self.open_ids(), start) {
                Some(id) => failed(format!("sequence {id} is there although its time was over")),
                None => self.account(),
            },
            Err(e) => self.fault("tend", &e),
        }
    }

    pub(super) fn set_capacity(&mut self, segments: Option<u64>) -> Stopped {
        let capacity = segments.map(|segments| self.capacity_bytes(segments));
        self.limited |= capacity.is_some();
        self.capacity = capacity;
        self.above = self.simulation.take_peak_bytes();
        self.held = (Vec::new(), 0);
        let set = self.store()?.set_capacity(capacity.map(ByteSize));
        self.by_itself(0, set.is_ok())?;
        self.note_given_up();
        match set {
            Ok(()) => {
                let bytes = self.simulation.take_peak_bytes().min(self.simulation.take_peak_bytes());
                if !self.changed && capacity.is_some_and(|capacity| bytes > capacity) {
                    return failed(format!("the files have {bytes} bytes under a capacity of {capacity:?}"));
                }
                self.coverage.add(coverage::CAPACITY);
                self.account()
            }
            Err(e) => self.fault("set the capacity", &e),
        }
    }

    /// The files grow to the capacity and no further, and where they are beyond it not at all. Once a disk left or
    /// joined, those of the disks that are members now, as they are when an operation ends. The state of a manifest
    /// that the capacity leaves too little for is written all the same, and counted.
    pub(super) fn within_capacity(&mut self) -> Stopped {
        self.note_given_up();
        let peak = self.simulation.take_peak_bytes();
        let exceeded = events(Event::CapacityExceeded);
        let more = exceeded > self.exceeded;
        if more {
            (self.exceeded, self.above) = (exceeded, self.above.max(peak));
        }
        let Some(capacity) = self.capacity else { return Ok(()) };
        if self.changed {
            return self.members_within(capacity, more);
        }
        let most = capacity.max(self.above);
        if peak > most {
            return failed(format!("files of {peak} bytes, of {most} that may be"));
        }
        self.above = self.above.min(self.simulation.take_peak_bytes());
        Ok(())
    }

    /// The same for the disks that are members. `exceeded`: as the state alone must.
    fn members_within(&mut self, capacity: u64, exceeded: bool) -> Stopped {
        let Some(store) = self.store.as_ref().filter(|_| !self.simulation.is_down()) else { return Ok(()) };
        let (status, lost) = (store.status(), store.health().lost);
        let members = status.devices.iter().filter(|device| !lost.contains(&device.index));
        let disk = |path: &str| path.strip_prefix("simulated-").and_then(|disk| disk.parse().ok());
        let disks: Vec<usize> = members.filter_map(|device| disk(&device.path)).collect();
        let bytes = disks.iter().map(|disk| self.simulation.bytes(*disk)).sum();
        let (before, held) = std::mem::replace(&mut self.held, (disks, bytes));
        if !exceeded && before == self.held.0 && bytes > capacity.max(held) {
            return failed(format!(
                "files of {bytes} bytes on disks {before:?}, of {capacity} that may be, after {held}"
            ));
        }
        self.coverage.add(coverage::MEMBERS_WITHIN);
        Ok(())
    }

    /// All bytes are somewhere.
    fn account(&mut self) -> Stopped {
        if self.simulation.is_down() {
            return Ok(());
        }
        let usage = match self.store()?.usage() {
            Ok(usage) => usage,
            Err(e) => return self.fault("usage", &e),
        };
        if usage.sum_bytes() != usage.capacity_bytes {
            return failed(format!("the parts make {} bytes: {usage:?}", usage.sum_bytes()));
        }
        Ok(())
    }
}
