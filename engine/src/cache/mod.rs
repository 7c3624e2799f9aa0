//! The block cache: blocks that were read once and may be selected again at the next decode step.
//!
//! - [`BlockCache`] holds the bytes and the counts. It has one lock, which is held for no I/O.
//! - A [`policy::ReplacementPolicy`] decides which keys stay. One file per policy by block: `fifo`, `lru`, `cost`,
//!   `s3_fifo`. The folder `clusters` has policies by cluster. `cost_switch` goes from blocks to clusters.
//! - `request` has the clusters of a selection, which policies by cluster ask for.
//! - `replay` drives a policy by a trace, without blocks, to measure hit rates.
//! - `factory` maps the option to a policy. A new policy is one file, a variant of [`crate::options::CachePolicy`], and
//!   one line there.
//!
//! The key of a block is its identity on disk: the frame that first held it, and its place among the frame's blocks.
//! Therefore:
//! - Forks that share a frame share its resident blocks.
//! - A group that was truncated and written again is another block.
//! - Moving a frame does not invalidate its blocks.
//!
//! Invariant: the bytes of resident blocks never exceed the capacity, which is taken from the memory budget at
//! creation.

mod blocks;
mod clusters;
mod cost;
mod cost_switch;
mod factory;
mod fifo;
mod key;
mod lru;
mod policy;
mod replay;
mod request;
mod s3_fifo;
#[cfg(test)]
mod tests;

pub use blocks::CacheStatus;
pub(crate) use blocks::{BlockCache, CacheReader, Resident};
pub(crate) use key::{BlockKey, ClusterKey};
pub(crate) use policy::ReadPrice;
pub use replay::{PolicyReplay, ReplayedCluster};
pub(crate) use request::{ActivatedClusters, ClusterBlock};
