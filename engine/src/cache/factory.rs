//! The choice of a replacement policy.

use super::cost::CostEffective;
use super::fifo::FifoSlots;
use super::lru::Lru;
use super::policy::{Key, ReplacementPolicy};
use super::s3_fifo::S3Fifo;
use crate::options::CachePolicy;

/// Creates the chosen policy for `capacity` bytes.
pub(super) fn policy<K: Key>(choice: CachePolicy, capacity: usize) -> Box<dyn ReplacementPolicy<K>> {
    match choice {
        CachePolicy::Fifo => Box::new(FifoSlots::new(capacity)),
        CachePolicy::Lru => Box::new(Lru::new(capacity)),
        CachePolicy::CostEffective { base_us, mib_per_s } => Box::new(CostEffective::new(capacity, base_us, mib_per_s)),
        CachePolicy::S3Fifo => Box::new(S3Fifo::new(capacity)),
    }
}
