//! Replacement by cluster: what is admitted and evicted is a cluster, and its blocks follow.
//!
//! | file | what it does |
//! |---|---|
//! | `replacement` | [`ClusterReplacement`], the policy: which blocks are held, and for which cluster |
//! | `units` | the clusters that are held or remembered, in the order of eviction |
//! | `order` | the ranks of clusters: first in, least recently used, cost-effective, small first |
//! | `changed_share` | the reserved share of clusters that changed lately |
//!
//! How a request passes through:
//! 1. [`ReplacementPolicy::activate`] names the clusters of a request and the blocks that each of them needs. It counts
//!    a use of each cluster.
//! 2. Each block goes to one of its clusters: one that changed lately, else the one that is used most.
//! 3. A cluster is priced by the blocks that would have to be read for it alone. The price and its uses give its rank.
//! 4. Missing blocks are admitted with the rank of their cluster. Blocks of the cluster with the lowest rank leave.
//!
//! A block that no cluster asked for is a unit of its own. Window, dense layers and group methods have such blocks.
//!
//! [`ReplacementPolicy::activate`]: super::policy::ReplacementPolicy::activate

mod changed_share;
mod order;
mod replacement;
#[cfg(test)]
mod tests;
mod units;

pub(super) use order::{ByCost, BySize, FirstIn, LastUsed};
pub(super) use replacement::ClusterReplacement;
