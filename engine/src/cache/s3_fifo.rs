//! S3-FIFO, as implemented by the crate `quick_cache`. It resists scans, needs no tuning and serves as a comparison.

use super::key::WordHash;
use super::policy::{Key, ReplacementPolicy};
use quick_cache::unsync::Cache;
use quick_cache::{Lifecycle, Weighter};
use std::marker::PhantomData;

/// The number of blocks for which the crate sizes its tables at first.
const ENTRIES: usize = 1024;

#[derive(Clone)]
struct BlockBytes;

impl<K> Weighter<K, usize> for BlockBytes {
    fn weight(&self, _key: &K, bytes: &usize) -> u64 {
        *bytes as u64
    }
}

/// Collects what is evicted.
struct Evictions<K>(PhantomData<fn() -> K>);

impl<K> Lifecycle<K, usize> for Evictions<K> {
    type RequestState = EvictedKeys<K>;

    fn on_evict(&self, state: &mut EvictedKeys<K>, key: K, _bytes: usize) {
        state.0.push(key);
    }
}

struct EvictedKeys<K>(Vec<K>);

impl<K> Default for EvictedKeys<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

pub(super) struct S3Fifo<K> {
    cache: Cache<K, usize, BlockBytes, WordHash, Evictions<K>>,
}

impl<K: Key> S3Fifo<K> {
    pub(super) fn new(capacity: usize) -> Self {
        let evictions = Evictions(PhantomData);
        Self { cache: Cache::with(ENTRIES, capacity as u64, BlockBytes, WordHash::default(), evictions) }
    }
}

impl<K: Key> ReplacementPolicy<K> for S3Fifo<K> {
    fn touch(&mut self, key: K) {
        let _ = self.cache.get(&key);
    }

    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool {
        if bytes == 0 || bytes as u64 > self.cache.capacity() || self.cache.contains_key(&key) {
            return false;
        }
        let mut gone = EvictedKeys::default();
        self.cache.insert_with_lifecycle(key, bytes, &mut gone);
        // The crate may evict the new key at once.
        let admitted = self.cache.contains_key(&key);
        evicted.extend(gone.0.into_iter().filter(|old| *old != key));
        admitted
    }

    fn evict(&mut self) -> Option<K> {
        // The crate offers no eviction on demand, so any key is removed.
        let key = self.cache.iter().next().map(|(key, _)| *key)?;
        self.cache.remove(&key);
        Some(key)
    }

    fn remove(&mut self, key: K) {
        self.cache.remove(&key);
    }

    #[cfg(test)]
    fn holds(&self, key: K) -> bool {
        self.cache.contains_key(&key)
    }

    fn bytes(&self) -> usize {
        self.cache.weight() as usize
    }

    fn len(&self) -> usize {
        self.cache.len()
    }
}
