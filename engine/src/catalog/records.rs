//! A buffer of encoded manifest records, for the log and for the catalog.

use crate::layout::KvLayout;
use std::collections::BTreeMap;
use stratakv_format::features::{INCOMPAT_CODECS, INCOMPAT_POOLS, INCOMPAT_REPLICAS};
use stratakv_format::manifest::{FLAG_DERIVED, Kind, LayoutDefined, Record, Records, encode_record};
use stratakv_format::{DeviceIndex, LayoutId, Location};
use zerocopy::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

/// Encoded records that take effect together.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordBuffer {
    bytes: Vec<u8>,
    /// The end offset of each record.
    ends: Vec<usize>,
    /// The incompatible feature bits that the records need: copies, codecs, pools.
    features: u64,
}

impl RecordBuffer {
    pub(crate) fn push(&mut self, kind: Kind, body: &(impl IntoBytes + Immutable), tail: &[u8]) {
        encode_record(&mut self.bytes, kind, body, tail);
        self.ends.push(self.bytes.len());
        if kind == Kind::Replica {
            self.require_copies();
        }
    }

    /// Requires the feature bit of copies.
    pub(crate) fn require_copies(&mut self) {
        self.features |= INCOMPAT_REPLICAS;
    }

    /// Requires the feature bit of pools.
    pub(crate) fn require_pools(&mut self) {
        self.features |= INCOMPAT_POOLS;
    }

    /// Returns the incompatible feature bits that a manifest with these records must have.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    pub(crate) fn push_layout(&mut self, id: LayoutId, layout: &KvLayout) {
        if layout.raw().is_encoded() {
            self.features |= INCOMPAT_CODECS;
        }
        let mut encoded = Vec::new();
        layout.raw().encode(&mut encoded);
        self.push(Kind::Layout, &LayoutDefined { layout: U32::new(id.0), reserved: U32::new(0) }, &encoded);
    }

    pub(crate) fn append(&mut self, other: &Self) {
        let base = self.bytes.len();
        self.bytes.extend_from_slice(&other.bytes);
        self.ends.extend(other.ends.iter().map(|end| base + end));
        self.features |= other.features;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(crate) fn count(&self) -> usize {
        self.ends.len()
    }

    /// Returns the records in order.
    pub(super) fn records(&self) -> Records<'_> {
        Records::new(&self.bytes, self.ends.len() as u32)
    }

    /// Returns the devices of all copies of the frames that these records define, by frame. Derived frames are left
    /// out, because no sequence needs them.
    pub(crate) fn announced(&self) -> BTreeMap<u64, Vec<DeviceIndex>> {
        let mut frames: BTreeMap<u64, Vec<DeviceIndex>> = BTreeMap::new();
        for record in self.records() {
            let (frame, location) = match record {
                Ok(Record::Frame(frame)) if frame.flags.get() & FLAG_DERIVED == 0 => (frame.frame, &frame.location),
                Ok(Record::Replica(copy)) => (copy.frame, &copy.location),
                _ => continue,
            };
            frames.entry(frame.get()).or_default().push(Location::from_raw(location).device);
        }
        frames
    }

    /// Keeps only the last of several commits of one sequence, if only commits are between them.
    pub(crate) fn settle(&mut self) {
        let mut last = BTreeMap::new();
        let mut settled = Vec::new();
        for (index, record) in self.records().enumerate() {
            match record {
                Ok(Record::SequenceCommit(commit)) => settled.extend(last.insert(commit.sequence.get(), index)),
                _ => last.clear(),
            }
        }
        settled.sort_unstable();
        self.drop_records(&settled);
    }

    /// Drops the seals of segments of this device.
    pub(crate) fn forget_seals(&mut self, device: DeviceIndex) {
        let records = self.records().enumerate();
        let seals = records.filter(|(_, record)| match record {
            Ok(Record::SegmentSeal(seal)) => seal.device.get() == device.0,
            _ => false,
        });
        let seals: Vec<usize> = seals.map(|(index, _)| index).collect();
        self.drop_records(&seals);
    }

    /// Removes the records with these indices, which must be in rising order.
    pub(super) fn drop_records(&mut self, dropped: &[usize]) {
        let old = std::mem::take(self);
        self.features = old.features;
        let mut dropped = dropped.iter().copied().peekable();
        let mut start = 0;
        for (index, &end) in old.ends.iter().enumerate() {
            if dropped.next_if_eq(&index).is_none() {
                self.bytes.extend_from_slice(&old.bytes[start..end]);
                self.ends.push(self.bytes.len());
            }
            start = end;
        }
    }

    /// Splits the records into runs that fit in one batch each. Returns the bytes and the record count of each run.
    pub(crate) fn batches(&self, batch_bytes: usize) -> Vec<(&[u8], u32)> {
        let mut batches = Vec::new();
        let (mut start, mut first, mut last) = (0, 0, 0);
        for (index, &end) in self.ends.iter().enumerate() {
            if end - start > batch_bytes && last > start {
                batches.push((&self.bytes[start..last], (index - first) as u32));
                (start, first) = (last, index);
            }
            last = end;
        }
        batches.push((&self.bytes[start..last], (self.ends.len() - first) as u32));
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratakv_format::manifest::{RECORDS_BYTES_MAX, SequenceCommit, SequenceDelete, SequenceTruncate};
    use zerocopy::little_endian::U64;

    #[test]
    fn batches_hold_every_record_once_and_fit() {
        let mut records = RecordBuffer::default();
        for sequence in 0..100_000_u64 {
            let sequence = U64::new(sequence);
            if sequence.get().is_multiple_of(3) {
                records.push(Kind::SequenceDelete, &SequenceDelete { sequence }, &[]);
            } else {
                records.push(Kind::SequenceTruncate, &SequenceTruncate { sequence, tokens: U64::new(1) }, &[]);
            }
        }
        let batches = records.batches(RECORDS_BYTES_MAX);
        assert!(batches.len() > 1 && batches.iter().all(|(bytes, _)| bytes.len() <= RECORDS_BYTES_MAX));
        assert_eq!(batches.iter().map(|(_, count)| *count as usize).sum::<usize>(), records.count());
        assert_eq!(batches.concat_bytes(), records.bytes);
    }

    #[test]
    fn settle_keeps_the_last_of_consecutive_commits() {
        let commit = |sequence: u64, tokens: u64| SequenceCommit {
            sequence: U64::new(sequence),
            tokens: U64::new(tokens),
            state_frame: U64::new(0),
            token_ids: U64::new(0),
            committed_unix_ms: U64::new(1),
        };
        let mut records = RecordBuffer::default();
        for (sequence, tokens) in [(1, 1), (2, 1), (1, 2), (1, 3)] {
            records.push(Kind::SequenceCommit, &commit(sequence, tokens), &[]);
        }
        // A truncation depends on the commits before it, so they are kept.
        records.push(Kind::SequenceTruncate, &SequenceTruncate { sequence: U64::new(1), tokens: U64::new(2) }, &[]);
        records.push(Kind::SequenceCommit, &commit(1, 2), &[]);
        records.settle();
        let left = Records::new(&records.bytes, records.count() as u32).map(|record| match record {
            Ok(Record::SequenceCommit(commit)) => (commit.sequence.get(), commit.tokens.get()),
            _ => (0, 0),
        });
        assert_eq!(left.collect::<Vec<_>>(), [(2, 1), (1, 3), (0, 0), (1, 2)]);
    }

    trait Concat {
        fn concat_bytes(&self) -> Vec<u8>;
    }

    impl Concat for Vec<(&[u8], u32)> {
        fn concat_bytes(&self) -> Vec<u8> {
            self.iter().flat_map(|(bytes, _)| bytes.iter().copied()).collect()
        }
    }
}
