//! Options of a block cache.

use super::size::ByteSize;
use crate::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The policy that chooses which blocks a cache evicts.
///
/// Policies parse and print as `fifo`, `lru`, `cost`, `s3-fifo`, `cluster-fifo`, `cluster-lru` and `cluster-aligned`.
/// `cost:80:1000` gives the microseconds of a request and the MiB per second, and `cluster-aligned:16:25` the kept
/// steps and the reserved percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The oldest slot, regardless of use (KVSwap section 3.4). The cheapest policy. It suffices if the capacity is a
    /// few times what a step reads.
    Fifo,
    /// The least recently used block. It keeps all blocks of the last step if they fit.
    #[default]
    Lru,
    /// The block or cluster with the lowest `f * (request + size / bandwidth) / size` (SWARM section 4.4). For
    /// capacities below what a step reads, and for methods that choose clusters.
    ///
    /// The `f` of a block rises by one at steps that use it, and falls by one at other steps. Once a selection names
    /// clusters, units are clusters, whose `f` is a sum of uses that fades with each step.
    CostEffective {
        /// The cost of a read. `None` is what the profiles of the store's devices say at the moment.
        #[serde(default)]
        read_cost: Option<ReadCost>,
    },
    /// S3-FIFO: a general policy that resists scans.
    S3Fifo,
    /// The cluster that was admitted first. A baseline.
    ClusterFifo,
    /// The least recently used cluster. A baseline.
    ClusterLru,
    /// Small clusters first, and a reserved share for clusters that took in tokens or were split (`DynaKV` section
    /// 6.2). For methods whose clusters change while the sequence grows.
    ClusterAligned {
        /// The steps for which a changed cluster stays in the reserved share.
        kept_steps: u32,
        /// The most percent of the capacity that changed clusters take, from 0 to 100.
        reserved_percent: u8,
    },
}

/// The cost of a read: what one request takes, and what its bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadCost {
    /// The microseconds that a request adds to a batch.
    pub request_us: u32,
    /// The bandwidth of the device, in MiB per second. At least 1.
    pub mib_per_s: u32,
}

impl CachePolicy {
    /// The cost-effective policy with costs from the profiles of the devices.
    pub const COST_EFFECTIVE: Self = Self::CostEffective { read_cost: None };
    /// The cluster-aligned policy. The paper's table 2 follows changed clusters for up to 16 steps.
    pub const CLUSTER_ALIGNED: Self = Self::ClusterAligned { kept_steps: 16, reserved_percent: 25 };
    /// Every policy with its default parameters.
    pub const ALL: [Self; 7] = [
        Self::Fifo,
        Self::Lru,
        Self::COST_EFFECTIVE,
        Self::S3Fifo,
        Self::ClusterFifo,
        Self::ClusterLru,
        Self::CLUSTER_ALIGNED,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Lru => "lru",
            Self::CostEffective { .. } => "cost",
            Self::S3Fifo => "s3-fifo",
            Self::ClusterFifo => "cluster-fifo",
            Self::ClusterLru => "cluster-lru",
            Self::ClusterAligned { .. } => "cluster-aligned",
        }
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no bandwidth, or more than 100 percent.
    pub(crate) fn check(self) -> Result<()> {
        let refused =
            |text: String| Err(Error::new(ErrorKind::InvalidArgument, format!("cache policy {self}: {text}")));
        match self {
            Self::CostEffective { read_cost: Some(ReadCost { mib_per_s: 0, .. }) } => {
                refused("0 MiB per second; give at least 1".to_owned())
            }
            Self::ClusterAligned { reserved_percent: percent @ 101.., .. } => {
                refused(format!("{percent} percent of the capacity; give at most 100"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for CachePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match *self {
            Self::CostEffective { read_cost: Some(cost) } => write!(f, ":{}:{}", cost.request_us, cost.mib_per_s),
            Self::ClusterAligned { kept_steps, reserved_percent } if *self != Self::CLUSTER_ALIGNED => {
                write!(f, ":{kept_steps}:{reserved_percent}")
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for CachePolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |what: &str| Error::new(ErrorKind::InvalidArgument, format!("cache policy {text:?}: {what}"));
        let (name, numbers) = text.split_once(':').map_or((text, None), |(name, numbers)| (name, Some(numbers)));
        let Some(policy) = Self::ALL.into_iter().find(|policy| policy.name() == name) else {
            let names = Self::ALL.map(Self::name).join(", ");
            return Err(wrong(&format!("unknown name {name:?}; use one of {names}")));
        };
        let Some(numbers) = numbers else { return Ok(policy) };
        let pair = numbers.split_once(':').and_then(|(a, b)| Some((a.parse::<u32>().ok()?, b.parse::<u32>().ok()?)));
        let (first, second) = pair.ok_or_else(|| wrong("the parameters are two whole numbers, as NAME:A:B"))?;
        let policy = match policy {
            Self::CostEffective { .. } => {
                Self::CostEffective { read_cost: Some(ReadCost { request_us: first, mib_per_s: second }) }
            }
            Self::ClusterAligned { .. } => Self::ClusterAligned {
                kept_steps: first,
                reserved_percent: u8::try_from(second).map_err(|_| wrong("give at most 100 percent"))?,
            },
            _ => return Err(wrong(&format!("{name} has no parameters"))),
        };
        policy.check().map(|()| policy)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_parse_and_print() {
        for policy in CachePolicy::ALL {
            assert_eq!(policy.to_string().parse::<CachePolicy>().unwrap(), policy);
        }
        for text in ["cost:80:1000", "cluster-aligned:4:50", "cluster-aligned:0:0"] {
            assert_eq!(text.parse::<CachePolicy>().unwrap().to_string(), text);
        }
        assert_eq!("cluster-aligned:16:25".parse::<CachePolicy>().unwrap(), CachePolicy::CLUSTER_ALIGNED);
    }

    #[test]
    fn policy_names_that_are_wrong_say_why() {
        for (bad, why) in [
            ("", "unknown name"),
            ("best", "use one of fifo, lru, cost"),
            ("lru:1:2", "no parameters"),
            ("cost:80", "two whole numbers"),
            ("cost:80:x", "two whole numbers"),
            ("cost:1:2:3", "two whole numbers"),
            ("cost:80:0", "at least 1"),
            ("cluster-aligned:1:101", "at most 100"),
            ("cluster-aligned:1:1000", "at most 100"),
        ] {
            let error = bad.parse::<CachePolicy>().unwrap_err();
            assert!(error.kind() == ErrorKind::InvalidArgument && error.to_string().contains(why), "{bad}: {error}");
        }
    }
}
