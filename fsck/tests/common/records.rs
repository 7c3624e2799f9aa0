//! Manifest records and the batches they go into.

use stratakv_format::manifest::{self as m, Kind, encode_record};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The encoded records of one batch.
#[derive(Default, Clone)]
pub struct Records {
    pub bytes: Vec<u8>,
    pub count: u32,
}

impl Records {
    pub fn push(&mut self, kind: Kind, body: &(impl IntoBytes + zerocopy::Immutable), tail: &[u8]) {
        encode_record(&mut self.bytes, kind, body, tail);
        self.count += 1;
    }

    /// Adds a frame, and a reference of a sequence to all of its tokens.
    pub fn push_frame(&mut self, sequence: u64, frame: &m::Frame) {
        self.push(Kind::Frame, frame, &[]);
        let (sequence, token_end) = (U64::new(sequence), U64::new(u64::MAX));
        self.push(Kind::FrameRef, &m::FrameRef { sequence, frame: frame.frame, token_end }, &[]);
    }
}

pub fn create(id: u64, key: &[u8]) -> m::SequenceCreate {
    m::SequenceCreate {
        sequence: U64::new(id),
        created_unix_ms: U64::new(0),
        ttl_ms: U64::new(0),
        layout: U32::new(1),
        summaries: U32::new(1),
        replicas: 1,
        evictable: 0,
        key_bytes: U16::new(key.len() as u16),
        reserved: U32::new(0),
        parent: U64::new(0),
        parent_tokens: U64::new(0),
    }
}

pub fn commit(id: u64, tokens: u64, token_ids: u64, state: u64) -> m::SequenceCommit {
    m::SequenceCommit {
        sequence: U64::new(id),
        tokens: U64::new(tokens),
        state_frame: U64::new(state),
        token_ids: U64::new(token_ids),
        committed_unix_ms: U64::new(0),
    }
}
