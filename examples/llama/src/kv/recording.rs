//! A cache in memory with full attention that records the queries it sees.

use anyhow::Result;

use super::cache::{Committed, KvCache, KvStats};
use super::geometry::KvGeometry;
use super::memory::MemoryKv;
use super::recorded::RecordedQueries;

/// A cache in memory that records the newest queries of each layer, of prefill and of decode steps.
#[derive(Clone, Debug)]
pub struct RecordingKv {
    inner: MemoryKv,
    recorded: RecordedQueries,
}

impl RecordingKv {
    /// Makes a cache that continues `inner` and records at most `limit` queries per layer.
    #[must_use]
    pub fn new(inner: MemoryKv, limit: usize) -> Self {
        let layers = inner.geometry().layers.len();
        Self { inner, recorded: RecordedQueries::new(layers, limit) }
    }

    /// Continues with another cache, and keeps the queries that were recorded.
    pub fn continue_from(&mut self, inner: MemoryKv) {
        self.inner = inner;
    }

    /// Returns the cache and the recorded queries.
    #[must_use]
    pub fn into_parts(self) -> (MemoryKv, RecordedQueries) {
        (self.inner, self.recorded)
    }

    fn record(&mut self, layer: usize, queries: &[f32]) {
        let geometry = self.inner.geometry();
        let row = geometry.layers.get(layer).map_or(0, |shape| geometry.query_heads * shape.head_dim);
        self.recorded.add(layer, queries, row);
    }
}

impl KvCache for RecordingKv {
    fn geometry(&self) -> &KvGeometry {
        self.inner.geometry()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        self.inner.append(layer, keys, values, tokens)
    }

    fn observe(&mut self, layer: usize, queries: &[f32]) {
        self.record(layer, queries);
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        self.record(layer, queries);
        self.inner.attend(layer, queries, out)
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        self.inner.commit(new_ids, state)
    }

    fn committed(&self) -> Result<Option<Committed>> {
        self.inner.committed()
    }

    fn stats(&self) -> KvStats {
        self.inner.stats()
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        Box::new(self.inner).finish(keep)
    }
}
