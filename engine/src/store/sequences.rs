//! The sequences of a store: they are created, opened, listed and deleted here.

use super::{SequenceInfo, Store};
use crate::catalog::{COPIES_MAX, SequenceMeta};
use crate::error::{Error, ErrorKind, Result};
use crate::io::planted;
use crate::layout::KvLayout;
use crate::log::{SequenceIdentity, SequenceLock};
use crate::metrics::lock;
use crate::options::{CreateOptions, Durability, StoredSummary};
use crate::sequence::{OpenSequence, Sequence, SequenceRef, load};
use stratakv_format::{LayoutId, SequenceId};

impl Store {
    /// Creates a sequence. Its first commit stores it.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the key is taken. [`ErrorKind::InvalidArgument`]: the key has over 512 bytes.
    /// [`ErrorKind::MemoryLimit`]: there is no memory for its tails. [`ErrorKind::Configuration`]: it has more copies
    /// than the store has devices.
    pub fn create_sequence(&self, layout: &KvLayout, options: CreateOptions) -> Result<Sequence> {
        let inner = &self.inner;
        inner.committer.check_memory()?;
        let copies = options.copies.max(1);
        if usize::from(copies) > COPIES_MAX {
            let text = format!("create sequence: {copies} copies are requested; from 1 to {COPIES_MAX} are possible");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let members = inner.devices.list.slots();
        if usize::from(copies) > members {
            let text = format!("create sequence: {copies} copies need as many devices; the store has {members}");
            return Err(Error::new(ErrorKind::Configuration, text));
        }
        let (id, claim) = inner.claim(&options.key)?;
        let layout_id = self.layout_id(layout);
        let summaries = options.summaries.iter().fold(0, |bits, summary| match summary {
            StoredSummary::MinMax => bits | 1 << (stratakv_format::frame::SUMMARY_MIN_MAX - 1),
        });
        let identity = SequenceIdentity {
            sequence: id,
            parent: None,
            key: options.key.clone(),
            summaries,
            layout_id,
            layout: layout.clone(),
            ttl_ms: options.ttl_ms,
            evictable: options.evictable,
            copies: usize::from(copies),
        };
        let records = identity.create_records(inner.devices.environment.unix_ms());
        lock(&inner.space).classify(id, class_of(identity.ttl_ms, identity.evictable));
        Sequence::new(claim, identity, records, options.residency)
    }

    /// Returns the number of a layout, a new one if the store does not have it yet.
    pub(super) fn layout_id(&self, layout: &KvLayout) -> LayoutId {
        let mut catalog = lock(&self.inner.catalog);
        catalog.find_layout(layout).unwrap_or_else(|| {
            let id = catalog.counters.layout;
            catalog.counters.layout += 1;
            LayoutId(id)
        })
    }

    /// Opens a sequence by its key or its id, as its last commit left it.
    ///
    /// ```
    /// use stratakv::{ByteSize, CreateOptions, Durability, KvLayout, OpenSequence, Store};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let store = Store::options().device(dir.path()).segment_bytes(ByteSize::mib(1)).open()?;
    /// let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).build()?;
    /// let mut sequence = store.create_sequence(&layout, CreateOptions::new().key("chat"))?;
    /// sequence.commit(Durability::Sync)?;
    /// let id = sequence.id();
    /// drop(sequence); // One handle per sequence.
    ///
    /// let sequence = store.open_sequence("chat", OpenSequence::new().layout(&layout))?;
    /// drop(sequence);
    /// let sequence = store.open_sequence(id, OpenSequence::new())?;
    /// assert_eq!(sequence.key(), "chat");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no sequence has the key or the id. [`ErrorKind::InUse`]: it is open.
    /// [`ErrorKind::LayoutMismatch`]: it was written with another layout than the options require.
    /// [`ErrorKind::Corruption`]: its frames are damaged.
    pub fn open_sequence<'a>(&self, sequence: impl Into<SequenceRef<'a>>, options: OpenSequence) -> Result<Sequence> {
        match sequence.into() {
            SequenceRef::Id(id) => self.open_by_id(id, options),
            SequenceRef::Key(key) => {
                self.inner.flush_others()?;
                let id = lock(&self.inner.catalog).keys.get(key).copied();
                let id = id.ok_or_else(|| {
                    Error::new(ErrorKind::NotFound, format!("open sequence: no sequence has the key {key:?}"))
                })?;
                self.open_by_id(id, options)
            }
        }
    }

    /// Locks a sequence for one handle. Returns the lock, and what the catalog then knows of the sequence.
    fn lock_sequence(&self, id: SequenceId) -> Result<(SequenceLock, SequenceMeta)> {
        let claim = SequenceLock::new(&self.inner, id, "");
        // The last handle has queued its commit or its deletion. After a flush the catalog has it.
        self.inner.flush_others()?;
        let meta = {
            let mut catalog = lock(&self.inner.catalog);
            let now = self.inner.devices.environment.unix_ms();
            let is_sequence = catalog.sequences.get(&id).is_some_and(|meta| meta.adapter.is_none());
            let used = if is_sequence { catalog.use_at(now) } else { now };
            let found = catalog.sequences.get_mut(&id).filter(|_| is_sequence);
            found.map(|meta| {
                meta.used_unix_ms = used;
                meta.clone()
            })
        };
        let meta = meta.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("sequence {id} does not exist")))?;
        let claim = claim.ok_or_else(|| {
            Error::new(ErrorKind::InUse, format!("sequence {id} is open; drop its other handle first"))
        })?;
        Ok((claim, meta))
    }

    fn open_by_id(&self, id: SequenceId, options: OpenSequence) -> Result<Sequence> {
        let load = |(claim, meta): (SequenceLock, SequenceMeta)| {
            lock(&self.inner.space).classify(id, class_of(meta.ttl_ms, meta.evictable));
            load(claim, id, &meta, options.summaries)
        };
        let loaded = load(self.lock_sequence(id)?).or_else(|e| match e.kind() {
            // The damage may be of the transfer, not of the medium, so it is read once more. The failed handle gave up
            // its lock, so another one may have committed since.
            ErrorKind::Corruption if !planted!(NotReadAgain) => self.lock_sequence(id).map_or(Err(e), load),
            _ => Err(e),
        });
        let sequence = loaded.map_err(|e| e.during(format!("open sequence {id}")))?;
        match options.layout.filter(|layout| layout != sequence.layout()) {
            None => Ok(sequence),
            Some(layout) => {
                let what = layout.difference(sequence.layout().raw());
                let text = format!(
                    "open sequence: {:?} was written with another {what}; the model, dtype, group size or codec \
                     differs",
                    sequence.key()
                );
                Err(Error::new(ErrorKind::LayoutMismatch, text))
            }
        }
    }

    /// Deletes a sequence without opening it, as [`Sequence::delete`] does. A sequence may be too damaged to be opened.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is no such sequence. [`ErrorKind::InUse`]: it is open. Or the commit failed.
    pub fn delete_sequence_id(&self, id: SequenceId, durability: Durability) -> Result<()> {
        let claim = SequenceLock::new(&self.inner, id, "");
        self.inner.flush_others()?;
        if lock(&self.inner.catalog).sequences.get(&id).is_none_or(|meta| meta.adapter.is_some()) {
            return Err(Error::new(ErrorKind::NotFound, format!("sequence {id} does not exist")));
        }
        let _claim = claim
            .ok_or_else(|| Error::new(ErrorKind::InUse, format!("sequence {id} is open; drop its handle first")))?;
        self.inner.delete_sequence(id, durability)
    }

    /// Returns the committed sequences, by id.
    ///
    /// A deleted sequence is not listed, even if its deletion is not durable yet. A crash may then restore it.
    #[must_use]
    pub fn sequences(&self) -> Vec<SequenceInfo> {
        let catalog = lock(&self.inner.catalog);
        let info = |(id, meta): (SequenceId, &SequenceMeta)| SequenceInfo {
            id: id.0,
            key: meta.key.clone(),
            tokens: meta.tokens,
            disk_bytes: {
                let frames = meta.refs.iter().filter_map(|(frame, _)| catalog.frames.get(frame));
                frames.flat_map(|frame| frame.locations()).map(|location| location.bytes()).sum()
            },
            frames: meta.refs.len(),
            parent: meta.parent.map(|(parent, _)| parent.0),
            created_unix_ms: meta.created_unix_ms,
            committed_unix_ms: meta.committed_unix_ms,
            ttl_ms: meta.ttl_ms,
            evictable: meta.evictable,
        };
        catalog.listed().map(info).collect()
    }
}

/// Returns the class of a sequence. Small sequences that end in the same way share segments.
fn class_of(ttl_ms: u64, evictable: u8) -> u8 {
    match (ttl_ms, evictable) {
        (0, 0) => 0,
        (_, 0) => 1,
        _ => 2,
    }
}
