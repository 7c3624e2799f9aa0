//! The engine: one sequence of one layer, whose groups are the blocks.

use super::super::peer::{BatchReader, Peer, PeerSetup};
use super::super::source::BlockSource;
use crate::support::model::{HEAD_DIM, KV_HEADS, TOKEN_LAYER_BYTES, layout};
use anyhow::Result;
use half::f16;
use half::slice::HalfBitsSliceExt;
use std::sync::Arc;
use stratakv::{
    ByteSize, CreateOptions, Durability, OpenSequence, SelectRequest, Sequence, Store, StoreOptions, TensorView,
};

const KEY: &str = "peers";

/// The engine's store.
pub(in super::super) struct Engine {
    store: Arc<Store>,
    sequence: Arc<Sequence>,
    source: Arc<BlockSource>,
    /// Tokens of a group.
    group: usize,
    keys: Vec<u16>,
    values: Vec<u16>,
}

impl Engine {
    /// Opens the store, with room in memory for the buffers of several batches.
    ///
    /// # Errors
    /// The engine refuses to open it.
    pub(in super::super) fn open(setup: &PeerSetup) -> Result<Self> {
        let batch_bytes = (setup.batch * setup.source.block_bytes()) as u64;
        let memory = ByteSize((8 * batch_bytes).max(96 << 20));
        let store = StoreOptions::default().memory_limit(memory).device(&setup.dir).open()?;
        let group = setup.source.block_bytes() / TOKEN_LAYER_BYTES as usize;
        let sequence = match store.open_sequence(KEY, OpenSequence::new()) {
            Err(e) if e.kind() == stratakv::ErrorKind::NotFound => {
                store.create_sequence(&layout(1, group as u16)?, CreateOptions::new().key(KEY))?
            }
            found => found?,
        };
        let (store, sequence) = (Arc::new(store), Arc::new(sequence));
        Ok(Self { store, sequence, source: Arc::clone(&setup.source), group, keys: Vec::new(), values: Vec::new() })
    }

    fn sequence(&mut self) -> Result<&mut Sequence> {
        Arc::get_mut(&mut self.sequence).ok_or_else(|| anyhow::anyhow!("the sequence is being read"))
    }
}

impl Peer for Engine {
    fn put(&mut self, first: u64, count: usize) -> Result<()> {
        let half = self.source.block_bytes() / 4;
        let (mut keys, mut values) = (std::mem::take(&mut self.keys), std::mem::take(&mut self.values));
        keys.resize(count * half, 0);
        values.resize(count * half, 0);
        let planes = keys.chunks_exact_mut(half).zip(values.chunks_exact_mut(half));
        for (number, (keys, values)) in (first..).zip(planes) {
            self.source.fill(number, keys, values);
        }
        let tokens = count * self.group;
        let (k, v): (&[f16], &[f16]) = (keys.reinterpret_cast(), values.reinterpret_cast());
        let k = TensorView::token_major(k, tokens, KV_HEADS, HEAD_DIM);
        let v = TensorView::token_major(v, tokens, KV_HEADS, HEAD_DIM);
        self.sequence()?.append(0, k, v)?;
        (self.keys, self.values) = (keys, values);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.sequence()?.commit(Durability::Sync)?)
    }

    fn reader(&self) -> Result<Box<dyn BatchReader>> {
        let (store, sequence) = (Arc::clone(&self.store), Arc::clone(&self.sequence));
        Ok(Box::new(EngineReader { store, sequence, source: Arc::clone(&self.source), chosen: Vec::new() }))
    }

    fn close(self: Box<Self>) -> Result<()> {
        drop(self.sequence);
        Ok(Arc::into_inner(self.store).map_or(Ok(()), Store::close)?)
    }
}

/// A caller of the engine.
struct EngineReader {
    store: Arc<Store>,
    sequence: Arc<Sequence>,
    source: Arc<BlockSource>,
    /// The numbers of a batch in rising order.
    chosen: Vec<u64>,
}

impl BatchReader for EngineReader {
    fn read(&mut self, numbers: &[u64]) -> Result<u64> {
        self.chosen.clear();
        self.chosen.extend_from_slice(numbers);
        self.chosen.sort_unstable();
        let selection = self.sequence.select(0, SelectRequest::groups(&self.chosen))?;
        let batch = self.store.read(&[&selection]).wait()?;
        let blocks = batch.get(0)?;
        let mut bytes = 0;
        for (nth, &number) in self.chosen.iter().enumerate() {
            let (keys, values) = blocks.group(nth)?;
            bytes += self.source.consume(number, &[&keys, &values])?;
        }
        Ok(bytes)
    }
}
