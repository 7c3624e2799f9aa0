//! Maintenance: cleaning, eviction, expiry and the capacity, on request or by the store itself.

use super::{Runner, StepResult, failed};
use crate::sim::coverage;
use std::sync::{MutexGuard, PoisonError};
use stratakv::ByteSize;
use stratakv::metrics::{Evicted, EvictionReason};
use stratakv::sim::{Event, events};

impl Runner<'_> {
    pub(super) fn gone_now(&self) -> MutexGuard<'_, Vec<Evicted>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what the store did by itself during an operation, before the operation's own entries.
    ///
    /// A store without space commits queued changes to free segments, and evicts. A crash may leave either state, but
    /// only if the store did so.
    ///
    /// `own` is the number of commits of the operation itself. `whole` is true if the operation succeeded.
    pub(super) fn by_itself(&mut self, own: u64, whole: bool) -> StepResult {
        self.note_gone()?;
        if events(Event::GroupCommit) > self.commits + own {
            self.model.sync_attempted(false);
            if !whole && self.is_short() {
                self.model.may_have_evicted(&self.open_ids());
            }
        }
        Ok(())
    }

    /// Returns whether space may be short, because of a capacity or a fault of a device.
    fn is_short(&self) -> bool {
        self.limited || self.simulation.faults_hit() > 0
    }

    /// Records the sequences that the store evicted or that expired.
    fn note_gone(&mut self) -> StepResult {
        let events = std::mem::take(&mut *self.gone_now());
        let gone: Vec<(u64, bool, u64)> =
            events.iter().map(|event| (event.id, event.reason == EvictionReason::Expired, event.tokens)).collect();
        if let Some(event) = events.iter().find(|event| event.reason == EvictionReason::Space && !self.is_short()) {
            return failed(format!("evicted although space is not short: {event:?}"));
        }
        self.note(|| format!("went: {gone:?}"));
        for (id, ..) in &gone {
            if self.stored.gone(*id) {
                self.coverage.add(coverage::CLUSTERS_WENT);
            }
        }
        if events.iter().any(|event| event.reason == EvictionReason::Space) {
            self.clusters_went_first()?;
        }
        let open = self.open_ids();
        self.model.evicted(&gone, &open, self.simulation.latest()).or_else(failed)
    }

    pub(super) fn clean(&mut self) -> StepResult {
        let cleaned = self.store()?.clean();
        self.model.sync_attempted(cleaned.is_ok());
        match cleaned {
            Ok(_) => self.account(),
            Err(e) => self.fault("clean", &e),
        }
    }

    pub(super) fn run_maintenance(&mut self) -> StepResult {
        let start = self.simulation.now();
        let tended = self.store()?.run_maintenance();
        self.by_itself(0, tended.is_ok())?;
        match tended {
            Ok(_) => match self.model.overdue(&self.open_ids(), start) {
                Some(id) => failed(format!("sequence {id} is there although it has expired")),
                None => self.account(),
            },
            Err(e) => self.fault("tend", &e),
        }
    }

    pub(super) fn set_capacity(&mut self, segments: Option<u64>) -> StepResult {
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
                // A power failure may leave a file whose creation failed. The next open removes it.
                let counts = !self.changed && !self.simulation.is_down();
                if counts && capacity.is_some_and(|capacity| bytes > capacity) {
                    return failed(format!("the files have {bytes} bytes under a capacity of {capacity:?}"));
                }
                self.coverage.add(coverage::CAPACITY);
                self.account()
            }
            Err(e) => self.fault("set the capacity", &e),
        }
    }

    /// Checks that the files do not grow beyond the capacity, and do not grow at all if they already exceed it.
    ///
    /// After a disk left or joined, only the members' files at the end of an operation count. A manifest whose state
    /// does not fit into the capacity is written anyway and counted as [`Event::CapacityExceeded`].
    pub(super) fn within_capacity(&mut self) -> StepResult {
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
            return failed(format!("the files have {peak} bytes, but at most {most} are allowed"));
        }
        self.above = self.above.min(self.simulation.take_peak_bytes());
        Ok(())
    }

    /// Checks the capacity for the disks that are members. `exceeded` is true if a manifest's state alone exceeds it.
    fn members_within(&mut self, capacity: u64, exceeded: bool) -> StepResult {
        let Some(store) = self.store.as_ref().filter(|_| !self.simulation.is_down()) else { return Ok(()) };
        let (status, lost) = (store.status(), store.health().lost);
        let members = status.devices.iter().filter(|device| !lost.contains(&device.index));
        let disk = |path: &str| path.strip_prefix("simulated-").and_then(|disk| disk.parse().ok());
        let disks: Vec<usize> = members.filter_map(|device| disk(&device.path)).collect();
        let bytes = disks.iter().map(|disk| self.simulation.bytes(*disk)).sum();
        let (before, held) = std::mem::replace(&mut self.held, (disks, bytes));
        if !exceeded && before == self.held.0 && bytes > capacity.max(held) {
            return failed(format!(
                "the files on disks {before:?} have {bytes} bytes, after {held}, but the capacity is {capacity}"
            ));
        }
        self.coverage.add(coverage::MEMBERS_WITHIN);
        Ok(())
    }

    /// Checks that the parts of the usage add up to the capacity.
    fn account(&mut self) -> StepResult {
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
