//! Forking: a second sequence that starts with the same tokens. What is in frames is shared, what is in memory is copied.
//!
//! A fork leaves no trace until its first commit, which announces every frame it took over together with its references; a
//! frame that the manifest knows already is not written a second time. Until then its segments are held like those of a reader.

use super::{ForkOrigin, ReferencedFrame, Sequence};
use crate::catalog::{FrameMeta, RecordBuffer, ReplicaMeta, SegmentHandle, SequenceMeta};
use crate::error::Result;
use crate::log::{SequenceIdentity, WrittenFrame, unix_ms};
use std::sync::Arc;
use stratakv_format::Location;
use stratakv_format::manifest::Kind;

impl Sequence {
    /// A sequence without a key that starts with all tokens of this one, its token ids and its caller's state. From then on the
    /// two are independent: each is appended to, cut, committed and deleted by itself. Frames are shared, and so are groups in
    /// memory, which each of the two writes in its own time; no data is written.
    ///
    /// The fork is stored with its first commit, which also commits what it took over, whether this sequence commits it or
    /// not. Dropped before that, it is gone.
    ///
    /// # Errors
    /// [`crate::ErrorKind::MemoryLimit`]: no memory for its tails. [`crate::ErrorKind::NoSpace`], [`crate::ErrorKind::Io`]: frames
    /// on their way could not be written. Nothing changed.
    pub fn fork(&mut self) -> Result<Self> {
        self.fork_as("")
    }

    /// As [`Sequence::fork`], with a key.
    ///
    /// # Errors
    /// As [`Sequence::fork`]; [`crate::ErrorKind::AlreadyExists`]: the key is taken.
    pub fn fork_as(&mut self, key: &str) -> Result<Self> {
        self.fork_with(key).map_err(|e| e.during(format!("fork of sequence {}", self.who.sequence)))
    }

    fn fork_with(&mut self, key: &str) -> Result<Self> {
        self.store.committer.check()?;
        self.land_all()?;
        let (id, claim) = self.store.claim(key)?;
        let parent = Some((self.who.sequence, self.len()));
        let who = SequenceIdentity { sequence: id, parent, key: key.to_owned(), ..self.who.clone() };
        let now = unix_ms();
        let meta = SequenceMeta {
            key: who.key.clone(),
            layout: who.layout_id,
            summaries: who.summaries,
            created_unix_ms: now,
            // It may live as long, and be evicted as early, as the one it comes from.
            ttl_ms: who.ttl_ms,
            replicas: who.copies as u8,
            evictable: who.evictable,
            parent,
            tokens: 0,
            token_ids: 0,
            state_frame: None,
            committed_unix_ms: now,
            used_unix_ms: 0,
            adapter: None,
            refs: Vec::new(),
        };
        let mut records = RecordBuffer::default();
        if who.copies > 1 {
            records.require_replicas();
        }
        records.push(Kind::SequenceCreate, &meta.create_record(id), meta.key.as_bytes());
        let mut child = Self::new(claim, who, records, self.summary_residency())?;
        for (own, other) in child.layers.iter_mut().zip(&mut self.layers) {
            *own = other.as_mut().map(super::Layer::snapshot).transpose()?;
        }
        child.token_ids.clone_from(&self.token_ids);
        (child.ids_written, child.ids_durable) = (self.ids_written, self.ids_written);
        (child.ids_grouped, child.settled) = (self.ids_grouped, self.settled);
        child.state.clone_from(&self.state);
        child.state_dirty = self.state.is_some();
        let named = self
            .held
            .iter()
            .map(|held| ReferencedFrame { shared: held.shared.or(Some(ForkOrigin::Named)), ..held.clone() });
        let unnamed = self.frames.iter().map(|frame| ReferencedFrame::written(frame, Some(ForkOrigin::Unnamed)));
        // One that holds nothing but the caller's state is not shared.
        child.held = named.chain(unnamed).filter(|held| held.first_token.is_some()).collect();
        child.measure_frames();
        if !child.account() {
            return Err(super::no_memory("the index of a fork"));
        }
        Ok(child)
    }
}

impl ReferencedFrame {
    pub(super) fn written(frame: &WrittenFrame, shared: Option<ForkOrigin>) -> Self {
        Self {
            frame: frame.id,
            meta: frame.meta.clone(),
            slot: Arc::clone(&frame.body),
            first_token: frame.first_token,
            token_end: frame.token_end,
            small: frame.small,
            shared,
        }
    }

    /// Announces it where its copies lie now. Gives their segments.
    pub(super) fn announce(&self, records: &mut RecordBuffer) -> Vec<Arc<SegmentHandle>> {
        let now = self.slot.now();
        let pages = self.meta.location.pages;
        let replica = |copy| {
            let (segment, page, header_crc) = now.copy(copy);
            let (device, segment) = segment.key;
            ReplicaMeta { generation: 1, location: Location { device, segment, page, pages }, header_crc }
        };
        let first = replica(0);
        let meta = FrameMeta {
            location: first.location,
            header_crc: first.header_crc,
            replicas: (1..now.copies()).map(replica).collect(),
            ..self.meta.clone()
        };
        meta.announce(self.frame, records);
        (0..now.copies()).map(|copy| Arc::clone(now.copy(copy).0)).collect()
    }
}
