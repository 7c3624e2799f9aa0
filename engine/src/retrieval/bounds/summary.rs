//! The summary of bounds: element-wise minima and maxima of each group, and of runs of 2, 4, 8 ... groups (LeoAM
//! section 4; Quest).
//!
//! The runs form a tree, which LeoAM descends only where a better group may be.

use crate::error::Result;
use crate::kernels::{extremes, merge_extremes};
use crate::metrics::Reservation;
use crate::retrieval::bounds::layer_records::{LayerRecords, LoadedMinMax};
use crate::retrieval::bounds::records::Reserve;
use crate::retrieval::stored_summary::SummaryRecordId;
use crate::retrieval::summary::{KeyGroup, KeyShape, LayerSummary, Records, SummarySpec};
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::DType;
use stratakv_format::frame::{SUMMARY_MIN_MAX, SummaryRecords, min_max_element};

/// The recipe of bounds. `levels` is 1 for groups only. Each further level covers runs twice as long, at half the
/// memory.
#[derive(Clone, Copy, Debug)]
pub struct BoundsSpec {
    /// The levels, 1 to 16.
    pub levels: usize,
}

impl SummarySpec for BoundsSpec {
    fn id(&self) -> String {
        format!("bounds/{}", self.levels)
    }

    fn layer(&self, _layer: usize, shape: KeyShape) -> Result<Box<dyn LayerSummary>> {
        let levels = vec![Records::new(2 * shape.width()); self.levels.clamp(1, 16)];
        Ok(Box::new(Bounds { shape, element: min_max_element(shape.dtype), levels, streamed: None }))
    }
}

/// The bounds of a layer. A min/max record holds minima `[kv_heads, key_dim]` and then maxima, in 16 bits and rounded
/// outward.
pub(crate) struct Bounds {
    shape: KeyShape,
    element: DType,
    /// Records by level. Record `i` of level `l` covers groups `i << l` to `(i + 1) << l`. Level 0 of streamed bounds
    /// is empty.
    levels: Vec<Records<u16>>,
    streamed: Option<OfLayer>,
}

/// The state of bounds that are streamed.
#[derive(Default)]
struct OfLayer {
    /// The records of groups, during a selection, and the memory of the levels above.
    records: Option<(Arc<LayerRecords>, Reservation)>,
    /// By level: the runs before the first group that was read.
    before: Vec<usize>,
}

impl Bounds {
    pub(crate) fn levels(&self) -> usize {
        self.levels.len()
    }

    /// Returns the complete runs of a level.
    pub(crate) fn runs(&self, level: usize) -> usize {
        match self.streamed.as_ref().map(|streamed| &streamed.records) {
            Some(Some((records, _))) => records.range().end >> level,
            Some(None) => 0,
            None => self.levels.get(level).map_or(0, Records::count),
        }
    }

    /// Returns the records of runs of a level, in pieces: minima `[kv_heads, key_dim]`, then maxima.
    pub(crate) fn records(&self, level: usize, runs: Range<usize>) -> impl Iterator<Item = &[u16]> {
        let streamed = self.streamed.as_ref();
        let read = streamed.and_then(|streamed| streamed.records.as_ref()).filter(|_| level == 0);
        let before = streamed.and_then(|streamed| streamed.before.get(level)).copied().unwrap_or(0);
        let whole = (level > 0 || streamed.is_none()).then(|| runs.start - before..runs.end - before);
        let own = whole.map(|own| self.levels[level].slice(own));
        read.map(|(records, _)| records.slices(runs)).into_iter().flatten().chain(own)
    }

    /// Returns the element type of records.
    pub(crate) fn element(&self) -> DType {
        self.element
    }

    /// Returns whether it is streamed.
    pub(crate) fn is_streamed(&self) -> bool {
        self.streamed.is_some()
    }

    /// Returns the bounds of these records of groups, or none if there is no memory for the levels above.
    fn over(&self, records: &Arc<LayerRecords>, reserve: Reserve<'_>) -> Option<Self> {
        let Range { start, end } = records.range();
        let before: Vec<usize> = (0..self.levels.len()).map(|level| start.div_ceil(1 << level)).collect();
        let count = |level: usize| (end >> level).saturating_sub(before[level]);
        let record = 2 * self.shape.width();
        let held = reserve((1..self.levels.len()).map(count).sum::<usize>() * record * size_of::<u16>())?;
        let mut levels = vec![Records::new(record); self.levels.len()];
        for level in 1..levels.len() {
            let (below, own) = levels.split_at_mut(level);
            let own = &mut own[0];
            own.reserve(count(level));
            // A run whose first half was not read is left out.
            let first = before[level] * 2;
            match level {
                1 => {
                    let mut halves = records.slices(first..end).flat_map(|piece| piece.chunks_exact(record));
                    while let (Some(left), Some(right)) = (halves.next(), halves.next()) {
                        merge_extremes(left, right, own.add());
                    }
                }
                _ => {
                    let below = &below[level - 1];
                    let skip = first.saturating_sub(before[level - 1]).min(below.count());
                    for pair in below.slice(skip..below.count()).chunks_exact(2 * record) {
                        merge_extremes(&pair[..record], &pair[record..], own.add());
                    }
                }
            }
        }
        let streamed = OfLayer { records: Some((Arc::clone(records), held)), before };
        Some(Self { shape: self.shape, element: self.element, levels, streamed: Some(streamed) })
    }
}

impl Bounds {
    /// Updates the levels above after a group was added.
    fn merge(&mut self) {
        for level in 1..self.levels.len() {
            let below = self.levels[level - 1].count();
            if !below.is_multiple_of(2) {
                break;
            }
            let (halves, own) = self.levels.split_at_mut(level);
            let pair = halves[level - 1].slice(below - 2..below);
            let (left, right) = pair.split_at(pair.len() / 2);
            merge_extremes(left, right, own[0].add());
        }
    }
}

impl LayerSummary for Bounds {
    fn groups(&self) -> usize {
        self.runs(0)
    }

    fn push(&mut self, group: &KeyGroup<'_>) {
        if self.is_streamed() {
            return;
        }
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
        if self.is_streamed() {
            return self.bytes();
        }
        self.levels.iter().enumerate().map(|(level, records)| records.bytes_for((groups >> level) + 1)).sum()
    }

    fn stored_as(&self) -> Option<SummaryRecordId> {
        let record_bytes = u32::try_from(self.levels[0].record_bytes()).unwrap_or(u32::MAX);
        Some(SummaryRecordId(SummaryRecords { kind: SUMMARY_MIN_MAX, parameter: 0, adapter_checksum: 0, record_bytes }))
    }

    fn encode(&self, groups: Range<usize>, out: &mut Vec<u8>) {
        self.levels[0].encode(groups, out);
    }

    fn restore(&mut self, records: &[u8]) -> bool {
        let whole = records.chunks_exact(self.levels[0].record_bytes());
        if !whole.remainder().is_empty() || self.is_streamed() {
            return false;
        }
        for record in whole {
            self.levels[0].restore(record);
            self.merge();
        }
        true
    }

    fn streams_from_min_max(&self) -> bool {
        true
    }

    fn stream(&mut self) {
        self.streamed = Some(OfLayer::default());
        self.truncate(0);
    }

    fn over_min_max(&self, loaded: LoadedMinMax<'_>) -> Option<Box<dyn LayerSummary>> {
        self.over(loaded.records, loaded.reserve).map(|over| Box::new(over) as Box<dyn LayerSummary>)
    }
}
