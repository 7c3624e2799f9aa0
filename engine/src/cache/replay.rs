//! [`PolicyReplay`]: a replacement policy without blocks, which measures hit rates on traces.

use super::factory::policy;
use super::key::{ClusterKey, WordHash};
use super::policy::{PriceSource, ReplacementPolicy};
use super::request::{ActivatedClusters, ClusterBlock, ClusterRequest};
use crate::options::{CachePolicy, ReadCost};
use std::collections::{HashMap, HashSet};

/// A cluster that a replayed step requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayedCluster {
    /// The number of the cluster.
    pub cluster: u32,
    /// The share of the queries of a profile that activated it; 0 without a profile.
    pub profiled: f32,
    /// Its blocks with their bytes, each block once. Blocks with consecutive numbers are read by one request.
    pub blocks: Vec<(u64, usize)>,
}

/// A replacement policy that is driven by a trace of requests instead of a store. It holds no bytes.
pub struct PolicyReplay {
    policy: Box<dyn ReplacementPolicy<u64>>,
    held: HashSet<u64, WordHash>,
    evicted: Vec<u64>,
    steps: u64,
}

impl PolicyReplay {
    /// Returns an empty cache of `capacity` bytes.
    #[must_use]
    pub fn new(choice: CachePolicy, capacity: usize) -> Self {
        Self { policy: policy(choice, capacity), held: HashSet::default(), evicted: Vec::new(), steps: 0 }
    }

    /// Replays a decode step that requests these blocks, each with its bytes. Returns which of them were held.
    ///
    /// As in a store, all blocks are looked up before those that were missing are admitted.
    pub fn step(&mut self, blocks: &[(u64, usize)]) -> Vec<bool> {
        let hits: Vec<bool> = blocks.iter().map(|(key, _)| self.held.contains(key)).collect();
        blocks.iter().zip(&hits).filter(|(_, hit)| **hit).for_each(|((key, _), _)| self.policy.touch(*key));
        self.admit_missing(blocks, &hits);
        hits
    }

    /// Replays a decode step that requests clusters, as [`Self::step`]. A block that several clusters need is requested
    /// once. Returns each block with its bytes and whether it was held, in the order in which clusters name them.
    ///
    /// `changed` are clusters that took in tokens or were split since the last step.
    pub fn step_of_clusters(&mut self, clusters: &[ReplayedCluster], changed: &[u32]) -> Vec<(u64, usize, bool)> {
        self.steps += 1;
        let (mut blocks, mut index_of) = (Vec::new(), HashMap::<u64, u32, WordHash>::default());
        let mut activated = ActivatedClusters::default();
        let key = |cluster| ClusterKey { selector: 0, layer: 0, list: 0, cluster };
        for cluster in clusters {
            let mut before = None;
            let own = cluster.blocks.iter().map(|&(block, bytes)| {
                let index = *index_of.entry(block).or_insert_with(|| {
                    blocks.push((block, bytes));
                    (blocks.len() - 1) as u32
                });
                let joins = before.replace(block).is_some_and(|before: u64| before + 1 == block);
                ClusterBlock { index, joins }
            });
            activated.push(key(cluster.cluster), cluster.profiled, own);
        }
        changed.iter().for_each(|cluster| activated.change(key(*cluster), self.steps));
        let hits: Vec<bool> = blocks.iter().map(|(key, _)| self.held.contains(key)).collect();
        if self.policy.follows_clusters() {
            let requested: Vec<Option<(u64, usize)>> = blocks.iter().copied().map(Some).collect();
            self.policy.activate(&ClusterRequest { blocks: &requested, clusters: &activated });
        } else {
            blocks.iter().zip(&hits).filter(|(_, hit)| **hit).for_each(|((key, _), _)| self.policy.touch(*key));
        }
        self.admit_missing(&blocks, &hits);
        blocks.iter().zip(hits).map(|((key, bytes), hit)| (*key, *bytes, hit)).collect()
    }

    /// Admits what was missing, and ends the step.
    fn admit_missing(&mut self, blocks: &[(u64, usize)], hits: &[bool]) {
        for (key, bytes) in blocks.iter().zip(hits).filter(|(_, hit)| !**hit).map(|(block, _)| *block) {
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
    }

    /// Returns the microseconds that requests of a batch take. Without `cost`, an ordinary device reads them.
    #[must_use]
    pub fn read_us(cost: Option<ReadCost>, requests: usize, bytes: usize) -> f64 {
        PriceSource::new(cost).price.of(requests as f64, bytes as f64) * 1e6
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
        for choice in CachePolicy::ALL {
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
