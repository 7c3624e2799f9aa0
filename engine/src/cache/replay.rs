//! [`PolicyReplay`]: a replacement policy without blocks, which measures hit rates on traces.

use super::factory::policy;
use super::key::WordHash;
use super::policy::ReplacementPolicy;
use crate::options::CachePolicy;
use std::collections::HashSet;

/// A replacement policy that is driven by a trace of requests instead of a store. It holds no bytes.
pub struct PolicyReplay {
    policy: Box<dyn ReplacementPolicy<u64>>,
    held: HashSet<u64, WordHash>,
    evicted: Vec<u64>,
}

impl PolicyReplay {
    /// Returns an empty cache of `capacity` bytes.
    #[must_use]
    pub fn new(choice: CachePolicy, capacity: usize) -> Self {
        Self { policy: policy(choice, capacity), held: HashSet::default(), evicted: Vec::new() }
    }

    /// Replays a decode step that requests these blocks, each with its bytes. Returns which of them were held.
    ///
    /// As in a store, all blocks are looked up before those that were missing are admitted.
    pub fn step(&mut self, blocks: &[(u64, usize)]) -> Vec<bool> {
        let hits: Vec<bool> = blocks.iter().map(|(key, _)| self.held.contains(key)).collect();
        blocks.iter().zip(&hits).filter(|(_, hit)| **hit).for_each(|((key, _), _)| self.policy.touch(*key));
        for (key, bytes) in blocks.iter().zip(&hits).filter(|(_, hit)| !**hit).map(|(block, _)| *block) {
            // A step may request a block twice.
            let is_admitted = !self.held.contains(&key) && self.policy.admit(key, bytes, &mut self.evicted);
            for old in self.evicted.drain(..) {
                self.held.remove(&old);
            }
            if is_admitted {
                self.held.insert(key);
            }
        }
        self.policy.end_step();
        hits
    }

    /// Returns the bytes of the blocks held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.policy.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_hits_what_the_policy_holds() {
        let mut replay = PolicyReplay::new(CachePolicy::Lru, 300);
        assert_eq!(replay.step(&[(1, 100), (2, 100), (2, 100)]), [false, false, false]);
        assert_eq!(replay.step(&[(1, 100), (3, 100)]), [true, false]);
        assert_eq!((replay.step(&[(4, 100)]), replay.held_bytes()), (vec![false], 300));
        // 2 was used least recently.
        assert_eq!(replay.step(&[(1, 100), (2, 100), (3, 100)]), [true, false, true]);
    }

    #[test]
    fn every_policy_holds_at_most_its_capacity() {
        let cost = CachePolicy::CostEffective { base_us: 80, mib_per_s: 1000 };
        for choice in [CachePolicy::Fifo, CachePolicy::Lru, cost, CachePolicy::S3Fifo] {
            let mut replay = PolicyReplay::new(choice, 1000);
            for step in 0..200_u64 {
                let blocks: Vec<(u64, usize)> =
                    (0..5).map(|i| (step * i % 37, 50 + (step * i % 37) as usize)).collect();
                replay.step(&blocks);
                let sizes: usize = replay.held.iter().map(|key| 50 + *key as usize).sum();
                assert!(sizes == replay.held_bytes() && sizes <= 1000, "{choice:?} holds {sizes} bytes");
            }
        }
    }
}
