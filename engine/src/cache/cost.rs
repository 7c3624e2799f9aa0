//! The cost-effective policy by block: keeps blocks that are often used, small, and expensive to read again.
//!
//! Source: the cost-effectiveness heap of SWARM (section 4.4 of the paper). The score of a key is
//! `S = f * (T_base + size * T_transfer) / size`, and the key with the lowest score is evicted first.
//!
//! 1. Each step that uses a key adds 1 to its `f`.
//! 2. Each step that does not use a held key subtracts 1, down to zero.
//! 3. A key that was read but not admitted keeps its `f` for a while, so repeated use admits it.
//!
//! Invariant: the order of keys of one size never changes between uses. A key used last in step `at` with `f` now has
//! `f - (now - at)`. So `f + at` orders the keys of one size, and one ordered set per size is enough.

use super::key::WordHash;
use super::policy::{Key, PriceSource, ReadPrice, ReplacementPolicy};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

struct PricedEntry {
    /// `f` at the last use, plus the step of that use.
    rank: u64,
    /// The step of the last use.
    at: u64,
    bytes: usize,
    /// A serial number that orders entries of one rank, the older first.
    stamp: u64,
}

pub(super) struct CostEffective<K> {
    capacity: usize,
    used: usize,
    source: PriceSource,
    step: u64,
    stamp: u64,
    entries: HashMap<K, PricedEntry, WordHash>,
    /// The entries of each size, ordered by rank and stamp.
    sizes: BTreeMap<usize, BTreeSet<(u64, u64, K)>>,
    /// `f` of keys that are not held. The oldest is forgotten first.
    absent: HashMap<K, u64, WordHash>,
    absent_order: VecDeque<K>,
}

/// The number of absent keys that are remembered per held key.
const ABSENT_PER_ENTRY: usize = 2;
/// The minimum number of absent keys that are remembered.
const ABSENT_MIN: usize = 64;

impl<K: Key> CostEffective<K> {
    pub(super) fn new(capacity: usize, source: PriceSource) -> Self {
        Self {
            capacity,
            used: 0,
            source,
            step: 0,
            stamp: 0,
            entries: HashMap::default(),
            sizes: BTreeMap::new(),
            absent: HashMap::default(),
            absent_order: VecDeque::new(),
        }
    }

    fn score(&self, f: u64, bytes: usize) -> f64 {
        let size = bytes.max(1) as f64;
        f as f64 * self.source.price.of(1.0, size) / size
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn price(&self) -> PriceSource {
        self.source
    }

    /// Removes all keys, and returns each with its `f` and its bytes. The lowest `f` of a size comes first.
    pub(super) fn drain(&mut self) -> Vec<(K, u64, usize)> {
        let (sizes, step) = (std::mem::take(&mut self.sizes), self.step);
        self.entries.clear();
        self.used = 0;
        let keys = sizes.into_iter().flat_map(|(bytes, set)| set.into_iter().map(move |entry| (entry, bytes)));
        keys.map(|((rank, _, key), bytes)| (key, rank.saturating_sub(step), bytes)).collect()
    }

    /// Returns the key with the lowest score. Ties go to the lowest rank, then to the oldest entry.
    fn worst(&self) -> Option<(f64, K)> {
        let lowest = self.sizes.iter().filter_map(|(&bytes, set)| set.first().map(|first| (bytes, first)));
        let scored = lowest
            .map(|(bytes, &(rank, stamp, key))| (self.score(rank.saturating_sub(self.step), bytes), rank, stamp, key));
        let least = scored.min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        least.map(|(score, .., key)| (score, key))
    }

    fn take(&mut self, key: K) -> Option<PricedEntry> {
        let entry = self.entries.remove(&key)?;
        self.used -= entry.bytes;
        if let Some(set) = self.sizes.get_mut(&entry.bytes) {
            set.remove(&(entry.rank, entry.stamp, key));
            if set.is_empty() {
                self.sizes.remove(&entry.bytes);
            }
        }
        Some(entry)
    }

    fn put(&mut self, key: K, f: u64, bytes: usize) {
        self.stamp += 1;
        let entry = PricedEntry { rank: f + self.step, at: self.step, bytes, stamp: self.stamp };
        self.sizes.entry(bytes).or_default().insert((entry.rank, entry.stamp, key));
        self.used += bytes;
        self.entries.insert(key, entry);
    }

    fn remember(&mut self, key: K, f: u64) {
        if self.absent.insert(key, f).is_none() {
            self.absent_order.push_back(key);
        }
        let limit = (self.entries.len() * ABSENT_PER_ENTRY).max(ABSENT_MIN);
        while self.absent_order.len() > limit {
            if let Some(old) = self.absent_order.pop_front() {
                self.absent.remove(&old);
            }
        }
    }
}

impl<K: Key> ReplacementPolicy<K> for CostEffective<K> {
    fn touch(&mut self, key: K) {
        // A step counts a key once.
        if self.entries.get(&key).is_none_or(|entry| entry.at == self.step) {
            return;
        }
        if let Some(entry) = self.take(key) {
            // `f` falls by one for each step between the last use and this one.
            let f = entry.rank.saturating_sub(self.step - 1) + 1;
            self.put(key, f, entry.bytes);
        }
    }

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        if bytes > self.capacity || self.entries.contains_key(&key) {
            return false;
        }
        let f = self.absent.get(&key).map_or(1, |f| f + 1);
        let own = self.score(f, bytes);
        while self.used + bytes > self.capacity {
            match self.worst() {
                Some((score, worst)) if score < own => {
                    if let Some(entry) = self.take(worst) {
                        self.remember(worst, entry.rank.saturating_sub(self.step));
                    }
                    evicted.push(worst);
                }
                _ => {
                    self.remember(key, f);
                    return false;
                }
            }
        }
        // The key keeps its place in `absent_order` until it is the oldest.
        self.put(key, f, bytes);
        true
    }

    fn evict(&mut self) -> Option<K> {
        let (_, key) = self.worst()?;
        self.take(key);
        Some(key)
    }

    fn remove(&mut self, key: K) {
        self.take(key);
    }

    fn end_step(&mut self) {
        self.step += 1;
    }

    fn set_read_price(&mut self, price: ReadPrice) {
        self.source.set(price);
    }

    #[cfg(test)]
    fn holds(&self, key: K) -> bool {
        self.entries.contains_key(&key)
    }

    fn bytes(&self) -> usize {
        self.used
    }

    fn len(&self) -> usize {
        self.entries.len()
    }
}
