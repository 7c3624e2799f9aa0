//! The bytes of resident blocks, and the counts of what they saved.
//!
//! A cache takes its whole capacity from the memory budget when it is created. The memory left for reads and appends
//! therefore does not depend on the resident blocks. A block that is evicted while a read holds it keeps its pages
//! until the read ends. Meanwhile other blocks are refused, so that the capacity is never exceeded.

use super::factory::policy;
use super::key::{BlockKey, WordHash};
use super::policy::{ReadPrice, ReplacementPolicy};
use super::request::{ActivatedClusters, ClusterRequest};
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
    /// The number of requested clusters, under policies that rank clusters.
    pub clusters: u64,
    /// The number of requested clusters whose blocks were all resident.
    pub resident_clusters: u64,
}

/// The layer of a handle that requests blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheReader<'a> {
    pub(crate) handle: u64,
    pub(crate) layer: u32,
    /// The token count of the layer.
    pub(crate) tokens: u64,
    /// The clusters of the selection, if it names any.
    pub(crate) clusters: Option<&'a ActivatedClusters>,
    /// True if the blocks may be needed soon, and no step waits for them yet.
    pub(crate) is_ahead: bool,
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

impl Table {
    /// Returns a block, if it is resident. Counts a use, unless the request is ahead of need.
    fn find(&mut self, request: (BlockKey, usize), is_ahead: bool) -> Option<Resident> {
        if is_ahead {
            return self.resident(request);
        }
        let found = self.count(request)?;
        self.policy.touch(request.0);
        Some(found)
    }

    /// Returns a block, if it is resident. Counts a hit or a miss.
    fn count(&mut self, request: (BlockKey, usize)) -> Option<Resident> {
        let found = self.resident(request);
        match &found {
            Some(block) => {
                self.counts.hits += 1;
                self.counts.saved_bytes += block.len as u64;
            }
            None => self.counts.misses += 1,
        }
        found
    }

    fn resident(&self, (key, block_bytes): (BlockKey, usize)) -> Option<Resident> {
        self.blocks.get(&key).filter(|block| block.len == block_bytes).cloned()
    }

    /// Tells the policy what a request that names clusters uses.
    fn activate(
        &mut self,
        clusters: &ActivatedClusters,
        requested: &[Option<(BlockKey, usize)>],
        found: &[Option<Resident>],
    ) {
        let charged = |request: &Option<(BlockKey, usize)>| request.map(|(key, bytes)| (key, charge(bytes)));
        let blocks: Vec<Option<(BlockKey, usize)>> = requested.iter().map(charged).collect();
        let is_resident = |index: u32| requested[index as usize].is_none() || found[index as usize].is_some();
        for cluster in clusters.iter() {
            self.counts.clusters += 1;
            let all = cluster.blocks.iter().all(|block| is_resident(block.index));
            self.counts.resident_clusters += u64::from(all);
        }
        self.policy.activate(&ClusterRequest { blocks: &blocks, clusters });
    }
}

/// A cache of resident blocks with one policy and a fixed share of the memory budget.
pub(crate) struct BlockCache {
    arena: Arena,
    table: Mutex<Table>,
    follows_clusters: bool,
    _account: Reservation,
}

impl BlockCache {
    /// Creates a cache. `account` is the reservation of its capacity.
    ///
    /// # Errors
    /// [`ErrorKind::Configuration`]: the capacity is smaller than one slab of buffers.
    /// [`ErrorKind::InvalidArgument`]: a parameter of the policy is out of its range.
    pub(crate) fn new(options: &CacheOptions, account: Reservation) -> Result<Arc<Self>> {
        options.policy.check()?;
        let bytes = account.bytes();
        let slabs = bytes / SLAB_BYTES;
        if slabs == 0 {
            let text = format!("cache: a capacity of {bytes} bytes is below the minimum of {SLAB_BYTES}; raise it");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let arena = Arena::new(MemoryBudget::new(slabs * SLAB_BYTES), slabs * SLAB_BYTES);
        let policy = policy(options.policy, bytes);
        let follows_clusters = policy.follows_clusters();
        let table = Table {
            policy,
            blocks: HashMap::default(),
            requesters: HashMap::default(),
            counts: CacheStatus { capacity_bytes: bytes as u64, ..CacheStatus::default() },
        };
        Ok(Arc::new(Self { arena, table: Mutex::new(table), follows_clusters, _account: account }))
    }

    /// Returns whether selections should name the clusters of their blocks.
    pub(crate) fn follows_clusters(&self) -> bool {
        self.follows_clusters
    }

    /// Returns the resident ones of the blocks that a layer of a handle requests, each given with its size in bytes.
    /// `price` is that of a read at the moment.
    ///
    /// A new decode step begins when the same layer requests blocks with another token count, or when the requesters
    /// exceed [`REQUESTERS_MAX`]. A request ahead of need is not counted and begins no step.
    pub(crate) fn find(
        &self,
        reader: CacheReader<'_>,
        requested: impl Iterator<Item = Option<(BlockKey, usize)>>,
        price: ReadPrice,
    ) -> Vec<Option<Resident>> {
        let mut table = lock(&self.table);
        let of_layer = (reader.handle, reader.layer);
        if !reader.is_ahead
            && (table.requesters.insert(of_layer, reader.tokens).is_some_and(|before| before != reader.tokens)
                || table.requesters.len() > REQUESTERS_MAX)
        {
            table.requesters.clear();
            table.requesters.insert(of_layer, reader.tokens);
            table.policy.end_step();
            table.policy.set_read_price(price);
        }
        let clusters = reader.clusters.filter(|_| !reader.is_ahead && self.follows_clusters);
        let Some(clusters) = clusters else {
            return requested.map(|request| table.find(request?, reader.is_ahead)).collect();
        };
        let requested: Vec<Option<(BlockKey, usize)>> = requested.collect();
        let found: Vec<Option<Resident>> = requested.iter().map(|request| table.count((*request)?)).collect();
        table.activate(clusters, &requested, &found);
        found
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
            let reader = CacheReader { handle: sequence, layer: 0, tokens: 100, clusters: None, is_ahead: false };
            cache.find(reader, std::iter::empty(), ReadPrice::ordinary());
            assert!(lock(&cache.table).requesters.len() <= REQUESTERS_MAX);
        }
    }
}
