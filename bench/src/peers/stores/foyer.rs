//! foyer: a hybrid cache. It may forget a block, which then counts as an error of the run.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use super::{CACHE_BYTES, blocks};
use anyhow::{Context, Result};
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, UringIoEngineConfig,
};
use std::sync::Arc;
use tokio::runtime::{Handle, Runtime};

/// Bytes of a region of foyer's device.
const REGION_BYTES: usize = 64 << 20;

/// The cache with the runtime that it works on.
pub(in super::super) struct Foyer {
    runtime: Runtime,
    cache: HybridCache<u64, Vec<u8>>,
    source: Arc<BlockSource>,
    buffer: Vec<u16>,
}

impl Foyer {
    /// Opens the cache with a small share of memory and a device that holds all blocks.
    ///
    /// # Errors
    /// foyer refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let bytes = setup.blocks as usize * (setup.source.block_bytes() + 4096);
        let capacity = (bytes + bytes / 4).next_multiple_of(REGION_BYTES) + 8 * REGION_BYTES;
        let device = FsDeviceBuilder::new(&setup.dir).with_capacity(capacity).with_direct(true).build()?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(REGION_BYTES)
            .with_buffer_pool_size(2 * REGION_BYTES)
            .with_submit_queue_size_threshold(2 * REGION_BYTES);
        let cache = HybridCacheBuilder::new().with_policy(HybridCachePolicy::WriteOnInsertion).memory(CACHE_BYTES);
        let cache = cache.with_weighter(|_, block: &Vec<u8>| block.len()).storage();
        let io: Box<dyn IoEngineConfig> = Box::new(UringIoEngineConfig::new());
        let cache = cache.with_io_engine_config(io).with_engine_config(engine);
        let cache = runtime.block_on(cache.build())?;
        Ok(Self { runtime, cache, source: Arc::clone(&setup.source), buffer: Vec::new() })
    }
}

impl Peer for Foyer {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        for (number, block) in blocks(&self.source, &mut self.buffer, first, count) {
            self.cache.insert(number, block.to_vec());
        }
        // Its queue drops entries when it is full, so the writer waits for the queue.
        self.runtime.block_on(self.cache.storage().wait());
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.runtime.block_on(self.cache.storage().wait());
        Ok(())
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let (cache, source) = (self.cache.clone(), Arc::clone(&self.source));
        Ok(Box::new(FoyerReader { handle: self.runtime.handle().clone(), cache, source }))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.runtime.block_on(self.cache.close())?)
    }
}

/// A caller of the cache: one task per block.
struct FoyerReader {
    handle: Handle,
    cache: HybridCache<u64, Vec<u8>>,
    source: Arc<BlockSource>,
}

impl BatchReader for FoyerReader {
    fn read(&mut self, numbers: &[u64]) -> Result<u64> {
        let start = |&number: &u64| {
            let (cache, source) = (self.cache.clone(), Arc::clone(&self.source));
            self.handle.spawn(async move {
                let entry = cache.get(&number).await?.with_context(|| format!("block {number} is missing"))?;
                source.consume(number, &[entry.value()])
            })
        };
        let tasks: Vec<_> = numbers.iter().map(start).collect();
        self.handle.block_on(async {
            let mut bytes = 0;
            for task in tasks {
                bytes += task.await.context("a task of a read ended early")??;
            }
            Ok(bytes)
        })
    }
}
