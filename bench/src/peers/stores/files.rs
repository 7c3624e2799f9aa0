//! A file per block, read by many threads: what a runtime without a storage engine does.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::super::workers::{BlockRead, Workers};
use crate::support::bare::{Pages, open_direct};
use anyhow::{Context, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Files of one folder.
const FOLDER_FILES: u64 = 1024;

/// The files.
pub(in super::super) struct Files {
    dir: PathBuf,
    source: Arc<BlockSource>,
    buffer: Pages,
    threads: usize,
    /// True if reads avoid the page cache. Writes always do.
    direct: bool,
}

impl Files {
    /// Opens the folder of all files.
    ///
    /// # Errors
    /// There is no memory for a block.
    pub(in super::super) fn open(setup: &PeerSetup, direct: bool) -> Result<Self> {
        let buffer = Pages::new(setup.source.block_bytes())?;
        let (dir, source) = (setup.dir.clone(), Arc::clone(&setup.source));
        Ok(Self { dir, source, buffer, threads: setup.threads, direct })
    }
}

/// Returns the file of a block.
fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join((number / FOLDER_FILES).to_string()).join(number.to_string())
}

impl Peer for Files {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        for number in first..first + count as u64 {
            let path = path(&self.dir, number);
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
            }
            let bytes = &mut self.buffer.bytes_mut()[..self.source.block_bytes()];
            let elements = <[u16]>::mut_from_bytes(bytes).map_err(|e| anyhow::anyhow!("{e}"))?;
            self.source.fill(number, elements, &mut []);
            let bytes = &self.buffer.bytes_mut()[..self.source.block_bytes()];
            open_direct(&path, true)?.write_all_at(bytes, 0).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let folder = File::open(&self.dir)?;
        rustix::fs::syncfs(&folder).with_context(|| format!("syncfs of {}", self.dir.display()))
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let reads = (0..self.threads).map(|_| self.block_read()).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(Workers::new(reads)?))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Files {
    /// Returns the reads of one thread: open, read, close.
    fn block_read(&self) -> Result<BlockRead> {
        let (dir, source, direct) = (self.dir.clone(), Arc::clone(&self.source), self.direct);
        let bytes = source.block_bytes();
        let mut buffer = Pages::new(bytes)?;
        Ok(Box::new(move |number| {
            let path = path(&dir, number);
            let context = || format!("read {}", path.display());
            let file = if direct { open_direct(&path, false)? } else { File::open(&path).with_context(context)? };
            let block = &mut buffer.bytes_mut()[..bytes];
            file.read_exact_at(block, 0).with_context(context)?;
            source.consume(number, &[block])
        }))
    }
}
