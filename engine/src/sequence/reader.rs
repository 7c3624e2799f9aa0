//! Readers: snapshots of a sequence, beside its writer.

use super::handle::{Sequence, next_handle};
use super::layer_set::reserve;
use super::selector_set::SelectorSet;
use super::streams::SummaryStreams;
use crate::error::Result;
use crate::layout::KvLayout;
use crate::metrics::{Category, Reservation};
use crate::plan::{SelectRequest, Selection};
use crate::retrieval::MinMax;
use crate::retrieval::Selector;
use crate::retrieval::SelectorId;
use std::sync::Arc;
use stratakv_format::SequenceId;

/// A snapshot of a sequence, made by [`Sequence::reader`].
///
/// It has the same tokens, token ids and state for as long as it lives, whatever the writer appends, commits, cuts or
/// deletes. A sequence may have many readers, on any threads. Until a reader is dropped, its segments are not used
/// again and its groups in memory stay there.
///
/// Its selections are read with [`Store::read`](crate::Store::read) and attended to like selections of the sequence.
///
/// ```
/// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, SelectRequest, Store, TensorView};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
/// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
/// let mut sequence = store.create_sequence(&layout, CreateOptions::new())?;
/// let tokens = vec![0.5_f32; 20 * 8];
/// let tensor = TensorView::token_major(&tokens, 20, 1, 8);
/// sequence.append(0, tensor, tensor)?;
/// sequence.commit(Durability::Sync)?;
///
/// let reader = sequence.reader()?;
/// sequence.append(0, tensor, tensor)?;
/// sequence.truncate(3)?;
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         let selection = reader.select(0, SelectRequest::all()).expect("a selection");
///         let batch = store.read(&[&selection]).wait().expect("a read");
///         assert_eq!((selection.length(), batch.get(0).is_ok()), (20, true));
///     });
/// });
/// # Ok(()) }
/// ```
pub struct SequenceReader {
    /// A sequence without a lock: it never writes.
    inner: Sequence,
    /// The tables of frames. The writer and this reader share their account.
    _frames: Reservation,
}

impl Sequence {
    /// Returns a reader of the first [`Sequence::len`] tokens, committed or not. It takes memory for the tables of the
    /// sequence, not for its data. Groups that are in memory now stay there as long as the reader lives.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`](crate::ErrorKind::MemoryLimit): no memory for the tables. Errors of
    /// [`Sequence::truncate`], if layers differ in length.
    pub fn reader(&mut self) -> Result<SequenceReader> {
        let tokens = self.len();
        let mut blocks = Vec::with_capacity(self.layers.slots());
        for at in 0..self.layers.slots() {
            let longer = self.layers.get(at).is_some_and(|layer| layer.tokens() > tokens);
            blocks.push(if longer { self.cut_block(at, tokens)? } else { None });
        }
        let tail_bytes: usize = self.layers.iter().map(|layer| layer.block().block_bytes).sum();
        let summary_bytes: usize =
            self.layers.iter().filter_map(|layer| layer.summaries().min_max()).map(MinMax::own_bytes).sum();
        let index_bytes = size_of::<Self>()
            + self.layers.table_bytes()
            + summary_bytes
            + self.token_ids.len() * size_of::<u32>()
            + self.caller_state().map_or(0, <[u8]>::len);
        let devices = &self.store.devices;
        let tails = reserve(devices, tail_bytes, Category::Tails)?;
        let index = reserve(devices, index_bytes, Category::Index)?;
        let inner = Self {
            layers: self.layers.snapshot(tails, tokens, &blocks)?,
            store: Arc::clone(&self.store),
            identity: self.identity.clone(),
            handle: next_handle(),
            token_ids: self.token_ids.snapshot(),
            caller_state: self.caller_state.snapshot(),
            frames: self.frames.snapshot(self.store.gathering()?, self.shared_derived()),
            selectors: SelectorSet::new(reserve(&self.store.devices, 0, Category::Summaries)?),
            index,
            streams: SummaryStreams::new(self.summary_residency()),
            cache: self.cache.clone(),
            commits: self.commits.snapshot(),
        };
        Ok(SequenceReader { inner, _frames: self.index.share() })
    }
}

impl SequenceReader {
    /// Returns the id of the sequence.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.inner.id()
    }

    /// Returns the key; empty if the sequence has none.
    #[must_use]
    pub fn key(&self) -> &str {
        self.inner.key()
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        self.inner.layout()
    }

    /// Returns the number of tokens that this reader sees, in every layer with keys and values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.len()
    }

    /// Returns whether this reader sees no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Returns the tokens that were committed when this reader was made.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.inner.committed()
    }

    /// Returns the caller's state when this reader was made.
    #[must_use]
    pub fn caller_state(&self) -> Option<&[u8]> {
        self.inner.caller_state()
    }

    /// Returns the token ids when this reader was made.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        self.inner.token_ids()
    }

    /// Selects what a step attends to in `layer`, as [`Sequence::select`]. A selector of the request was attached to
    /// this reader.
    ///
    /// # Errors
    /// As [`Sequence::select`].
    pub fn select(&self, layer: usize, request: SelectRequest<'_>) -> Result<Selection> {
        self.inner.select(layer, request)
    }

    /// Attaches a selector to this reader, as [`Sequence::attach`]. The reader has its own summaries, from stored
    /// records or from the keys that it sees. It does not see selectors of the sequence.
    ///
    /// # Errors
    /// As [`Sequence::attach`].
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.inner.attach(selector)
    }

    /// Detaches a selector, as [`Sequence::detach`].
    ///
    /// # Errors
    /// As [`Sequence::detach`].
    pub fn detach(&mut self, selector: SelectorId) -> Result<()> {
        self.inner.detach(selector)
    }

    /// Builds the clusters of one layer from recorded queries, as [`Sequence::profile`]. They are those of this reader.
    ///
    /// # Errors
    /// As [`Sequence::profile`].
    pub fn profile(
        &mut self,
        selector: SelectorId,
        layer: usize,
        queries: &[&[f32]],
        scale: Option<f32>,
    ) -> Result<()> {
        self.inner.profile(selector, layer, queries, scale)
    }

    /// Splits clusters while the device is idle, as [`Sequence::split_clusters`]. The reader has clusters of its own.
    ///
    /// # Errors
    /// As [`Sequence::split_clusters`].
    pub fn split_clusters(&mut self, selector: SelectorId, limit: usize) -> Result<usize> {
        self.inner.split_clusters(selector, limit)
    }

    /// Returns the bytes of a selector's summaries, as [`Sequence::selector_bytes`].
    ///
    /// # Errors
    /// As [`Sequence::selector_bytes`].
    pub fn selector_bytes(&self, selector: SelectorId) -> Result<u64> {
        self.inner.selector_bytes(selector)
    }

    /// Returns the sequence that this reader sees, for parts of the engine that take one.
    pub(crate) fn sequence(&self) -> &Sequence {
        &self.inner
    }
}

impl std::fmt::Debug for SequenceReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceReader").field("id", &self.id()).field("len", &self.len()).finish_non_exhaustive()
    }
}
