//! The state that the manifest describes.
//!
//! - Recovery builds it from the records on disk. Each kind of record has its effect in `sequences`, `frames` or
//!   `segments`.
//! - A commit applies the same records that it made durable.
//! - A checkpoint writes it as records again (`checkpoint`).
//! - Calls that list sequences see those that can be opened (`listing`).
//!
//! Invariants:
//! - A frame is removed with its last reference.
//! - `live_pages` of a segment is the number of pages of the copies in it.
//! - `idle` holds exactly the sealed segments without live pages.
//! - The references of a sequence are in order of LSN.
//! - A derived frame has one copy, in a segment for pools. Other frames are in segments for the log.
//!
//! A record that contradicts the state is an error. On disk that is corruption.

mod checkpoint;
mod frames;
mod listing;
mod segments;
mod sequences;

use super::meta::{Counters, FrameMeta, SegmentKey, SegmentMeta, SequenceMeta};
use crate::layout::KvLayout;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use stratakv_format::manifest::{self as m, Record};
use stratakv_format::{DeviceIndex, FrameId, LayoutId, SequenceId};

/// The maximum number of copies of a frame.
pub(crate) const COPIES_MAX: usize = m::REPLICAS_MAX as usize;

/// The committed state of a store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Catalog {
    pub(crate) members: BTreeMap<DeviceIndex, m::Member>,
    pub(crate) layouts: BTreeMap<LayoutId, KvLayout>,
    pub(crate) sequences: BTreeMap<SequenceId, SequenceMeta>,
    pub(crate) keys: HashMap<String, SequenceId>,
    /// Adapters by layout, name and version.
    pub(crate) adapters: BTreeMap<(LayoutId, String, u32), SequenceId>,
    pub(crate) frames: HashMap<FrameId, FrameMeta>,
    pub(crate) segments: BTreeMap<SegmentKey, SegmentMeta>,
    pub(crate) counters: Counters,
    /// The sealed segments without live pages. They are freed once no reader holds them.
    pub(crate) idle: BTreeSet<SegmentKey>,
    /// The frames placed in each segment since it was opened. Some may have been deleted or moved since.
    placed: HashMap<SegmentKey, Vec<FrameId>>,
    /// The number of references of all sequences.
    refs: u64,
    /// The bytes of all keys.
    key_bytes: u64,
    /// The bytes of the records of all adapters.
    adapter_bytes: u64,
    /// The latest use of any sequence, in milliseconds since 1970.
    used_unix_ms: u64,
    /// The sequences and adapters whose deletion is queued. They are not part of the state on disk.
    queued_deletions: HashSet<SequenceId>,
    /// The generation and nonce of the manifest that replaces this one, if its last record names one.
    pub(crate) superseded: Option<(u64, u64)>,
}

type Applied = std::result::Result<(), String>;

impl Catalog {
    /// Applies one record.
    ///
    /// # Errors
    /// The record contradicts the records before it. The text says how.
    pub(crate) fn apply(&mut self, record: &Record<'_>) -> Applied {
        match record {
            Record::Member(member) => self.member(member)?,
            Record::Layout(defined, bytes) => {
                let layout = stratakv_format::layout::Layout::decode(bytes).map_err(|e| e.to_string())?;
                let layout = KvLayout::new(layout).map_err(|e| e.to_string())?;
                let id = defined.layout.get();
                self.counters.layout = self.counters.layout.max(id.saturating_add(1));
                if self.layouts.insert(LayoutId(id), layout).is_some() {
                    return Err(format!("layout {id} exists already"));
                }
            }
            Record::SequenceCreate(create, key) => self.create(create, key)?,
            Record::Adapter(adapter, name) => self.adapter(adapter, name)?,
            Record::Fork(fork, key) => self.fork(fork, key)?,
            Record::SequenceTruncate(cut) => self.truncate(SequenceId(cut.sequence.get()), cut.tokens.get())?,
            Record::SequenceDelete(delete) => self.delete(SequenceId(delete.sequence.get()))?,
            Record::Frame(frame) => self.frame(frame)?,
            Record::FrameRef(r) => {
                self.reference(SequenceId(r.sequence.get()), FrameId(r.frame.get()), r.token_end.get())?;
            }
            Record::FrameRelease(r) => {
                let frame = FrameId(r.frame.get());
                let sequence = self.sequence_mut(SequenceId(r.sequence.get()))?;
                let before = sequence.refs.len();
                sequence.refs.retain(|(id, _)| *id != frame);
                if sequence.refs.len() == before {
                    return Err(format!("a release of frame {frame}, to which the sequence does not refer"));
                }
                self.refs -= 1;
                self.release(frame);
            }
            Record::FrameMoved(moved) => self.moved(moved)?,
            Record::Replica(copy) => self.copy(copy)?,
            Record::SegmentOpen(open) => self.segment_open(open)?,
            Record::SegmentSeal(seal) => self.segment_seal(seal)?,
            Record::SegmentFree(free) => self.segment_free(free)?,
            Record::SequenceCommit(commit) => {
                let state = commit.state_frame.get();
                let sequence = self.sequence_mut(SequenceId(commit.sequence.get()))?;
                sequence.tokens = commit.tokens.get();
                sequence.token_ids = commit.token_ids.get();
                sequence.state_frame = (state != 0).then_some(FrameId(state));
                sequence.committed_unix_ms = commit.committed_unix_ms.get();
                sequence.used_unix_ms = sequence.used_unix_ms.max(sequence.committed_unix_ms);
                self.used_unix_ms = self.used_unix_ms.max(commit.committed_unix_ms.get());
            }
            Record::Counters(c) => {
                let own = &mut self.counters;
                own.frame = own.frame.max(c.next_frame.get());
                own.sequence = own.sequence.max(c.next_sequence.get());
                own.lsn = own.lsn.max(c.next_lsn.get());
                own.layout = own.layout.max(c.next_layout.get());
                own.lifetime_bytes = own.lifetime_bytes.max(c.lifetime_bytes.get());
            }
            Record::Superseded(next) => self.superseded = Some((next.generation.get(), next.nonce.get())),
            Record::CheckpointEnd(_) | Record::Unknown(_) => {}
            Record::PoolAllocation(_) => {
                return Err("a pool allocation, which no feature of this version allows".into());
            }
        }
        Ok(())
    }

    /// Returns the time of a use at `now`. It is later than every use before, even if the clock went back, because
    /// eviction begins with the sequence that was used least recently.
    pub(crate) fn use_at(&mut self, now: u64) -> u64 {
        let is_back = now < self.used_unix_ms;
        self.used_unix_ms = if is_back { self.used_unix_ms.saturating_add(1) } else { now };
        self.used_unix_ms
    }

    /// Returns the id of an equal layout.
    pub(crate) fn find_layout(&self, layout: &KvLayout) -> Option<LayoutId> {
        self.layouts.iter().find(|(_, known)| *known == layout).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests;
