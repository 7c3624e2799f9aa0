//! LMDB: a copy-on-write B-tree in a memory map.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::super::workers::{BlockRead, Workers};
use super::blocks;
use anyhow::{Context, Result};
use heed::byteorder::BigEndian;
use heed::types::{Bytes, U64};
use heed::{Database, Env, EnvFlags, EnvOpenOptions};
use std::sync::Arc;

/// The database: blocks by number.
type Blocks = Database<U64<BigEndian>, Bytes>;

/// The environment.
pub(in super::super) struct Lmdb {
    environment: Env,
    database: Blocks,
    source: Arc<BlockSource>,
    threads: usize,
    buffer: Vec<u16>,
}

impl Lmdb {
    /// Opens the environment without read-ahead, because reads are random.
    ///
    /// # Errors
    /// LMDB refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let bytes = setup.blocks as usize * (setup.source.block_bytes() + 4096);
        let mut options = EnvOpenOptions::new();
        options.map_size((bytes + bytes / 4 + (64 << 20)).next_multiple_of(1 << 20));
        options.max_readers(16 + 8 * setup.threads as u32);
        // SAFETY: this process alone writes the file, in a directory of its own. Commits are not synced before
        // `force_sync`, so a power failure may lose the file, which then is not read again.
        #[allow(unsafe_code)]
        let environment = unsafe {
            options.flags(EnvFlags::NO_READ_AHEAD | EnvFlags::NO_SYNC | EnvFlags::NO_META_SYNC);
            options.open(&setup.dir)
        };
        let environment = environment.with_context(|| format!("open {}", setup.dir.display()))?;
        let mut transaction = environment.write_txn()?;
        let database = environment.create_database(&mut transaction, None)?;
        transaction.commit()?;
        let source = Arc::clone(&setup.source);
        Ok(Self { environment, database, source, threads: setup.threads, buffer: Vec::new() })
    }
}

impl Peer for Lmdb {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        let mut transaction = self.environment.write_txn()?;
        for (number, block) in blocks(&self.source, &mut self.buffer, first, count) {
            self.database.put(&mut transaction, &number, block)?;
        }
        Ok(transaction.commit()?)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.environment.force_sync()?)
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let read = || -> BlockRead {
            let (environment, database, source) = (self.environment.clone(), self.database, Arc::clone(&self.source));
            Box::new(move |number| {
                let transaction = environment.read_txn()?;
                let block = database.get(&transaction, &number)?;
                source.consume(number, &[block.with_context(|| format!("block {number} is missing"))?])
            })
        };
        Ok(Box::new(Workers::new((0..self.threads).map(|_| read()).collect())?))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
