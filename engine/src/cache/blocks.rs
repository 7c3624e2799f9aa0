//! The bytes of resident blocks, and the counts of what they saved.
//!
//! A cache takes its whole capacity off the memory budget when it is made: what is left for reads and appends does not
//! depend on what happens to be resident. Blocks that were evicted while a read still holds them keep their pages until it
//! lets go; meanwhile others are not admitted rather than the capacity exceeded.

use super::key::{BlockKey, WordHash};
use super::policy::{Replacement, policy};
use crate::error::{Error, ErrorKind, Result};
use crate::io::buffer::arena::{Arena, Lease, PAGE_BYTES};
use crate::io::buffer::slab::SLAB_BYTES;
use crate::metrics::{MemoryBudget, Reservation, lock};
use crate::options::CacheOptions;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Table entries, policy and bookkeeping of one block, in bytes: taken off the capacity.
const ENTRY_BYTES: usize = 512;
/// Layers of sequences that may have asked in one step; more of them begin another. Sequences that ask once and go would otherwise
/// be remembered for good.
const ASKERS_MAX: usize = 16_384;
/// Blocks that may go for one that finds no gap.
const MAKE_ROOM: usize = 16;

/// A block in memory that was held against its checksum when it was read.
#[derive(Clone)]
pub(crate) struct Resident {
    lease: Arc<Lease>,
    start: usize,
    len: usize,
}

impl Resident {
    /// The block of `len` bytes from `start` of a buffer.
    pub(crate) fn new(lease: Arc<Lease>, start: usize, len: usize) -> Self {
        Self { lease, start, len }
    }

    /// The block; none while its buffer is being read into.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.lease.bytes()?.get(self.start..self.start + self.len)
    }
}

/// What a cache of resident blocks holds and what it has saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheStatus {
    /// Bytes it takes off `memory_limit`.
    pub capacity_bytes: u64,
    /// What the blocks it holds take of the capacity, in bytes: their pages and the tables.
    pub resident_bytes: u64,
    /// Blocks it holds.
    pub resident_blocks: u64,
    /// Blocks asked for that were resident.
    pub hits: u64,
    /// Blocks asked for that had to be read.
    pub misses: u64,
    /// Bytes of keys and values that were not read because they were resident.
    pub saved_bytes: u64,
    /// Blocks taken in.
    pub admitted: u64,
    /// Blocks that went for others.
    pub evicted: u64,
    /// Blocks read that were not taken in.
    pub refused: u64,
}

impl CacheStatus {
    /// Hits over blocks asked for, 0 when there were none.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let asked = self.hits + self.misses;
        if asked == 0 { 0.0 } else { self.hits as f64 / asked as f64 }
    }
}

struct Table {
    policy: Box<dyn Replacement<BlockKey>>,
    blocks: HashMap<BlockKey, Resident, WordHash>,
    /// Who has asked in this step, layers of handles, and how many tokens they had.
    asked: HashMap<(u64, u32), u64, WordHash>,
    counts: CacheStatus,
}

/// Resident blocks under one policy and one share of the memory budget.
pub(crate) struct BlockCache {
    arena: Arena,
    table: Mutex<Table>,
    _account: Reservation,
}

impl BlockCache {
    /// A cache of these options; `account` holds its capacity.
    ///
    /// # Errors
    /// Less than a slab of buffers.
    pub(crate) fn new(options: &CacheOptions, account: Reservation) -> Result<Arc<Self>> {
        let bytes = account.bytes();
        let slabs = bytes / SLAB_BYTES;
        if slabs == 0 {
            let text = format!("a cache of {bytes} bytes: at least {SLAB_BYTES} are needed");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let arena = Arena::new(MemoryBudget::new(slabs * SLAB_BYTES), slabs * SLAB_BYTES);
        let table = Table {
            policy: policy(options.policy, bytes),
            blocks: HashMap::default(),
            asked: HashMap::default(),
            counts: CacheStatus { capacity_bytes: bytes as u64, ..CacheStatus::default() },
        };
        Ok(Arc::new(Self { arena, table: Mutex::new(table), _account: account }))
    }

    /// What is resident of the blocks that layer `layer` of a handle asks for when it has `tokens`, each with its bytes.
    /// The same layer asking with more or fewer tokens means that another decode step has begun, and so do very many askers. Asking `ahead` of need is
    /// not counted and begins nothing.
    pub(crate) fn find(
        &self,
        (handle, layer, tokens): (u64, u32, u64),
        asked: impl Iterator<Item = Option<(BlockKey, usize)>>,
        ahead: bool,
    ) -> Vec<Option<Resident>> {
        let mut table = lock(&self.table);
        if !ahead
            && (table.asked.insert((handle, layer), tokens).is_some_and(|before| before != tokens)
                || table.asked.len() > ASKERS_MAX)
        {
            table.asked.clear();
            table.asked.insert((handle, layer), tokens);
            table.policy.end_step();
        }
        let found = asked.map(|asked| {
            let (key, block_bytes) = asked?;
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

    /// Takes in a block that was read and checked, if the policy wants it and there is room.
    pub(crate) fn admit(&self, key: BlockKey, block: &[u8]) {
        let mut table = lock(&self.table);
        if table.blocks.contains_key(&key) {
            return;
        }
        let mut evicted = Vec::new();
        let wanted = table.policy.admit(key, charge(block.len()), &mut evicted);
        table.counts.evicted += evicted.len() as u64;
        // Their pages come back here, unless a read holds them.
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

    /// A copy of a block in the cache's own pages. Blocks of other sizes may have left no gap that is long enough.
    fn copy(&self, table: &mut Table, key: BlockKey, block: &[u8]) -> Option<Resident> {
        for _ in 0..MAKE_ROOM {
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

/// What a block takes of the capacity: its share of a slab, and of the tables.
fn charge(block: usize) -> usize {
    let per_slab = (SLAB_BYTES / block.max(1).next_multiple_of(PAGE_BYTES)).max(1);
    SLAB_BYTES / per_slab + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Category;

    #[test]
    fn sequences_that_ask_once_are_not_remembered_for_good() {
        let account = MemoryBudget::new(2 * SLAB_BYTES).try_reserve(2 * SLAB_BYTES, Category::Cache).expect("fits");
        let cache = BlockCache::new(&CacheOptions::new(crate::options::ByteSize::mib(4)), account).expect("a cache");
        for sequence in 0..5 * ASKERS_MAX as u64 {
            cache.find((sequence, 0, 100), std::iter::empty(), false);
            assert!(lock(&cache.table).asked.len() <= ASKERS_MAX);
        }
    }
}
