//! Which keys stay.

use super::cost::CostEffective;
use super::fifo::FifoSlots;
use super::general::S3Fifo;
use super::lru::Lru;
use crate::options::CachePolicy;
use std::fmt::Debug;
use std::hash::Hash;

/// What a policy keeps apart.
pub(super) trait Key: Copy + Eq + Hash + Ord + Debug + Send + 'static {}

impl<K: Copy + Eq + Hash + Ord + Debug + Send + 'static> Key for K {}

/// A replacement policy over keys of known size. Invariant: the bytes of the keys held never exceed the capacity.
pub(super) trait Replacement<K: Key>: Send {
    /// A key that is held was asked for.
    fn touch(&mut self, key: K);

    /// A key that is not held was read, `bytes` long. Whether it is held from now on; what had to go for it is pushed to
    /// `evicted`, which may happen also when it is not.
    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool;

    /// Gives up the key that is worth the least.
    fn evict(&mut self) -> Option<K>;

    /// A key is held no more.
    fn remove(&mut self, key: K);

    /// A decode step ended.
    fn end_step(&mut self) {}

    /// Whether a key is held.
    #[cfg(test)]
    fn holds(&self, key: K) -> bool;

    /// Bytes of the keys held.
    fn bytes(&self) -> usize;

    /// Keys held.
    fn len(&self) -> usize;
}

/// A policy for `capacity` bytes.
pub(super) fn policy<K: Key>(choice: CachePolicy, capacity: usize) -> Box<dyn Replacement<K>> {
    match choice {
        CachePolicy::Fifo => Box::new(FifoSlots::new(capacity)),
        CachePolicy::Lru => Box::new(Lru::new(capacity)),
        CachePolicy::CostEffective { base_us, mib_per_s } => Box::new(CostEffective::new(capacity, base_us, mib_per_s)),
        CachePolicy::S3Fifo => Box::new(S3Fifo::new(capacity)),
    }
}
