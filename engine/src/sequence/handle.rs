//! The handle of a sequence: its parts, and what callers ask it about.
//!
//! [`Sequence`] has no logic of its own beyond this file. Each part changes only its own fields, and the other files of
//! this folder combine the parts into operations.
//!
//! Invariants:
//! - One handle per sequence is open, because [`CommitState`] holds its lock. The lock is dropped last.
//! - A dropped handle queues the commit that it owes, and waits for writes in flight, because their space may be used
//!   again.
//! - `index` covers the tables of layers and frames, and the token ids, after every operation ([`Sequence::account`]).

use super::caller_state::CallerState;
use super::commit_state::CommitState;
use super::errors::no_index_memory;
use super::frame_set::FrameSet;
use super::layer::LayerState;
use super::layer_set::{LayerSet, reserve};
use super::selector_set::SelectorSet;
use super::streams::SummaryStreams;
use super::token_ids::TokenIds;
use crate::cache::{BlockCache, CacheStatus};
use crate::catalog::RecordBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{KvLayout, PlacedBytes};
use crate::log::{SequenceIdentity, SequenceLock, StoreInner, front_limit};
use crate::metrics::{Category, Reservation};
use crate::options::{CacheOptions, Durability, SummaryResidency};
use crate::retrieval::MinMax;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use stratakv_format::SequenceId;

/// The least bytes of a frame that is striped over devices, because every frame costs a header page.
const STRIPE_BYTES_MIN: usize = 1 << 20;

/// One token stream of a store: an inference session appends to it and reads from it.
///
/// A sequence has one handle at a time. The handle is `Send`, so it can move between threads. Tokens that were not
/// [committed](Sequence::commit) are lost when it is dropped.
pub struct Sequence {
    pub(super) store: Arc<StoreInner>,
    pub(super) identity: SequenceIdentity,
    /// Unique among the handles of this process, readers included. Caches count a block once per handle and step.
    pub(super) handle: u64,
    pub(super) layers: LayerSet,
    pub(super) token_ids: TokenIds,
    pub(super) caller_state: CallerState,
    pub(super) frames: FrameSet,
    pub(super) selectors: SelectorSet,
    /// The memory of the tables of layers and frames, and of token ids.
    pub(super) index: Reservation,
    /// Records of summaries that were read ahead; none if summaries are resident.
    pub(super) streams: Option<Arc<SummaryStreams>>,
    /// The cache of resident blocks: the store's, or the sequence's own.
    pub(super) cache: Option<Arc<BlockCache>>,
    /// The last field to be dropped, because it has the lock. The commits of the sequence are queued by then.
    pub(super) commits: CommitState,
}

impl Sequence {
    /// Returns a sequence without tokens. Its first commit writes `records`, which create it.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]; [`ErrorKind::Configuration`]: segments too small for the layout.
    pub(crate) fn new(
        mut lock: SequenceLock,
        identity: SequenceIdentity,
        records: RecordBuffer,
        summaries: SummaryResidency,
    ) -> Result<Self> {
        lock.expires = identity.ttl_ms > 0;
        lock.uses = true;
        let store = Arc::clone(&lock.store);
        let layout = &identity.layout;
        let streams = SummaryStreams::new(summaries);
        let has_summary = identity.summaries != 0 && streams.is_none();
        let frame_limit = front_limit(&store.devices, &identity)?;
        let layers = LayerSet::new(&store.devices, layout, has_summary, frame_limit)?;
        let selectors = SelectorSet::new(reserve(&store.devices, 0, Category::Summaries)?);
        let gathered = store.gathering()?;
        let placed = PlacedBytes::new(layout.layers(), store.devices.list.slots());
        let index = reserve(&store.devices, size_of::<Self>() + placed.memory_bytes(), Category::Index)?;
        let frames = FrameSet::new(placed, (frame_limit, frame_target(&store, frame_limit)), gathered);
        let cache = store.cache.clone();
        Ok(Self {
            store,
            identity,
            handle: next_handle(),
            layers,
            token_ids: TokenIds::default(),
            caller_state: CallerState::default(),
            frames,
            selectors,
            index,
            streams,
            cache,
            commits: CommitState::new(lock, records),
        })
    }

    /// Returns the id, which is unique in the store and never reused.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.identity.sequence
    }

    /// Returns the key; empty if the sequence has none.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.identity.key
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.identity.layout
    }

    /// Returns the number of tokens: the minimum over the layers with keys and values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.layers.tokens()
    }

    /// Returns whether the sequence has no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of one layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer, or one without keys and values.
    pub fn layer_len(&self, layer: usize) -> Result<u64> {
        self.layer(layer).map(LayerState::tokens)
    }

    /// Returns the tokens of the last commit that succeeded or [is queued](Error::is_queued). After
    /// [`ErrorKind::Indeterminate`] these are the tokens of the commit before, because only the next open knows what is
    /// durable.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.commits.committed()
    }

    /// Returns the caller's state as of the last commit that succeeded, is queued, or is owed
    /// ([`Durability::None`](crate::Durability::None)). A failed commit does not count, as with
    /// [`Sequence::committed`].
    #[must_use]
    pub fn caller_state(&self) -> Option<&[u8]> {
        self.caller_state.bytes()
    }

    /// Returns the token ids given so far, including ids of earlier commits.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        self.token_ids.as_slice()
    }

    /// Returns the bytes of keys and values of all tokens, without codecs.
    #[must_use]
    pub fn kv_bytes(&self) -> u64 {
        let bytes = |layer: &LayerState| layer.tokens() * layer.token_bytes() as u64;
        self.layers.iter().map(bytes).sum()
    }

    /// Returns where this handle keeps its summaries.
    #[must_use]
    pub fn summary_residency(&self) -> SummaryResidency {
        self.streams.as_ref().map_or(SummaryResidency::Resident, |streams| streams.residency())
    }

    /// Returns the bytes of min/max records in memory: 0 if they are streamed.
    #[must_use]
    pub fn summary_bytes(&self) -> u64 {
        let summaries = self.layers.iter().filter_map(|layer| layer.summaries().min_max());
        summaries.map(|summary: &MinMax| summary.bytes() as u64).sum()
    }

    /// Gives the sequence its own cache, in place of the store's or of an earlier one; `None` means no cache at all.
    /// Blocks that forks share stay in the cache of the sequence that read them.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: its bytes are not free. [`ErrorKind::Configuration`]: fewer than 2 MiB. After an
    /// error the sequence has no cache.
    pub fn set_cache(&mut self, options: Option<CacheOptions>) -> Result<()> {
        // The earlier cache returns its memory first.
        self.cache = None;
        self.cache = options.map(|options| self.store.devices.block_cache(&options)).transpose()?;
        Ok(())
    }

    /// Returns what the cache of this sequence holds and has saved; none if it has no cache.
    #[must_use]
    pub fn cache_status(&self) -> Option<CacheStatus> {
        self.cache.as_ref().map(|cache| cache.status())
    }

    /// Deletes the sequence. With [`Durability::Sync`] the deletion survives a crash. Otherwise it becomes durable
    /// within the lazy delay, or with the next sync.
    ///
    /// # Errors
    /// The commit of the deletion failed: see [`ErrorKind::Indeterminate`], and [`Error::is_queued`] for a commit that
    /// is made later. The handle is gone in any case.
    pub fn delete(mut self, durability: Durability) -> Result<()> {
        self.store.committer.check()?;
        self.commits.take_owed();
        let id = self.identity.sequence;
        let stored = self.commits.is_stored();
        // Frames in flight hold buffers and space, and the deletion frees both.
        self.frames.quiesce();
        let store = Arc::clone(&self.store);
        self.streams.iter().for_each(|streams| streams.give_all_back());
        self.layers.clear();
        self.frames.drop_unnamed();
        // The lock keeps the sequence closed, and its key taken, until the deletion is queued.
        let _lock = self.commits.take_lock();
        drop(self);
        if stored { store.delete_sequence(id, durability) } else { Ok(()) }
    }

    /// Closes the handle. A commit at [`Durability::None`] is queued as a lazy one. Tokens that were not committed are
    /// lost.
    ///
    /// # Errors
    /// As [`Sequence::commit`], for the commit at [`Durability::None`].
    pub fn close(mut self) -> Result<()> {
        self.settle()
    }

    /// Writes and queues what a commit at `Durability::None` covered.
    fn settle(&mut self) -> Result<()> {
        match self.commits.take_owed() {
            Some(owed) => self.commit_to(owed.tokens, owed.token_ids, Durability::Lazy),
            None => Ok(()),
        }
    }

    pub(crate) fn store(&self) -> &Arc<StoreInner> {
        &self.store
    }

    pub(crate) fn identity(&self) -> &SequenceIdentity {
        &self.identity
    }

    /// Returns a layer with keys and values.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such layer. [`ErrorKind::Closed`]: the sequence was deleted.
    pub(super) fn layer(&self, layer: usize) -> Result<&LayerState> {
        self.identity.layout.kv_layer(layer)?;
        self.layers.get(layer).ok_or_else(deleted)
    }

    pub(super) fn layer_mut(&mut self, layer: usize) -> Result<&mut LayerState> {
        self.identity.layout.kv_layer(layer)?;
        self.layers.get_mut(layer).ok_or_else(deleted)
    }

    /// Accounts for the tables at their present size.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryLimit`]: they do not fit.
    pub(super) fn account(&mut self) -> Result<()> {
        let bytes =
            size_of::<Self>() + self.frames.memory_bytes() + self.layers.table_bytes() + self.token_ids.memory_bytes();
        if self.store.devices.resize(&mut self.index, bytes) { Ok(()) } else { Err(no_index_memory()) }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // There is no caller to tell: what a commit at `Durability::None` covered may be lost.
        let _ = self.settle();
        self.frames.quiesce();
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence")
            .field("id", &self.identity.sequence)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Returns a number that no other handle has.
pub(super) fn next_handle() -> u64 {
    static HANDLES: AtomicU64 = AtomicU64::new(0);
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

/// Returns the bytes of groups from which on a frame is written. Frames are smaller on several devices, so that groups
/// that are read together are on all of them. They are small against a segment, so that little of its end stays unused.
fn frame_target(store: &StoreInner, frame_limit: usize) -> usize {
    let frame_bytes = store.limits.frame_bytes;
    let stripe = (frame_bytes / store.devices.open_count().max(1)).max(STRIPE_BYTES_MIN);
    stripe.min((frame_limit / 8).max(64 << 10)).min(frame_bytes).min(frame_limit / 2)
}

fn deleted() -> Error {
    Error::new(ErrorKind::Closed, "the sequence was deleted")
}
