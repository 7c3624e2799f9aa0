//! The reserved share of clusters that took in tokens or were split.
//!
//! Source: `DynaKV`, section 6.2, principle 2. Clusters that changed are likely to be retrieved in the next steps
//! (table 2 of the paper), so they stay in memory regardless of other decisions.
//!
//! Invariants:
//! - The bytes of kept units never exceed the share. The unit that changed longest ago leaves the share first.
//! - A unit leaves the share `kept_steps` steps after its last change.

use super::units::{CacheUnit, UnitTable};
use crate::cache::policy::Key;
use std::collections::BTreeSet;

/// The units that changed lately.
pub(super) struct ChangedShare {
    limit: usize,
    kept_steps: u64,
    bytes: usize,
    /// The step until which each kept unit stays, and its slot.
    kept: BTreeSet<(u64, u32)>,
}

impl ChangedShare {
    /// Returns a share of `limit` bytes.
    pub(super) fn new(limit: usize, kept_steps: u32) -> Self {
        Self { limit, kept_steps: u64::from(kept_steps), bytes: 0, kept: BTreeSet::new() }
    }

    /// Takes note of a change of a unit.
    pub(super) fn change<K: Key>(&mut self, units: &mut UnitTable<K>, slot: u32, step: u64) {
        let until = step + self.kept_steps;
        let unit = units.get_mut(slot);
        if unit.is_kept {
            self.kept.remove(&(unit.kept_until, slot));
            self.kept.insert((until, slot));
        }
        unit.kept_until = until;
        self.keep(units, slot, step);
    }

    /// Keeps a held unit that changed within the last steps.
    pub(super) fn keep<K: Key>(&mut self, units: &mut UnitTable<K>, slot: u32, step: u64) {
        let unit = units.get_mut(slot);
        if unit.is_kept || unit.blocks == 0 || unit.kept_until <= step {
            return;
        }
        unit.is_kept = true;
        self.bytes += unit.bytes;
        self.kept.insert((unit.kept_until, slot));
        units.list(slot);
        self.shrink(units);
    }

    /// Adds the bytes of a block that a kept unit gained.
    pub(super) fn grow<K: Key>(&mut self, units: &mut UnitTable<K>, bytes: usize) {
        self.bytes += bytes;
        self.shrink(units);
    }

    /// Takes a block of `bytes` off a kept unit, which leaves the share if it has no other.
    pub(super) fn release<K>(&mut self, unit: &mut CacheUnit<K>, slot: u32, bytes: usize) {
        self.bytes -= bytes;
        if unit.blocks == 0 {
            unit.is_kept = false;
            self.kept.remove(&(unit.kept_until, slot));
        }
    }

    /// Lets go of units whose steps are over.
    pub(super) fn end_step<K: Key>(&mut self, units: &mut UnitTable<K>, step: u64) {
        while let Some((until, slot)) = self.kept.first().copied()
            && until <= step
        {
            self.let_go(units, (until, slot));
        }
    }

    fn shrink<K: Key>(&mut self, units: &mut UnitTable<K>) {
        while self.bytes > self.limit {
            let Some(oldest) = self.kept.first().copied() else { return };
            self.let_go(units, oldest);
        }
    }

    fn let_go<K: Key>(&mut self, units: &mut UnitTable<K>, (until, slot): (u64, u32)) {
        self.kept.remove(&(until, slot));
        let unit = units.get_mut(slot);
        unit.is_kept = false;
        unit.kept_until = 0;
        self.bytes -= unit.bytes;
        units.list(slot);
    }

    /// Returns the bytes of kept units.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the most bytes of kept units.
    #[cfg(test)]
    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}
