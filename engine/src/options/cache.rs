//! Options of a block cache.

use super::size::ByteSize;
use serde::{Deserialize, Serialize};

/// The policy that chooses which blocks a cache evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The oldest slot, regardless of use (KVSwap section 3.4). The cheapest policy. It suffices if the capacity is a
    /// few times what a step reads.
    Fifo,
    /// The least recently used block. It keeps all blocks of the last step if they fit.
    #[default]
    Lru,
    /// The block with the lowest `f * (base + size / bandwidth) / size` (SWARM section 4.4). `f` rises by one at steps
    /// that use the block, and falls by one at other steps. For capacities below what a step reads.
    CostEffective {
        /// The latency of one read, in microseconds.
        base_us: u32,
        /// The bandwidth of the device, in MiB per second.
        mib_per_s: u32,
    },
    /// S3-FIFO: a general policy that resists scans.
    S3Fifo,
}

/// A cache of resident blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOptions {
    /// Bytes, of which whole multiples of 2 MiB hold blocks. They are reserved from `memory_limit` at once, so that
    /// reads and appends keep the rest.
    pub bytes: ByteSize,
    /// The policy.
    #[serde(default)]
    pub policy: CachePolicy,
}

impl CacheOptions {
    /// Returns a cache of this capacity under the default policy.
    #[must_use]
    pub const fn new(bytes: ByteSize) -> Self {
        Self { bytes, policy: CachePolicy::Lru }
    }

    /// Sets the policy.
    #[must_use]
    pub const fn policy(mut self, policy: CachePolicy) -> Self {
        self.policy = policy;
        self
    }
}
