//! The least recently used policy.

use super::key::WordHash;
use super::policy::{Key, ReplacementPolicy};
use std::collections::{BTreeMap, HashMap};

pub(super) struct Lru<K> {
    capacity: usize,
    used: usize,
    now: u64,
    /// The time of the last use and the bytes, by key.
    entries: HashMap<K, (u64, usize), WordHash>,
    order: BTreeMap<u64, K>,
}

impl<K: Key> Lru<K> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, used: 0, now: 0, entries: HashMap::default(), order: BTreeMap::new() }
    }
}

impl<K: Key> ReplacementPolicy<K> for Lru<K> {
    fn touch(&mut self, key: K) {
        if let Some((used, _)) = self.entries.get_mut(&key) {
            self.order.remove(used);
            self.now += 1;
            *used = self.now;
            self.order.insert(self.now, key);
        }
    }

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        if bytes > self.capacity || self.entries.contains_key(&key) {
            return false;
        }
        while self.used + bytes > self.capacity {
            let Some((_, old)) = self.order.pop_first() else { return false };
            if let Some((_, freed)) = self.entries.remove(&old) {
                self.used -= freed;
            }
            evicted.push(old);
        }
        self.now += 1;
        self.entries.insert(key, (self.now, bytes));
        self.order.insert(self.now, key);
        self.used += bytes;
        true
    }

    fn evict(&mut self) -> Option<K> {
        let key = self.order.first_key_value().map(|(_, key)| *key)?;
        self.remove(key);
        Some(key)
    }

    fn remove(&mut self, key: K) {
        if let Some((used, bytes)) = self.entries.remove(&key) {
            self.order.remove(&used);
            self.used -= bytes;
        }
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
