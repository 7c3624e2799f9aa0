//! The interface of replacement policies.

use super::request::ClusterRequest;
use crate::io::scheduler::profile::Profile;
use crate::options::ReadCost;
use std::fmt::Debug;
use std::hash::Hash;

/// The bounds of a policy's key.
pub(super) trait Key: Copy + Eq + Hash + Ord + Debug + Send + 'static {}

impl<K: Copy + Eq + Hash + Ord + Debug + Send + 'static> Key for K {}

/// The price of a read: the seconds that a request adds to a batch, and the seconds that a byte adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReadPrice {
    pub(crate) request_s: f64,
    pub(crate) byte_s: f64,
}

impl From<ReadCost> for ReadPrice {
    fn from(cost: ReadCost) -> Self {
        let bytes_per_s = f64::from(cost.mib_per_s.max(1)) * f64::from(1 << 20);
        Self { request_s: f64::from(cost.request_us) / 1e6, byte_s: 1.0 / bytes_per_s }
    }
}

impl ReadPrice {
    /// Returns the price on a device that was never measured.
    pub(super) fn ordinary() -> Self {
        let (_, request_s, byte_s, _) = Profile::default().load();
        Self { request_s, byte_s }
    }

    /// Returns the seconds of a read.
    pub(super) fn of(self, requests: f64, bytes: f64) -> f64 {
        requests * self.request_s + bytes * self.byte_s
    }
}

/// The price of reads that a policy weighs: a fixed one, or one that follows the devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct PriceSource {
    pub(super) price: ReadPrice,
    is_fixed: bool,
}

impl PriceSource {
    /// Returns a fixed price, or the price of an ordinary device until it is [set](Self::set).
    pub(super) fn new(cost: Option<ReadCost>) -> Self {
        Self { price: cost.map_or_else(ReadPrice::ordinary, ReadPrice::from), is_fixed: cost.is_some() }
    }

    /// Sets the price, unless it is fixed.
    pub(super) fn set(&mut self, price: ReadPrice) {
        if !self.is_fixed {
            self.price = price;
        }
    }
}

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

    /// Sets the price of reads from now on, for policies that weigh it.
    fn set_read_price(&mut self, price: ReadPrice) {
        let _ = price;
    }

    /// Returns whether it ranks clusters, so that the cache calls [`Self::activate`].
    fn follows_clusters(&self) -> bool {
        false
    }

    /// Records a request that names clusters, before its missing blocks are offered. It takes the place of
    /// [`Self::touch`] for all blocks of the request. The cache calls it only if [`Self::follows_clusters`].
    fn activate(&mut self, request: &ClusterRequest<'_, K>) {
        let _ = request;
    }

    /// Returns whether a key is held.
    #[cfg(test)]
    fn holds(&self, key: K) -> bool;

    /// Returns the bytes of the keys held.
    fn bytes(&self) -> usize;

    /// Returns the number of keys held.
    fn len(&self) -> usize;
}
