//! The choice of a replacement policy.

use super::clusters::{BySize, ClusterReplacement, FirstIn, LastUsed};
use super::cost_switch::CostSwitch;
use super::fifo::FifoSlots;
use super::lru::Lru;
use super::policy::{Key, PriceSource, ReplacementPolicy};
use super::s3_fifo::S3Fifo;
use crate::options::CachePolicy;

/// Creates the chosen policy for `capacity` bytes.
pub(super) fn policy<K: Key>(choice: CachePolicy, capacity: usize) -> Box<dyn ReplacementPolicy<K>> {
    match choice {
        CachePolicy::Fifo => Box::new(FifoSlots::new(capacity)),
        CachePolicy::Lru => Box::new(Lru::new(capacity)),
        CachePolicy::CostEffective { read_cost } => Box::new(CostSwitch::new(capacity, PriceSource::new(read_cost))),
        CachePolicy::S3Fifo => Box::new(S3Fifo::new(capacity)),
        CachePolicy::ClusterFifo => Box::new(ClusterReplacement::new(capacity, FirstIn)),
        CachePolicy::ClusterLru => Box::new(ClusterReplacement::new(capacity, LastUsed)),
        CachePolicy::ClusterAligned { kept_steps, reserved_percent } => {
            let policy = ClusterReplacement::new(capacity, BySize::default());
            Box::new(policy.with_changed_share(reserved_percent, kept_steps))
        }
    }
}
