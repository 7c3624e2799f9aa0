//! The bytes of resident blocks, and the counts of what they saved.
//!
//! A cache takes its whole capacity from the memory budget when it is created. The memory left for reads and appends
//! therefore does not depend on the resident blocks. A block that is evicted while a read holds it keeps its pages
//! until the read ends. Meanwhile other blocks are refused, so that the capacity is never exceeded.

use super::factory::policy;
use super::key::{BlockKey, WordHash};
use super::policy::ReplacementPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::SLAB_BYTES;
use crate::io::buffer::arena::Arena;
use crate::io::buffer::lease::Lease;
use crate::metrics::{MemoryBudget, Reservation, lock};
use crate::options::CacheOptions;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The bytes charged to the capacity for the table entries of one block.
const ENTRY_BYTES: usize = 512;
/// The maximum number of layers of handles remembered in one step. One more begins the next step.
/// The limit bounds the memory for handles that read once and close.
const REQUESTERS_MAX: usize = 16_384;
/// The maximum number of blocks evicted for one block that finds no gap in the arena.
const EVICTIONS_PER_COPY: usize = 16;

/// A block in memory whose checksum was verified when it was read.
#[derive(Clone)]
pub(crate) struct Resident {
    lease: Arc<Lease>,
    start: usize,
    len: usize,
}

impl Resident {
    /// Refers to the block of `len` bytes at `start` of a buffer.
    pub(crate) fn new(lease: Arc<Lease>, start: usize, len: usize) -> Self {
        Self { lease, start, len }
    }

    /// Returns the block, or `None` while a read fills its buffer.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.lease.bytes()?.get(self.start..self.start + self.len)
    }
}

/// The content and the counters of a block cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheStatus {
    /// The bytes that the cache takes from `memory_limit`.
    pub capacity_bytes: u64,
    /// The bytes of the capacity in use: pages of resident blocks, and tables.
    pub resident_bytes: u64,
    /// The number of resident blocks.
    pub resident_blocks: u64,
    /// The number of requested blocks that were resident.
    pub hits: u64,
    /// The number of requested blocks that were not resident.
    pub misses: u64,
    /// The bytes of keys and values that were not read because they were resident.
    pub saved_bytes: u64,
    /// The number of blocks admitted.
    pub admitted: u64,
    /// The number of blocks evicted for others.
    pub evicted: u64,
    /// The number of blocks that were read and not admitted.
    pub refused: u64,
}

impl CacheStatus {
    /// Returns hits divided by requested blocks, or 0 if none was requested.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let asked = self.hits + self.misses;
        if asked == 0 { 0.0 } else { self.hits as f64 / asked as f64 }
    }
}

struct Table {
    policy: Box<dyn ReplacementPolicy<BlockKey>>,
    blocks: HashMap<BlockKey, Resident, WordHash>,
    /// The token count of each handle and layer that requested blocks in this step.
    requesters: HashMap<(u64, u32), u64, WordHash>,
    counts: CacheStatus,
}

/// A cache of resident blocks with one policy and a fixed share of the memory budget.
pub(crate) struct BlockCache {
    arena: Arena,
    table: Mutex<Table>,
    _account: Reservation,
}

impl BlockCache {
    /// Creates a cache. `account` is the reservation of its capacity.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: the capacity is smaller than one slab of buffers.
    pub(crate) fn new(options: &CacheOptions, account: Reservation) -> Result<Arc<Self>> {
        let bytes = account.bytes();
        let slabs = bytes / SLAB_BYTES;
        if slabs == 0 {
            let text = format!("cache: a capacity of {bytes} bytes is below the minimum of {SLAB_BYTES}; raise it");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let arena = Arena::new(MemoryBudget::new(slabs * SLAB_BYTES), slabs * SLAB_BYTES);
        let table = Table {
            policy: policy(options.policy, bytes),
            blocks: HashMap::default(),
            requesters: HashMap::default(),
            counts: CacheStatus { capacity_bytes: bytes as u64, ..CacheStatus::default() },
        };
        Ok(Arc::new(Self { arena, table: Mutex::new(table), _account: account }))
    }

    /// Returns the resident ones of the blocks that a layer of a handle requests, each given with its size in bytes.
    ///
    /// A new decode step begins when the same layer requests blocks with another token count, or when the requesters
    /// exceed [`REQUESTERS_MAX`]. A request `ahead` of need is not counted and begins no step.
    pub(crate) fn find(
        &self,
        (handle, layer, tokens): (u64, u32, u64),
        requested: impl Iterator<Item = Option<(BlockKey, usize)>>,
        ahead: bool,
    ) -> Vec<Option<Resident>> {
        let mut table = lock(&self.table);
        if !ahead
            && (table.requesters.insert((handle, layer), tokens).is_some_and(|before| before != tokens)
                || table.requesters.len() > REQUESTERS_MAX)
        {
            table.requesters.clear();
            table.requesters.insert((handle, layer), tokens);
            table.policy.end_step();
        }
        let found = requested.map(|request| {
            let (key, block_bytes) = request?;
            let found = table.blocks.get(&key).filter(|block| block.len == block_bytes).cloned();
            if ahead {
                return found;
            }
            if found.is_some() {
                table.policy.touch(key);
                table.counts.hits += 1;
                table.counts.saved_bytes += block_bytes as u64;
            } else {
                table.counts.misses += 1;
            }
            found
        });
        found.collect()
    }

    /// Admits a block that was read and verified, if the policy accepts it and there is space.
    pub(crate) fn admit(&self, key: BlockKey, block: &[u8]) {
        let mut table = lock(&self.table);
        if table.blocks.contains_key(&key) {
            return;
        }
        let mut evicted = Vec::new();
        let wanted = table.policy.admit(key, charge(block.len()), &mut evicted);
        table.counts.evicted += evicted.len() as u64;
        // This frees their pages, unless a read holds them.
        for old in evicted {
            table.blocks.remove(&old);
        }
        if !wanted {
            table.counts.refused += 1;
            return;
        }
        match self.copy(&mut table, key, block) {
            Some(resident) => {
                table.blocks.insert(key, resident);
                table.counts.admitted += 1;
            }
            None => {
                table.policy.remove(key);
                table.counts.refused += 1;
            }
        }
    }

    /// Copies a block to pages of the cache. Evicts blocks while no gap is long enough, because sizes may differ.
    fn copy(&self, table: &mut Table, key: BlockKey, block: &[u8]) -> Option<Resident> {
        for _ in 0..EVICTIONS_PER_COPY {
            if let Ok(mut lease) = self.arena.lease(block.len()) {
                lease.bytes_mut()?.copy_from_slice(block);
                return Some(Resident::new(Arc::new(lease), 0, block.len()));
            }
            let old = table.policy.evict()?;
            if old == key {
                return None;
            }
            table.blocks.remove(&old);
            table.counts.evicted += 1;
        }
        None
    }

    pub(crate) fn status(&self) -> CacheStatus {
        let table = lock(&self.table);
        let (blocks, bytes) = (table.policy.len() as u64, table.policy.bytes() as u64);
        CacheStatus { resident_bytes: bytes, resident_blocks: blocks, ..table.counts.clone() }
    }
}

/// Returns the bytes of capacity that a block takes: its share of a slab, and its table entries.
fn charge(block: usize) -> usize {
    let per_slab = (SLAB_BYTES / block.max(1).next_multiple_of(PAGE_BYTES)).max(1);
    SLAB_BYTES / per_slab + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Category;

    #[test]
    fn the_cache_forgets_handles_that_read_once() {
        let account = MemoryBudget::new(2 * SLAB_BYTES).try_reserve(2 * SLAB_BYTES, Category::Cache).expect("fits");
        let cache = BlockCache::new(&CacheOptions::new(crate::options::ByteSize::mib(4)), account).expect("a cache");
        for sequence in 0..5 * REQUESTERS_MAX as u64 {
            cache.find((sequence, 0, 100), std::iter::empty(), false);
            assert!(lock(&cache.table).requesters.len() <= REQUESTERS_MAX);
        }
    }
}
