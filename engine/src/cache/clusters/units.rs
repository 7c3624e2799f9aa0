//! The units of a policy by cluster: clusters and single blocks, held or remembered.
//!
//! Invariants:
//! - A unit is held if it has a block. Each held unit is either in the order of eviction or protected.
//! - A unit without a block is remembered with its uses, and the one that was used longest ago is forgotten first.
//! - A slot is used again after its unit was forgotten. Serial numbers tell the units of a slot apart.

use super::order::faded;
use crate::cache::key::{ClusterKey, WordHash};
use crate::cache::policy::Key;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

/// The number of remembered units per held unit.
const REMEMBERED_PER_HELD: usize = 16;
/// The minimum number of remembered units.
const REMEMBERED_MIN: usize = 1024;

/// The key of a unit, which is admitted and evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum UnitKey<K> {
    Cluster(ClusterKey),
    /// A block that no cluster asked for.
    Block(K),
}

/// A rank, in a total order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rank(pub(super) f64);

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rank {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Rank {}

/// The index that a unit is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Nowhere,
    /// In the order of eviction.
    Ranked(Rank, u64),
    /// Among remembered units, by the number of its last use.
    Remembered(u64),
}

/// A unit.
#[derive(Debug)]
pub(super) struct CacheUnit<K> {
    pub(super) key: UnitKey<K>,
    /// The number of the unit, unique in its policy.
    pub(super) serial: u64,
    /// Its uses at `step`, each of which fades with the steps.
    frequency: f64,
    step: u64,
    /// The step that was counted last.
    counted: Option<u64>,
    /// The number of its last use.
    pub(super) used: u64,
    pub(super) rank: f64,
    /// The requests and the bytes that a read of its blocks would take.
    pub(super) price: (usize, usize),
    /// The bytes and the number of its blocks that are held.
    pub(super) bytes: usize,
    pub(super) blocks: usize,
    /// Its blocks, and blocks that are gone or have another unit now.
    pub(super) owned: Vec<K>,
    /// The number of its last change.
    pub(super) changed: u64,
    /// The step until which it stays in the reserved share.
    pub(super) kept_until: u64,
    pub(super) is_kept: bool,
    /// True while the newest request uses it, under policies that protect such units.
    pub(super) is_in_use: bool,
    listed: Listed,
}

impl<K> CacheUnit<K> {
    /// Returns its uses at a step.
    pub(super) fn frequency_at(&self, step: u64) -> f64 {
        self.frequency * faded(step.saturating_sub(self.step))
    }

    /// Counts a use in a step. A step counts once.
    pub(super) fn count(&mut self, step: u64) {
        if self.counted != Some(step) {
            (self.frequency, self.step) = (self.frequency_at(step) + 1.0, step);
            self.counted = Some(step);
        }
    }

    /// Returns whether it may not be evicted.
    pub(super) fn is_protected(&self) -> bool {
        self.is_kept || self.is_in_use
    }
}

/// All units by slot.
pub(super) struct UnitTable<K> {
    slots: Vec<CacheUnit<K>>,
    free: Vec<u32>,
    numbers: HashMap<UnitKey<K>, u32, WordHash>,
    ranked: BTreeSet<(Rank, u64, u32)>,
    remembered: BTreeSet<(u64, u32)>,
    serial: u64,
}

impl<K: Key> UnitTable<K> {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            numbers: HashMap::default(),
            ranked: BTreeSet::new(),
            remembered: BTreeSet::new(),
            serial: 0,
        }
    }

    /// Returns the slot of a unit that is held or remembered.
    pub(super) fn find(&self, key: UnitKey<K>) -> Option<u32> {
        self.numbers.get(&key).copied()
    }

    /// Returns the slot of a unit. A unit that is not known begins with `uses`.
    pub(super) fn intern(&mut self, key: UnitKey<K>, step: u64, uses: f64) -> u32 {
        if let Some(slot) = self.find(key) {
            return slot;
        }
        self.serial += 1;
        let unit = CacheUnit {
            key,
            serial: self.serial,
            frequency: uses,
            step,
            counted: None,
            used: 0,
            rank: 0.0,
            price: (0, 0),
            bytes: 0,
            blocks: 0,
            owned: Vec::new(),
            changed: 0,
            kept_until: 0,
            is_kept: false,
            is_in_use: false,
            listed: Listed::Nowhere,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = unit;
                slot
            }
            None => {
                self.slots.push(unit);
                (self.slots.len() - 1) as u32
            }
        };
        self.numbers.insert(key, slot);
        self.list(slot);
        slot
    }

    pub(super) fn get(&self, slot: u32) -> &CacheUnit<K> {
        &self.slots[slot as usize]
    }

    /// Returns a unit to change. The caller calls [`Self::list`] if it changes what the order depends on.
    pub(super) fn get_mut(&mut self, slot: u32) -> &mut CacheUnit<K> {
        &mut self.slots[slot as usize]
    }

    /// Puts a unit where it belongs: into the order of eviction, among remembered units, or nowhere.
    pub(super) fn list(&mut self, slot: u32) {
        let unit = &mut self.slots[slot as usize];
        let listed = match unit.blocks {
            0 => Listed::Remembered(unit.used),
            _ if unit.is_protected() => Listed::Nowhere,
            _ => Listed::Ranked(Rank(unit.rank), unit.used),
        };
        match std::mem::replace(&mut unit.listed, listed) {
            before if before == listed => return,
            Listed::Nowhere => {}
            Listed::Ranked(rank, used) => _ = self.ranked.remove(&(rank, used, slot)),
            Listed::Remembered(used) => _ = self.remembered.remove(&(used, slot)),
        }
        match listed {
            Listed::Nowhere => {}
            Listed::Ranked(rank, used) => _ = self.ranked.insert((rank, used, slot)),
            Listed::Remembered(used) => _ = self.remembered.insert((used, slot)),
        }
    }

    /// Returns the slot and the rank of the unit that is evicted first.
    pub(super) fn lowest(&self) -> Option<(u32, f64)> {
        self.ranked.first().map(|(rank, _, slot)| (*slot, rank.0))
    }

    /// Forgets the units used longest ago, beyond the number that may be remembered.
    pub(super) fn forget_old(&mut self) {
        let held = self.numbers.len() - self.remembered.len();
        let limit = (held * REMEMBERED_PER_HELD).max(REMEMBERED_MIN);
        while self.remembered.len() > limit {
            let Some((_, slot)) = self.remembered.pop_first() else { return };
            let unit = &mut self.slots[slot as usize];
            unit.listed = Listed::Nowhere;
            unit.owned = Vec::new();
            // No claim on the unit holds any longer.
            unit.serial = 0;
            self.numbers.remove(&unit.key);
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
impl<K: Key> UnitTable<K> {
    /// Checks every unit against the bytes and the number of the blocks that slots own. Returns the bytes of units in
    /// the reserved share.
    pub(super) fn check(&self, owned: &HashMap<u32, (usize, usize)>) -> usize {
        let mut kept = 0;
        for slot in 0..self.slots.len() as u32 {
            let unit = self.get(slot);
            if self.free.contains(&slot) {
                assert!(!owned.contains_key(&slot) && unit.listed == Listed::Nowhere);
                continue;
            }
            assert_eq!(self.find(unit.key), Some(slot));
            assert_eq!((unit.bytes, unit.blocks), owned.get(&slot).copied().unwrap_or_default());
            let is_listed = match unit.listed {
                Listed::Nowhere => unit.blocks > 0 && unit.is_protected(),
                Listed::Ranked(rank, used) => {
                    rank == Rank(unit.rank) && !unit.is_protected() && self.ranked.contains(&(rank, used, slot))
                }
                Listed::Remembered(used) => unit.blocks == 0 && self.remembered.contains(&(used, slot)),
            };
            assert!(is_listed, "{unit:?}");
            kept += if unit.is_kept { unit.bytes } else { 0 };
        }
        assert_eq!(self.numbers.len() + self.free.len(), self.slots.len());
        kept
    }
}
