//! The interface of replacement policies.

use std::fmt::Debug;
use std::hash::Hash;

/// The bounds of a policy's key.
pub(super) trait Key: Copy + Eq + Hash + Ord + Debug + Send + 'static {}

impl<K: Copy + Eq + Hash + Ord + Debug + Send + 'static> Key for K {}

/// A replacement policy over keys of known size.
///
/// Invariant: the bytes of the keys held never exceed the capacity.
pub(super) trait ReplacementPolicy<K: Key>: Send {
    /// Records a use of a key that is held.
    fn touch(&mut self, key: K);

    /// Offers a key that is not held, of a block of `bytes` that was just read. Returns whether it was admitted.
    ///
    /// Keys evicted to make room are pushed to `evicted`, even if admission then fails.
    fn admit(&mut self, key: K, bytes: usize, evicted: &mut Vec<K>) -> bool;

    /// Evicts the key of the lowest worth and returns it.
    fn evict(&mut self) -> Option<K>;

    /// Removes a key, if it is held.
    fn remove(&mut self, key: K);

    /// Marks the end of a decode step.
    fn end_step(&mut self) {}

    /// Returns whether a key is held.
    #[cfg(test)]
    fn holds(&self, key: K) -> bool;

    /// Returns the bytes of the keys held.
    fn bytes(&self) -> usize;

    /// Returns the number of keys held.
    fn len(&self) -> usize;
}
