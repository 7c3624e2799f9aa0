//! Readers: a sequence as it was at one moment, beside its writer.

use super::Sequence;
use crate::catalog::RecordBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{KvLayout, Placed};
use crate::metrics::{Category, Reservation};
use crate::plan::{SelectOptions, Selection};
use crate::retrieval::MinMax;
use crate::retrieval::Selector;
use crate::retrieval::SelectorId;
use std::sync::Arc;
use stratakv_format::SequenceId;

/// A sequence as it was when [`Sequence::reader`] made this: the same tokens, token ids and state for as long as it lives,
/// whatever the writer appends, commits, cuts or deletes. Many may exist per sequence, on any threads. What it sees is not
/// given back before it is dropped: segments that hold it are not used again, and groups that were in memory stay there.
///
/// Views it selects are read with [`Store::read`](crate::Store::read) and attended to like those of the sequence.
///
/// ```
/// use stratakv::{ByteSize, Durability, KvLayout, CreateOptions, Store, TensorView};
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
///         let view = reader.select_all(0).expect("a view");
///         let batch = store.read(&[&view]).and_then(|ticket| ticket.wait()).expect("a read");
///         assert_eq!((view.length(), batch.get(0).is_ok()), (20, true));
///     });
/// });
/// # Ok(()) }
/// ```
pub struct SequenceReader {
    /// A sequence without a claim: it has nothing to write and never will.
    inner: Sequence,
    /// The tables of frames that the writer accounts for, until both are gone.
    _frames: Reservation,
}

impl Sequence {
    /// A reader of the sequence as it is now: its first [`Sequence::len`] tokens, committed or not. It costs the tables of
    /// the sequence, not its data; groups that are in memory when it is made stay there as long as it lives.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: no memory for the tables. Where layers differ in length also those of
    /// [`Sequence::truncate`].
    pub fn reader(&mut self) -> Result<SequenceReader> {
        let tokens = self.len();
        let mut blocks = Vec::with_capacity(self.layers.len());
        for at in 0..self.layers.len() {
            let longer = self.layers[at].as_ref().is_some_and(|layer| layer.tokens > tokens);
            blocks.push(if longer { self.cut_block(at, tokens)? } else { None });
        }
        let layers = self.layers.iter().flatten();
        let tail_bytes: usize = layers.clone().map(|layer| layer.block.block_bytes).sum();
        let tables: usize =
            layers.map(|layer| layer.table.memory_bytes() + layer.summary.as_ref().map_or(0, MinMax::own_bytes)).sum();
        let index_bytes =
            size_of::<Self>() + tables + self.token_ids.len() * 4 + self.state.as_ref().map_or(0, Vec::len);
        let reserve = |bytes, category| {
            let text = || format!("a reader of this sequence takes {bytes} bytes, more than memory_limit has left");
            self.store.devices.reserve(bytes, category).ok_or_else(|| Error::new(ErrorKind::MemoryLimit, text()))
        };
        let (tails, index) = (reserve(tail_bytes, Category::Tails)?, reserve(index_bytes, Category::Index)?);
        let mut layers = Vec::with_capacity(self.layers.len());
        for (layer, block) in self.layers.iter_mut().zip(&blocks) {
            let mut snapshot = layer.as_mut().map(super::Layer::snapshot).transpose()?;
            if let Some(longer) = snapshot.as_mut().filter(|layer| layer.tokens > tokens) {
                longer.cut(tokens, block.as_deref());
            }
            layers.push(snapshot);
        }
        let inner = Self {
            store: Arc::clone(&self.store),
            who: self.who.clone(),
            handle: super::next_handle(),
            layers,
            token_ids: self.token_ids.clone(),
            ids_written: 0,
            ids_durable: 0,
            ids_grouped: 0,
            state: self.state.clone(),
            state_dirty: false,
            state_frame: 0,
            frames: Vec::new(),
            held: Vec::new(),
            records: RecordBuffer::default(),
            stored: false,
            committed: self.committed,
            cut: false,
            released: 0,
            settled: self.settled,
            gathered: self.store.gathering()?,
            owed: None,
            frame_limit: self.frame_limit,
            frame_target: self.frame_target,
            placed: Placed::default(),
            methods: super::selectors::Methods::default(),
            method_bytes: reserve(0, Category::Summaries)?,
            index,
            frames_memory: 0,
            _tails: tails,
            streams: self.streams.as_ref().map(|_| Arc::default()),
            cache: self.cache.clone(),
            claim: None,
        };
        Ok(SequenceReader { inner, _frames: self.index.share() })
    }
}

impl SequenceReader {
    /// Id of the sequence.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.inner.id()
    }

    /// Its key, empty when it has none.
    #[must_use]
    pub fn key(&self) -> &str {
        self.inner.key()
    }

    /// Its layout.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        self.inner.layout()
    }

    /// Tokens this reader sees, in every layer with keys and values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.len()
    }

    /// Whether it sees no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Tokens that were committed when it was made.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.inner.committed()
    }

    /// The caller's state as it was.
    #[must_use]
    pub fn state(&self) -> Option<&[u8]> {
        self.inner.state()
    }

    /// Token ids as they were.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        self.inner.token_ids()
    }

    /// As [`Sequence::select`].
    ///
    /// # Errors
    /// As there.
    pub fn select(&self, layer: usize, query: &[f32], options: impl Into<SelectOptions>) -> Result<Selection> {
        self.inner.select(layer, query, options)
    }

    /// As [`Sequence::attach`]: summaries are taken from where they are stored with the groups, or built from the keys that this
    /// reader sees, and are its own. Those of the sequence it does not see.
    ///
    /// # Errors
    /// As there.
    pub fn attach(&mut self, selector: Arc<dyn Selector>) -> Result<SelectorId> {
        self.inner.attach(selector)
    }

    /// As [`Sequence::detach`].
    ///
    /// # Errors
    /// As there.
    pub fn detach(&mut self, selector: SelectorId) -> Result<()> {
        self.inner.detach(selector)
    }

    /// As [`Sequence::selector_bytes`].
    ///
    /// # Errors
    /// As there.
    pub fn selector_bytes(&self, selector: SelectorId) -> Result<u64> {
        self.inner.selector_bytes(selector)
    }

    /// As [`Sequence::select_with`], by a selector that was attached to this reader.
    ///
    /// # Errors
    /// As there.
    pub fn select_with(
        &self,
        selector: SelectorId,
        layer: usize,
        query: &[f32],
        options: impl Into<SelectOptions>,
    ) -> Result<Selection> {
        self.inner.select_with(selector, layer, query, options)
    }

    /// As [`Sequence::select_all`].
    ///
    /// # Errors
    /// As there.
    pub fn select_all(&self, layer: usize) -> Result<Selection> {
        self.inner.select_all(layer)
    }

    /// As [`Sequence::select_groups`].
    ///
    /// # Errors
    /// As there.
    pub fn select_groups(&self, layer: usize, groups: &[u64]) -> Result<Selection> {
        self.inner.select_groups(layer, groups)
    }

    /// The sequence it sees, for the parts of the engine that read one.
    pub(crate) fn sequence(&self) -> &Sequence {
        &self.inner
    }
}

impl std::fmt::Debug for SequenceReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SequenceReader").field("id", &self.id()).field("len", &self.len()).finish_non_exhaustive()
    }
}
