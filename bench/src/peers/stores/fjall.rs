//! fjall: a log-structured merge tree with separated values.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::super::workers::{BlockRead, Workers};
use super::{CACHE_BYTES, blocks, key};
use anyhow::{Context, Result};
use fjall::{CompressionType, Database, Keyspace, KeyspaceCreateOptions, KvSeparationOptions, PersistMode};
use std::sync::Arc;

/// The database.
pub(in super::super) struct Fjall {
    database: Database,
    blocks: Keyspace,
    source: Arc<BlockSource>,
    threads: usize,
    buffer: Vec<u16>,
}

impl Fjall {
    /// Opens the database with a small cache and without compression.
    ///
    /// # Errors
    /// fjall refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let database = Database::builder(&setup.dir).cache_size(CACHE_BYTES as u64).manual_journal_persist(true);
        let database = database.journal_compression(CompressionType::None).open()?;
        let separated = KvSeparationOptions::default().compression(CompressionType::None);
        let options = || KeyspaceCreateOptions::default().with_kv_separation(Some(separated.clone()));
        let blocks = database.keyspace("blocks", options)?;
        let source = Arc::clone(&setup.source);
        Ok(Self { database, blocks, source, threads: setup.threads, buffer: Vec::new() })
    }
}

impl Peer for Fjall {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        for (number, block) in blocks(&self.source, &mut self.buffer, first, count) {
            self.blocks.insert(key(number), block)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.blocks.rotate_memtable_and_wait()?;
        Ok(self.database.persist(PersistMode::SyncAll)?)
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let read = || -> BlockRead {
            let (blocks, source) = (self.blocks.clone(), Arc::clone(&self.source));
            Box::new(move |number| {
                let block = blocks.get(key(number))?.with_context(|| format!("block {number} is missing"))?;
                source.consume(number, &[&block])
            })
        };
        Ok(Box::new(Workers::new((0..self.threads).map(|_| read()).collect())?))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
