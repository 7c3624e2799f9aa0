//! Resident blocks: what was read once and may be attended to again at the next step.
//!
//! A [`Replacement`] policy says which keys stay; [`BlockCache`] holds the bytes. The key of a block is its identity on disk
//! (the frame that holds it, and which of the frame's blocks it is), so forks that share a frame share its blocks in memory,
//! a group that was cut off and written anew is another block, and moving a frame changes nothing.

mod blocks;
mod cost;
mod fifo;
mod general;
mod key;
mod lru;
mod policy;
#[cfg(test)]
mod tests;

pub use blocks::CacheStatus;
pub(crate) use blocks::{BlockCache, Resident};
pub(crate) use key::BlockKey;
