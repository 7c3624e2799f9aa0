//! Element-wise bounds of the keys of each group and of runs of 2, 4, 8 ... groups (LeoAM, section 4; Quest): a tree of
//! them for selectors that look closer only where it matters.

use super::keys::{KeyGroup, KeyShape, KeySummary, Records, SummaryKind};
use super::min_max::{MinMax, extremes, ordered};
use super::stored::StoredAs;
use crate::error::Result;
use std::ops::Range;
use stratakv_format::DType;
use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryRecords};

/// The kind of summary that keeps minima and maxima. `levels` is 1 for groups alone; each further one covers runs twice as
/// long, at half the memory of the level below.
#[derive(Clone, Copy, Debug)]
pub struct KeyBounds {
    /// Levels, 1 to 16.
    pub levels: usize,
}

impl SummaryKind for KeyBounds {
    fn id(&self) -> String {
        format!("bounds/{}", self.levels)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn KeySummary>> {
        let levels = vec![Records::new(2 * shape.width()); self.levels.clamp(1, 16)];
        Ok(Box::new(Bounds { shape, element: MinMax::element(shape.dtype), levels }))
    }
}

/// Records as those of min/max: minima `[kv_heads, key_dim]`, then maxima, 16 bits, rounded outward.
pub(crate) struct Bounds {
    shape: KeyShape,
    element: DType,
    /// By level; record `i` of level `l` is of groups `i << l` to `(i + 1) << l`.
    levels: Vec<Records<u16>>,
}

impl Bounds {
    pub(crate) fn levels(&self) -> usize {
        self.levels.len()
    }

    /// Whole runs of a level.
    pub(crate) fn runs(&self, level: usize) -> usize {
        self.levels.get(level).map_or(0, Records::count)
    }

    /// The records of runs of a level: minima `[kv_heads, key_dim]`, then maxima.
    pub(crate) fn records(&self, level: usize, runs: Range<usize>) -> &[u16] {
        self.levels[level].slice(runs)
    }

    /// What the elements of records are.
    pub(crate) fn element(&self) -> DType {
        self.element
    }
}

impl Bounds {
    /// Fills the levels above after a group was added.
    fn merge(&mut self) {
        let width = self.shape.width();
        for level in 1..self.levels.len() {
            let below = self.levels[level - 1].count();
            if !below.is_multiple_of(2) {
                break;
            }
            let pair = self.levels[level - 1].slice(below - 2..below).to_vec();
            let (left, right) = pair.split_at(2 * width);
            for (at, out) in self.levels[level].add().iter_mut().enumerate() {
                let (a, b) = (left[at], right[at]);
                let left_is_less = ordered(a) <= ordered(b);
                *out = if left_is_less == (at < width) { a } else { b };
            }
        }
    }
}

impl KeySummary for Bounds {
    fn groups(&self) -> usize {
        self.levels[0].count()
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        let width = self.shape.width();
        let (minima, maxima) = self.levels[0].add().split_at_mut(width);
        extremes(group.plane(), self.shape.kv_heads, self.shape.group_tokens, self.shape.dtype, minima, maxima);
        self.merge();
    }

    fn truncate(&mut self, groups: usize) {
        for (level, records) in self.levels.iter_mut().enumerate() {
            records.truncate((groups >> level).min(records.count()));
        }
    }

    fn bytes(&self) -> usize {
        self.levels.iter().map(Records::bytes).sum()
    }

    fn bytes_for(&self, groups: usize) -> usize {
        self.levels.iter().enumerate().map(|(level, records)| records.bytes_for((groups >> level) + 1)).sum()
    }

    fn stored_as(&self) -> Option<StoredAs> {
        let record_bytes = u32::try_from(self.levels[0].record_bytes()).unwrap_or(u32::MAX);
        Some(StoredAs(SummaryRecords { kind: SUMMARY_MIN_MAX, parameter: 0, adapter_checksum: 0, record_bytes }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        self.levels[0].encode(groups, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let whole = records.chunks_exact(self.levels[0].record_bytes());
        if !whole.remainder().is_empty() {
            return false;
        }
        for record in whole {
            self.levels[0].restore(record);
            self.merge();
        }
        true
    }
}
