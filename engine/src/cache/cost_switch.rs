//! The cost-effective policy of a cache: by block until a request names clusters, and by cluster from then on.
//!
//! Caches of group methods therefore decide as if clusters did not exist. The first request that names clusters turns
//! the held blocks into units of their own.

use super::clusters::{ByCost, ClusterReplacement};
use super::cost::CostEffective;
use super::policy::{Key, PriceSource, ReadPrice, ReplacementPolicy};
use super::request::ClusterRequest;

/// The cost-effective policy.
pub(super) struct CostSwitch<K> {
    /// Holds nothing once there are clusters.
    blocks: CostEffective<K>,
    clusters: Option<Box<ClusterReplacement<K, ByCost>>>,
}

impl<K: Key> CostSwitch<K> {
    /// Returns an empty cache.
    pub(super) fn new(capacity: usize, price: PriceSource) -> Self {
        Self { blocks: CostEffective::new(capacity, price), clusters: None }
    }

    fn policy(&self) -> &dyn ReplacementPolicy<K> {
        match &self.clusters {
            None => &self.blocks,
            Some(clusters) => clusters.as_ref(),
        }
    }
}

impl<K: Key> ReplacementPolicy<K> for CostSwitch<K> {
    fn touch(&mut self, key: K) {
        match &mut self.clusters {
            None => self.blocks.touch(key),
            Some(clusters) => clusters.touch(key),
        }
    }

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        match &mut self.clusters {
            None => self.blocks.admit(key, bytes, evicted),
            Some(clusters) => clusters.admit(key, bytes, evicted),
        }
    }

    fn evict(&mut self) -> Option<K> {
        match &mut self.clusters {
            None => self.blocks.evict(),
            Some(clusters) => clusters.evict(),
        }
    }

    fn remove(&mut self, key: K) {
        match &mut self.clusters {
            None => self.blocks.remove(key),
            Some(clusters) => clusters.remove(key),
        }
    }

    fn end_step(&mut self) {
        match &mut self.clusters {
            None => self.blocks.end_step(),
            Some(clusters) => clusters.end_step(),
        }
    }

    fn set_read_price(&mut self, price: ReadPrice) {
        match &mut self.clusters {
            None => self.blocks.set_read_price(price),
            Some(clusters) => clusters.set_read_price(price),
        }
    }

    fn follows_clusters(&self) -> bool {
        true
    }

    fn activate(&mut self, request: &ClusterRequest<'_, K>) {
        let blocks = &mut self.blocks;
        let clusters = self.clusters.get_or_insert_with(|| {
            let mut clusters = ClusterReplacement::new(blocks.capacity(), ByCost::new(blocks.price()));
            for (key, uses, bytes) in blocks.drain() {
                clusters.insert(key, uses as f64, bytes);
            }
            Box::new(clusters)
        });
        clusters.activate(request);
    }

    #[cfg(test)]
    fn holds(&self, key: K) -> bool {
        self.policy().holds(key)
    }

    fn bytes(&self) -> usize {
        self.policy().bytes()
    }

    fn len(&self) -> usize {
        self.policy().len()
    }
}
