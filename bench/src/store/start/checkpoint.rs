//! The records of a checkpoint, encoded with the format's own types.

use crate::store::start::geometry::{CREATED_S, FRAMES_PER_SEQUENCE, GROUP, NONCE};
use anyhow::Result;
use stratakv_format::manifest::{
    self as format, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, Kind, RECORDS_BYTES_MAX, SequenceCommit, SequenceCreate,
};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

/// Encoded records, with the end of each.
#[derive(Default)]
pub(super) struct CheckpointRecords {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl CheckpointRecords {
    pub(super) fn count(&self) -> u64 {
        self.ends.len() as u64
    }

    pub(super) fn push(&mut self, kind: Kind, body: &(impl IntoBytes + Immutable), tail: &[u8]) {
        format::encode_record(&mut self.bytes, kind, body, tail);
        self.ends.push(self.bytes.len());
    }

    /// Adds the records of one sequence: its creation, its references to frames, and its commit.
    pub(super) fn push_sequence(&mut self, sequence: u64) {
        let key = format!("session-{sequence}");
        let create = SequenceCreate {
            sequence: U64::new(sequence),
            parent: U64::new(0),
            parent_tokens: U64::new(0),
            created_unix_ms: U64::new(CREATED_S * 1000),
            ttl_ms: U64::new(0),
            layout: U32::new(1),
            summaries: U32::new(0),
            replicas: 1,
            evictable: 0,
            key_bytes: U16::new(key.len() as u16),
            reserved: U32::new(0),
        };
        self.push(Kind::SequenceCreate, &create, key.as_bytes());
        for nth in 0..FRAMES_PER_SEQUENCE {
            let frame = (sequence - 1) * FRAMES_PER_SEQUENCE + nth + 1;
            let reference = format::FrameRef {
                sequence: U64::new(sequence),
                frame: U64::new(frame),
                token_end: U64::new(u64::MAX),
            };
            self.push(Kind::FrameRef, &reference, &[]);
        }
        let commit = SequenceCommit {
            sequence: U64::new(sequence),
            tokens: U64::new(FRAMES_PER_SEQUENCE * u64::from(GROUP)),
            state_frame: U64::new(0),
            token_ids: U64::new(0),
            committed_unix_ms: U64::new(CREATED_S * 1000),
        };
        self.push(Kind::SequenceCommit, &commit, &[]);
    }

    /// Encodes all records as batches that take effect together. Returns the bytes and the number of the last batch.
    ///
    /// # Errors
    /// A batch cannot be encoded.
    pub(super) fn batches(&self) -> Result<(Vec<u8>, u64)> {
        let (mut out, mut number, mut first, mut start) = (Vec::new(), 0, 0, 0);
        while first < self.ends.len() {
            let fits = self.ends[first..].partition_point(|end| end - start <= RECORDS_BYTES_MAX);
            let end = self.ends[first + fits - 1];
            let more = if first + fits < self.ends.len() { FLAG_MORE } else { 0 };
            number += 1;
            let place = BatchPlace { generation: 1, nonce: NONCE, sequence: number };
            let records = &self.bytes[start..end];
            out.extend(format::encode_batch(&place, number - 1, 1, FLAG_CHECKPOINT | more, records, fits as u32)?);
            (first, start) = (first + fits, end);
        }
        Ok((out, number))
    }
}
