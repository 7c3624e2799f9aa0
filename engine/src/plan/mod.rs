//! Views to reads: parts of fixed size, neighbours coalesced. Pure.
//!
//! A part is a run of a view's units, as many as [`part_groups`] says, cut the same way whatever is resident and wherever
//! it lies, so that attention over it gives the same bits every time. Blocks of a part that are on devices share one buffer.

use crate::cache::{BlockKey, Resident};
use crate::index::SegmentHandle;
use crate::layout::part_groups;
use crate::select::{Unit, UnitSource, ViewInner};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Why blocks are read now.
#[derive(Clone, Copy)]
pub(crate) enum Urgency<'a> {
    /// Somebody waits for them; those named are brought by a read ahead.
    Demand(Option<&'a HashSet<BlockKey>>),
    /// They may be needed soon.
    #[allow(dead_code, reason = "the decode pipeline, and tests")]
    Ahead,
}

impl Urgency<'_> {
    pub(crate) fn is_ahead(self) -> bool {
        matches!(self, Self::Ahead)
    }

    fn awaited(self, key: &BlockKey) -> bool {
        matches!(self, Self::Demand(Some(awaited)) if awaited.contains(key))
    }
}

/// One read: whole units of a segment (pages, or less where the device reads less) to an offset of the part's buffer.
pub(crate) struct PlannedRead {
    pub(crate) segment: Arc<SegmentHandle>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    pub(crate) to: usize,
}

/// A part of a view.
pub(crate) struct Part {
    pub(crate) view: usize,
    pub(crate) units: Range<usize>,
    /// Offset in the buffer of each unit's block; none for units in memory.
    pub(crate) blocks: Vec<Option<usize>>,
    /// Blocks of units that are on devices but need not be read.
    pub(crate) resident: Vec<Option<Resident>>,
    pub(crate) reads: Vec<PlannedRead>,
    pub(crate) buffer_bytes: usize,
}

/// All parts of all views, view after view, less what `ahead` brings or a cache holds.
pub(crate) fn plan(views: &[Arc<ViewInner>], urgency: Urgency<'_>) -> Vec<Part> {
    let mut parts = Vec::new();
    for (index, view) in views.iter().enumerate() {
        let block = view.layout.block(view.layer);
        let (block_bytes, per_part) = (block.block_bytes, part_groups(block));
        let wanted = |unit: &Unit| unit.source.key(view.layer).filter(|key| !urgency.awaited(key));
        let mut resident = match &view.cache {
            None => Vec::new(),
            Some(cache) => {
                let asker = (view.sequence, view.layer as u32);
                cache.find(asker, view.units.iter().map(wanted), block_bytes, urgency.is_ahead())
            }
        };
        resident.resize_with(view.units.len(), || None);
        let mut resident = resident.into_iter();
        for start in (0..view.units.len()).step_by(per_part) {
            let units = start..(start + per_part).min(view.units.len());
            let resident = resident.by_ref().take(units.len()).collect();
            parts.push(plan_part(index, view, units, resident, block_bytes, urgency));
        }
    }
    parts
}

fn plan_part(
    index: usize,
    view: &ViewInner,
    units: Range<usize>,
    resident: Vec<Option<Resident>>,
    block_bytes: usize,
    urgency: Urgency<'_>,
) -> Part {
    let mut part = Part {
        view: index,
        units: units.clone(),
        blocks: Vec::with_capacity(units.len()),
        resident,
        reads: Vec::new(),
        buffer_bytes: 0,
    };
    for (nth, unit) in view.units[units].iter().enumerate() {
        let UnitSource::Disk { frame, offset, .. } = &unit.source else {
            part.blocks.push(None);
            continue;
        };
        let awaited = || unit.source.key(view.layer).is_some_and(|key| urgency.awaited(&key));
        if part.resident[nth].is_some() || awaited() {
            part.blocks.push(None);
            continue;
        }
        let std::ops::Range { start: first, end } = frame.segment.readable(*offset, block_bytes);
        match part.reads.last_mut() {
            // Continues the last read, or lies in its last unit.
            Some(last)
                if Arc::ptr_eq(&last.segment, &frame.segment)
                    && first >= last.offset
                    && first <= last.offset + last.bytes as u64 =>
            {
                let grown = (end - last.offset) as usize;
                part.buffer_bytes += grown.saturating_sub(last.bytes);
                last.bytes = last.bytes.max(grown);
            }
            _ => {
                let bytes = (end - first) as usize;
                let segment = Arc::clone(&frame.segment);
                part.reads.push(PlannedRead { segment, offset: first, bytes, to: part.buffer_bytes });
                part.buffer_bytes += bytes;
            }
        }
        if let Some(read) = part.reads.last() {
            part.blocks.push(Some(read.to + (offset - read.offset) as usize));
        }
    }
    part
}
