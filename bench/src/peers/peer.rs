//! What every peer can do: take blocks, and read batches of them.

use super::source::BlockSource;
use super::stores;
use anyhow::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// A store that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PeerName {
    /// The engine, with checksums.
    Stratakv,
    /// One file and a bare `io_uring` loop: no names, no checksums.
    Raw,
    /// A file per block, read with `O_DIRECT` by many threads: no checksums.
    FilesDirect,
    /// A file per block, read through the page cache by many threads: no checksums.
    FilesBuffered,
    /// RocksDB with values in blob files, MultiGet with asynchronous I/O.
    #[cfg(feature = "peers")]
    RocksdbBlob,
    /// RocksDB with values in blob files, read by many threads.
    #[cfg(feature = "peers")]
    RocksdbBlobThreads,
    /// RocksDB with values in sorted tables, MultiGet with asynchronous I/O.
    #[cfg(feature = "peers")]
    RocksdbSst,
    /// foyer, a hybrid cache, on its `io_uring` engine.
    #[cfg(feature = "peers")]
    Foyer,
    /// fjall with separated values, read by many threads.
    #[cfg(feature = "peers")]
    Fjall,
    /// redb, read by many threads.
    #[cfg(feature = "peers")]
    Redb,
    /// LMDB, read by many threads.
    #[cfg(feature = "peers")]
    Lmdb,
}

impl PeerName {
    /// Returns the name of the argument and of results.
    pub(super) fn text(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns the folder of its store. Peers that read the same store in other ways share one.
    pub(super) fn folder(self) -> String {
        match self {
            Self::FilesBuffered => Self::FilesDirect.text(),
            #[cfg(feature = "peers")]
            Self::RocksdbBlobThreads => Self::RocksdbBlob.text(),
            other => other.text(),
        }
    }

    /// Returns whether it writes a store of its own.
    pub(super) fn writes(self) -> bool {
        self.folder() == self.text()
    }

    /// Opens its store, which is created if it does not exist.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub(super) fn open(self, setup: &PeerSetup) -> Result<Box<dyn Peer>> {
        Ok(match self {
            Self::Stratakv => Box::new(stores::engine::Engine::open(setup)?),
            Self::Raw => Box::new(stores::raw::RawFile::open(setup)?),
            Self::FilesDirect => Box::new(stores::files::Files::open(setup, true)?),
            Self::FilesBuffered => Box::new(stores::files::Files::open(setup, false)?),
            #[cfg(feature = "peers")]
            Self::RocksdbBlob => Box::new(stores::rocks::Rocks::open(setup, true, false)?),
            #[cfg(feature = "peers")]
            Self::RocksdbBlobThreads => Box::new(stores::rocks::Rocks::open(setup, true, true)?),
            #[cfg(feature = "peers")]
            Self::RocksdbSst => Box::new(stores::rocks::Rocks::open(setup, false, false)?),
            #[cfg(feature = "peers")]
            Self::Foyer => Box::new(stores::foyer::Foyer::open(setup)?),
            #[cfg(feature = "peers")]
            Self::Fjall => Box::new(stores::fjall::Fjall::open(setup)?),
            #[cfg(feature = "peers")]
            Self::Redb => Box::new(stores::redb::Redb::open(setup)?),
            #[cfg(feature = "peers")]
            Self::Lmdb => Box::new(stores::lmdb::Lmdb::open(setup)?),
        })
    }
}

/// What a peer needs to open its store.
pub(super) struct PeerSetup {
    /// Its directory, which exists.
    pub(super) dir: PathBuf,
    pub(super) source: Arc<BlockSource>,
    /// Blocks of the whole store.
    pub(super) blocks: u64,
    /// Blocks of a batch.
    pub(super) batch: usize,
    /// Threads that read for one caller, in peers that read synchronously.
    pub(super) threads: usize,
}

/// An open store.
pub(super) trait Peer: Sync {
    /// Stores `count` blocks from `first` on.
    ///
    /// # Errors
    /// The store refuses them.
    fn put(&mut self, first: u64, count: usize) -> Result<()>;

    /// Makes everything durable, as far as the store can, and waits for work that it has put off.
    ///
    /// # Errors
    /// The store cannot be synced.
    fn finish(&mut self) -> Result<()>;

    /// Returns a reader for the calling thread. Several threads may read at the same time.
    ///
    /// # Errors
    /// The reader cannot be made.
    fn reader(&self) -> Result<Box<dyn BatchReader>>;

    /// Closes the store.
    ///
    /// # Errors
    /// The store reports what it could not write.
    fn close(self: Box<Self>) -> Result<()>;
}

/// One caller of a store. It stays on the thread that made it.
pub(super) trait BatchReader {
    /// Reads blocks and [consumes](BlockSource::consume) each. Returns their bytes.
    ///
    /// # Errors
    /// A block is missing, cannot be read, or has other bytes.
    fn read(&mut self, numbers: &[u64]) -> Result<u64>;
}
