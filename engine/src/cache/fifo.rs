//! First in, first out. Source: the reuse buffer of KVSwap (section 3.4 of the paper).
//!
//! Block slots, and a table from key to slot. A hand moves around the slots, and the block under it is evicted next.

use super::key::WordHash;
use super::policy::{Key, ReplacementPolicy};
use std::collections::HashMap;

/// The slots of the first-in-first-out policy.
///
/// Slots are added while bytes are left, so blocks of one size soon fix their number. A larger block empties several
/// slots.
pub(super) struct FifoSlots<K> {
    capacity: usize,
    used: usize,
    slots: Vec<Option<(K, usize)>>,
    /// Slots emptied by a larger block or a removal.
    empty: Vec<usize>,
    /// The index of the slot that is emptied next.
    hand: usize,
    table: HashMap<K, usize, WordHash>,
}

impl<K: Key> FifoSlots<K> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, used: 0, slots: Vec::new(), empty: Vec::new(), hand: 0, table: HashMap::default() }
    }

    /// Empties the next full slot. Returns its key and index.
    fn replace_next(&mut self) -> Option<(K, usize)> {
        for _ in 0..self.slots.len() {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            if let Some((key, bytes)) = self.slots[at].take() {
                self.table.remove(&key);
                self.used -= bytes;
                return Some((key, at));
            }
        }
        None
    }
}

impl<K: Key> ReplacementPolicy<K> for FifoSlots<K> {
    fn touch(&mut self, _key: K) {}

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        if bytes > self.capacity || self.table.contains_key(&key) {
            return false;
        }
        let mut slot = None;
        while self.used + bytes > self.capacity {
            let Some((old, at)) = self.replace_next() else { return false };
            evicted.push(old);
            match slot {
                None => slot = Some(at),
                Some(_) => self.empty.push(at),
            }
        }
        let slot = slot.or_else(|| self.empty.pop()).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some((key, bytes));
        self.table.insert(key, slot);
        self.used += bytes;
        true
    }

    fn evict(&mut self) -> Option<K> {
        let (key, slot) = self.replace_next()?;
        self.empty.push(slot);
        Some(key)
    }

    fn remove(&mut self, key: K) {
        if let Some(slot) = self.table.remove(&key)
            && let Some((_, bytes)) = self.slots[slot].take()
        {
            self.used -= bytes;
            self.empty.push(slot);
        }
    }

    #[cfg(test)]
    fn holds(&self, key: K) -> bool {
        self.table.contains_key(&key)
    }

    fn bytes(&self) -> usize {
        self.used
    }

    fn len(&self) -> usize {
        self.table.len()
    }
}
