//! A sequence: one token stream. Appends, commits, selections.

mod adapter;
mod append;
mod blocks;
mod commit;
mod fork;
mod frame_metadata;
mod group_scan;
mod layer;
mod open;
mod open_options;
mod reader;
mod reconstruct;
mod restore;
mod select;
mod selectors;
mod suffix_summary;
mod summary_streams;
#[cfg(test)]
mod tests;
mod truncate;

use crate::cache::{BlockCache, CacheStatus};
use crate::catalog::{FrameMeta, FrameSlot, RecordBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{KvLayout, Placed};
use crate::log::{CoveredEnds, SequenceIdentity, SequenceLock, StoreInner, WrittenFrame, front_limit};
use crate::metrics::{Category, Reservation};
use crate::options::{CacheOptions, Durability, SummaryResidency};
use layer::Layer;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use stratakv_format::{FrameId, SequenceId};

pub(crate) use adapter::{adapter_meta, load_adapter, write_adapter};
pub(crate) use open::load;
pub use open_options::OpenSequence;
pub use reader::SequenceReader;
pub(crate) use summary_streams::Streams;

/// A frame that is striped over devices is not smaller than this: every frame costs a header page.
const STRIPE_BYTES_MIN: usize = 1 << 20;

/// One token stream of a store: what an inference session appends to and reads from. One handle at a time; `Send`, so that it
/// can move between threads. Tokens that were not committed are gone when it is dropped.
pub struct Sequence {
    store: Arc<StoreInner>,
    who: SequenceIdentity,
    /// Of all handles of this process, readers included: what caches tell askers apart by.
    handle: u64,
    /// By layer; none for layers without KV.
    layers: Vec<Option<Layer>>,
    token_ids: Vec<u32>,
    /// Token ids that a written frame holds.
    ids_written: usize,
    /// Token ids that a committed frame holds.
    ids_durable: usize,
    /// Token ids that frames hold which stay.
    ids_grouped: usize,
    state: Option<Vec<u8>>,
    /// The state was set since the last commit.
    state_dirty: bool,
    /// Frame that holds the committed state.
    state_frame: u64,
    /// Frames whose writes are under way or ended, and that no commit names yet.
    frames: Vec<WrittenFrame>,
    /// Frames that commits named, its own or those of whom it was forked from.
    held: Vec<ReferencedFrame>,
    /// Records that go into the next commit before its own: creation, cuts.
    records: RecordBuffer,
    /// A commit has named it.
    stored: bool,
    committed: u64,
    /// Tokens were cut off since the last commit.
    cut: bool,
    /// Frames that the next commit lets go because of that.
    released: usize,
    /// Tokens of the last commit, also of whom it was forked from: what came since is new.
    settled: u64,
    /// Groups in memory between commits, of all that such groups may take.
    gathered: Reservation,
    /// What a commit at `Durability::None` covered, when none has followed: tokens and token ids.
    owed: Option<(u64, usize)>,
    /// The most bytes a frame may take.
    frame_limit: usize,
    /// Group bytes from which a frame is written.
    frame_target: usize,
    /// What of each layer lies on which device.
    placed: Placed,
    methods: selectors::Methods,
    method_bytes: Reservation,
    index: Reservation,
    /// Bytes of `frames` and `held` in memory.
    frames_memory: usize,
    /// Held for the tails.
    _tails: Reservation,
    /// Where its summaries are streamed: those that are in memory just now.
    streams: Option<Arc<Streams>>,
    /// Resident blocks: the store's cache, or its own.
    cache: Option<Arc<BlockCache>>,
    /// The last to go: what the sequence commits is queued by then.
    claim: Option<SequenceLock>,
}

/// A frame that the sequence refers to.
#[derive(Clone)]
struct ReferencedFrame {
    frame: FrameId,
    meta: FrameMeta,
    /// Where it is.
    slot: Arc<FrameSlot>,
    /// The lowest token it holds anything of; none when it holds only the caller's state.
    first_token: Option<u64>,
    /// Tokens from here on were cut off.
    token_end: u64,
    /// Ends of what it holds, when that is no groups.
    small: Option<CoveredEnds>,
    /// What the next commit does about it, when no commit of this sequence has named it yet.
    shared: Option<ForkOrigin>,
}

/// A frame taken over from another sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ForkOrigin {
    /// A commit of that one named it.
    Named,
    /// Nobody has: it may not be durable.
    Unnamed,
}

impl Sequence {
    /// A sequence without tokens. `records` create it, with its first commit.
    pub(crate) fn new(
        mut claim: SequenceLock,
        who: SequenceIdentity,
        records: RecordBuffer,
        summaries: SummaryResidency,
    ) -> Result<Self> {
        claim.expires = who.ttl_ms > 0;
        claim.uses = true;
        let store = Arc::clone(&claim.store);
        let layout = &who.layout;
        let streams = (summaries == SummaryResidency::Streamed).then(Arc::<Streams>::default);
        let has_summary = who.summaries != 0 && streams.is_none();
        let frame_limit = front_limit(&store.devices, &who)?;
        let mut layers = Vec::with_capacity(layout.layers());
        let mut tail_bytes = 0;
        for index in 0..layout.layers() {
            layers.push(match layout.raw().layers[index].has_kv() {
                true => {
                    // The tail itself, and the copy that a view may hold while it changes.
                    tail_bytes += 2 * layout.plain_block(index).block_bytes;
                    Some(Layer::new(layout, index, has_summary, frame_limit)?)
                }
                false => None,
            });
        }
        let reserve = |bytes, category| {
            store.devices.reserve(bytes, category).ok_or_else(|| {
                let text = format!("a sequence of this layout takes {bytes} bytes, more than memory_limit has left");
                Error::new(ErrorKind::MemoryLimit, text)
            })
        };
        let tails = reserve(tail_bytes, Category::Tails)?;
        let method_bytes = reserve(0, Category::Summaries)?;
        let gathered = store.gathering()?;
        let placed = Placed::new(layout.layers(), store.devices.list.slots());
        let index = reserve(size_of::<Self>() + placed.memory_bytes(), Category::Index)?;
        // With several devices smaller frames, so that what is read together lies on all of them; and small against a segment,
        // so that little is left at its end.
        let stripe = (store.limits.frame_bytes / store.devices.open_count().max(1)).max(STRIPE_BYTES_MIN);
        let frame_target =
            stripe.min((frame_limit / 8).max(64 << 10)).min(store.limits.frame_bytes).min(frame_limit / 2);
        let cache = store.cache.clone();
        Ok(Self {
            store,
            cache,
            who,
            handle: next_handle(),
            layers,
            token_ids: Vec::new(),
            ids_written: 0,
            ids_durable: 0,
            ids_grouped: 0,
            state: None,
            state_dirty: false,
            state_frame: 0,
            frames: Vec::new(),
            held: Vec::new(),
            records,
            stored: false,
            committed: 0,
            cut: false,
            released: 0,
            settled: 0,
            gathered,
            owed: None,
            frame_limit,
            frame_target,
            placed,
            methods: selectors::Methods::default(),
            method_bytes,
            index,
            frames_memory: 0,
            _tails: tails,
            streams,
            claim: Some(claim),
        })
    }

    /// Its id: unique in the store, never reused.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.who.sequence
    }

    /// Its key, empty when it has none.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.who.key
    }

    /// Its layout.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.who.layout
    }

    /// Tokens of the sequence: the minimum over its layers with keys and values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.layers.iter().flatten().map(|layer| layer.tokens).min().unwrap_or(0)
    }

    /// Whether it has no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of one layer.
    ///
    /// # Errors
    /// No such layer, or one without KV.
    pub fn layer_len(&self, layer: usize) -> Result<u64> {
        self.layer(layer).map(|layer| layer.tokens)
    }

    /// Tokens of the last commit that was made or [is queued](Error::is_queued). After [`ErrorKind::Indeterminate`] those of the
    /// one before it: what is durable is known when the store is opened again.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// The caller's state as of the last commit that was made, is queued, or waits for one
    /// ([`Durability::None`](crate::Durability::None)). As with [`Sequence::committed`], a commit that failed does not count.
    #[must_use]
    pub fn state(&self) -> Option<&[u8]> {
        self.state.as_deref()
    }

    /// Token ids given so far, those of earlier commits included.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Bytes of keys and values of all tokens.
    #[must_use]
    pub fn kv_bytes(&self) -> u64 {
        let bytes = |layer: &Layer| {
            let elements = layer.geometry.key_elements() + layer.geometry.value_elements();
            layer.tokens * (elements * self.who.layout.dtype().bytes()) as u64
        };
        self.layers.iter().flatten().map(bytes).sum()
    }

    /// Where this handle has its summaries.
    #[must_use]
    pub fn summary_residency(&self) -> SummaryResidency {
        if self.streams.is_some() { SummaryResidency::Streamed } else { SummaryResidency::Resident }
    }

    /// Bytes of its min/max records in memory: none where they are [streamed](Summaries::Streamed).
    #[must_use]
    pub fn summary_bytes(&self) -> u64 {
        let summaries = self.layers.iter().flatten().filter_map(|layer| layer.summary.as_ref());
        summaries.map(|summary| summary.bytes() as u64).sum()
    }

    /// Gives the sequence a cache of its own, in place of the store's or of an earlier one; none means no cache at all.
    /// Blocks that forks share stay in the cache of whoever read them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: its bytes are not free; [`ErrorKind::Configuration`]: fewer than 2 MiB. It then has none.
    pub fn set_cache(&mut self, options: Option<CacheOptions>) -> Result<()> {
        // An earlier one gives its memory back first.
        self.cache = None;
        self.cache = options.map(|options| self.store.devices.block_cache(&options)).transpose()?;
        Ok(())
    }

    /// What the cache that it reads through holds and has saved: its own, or the store's.
    #[must_use]
    pub fn cache_status(&self) -> Option<CacheStatus> {
        self.cache.as_ref().map(|cache| cache.status())
    }

    /// Deletes the sequence. With [`Durability::Sync`] it stays deleted after a crash; otherwise the deletion is durable
    /// within the lazy delay, or with the next sync.
    ///
    /// # Errors
    /// The commit of the deletion failed: see [`ErrorKind::Indeterminate`], and [`Error::is_queued`] for one that is made later.
    /// The handle is gone in any case.
    pub fn delete(mut self, durability: Durability) -> Result<()> {
        self.store.committer.check()?;
        self.owed = None;
        let id = self.who.sequence;
        let stored = self.stored;
        // Frames under way hold buffers and space: both must be free of them.
        for frame in &mut self.frames {
            let _ = frame.wait();
        }
        let store = Arc::clone(&self.store);
        self.streams.iter().for_each(|streams| streams.give_all_back());
        self.layers.clear();
        self.frames.clear();
        // Nobody opens it again, or takes its key, before the deletion is queued.
        let _claim = self.claim.take();
        drop(self);
        if stored { store.delete_sequence(id, durability) } else { Ok(()) }
    }

    /// Gives the handle back. A commit at [`Durability::None`] is handed over as a lazy one; tokens that were not committed
    /// are gone.
    ///
    /// # Errors
    /// The commit owed could not be written.
    pub fn close(mut self) -> Result<()> {
        self.settle()
    }

    /// Writes and queues what a commit at `Durability::None` owes.
    fn settle(&mut self) -> Result<()> {
        match self.owed.take() {
            Some((tokens, ids)) => self.commit_to(tokens, ids, Durability::Lazy),
            None => Ok(()),
        }
    }

    pub(crate) fn store(&self) -> &Arc<StoreInner> {
        &self.store
    }

    pub(crate) fn identity(&self) -> &SequenceIdentity {
        &self.who
    }

    fn layer(&self, layer: usize) -> Result<&Layer> {
        self.who.layout.kv_layer(layer)?;
        let found = self.layers.get(layer).and_then(Option::as_ref);
        found.ok_or_else(|| Error::new(ErrorKind::Closed, "the sequence was deleted"))
    }

    fn layer_mut(&mut self, layer: usize) -> Result<&mut Layer> {
        self.who.layout.kv_layer(layer)?;
        let found = self.layers.get_mut(layer).and_then(Option::as_mut);
        found.ok_or_else(|| Error::new(ErrorKind::Closed, "the sequence was deleted"))
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // Nobody is left to tell; what a `None` commit owes may vanish.
        let _ = self.settle();
        // Space is not used again while a write into it is under way.
        for frame in &mut self.frames {
            let _ = frame.wait();
        }
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence").field("id", &self.who.sequence).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A number that no other handle has.
fn next_handle() -> u64 {
    static HANDLES: AtomicU64 = AtomicU64::new(0);
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

fn no_memory(what: &str) -> Error {
    Error::new(ErrorKind::MemoryLimit, format!("{what}: no memory within memory_limit"))
}
