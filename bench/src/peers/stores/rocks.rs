//! RocksDB: a log-structured merge tree, with values in blob files or in its sorted tables.
//!
//! The write-ahead log is off, because a cache can do without it: a flush makes everything durable. Reads and flushes
//! avoid the page cache. Checksums are verified, which is its default.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::super::workers::{BlockRead, Workers};
use super::{CACHE_BYTES, blocks, key};
use anyhow::{Context, Result};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, Options, ReadOptions, WaitForCompactOptions, WriteOptions,
};
use std::sync::Arc;

/// The column family that every database has.
const FAMILY: &str = "default";

/// The database.
pub(in super::super) struct Rocks {
    database: Arc<DB>,
    source: Arc<BlockSource>,
    /// The threads of a caller, or none for MultiGet.
    threads: Option<usize>,
    buffer: Vec<u16>,
}

impl Rocks {
    /// Opens the database with values in blob files or not, to be read by many threads or by MultiGet.
    ///
    /// # Errors
    /// RocksDB refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup, in_blobs: bool, by_threads: bool) -> Result<Self> {
        let mut options = Options::default();
        options.create_if_missing(true);
        options.increase_parallelism(2);
        options.set_compression_type(DBCompressionType::None);
        options.set_use_direct_reads(true);
        options.set_use_direct_io_for_flush_and_compaction(true);
        let mut tables = BlockBasedOptions::default();
        tables.set_block_cache(&Cache::new_lru_cache(CACHE_BYTES));
        options.set_block_based_table_factory(&tables);
        if in_blobs {
            options.set_enable_blob_files(true);
            options.set_min_blob_size(4096);
            options.set_blob_compression_type(DBCompressionType::None);
        }
        // MultiGet takes a handle of the column family, which only this call keeps.
        let database = DB::open_cf_with_opts(&options, &setup.dir, [(FAMILY, options.clone())])?;
        let database = Arc::new(database);
        let threads = by_threads.then_some(setup.threads);
        Ok(Self { database, source: Arc::clone(&setup.source), threads, buffer: Vec::new() })
    }
}

impl Peer for Rocks {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        for (number, block) in blocks(&self.source, &mut self.buffer, first, count) {
            self.database.put_opt(key(number), block, &options)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.database.flush()?;
        Ok(self.database.wait_for_compact(&WaitForCompactOptions::default())?)
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let Some(threads) = self.threads else {
            return Ok(Box::new(MultiGet { database: Arc::clone(&self.database), source: Arc::clone(&self.source) }));
        };
        let read = || -> BlockRead {
            let (database, source) = (Arc::clone(&self.database), Arc::clone(&self.source));
            Box::new(move |number| {
                let block = database.get_pinned(key(number))?.with_context(|| format!("block {number} is missing"))?;
                source.consume(number, &[&block])
            })
        };
        Ok(Box::new(Workers::new((0..threads).map(|_| read()).collect())?))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// A caller that asks for a batch at once.
struct MultiGet {
    database: Arc<DB>,
    source: Arc<BlockSource>,
}

impl BatchReader for MultiGet {
    fn read(&mut self, numbers: &[u64]) -> Result<u64> {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable();
        let keys: Vec<[u8; 8]> = sorted.iter().map(|number| key(*number)).collect();
        let mut options = ReadOptions::default();
        options.set_async_io(true);
        let family = self.database.cf_handle(FAMILY).context("RocksDB has no default column family")?;
        let found = self.database.batched_multi_get_cf_opt(family, &keys, true, &options);
        let mut bytes = 0;
        for (&number, block) in sorted.iter().zip(found) {
            let block = block?.with_context(|| format!("block {number} is missing"))?;
            bytes += self.source.consume(number, &[&block])?;
        }
        Ok(bytes)
    }
}
