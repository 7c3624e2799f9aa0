//! One file and a bare `io_uring` loop. It has neither names nor checksums: what the device and the kernel reach.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use crate::support::bare::{BareReader, Pages, open_direct};
use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use zerocopy::FromBytes;

/// The file.
pub(in super::super) struct RawFile {
    path: PathBuf,
    file: File,
    source: Arc<BlockSource>,
    buffer: Pages,
    batch: usize,
}

impl RawFile {
    /// Opens the file, which is preallocated if it is new.
    ///
    /// # Errors
    /// The file system refuses it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let path = setup.dir.join("blocks");
        let file = open_direct(&path, true)?;
        let bytes = setup.blocks * setup.source.block_bytes() as u64;
        if file.metadata()?.len() < bytes {
            let flags = rustix::fs::FallocateFlags::empty();
            rustix::fs::fallocate(&file, flags, 0, bytes).with_context(|| format!("allocate {}", path.display()))?;
        }
        let buffer = Pages::new(setup.source.block_bytes())?;
        Ok(Self { path, file, source: Arc::clone(&setup.source), buffer, batch: setup.batch })
    }
}

impl Peer for RawFile {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        let block = self.source.block_bytes();
        if self.buffer.bytes_mut().len() < count * block {
            self.buffer = Pages::new(count * block)?;
        }
        let bytes = &mut self.buffer.bytes_mut()[..count * block];
        let elements = <[u16]>::mut_from_bytes(bytes).map_err(|e| anyhow::anyhow!("{e}"))?;
        self.source.fill_all(first, elements);
        let bytes = &self.buffer.bytes_mut()[..count * block];
        self.file.write_all_at(bytes, first * block as u64).with_context(|| format!("write {}", self.path.display()))
    }

    fn finish(&mut self) -> Result<()> {
        self.file.sync_all().with_context(|| format!("sync {}", self.path.display()))
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let reader = BareReader::new(&self.path, self.source.block_bytes(), self.batch)?;
        Ok(Box::new(RawReader { reader, source: Arc::clone(&self.source) }))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// A ring of its own for each caller.
struct RawReader {
    reader: BareReader,
    source: Arc<BlockSource>,
}

impl BatchReader for RawReader {
    fn read(&mut self, numbers: &[u64]) -> Result<u64> {
        self.reader.read(numbers)?;
        let blocks = self.reader.blocks().chunks_exact(self.source.block_bytes());
        blocks.zip(numbers).map(|(block, number)| self.source.consume(*number, &[block])).sum()
    }
}
