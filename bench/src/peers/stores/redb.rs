//! redb: a copy-on-write B-tree in one file.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::super::workers::{BlockRead, Workers};
use super::{CACHE_BYTES, blocks};
use anyhow::{Context, Result};
use redb::{Database, Durability, ReadableDatabase, TableDefinition};
use std::sync::Arc;

const TABLE: TableDefinition<u64, &[u8]> = TableDefinition::new("blocks");

/// The database.
pub(in super::super) struct Redb {
    database: Arc<Database>,
    source: Arc<BlockSource>,
    threads: usize,
    buffer: Vec<u16>,
}

impl Redb {
    /// Opens the database with a small cache.
    ///
    /// # Errors
    /// redb refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let path = setup.dir.join("blocks.redb");
        let database = Arc::new(Database::builder().set_cache_size(CACHE_BYTES).create(path)?);
        Ok(Self { database, source: Arc::clone(&setup.source), threads: setup.threads, buffer: Vec::new() })
    }
}

impl Peer for Redb {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::None)?;
        let mut table = transaction.open_table(TABLE)?;
        for (number, block) in blocks(&self.source, &mut self.buffer, first, count) {
            table.insert(number, block)?;
        }
        drop(table);
        Ok(transaction.commit()?)
    }

    fn finish(&mut self) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        Ok(transaction.commit()?)
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let read = || -> Result<BlockRead> {
            let (table, source) = (self.database.begin_read()?.open_table(TABLE)?, Arc::clone(&self.source));
            Ok(Box::new(move |number| {
                let block = table.get(number)?.with_context(|| format!("block {number} is missing"))?;
                source.consume(number, &[block.value()])
            }))
        };
        Ok(Box::new(Workers::new((0..self.threads).map(|_| read()).collect::<Result<_>>()?)?))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
