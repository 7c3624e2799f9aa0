//! The trait between the model and its KV cache.
//!
//! [`Model`](crate::model::Model) calls a cache in this order:
//!
//! 1. Prefill appends a prompt, one layer after the other, in chunks of tokens. [`KvCache::observe`] shows the prompt's
//!    queries if a cache wants them ([`KvCache::wants_queries`]).
//! 2. A decode step visits every layer: [`KvCache::append`] of one token, [`KvCache::prepare`], [`KvCache::attend`].
//! 3. [`KvCache::commit`] makes the new tokens durable.
//! 4. [`KvCache::finish`] deletes the sequence or leaves what was committed.

use std::path::Path;

use anyhow::Result;
use stratakv::pipeline::PipelineReport;

use super::geometry::KvGeometry;
use super::recorded::RecordedQueries;

/// The costs of a cache so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Stored keys and values in bytes, without headers and padding.
    pub kv_bytes_total: u64,
    /// Bytes that decode steps read. For a store these are whole pages that its devices completed.
    pub bytes_read: u64,
    /// Decode steps: calls of [`KvCache::attend`] divided by the number of layers.
    pub steps: u64,
    /// The most bytes of memory used at once. For a store this is all of its accounted memory since it was opened,
    /// which includes buffers and tables. A cache in memory counts keys and values.
    pub resident_bytes_peak: u64,
    /// The result of prefetching, or `None` if the cache does not prefetch.
    pub pipeline: Option<PipelineReport>,
}

impl KvStats {
    /// Returns the mean of [`KvStats::bytes_read`] per decode step.
    #[must_use]
    pub fn bytes_read_per_step(&self) -> u64 {
        self.bytes_read.checked_div(self.steps).unwrap_or(0)
    }
}

/// The token ids and the caller's state of the last commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Ids of all tokens in the cache, oldest first.
    pub ids: Vec<u32>,
    /// The bytes that the caller gave to the last commit.
    pub state: Vec<u8>,
}

/// A function that predicts the queries of the same token in the next layer, `[query_heads, head_dim]`.
pub type Predict<'a> = dyn Fn() -> Result<Vec<f32>> + 'a;

/// The keys and values of one token sequence.
///
/// Tensors are `f32` and token-major. Keys (after RoPE) and values are `[tokens, kv_heads, head_dim]`. Queries and
/// outputs of one token are `[query_heads, head_dim]`. The caller rounds keys and values to the geometry's dtype
/// before [`append`](Self::append).
pub trait KvCache {
    /// Returns the geometry that the cache was made with.
    fn geometry(&self) -> &KvGeometry;

    /// Returns the number of tokens that every layer holds.
    fn len(&self) -> usize;

    /// Returns whether the cache holds no token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `tokens` tokens to one layer: a chunk of the prompt in prefill, one token in decode.
    ///
    /// # Errors
    /// Fails if a length does not fit the geometry, if a value is not finite, or if the store reports an error.
    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()>;

    /// Announces an [`attend`](Self::attend) with the same queries, so that a cache can start reading.
    ///
    /// `predict` guesses the queries of the same token in the next layer. It is `None` for the last layer. The cache
    /// may prefetch the groups that these queries select.
    ///
    /// # Errors
    /// Fails as [`attend`](Self::attend) does, and if `predict` fails.
    fn prepare(&mut self, _layer: usize, _queries: &[f32], _predict: Option<&Predict<'_>>) -> Result<()> {
        Ok(())
    }

    /// Computes attention of the layer's newest token under the cache's policy. Every attended token counts in the
    /// policy's budget.
    ///
    /// # Errors
    /// Fails if a length does not fit the geometry, if the layer is empty, or if the store reports an error.
    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()>;

    /// Returns a directory on a disk, where prefill may keep what does not fit in little memory. A cache in memory has
    /// none.
    fn spill_dir(&self) -> Option<&Path> {
        None
    }

    /// Returns whether prefill should show its queries to this cache.
    fn wants_queries(&self) -> bool {
        false
    }

    /// Receives the queries of prefill, `[tokens, query_heads, head_dim]`, if a cache wants them or the caller asked
    /// for [`LogitPositions::Queries`](crate::model::LogitPositions).
    fn observe(&mut self, _layer: usize, _queries: &[f32]) {}

    /// Receives the queries that a policy makes its clusters of, instead of the newest ones that the cache receives by
    /// itself. Clusters that are built already stay as they are.
    fn set_profile(&mut self, _queries: RecordedQueries) {}

    /// Makes the appended tokens durable, with the ids of the tokens since the last commit and the caller's state.
    ///
    /// # Errors
    /// Fails if the store reports an error. The result of the commit is then unknown until the sequence is opened
    /// again.
    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()>;

    /// Returns the ids and the state of the last commit, or `None` before the first commit.
    ///
    /// # Errors
    /// Fails if the store reports an error.
    fn committed(&self) -> Result<Option<Committed>>;

    /// Returns the costs since the cache was made.
    fn stats(&self) -> KvStats;

    /// Ends the use of the cache. If `keep` is false, a stored sequence is deleted. Otherwise its last commit stays.
    ///
    /// # Errors
    /// Fails if the store reports an error.
    fn finish(self: Box<Self>, keep: bool) -> Result<()>;
}

impl<C: KvCache + ?Sized> KvCache for Box<C> {
    fn geometry(&self) -> &KvGeometry {
        (**self).geometry()
    }

    fn len(&self) -> usize {
        (**self).len()
    }

    fn append(&mut self, layer: usize, keys: &[f32], values: &[f32], tokens: usize) -> Result<()> {
        (**self).append(layer, keys, values, tokens)
    }

    fn prepare(&mut self, layer: usize, queries: &[f32], predict: Option<&Predict<'_>>) -> Result<()> {
        (**self).prepare(layer, queries, predict)
    }

    fn attend(&mut self, layer: usize, queries: &[f32], out: &mut [f32]) -> Result<()> {
        (**self).attend(layer, queries, out)
    }

    fn spill_dir(&self) -> Option<&Path> {
        (**self).spill_dir()
    }

    fn wants_queries(&self) -> bool {
        (**self).wants_queries()
    }

    fn observe(&mut self, layer: usize, queries: &[f32]) {
        (**self).observe(layer, queries);
    }

    fn set_profile(&mut self, queries: RecordedQueries) {
        (**self).set_profile(queries);
    }

    fn commit(&mut self, new_ids: &[u32], state: &[u8]) -> Result<()> {
        (**self).commit(new_ids, state)
    }

    fn committed(&self) -> Result<Option<Committed>> {
        (**self).committed()
    }

    fn stats(&self) -> KvStats {
        (**self).stats()
    }

    fn finish(self: Box<Self>, keep: bool) -> Result<()> {
        // The path names the inner implementation: a method call could resolve to this one again.
        <C as KvCache>::finish(*self, keep)
    }
}
