//! The identity of a sequence: what frame headers and the record that creates it say.

use crate::catalog::{RecordBuffer, SequenceMeta};
use crate::layout::KvLayout;
use stratakv_format::manifest::Kind;
use stratakv_format::{LayoutId, SequenceId};

/// The sequence that writes a frame, as its header names it.
#[derive(Clone)]
pub(crate) struct SequenceIdentity {
    pub(crate) sequence: SequenceId,
    pub(crate) parent: Option<(SequenceId, u64)>,
    pub(crate) key: String,
    pub(crate) summaries: u32,
    pub(crate) layout_id: LayoutId,
    pub(crate) layout: KvLayout,
    /// Its time to live in milliseconds, or 0.
    pub(crate) ttl_ms: u64,
    pub(crate) evictable: u8,
    /// How many copies each of its frames gets.
    pub(crate) copies: usize,
}

impl SequenceIdentity {
    /// Returns the manifest records that create the sequence, empty, at this time in milliseconds since 1970.
    pub(crate) fn create_records(&self, created_unix_ms: u64) -> RecordBuffer {
        let meta = SequenceMeta {
            key: self.key.clone(),
            layout: self.layout_id,
            summaries: self.summaries,
            created_unix_ms,
            ttl_ms: self.ttl_ms,
            copies: self.copies as u8,
            evictable: self.evictable,
            parent: self.parent,
            tokens: 0,
            token_ids: 0,
            state_frame: None,
            committed_unix_ms: created_unix_ms,
            used_unix_ms: created_unix_ms,
            adapter: None,
            refs: Vec::new(),
        };
        let mut records = RecordBuffer::default();
        if self.copies > 1 {
            records.require_copies();
        }
        records.push(Kind::SequenceCreate, &meta.create_record(self.sequence), meta.key.as_bytes());
        records
    }
}
