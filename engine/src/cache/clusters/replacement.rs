//! [`ClusterReplacement`]: a replacement policy whose units are clusters.
//!
//! Invariants:
//! - Each held block belongs to one unit: a cluster that asked for it, or itself. So the bytes of units add up to the
//!   bytes of the blocks.
//! - A block of a unit that is kept in the reserved share, or that the newest request uses, is not evicted. Policies
//!   without a reserved share protect nothing.
//! - A missing block is claimed by a unit from the request that names it until the end of the next step.

use super::changed_share::ChangedShare;
use super::order::{UnitOrder, UnitUse, uses_of_every_step};
use super::units::{UnitKey, UnitTable};
use crate::cache::key::{ClusterKey, WordHash};
use crate::cache::policy::{Key, ReadPrice, ReplacementPolicy};
use crate::cache::request::{ActivatedCluster, ClusterRequest};
use std::collections::HashMap;

/// The most claims of one step. More begin a new generation.
const CLAIMS_MAX: usize = 1 << 16;
/// The blocks of a unit that may be gone before they leave its list.
const STALE_BLOCKS: usize = 16;

/// The claim of a cluster to a block: whether the cluster changed lately, then its uses.
type ClaimWeight = (bool, f64);

#[derive(Clone, Copy)]
struct HeldBlock {
    slot: u32,
    bytes: usize,
}

/// A unit that asked for a missing block.
#[derive(Clone, Copy)]
struct BlockClaim {
    slot: u32,
    serial: u64,
}

/// A policy that admits and evicts clusters.
pub(in crate::cache) struct ClusterReplacement<K, O> {
    capacity: usize,
    used: usize,
    step: u64,
    /// The number of uses so far.
    now: u64,
    order: O,
    units: UnitTable<K>,
    blocks: HashMap<K, HeldBlock, WordHash>,
    /// The claims of this step, and of the step before.
    claims: [HashMap<K, BlockClaim, WordHash>; 2],
    changed: Option<ChangedShare>,
    /// The units that the newest request uses, with their serial numbers.
    in_use: Vec<(u32, u64)>,
}

impl<K: Key, O: UnitOrder> ClusterReplacement<K, O> {
    /// Returns an empty cache without a reserved share.
    pub(in crate::cache) fn new(capacity: usize, order: O) -> Self {
        Self {
            capacity,
            used: 0,
            step: 0,
            now: 0,
            order,
            units: UnitTable::new(),
            blocks: HashMap::default(),
            claims: [HashMap::default(), HashMap::default()],
            changed: None,
            in_use: Vec::new(),
        }
    }

    /// Reserves a share of the capacity for clusters that changed within the last steps. Units that the newest request
    /// uses are protected as well.
    pub(in crate::cache) fn with_changed_share(mut self, percent: u8, kept_steps: u32) -> Self {
        let bytes = (self.capacity as f64 * f64::from(percent.min(100)) / 100.0) as usize;
        self.changed = Some(ChangedShare::new(bytes, kept_steps));
        self
    }

    /// Adds a held block that was used by this many steps. There is room for it.
    pub(in crate::cache) fn insert(&mut self, key: K, uses: f64, bytes: usize) {
        let slot = self.units.intern(UnitKey::Block(key), self.step, uses.min(uses_of_every_step()));
        self.units.get_mut(slot).price = (1, bytes);
        self.rank(slot);
        self.hold(key, bytes, slot);
    }

    /// Counts a use of a unit.
    fn count(&mut self, slot: u32) {
        self.now += 1;
        let (now, step) = (self.now, self.step);
        let unit = self.units.get_mut(slot);
        unit.used = now;
        unit.count(step);
    }

    /// Ranks a unit by its uses and its price.
    fn rank(&mut self, slot: u32) {
        let unit = self.units.get(slot);
        let (requests, bytes) = unit.price;
        let facts = UnitUse {
            now: unit.used,
            step: self.step,
            frequency: unit.frequency_at(self.step),
            requests,
            bytes,
            held: (unit.blocks > 0).then_some(unit.rank),
        };
        let rank = self.order.rank(&facts);
        self.units.get_mut(slot).rank = rank;
        self.units.list(slot);
    }

    /// Makes a block a held block of a unit.
    fn hold(&mut self, key: K, bytes: usize, slot: u32) {
        self.used += bytes;
        self.blocks.insert(key, HeldBlock { slot, bytes });
        self.give(key, bytes, slot);
    }

    /// Adds a held block to a unit.
    fn give(&mut self, key: K, bytes: usize, slot: u32) {
        let unit = self.units.get_mut(slot);
        unit.bytes += bytes;
        unit.blocks += 1;
        unit.owned.push(key);
        if unit.owned.len() > 2 * unit.blocks + STALE_BLOCKS {
            let mut owned = std::mem::take(&mut unit.owned);
            owned.retain(|key| self.blocks.get(key).is_some_and(|held| held.slot == slot));
            owned.sort_unstable();
            owned.dedup();
            self.units.get_mut(slot).owned = owned;
        }
        self.units.list(slot);
        let is_kept = self.units.get(slot).is_kept;
        if let Some(changed) = &mut self.changed {
            match is_kept {
                true => changed.grow(&mut self.units, bytes),
                false => changed.keep(&mut self.units, slot, self.step),
            }
        }
    }

    /// Takes a held block off its unit.
    fn take(&mut self, bytes: usize, slot: u32) {
        let unit = self.units.get_mut(slot);
        unit.bytes -= bytes;
        unit.blocks -= 1;
        if unit.is_kept
            && let Some(changed) = &mut self.changed
        {
            changed.release(unit, slot, bytes);
        }
        self.units.list(slot);
    }

    /// Removes a held block.
    fn release(&mut self, key: K) {
        if let Some(held) = self.blocks.remove(&key) {
            self.used -= held.bytes;
            self.take(held.bytes, held.slot);
        }
    }

    /// Evicts a block of a unit. Returns its key.
    fn evict_from(&mut self, slot: u32, rank: f64) -> Option<K> {
        loop {
            let key = self.units.get_mut(slot).owned.pop()?;
            if self.blocks.get(&key).is_some_and(|held| held.slot == slot) {
                self.order.evicted(rank);
                self.release(key);
                return Some(key);
            }
        }
    }

    /// Takes note of a change of a cluster, unless it is known.
    fn change(&mut self, key: ClusterKey, number: u64) {
        if self.changed.is_none() {
            return;
        }
        let slot = self.units.intern(UnitKey::Cluster(key), self.step, 0.0);
        let unit = self.units.get_mut(slot);
        if unit.changed < number {
            unit.changed = number;
            if let Some(changed) = &mut self.changed {
                changed.change(&mut self.units, slot, self.step);
            }
        }
    }

    /// Lets go of the units of the last request.
    fn begin_request(&mut self) {
        for (slot, serial) in std::mem::take(&mut self.in_use) {
            let unit = self.units.get_mut(slot);
            if unit.serial == serial {
                unit.is_in_use = false;
                self.units.list(slot);
            }
        }
        self.units.forget_old();
        if self.claims[0].len() > CLAIMS_MAX {
            self.age_claims();
        }
    }

    fn age_claims(&mut self) {
        self.claims.swap(0, 1);
        self.claims[0].clear();
    }

    /// Counts a use of a cluster. Returns its slot, and the weight of its claims.
    fn use_cluster(&mut self, cluster: &ActivatedCluster<'_>) -> (u32, ClaimWeight) {
        let uses = f64::from(cluster.profiled) * uses_of_every_step();
        let slot = self.units.intern(UnitKey::Cluster(cluster.key), self.step, uses);
        self.count(slot);
        let (protects, step) = (self.changed.is_some(), self.step);
        let unit = self.units.get_mut(slot);
        let weight = (protects && unit.kept_until > step, unit.frequency_at(step));
        if protects && !unit.is_in_use {
            unit.is_in_use = true;
            self.in_use.push((slot, unit.serial));
        }
        self.units.list(slot);
        (slot, weight)
    }

    /// Gives a held block to the unit that wants it, if it deserves it more than the unit that has it.
    fn move_block(&mut self, key: K, to: u32, weight: ClaimWeight) -> u32 {
        let Some(held) = self.blocks.get_mut(&key) else { return to };
        let (from, bytes) = (held.slot, held.bytes);
        let owner = self.units.get(from);
        let owned = (owner.is_kept, owner.frequency_at(self.step));
        // A block that a prefetch brought is a unit of its own until a cluster asks for it.
        let is_better = match owner.key {
            UnitKey::Block(_) => owned <= weight,
            UnitKey::Cluster(_) => owned < weight,
        };
        if from == to || owner.is_kept || !is_better {
            return from;
        }
        held.slot = to;
        self.take(bytes, from);
        self.give(key, bytes, to);
        to
    }

    /// Returns the unit that claimed a missing block.
    fn claimed(&mut self, key: &K) -> Option<u32> {
        let claim = self.claims.iter_mut().find_map(|claims| claims.remove(key))?;
        (self.units.get(claim.slot).serial == claim.serial).then_some(claim.slot)
    }
}

impl<K: Key, O: UnitOrder> ReplacementPolicy<K> for ClusterReplacement<K, O> {
    fn touch(&mut self, key: K) {
        let Some(held) = self.blocks.get(&key).copied() else { return };
        let slot = self.units.intern(UnitKey::Block(key), self.step, 0.0);
        self.count(slot);
        self.units.get_mut(slot).price = (1, held.bytes);
        let frequency = self.units.get(slot).frequency_at(self.step);
        self.move_block(key, slot, (false, frequency));
        self.rank(slot);
    }

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        if bytes > self.capacity || self.blocks.contains_key(&key) {
            return false;
        }
        let slot = match self.claimed(&key) {
            Some(slot) => slot,
            None => {
                let slot = self.units.intern(UnitKey::Block(key), self.step, 0.0);
                self.units.get_mut(slot).price = (1, bytes);
                slot
            }
        };
        if self.units.get(slot).blocks == 0 {
            self.count(slot);
            self.rank(slot);
        }
        let rank = self.units.get(slot).rank;
        while self.used + bytes > self.capacity {
            let Some((worst, lowest)) = self.units.lowest() else { return false };
            if worst == slot || !self.order.may_evict(rank, lowest) {
                return false;
            }
            match self.evict_from(worst, lowest) {
                Some(key) => evicted.push(key),
                None => return false,
            }
        }
        self.hold(key, bytes, slot);
        true
    }

    fn evict(&mut self) -> Option<K> {
        let (worst, lowest) = self.units.lowest()?;
        self.evict_from(worst, lowest)
    }

    fn remove(&mut self, key: K) {
        self.release(key);
    }

    fn end_step(&mut self) {
        self.step += 1;
        if let Some(changed) = &mut self.changed {
            changed.end_step(&mut self.units, self.step);
        }
        self.age_claims();
    }

    fn set_read_price(&mut self, price: ReadPrice) {
        self.order.set_price(price);
    }

    fn follows_clusters(&self) -> bool {
        true
    }

    fn activate(&mut self, request: &ClusterRequest<'_, K>) {
        self.begin_request();
        for (key, number) in request.clusters.changed() {
            self.change(*key, *number);
        }
        let used: Vec<(u32, ClaimWeight)> = request.clusters.iter().map(|c| self.use_cluster(&c)).collect();
        // The cluster that each block goes to.
        let mut best: Vec<Option<(u32, ClaimWeight)>> = vec![None; request.blocks.len()];
        for (cluster, (slot, weight)) in request.clusters.iter().zip(&used) {
            for block in cluster.blocks {
                let best = &mut best[block.index as usize];
                if best.is_none_or(|(_, other)| other < *weight) {
                    *best = Some((*slot, *weight));
                }
            }
        }
        let mut owners: Vec<Option<(u32, usize)>> = Vec::with_capacity(best.len());
        for (block, best) in request.blocks.iter().zip(best) {
            let owner = block.and_then(|(key, bytes)| {
                let Some((slot, weight)) = best else {
                    self.touch(key);
                    return None;
                };
                if self.blocks.contains_key(&key) {
                    return Some((self.move_block(key, slot, weight), bytes));
                }
                self.claims[0].insert(key, BlockClaim { slot, serial: self.units.get(slot).serial });
                Some((slot, bytes))
            });
            owners.push(owner);
        }
        for (cluster, (slot, _)) in request.clusters.iter().zip(used) {
            let (mut requests, mut bytes, mut continues) = (0, 0, false);
            for block in cluster.blocks {
                let own = owners[block.index as usize].filter(|(owner, _)| *owner == slot);
                requests += usize::from(own.is_some() && !(continues && block.joins));
                bytes += own.map_or(0, |(_, bytes)| bytes);
                continues = own.is_some();
            }
            self.units.get_mut(slot).price = (requests, bytes);
            self.rank(slot);
        }
    }

    #[cfg(test)]
    fn holds(&self, key: K) -> bool {
        self.blocks.contains_key(&key)
    }

    fn bytes(&self) -> usize {
        self.used
    }

    fn len(&self) -> usize {
        self.blocks.len()
    }
}

#[cfg(test)]
impl<K: Key, O: UnitOrder> ClusterReplacement<K, O> {
    /// Returns the blocks that may not be evicted.
    pub(super) fn protected(&self) -> std::collections::BTreeSet<K> {
        let is_protected = |held: &HeldBlock| self.units.get(held.slot).is_protected();
        self.blocks.iter().filter(|(_, held)| is_protected(held)).map(|(key, _)| *key).collect()
    }

    /// Checks that units, blocks and the reserved share agree.
    pub(super) fn check(&self) {
        let mut owned: HashMap<u32, (usize, usize)> = HashMap::new();
        for (key, held) in &self.blocks {
            let (bytes, blocks) = owned.entry(held.slot).or_default();
            (*bytes, *blocks) = (*bytes + held.bytes, *blocks + 1);
            assert!(self.units.get(held.slot).owned.contains(key), "{key:?} is not in the list of its unit");
        }
        assert_eq!(self.blocks.values().map(|held| held.bytes).sum::<usize>(), self.used);
        let kept = self.units.check(&owned);
        match &self.changed {
            Some(changed) => assert!(kept == changed.bytes() && kept <= changed.limit(), "{kept} bytes are kept"),
            None => assert_eq!(kept, 0),
        }
    }
}
