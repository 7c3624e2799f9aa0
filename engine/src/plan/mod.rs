//! Planning reads: from selections to parts with requests. Pure, without I/O.
//!
//! 1. Look up cached blocks, and blocks that several selections have in common ([`share`]).
//! 2. Choose a copy for every block, so that all devices end as early as possible ([`balance`]).
//! 3. Cut each selection into parts of [`part_groups`] groups.
//! 4. Join neighbouring blocks of a part into one request, if the gap between them is small.
//!
//! Invariant: parts depend on the selection alone, not on what is cached or where it is stored. Attention to them
//! therefore gives equal bits every time.

mod balance;
mod entries;
mod parts;
mod section;
mod select_request;
mod selection;
mod share;
mod summary_sections;

pub(crate) use balance::Pieces;
pub use entries::GroupEntries;
pub(crate) use entries::{AttendedEntries, EntryLimits, entries_of_tokens};
pub(crate) use parts::{DeviceLoads, PlannedRead, ReadPart, ReadPriority};
pub(crate) use section::{Section, SectionAt};
pub(crate) use select_request::Choice;
pub use select_request::{PlaneSet, SelectOptions, SelectRequest};
pub use selection::Selection;
pub(crate) use selection::{GroupSource, KeySource, SelectedGroup, SelectedTail, SelectionInner};
pub(crate) use summary_sections::plan_records;

use crate::catalog::FrameBody;
use crate::io::buffer::PAGE_BYTES;
use crate::io::buffer::SLAB_BYTES;
use crate::layout::part_groups;
use parts::Origin;
use share::BlockHit;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::page::round_up_to_page;

/// Returns the parts of all selections, in order. Blocks that a prefetch brings, a cache holds or an earlier selection
/// reads get no request.
pub(crate) fn plan(views: &[Arc<SelectionInner>], urgency: ReadPriority<'_>, spread: &DeviceLoads) -> Vec<ReadPart> {
    let held = share::held(views, urgency, spread);
    let copies = choose_copies(views, &held, urgency, spread);
    let mut copies = copies.iter().copied();
    let mut parts = Vec::new();
    // The first part of each selection, and the groups per part.
    let mut cuts: Vec<(usize, usize)> = Vec::with_capacity(views.len());
    for ((index, view), held) in views.iter().enumerate().zip(held) {
        let per_part = part_groups(view.layout.block(view.layer));
        cuts.push((parts.len(), per_part));
        let origin = |view: usize, unit: usize| {
            let (first, per_part) = cuts[view];
            Origin { part: first + unit / per_part, nth: unit % per_part }
        };
        for start in (0..view.units.len()).step_by(per_part) {
            let units = start..(start + per_part).min(view.units.len());
            let copies: Vec<u8> = copies.by_ref().take(units.len()).collect();
            let held = &held[units.clone()];
            let mut part = plan_part(index, view, (units, held), &copies, urgency, spread);
            for (nth, held) in held.iter().enumerate() {
                if let Some(BlockHit::Shared { view, unit }) = held {
                    part.shared.push((nth, origin(*view, *unit)));
                }
            }
            parts.push(part);
        }
    }
    parts
}

/// Returns the frame and offset of a group that must be read.
fn on_disk<'a>(
    view: &'a SelectionInner,
    unit: &'a SelectedGroup,
    held: Option<&BlockHit>,
    urgency: ReadPriority<'_>,
) -> Option<(&'a Arc<FrameBody>, u64)> {
    let GroupSource::Disk { frame, offset, .. } = &unit.source else { return None };
    // Looking up a key costs a cache miss, so it is done only if a prefetch is named.
    let awaited = || {
        matches!(urgency, ReadPriority::Demand(Some(_)))
            && unit.source.key(view.layer).is_some_and(|key| urgency.awaited(&key))
    };
    (held.is_none() && !awaited()).then_some((frame, *offset))
}

/// Returns the copy to read for each group of all selections, or nothing if no frame has copies. Neighbouring groups
/// form a piece, which is balanced over the devices as one.
fn choose_copies(
    views: &[Arc<SelectionInner>],
    held: &[Vec<Option<BlockHit>>],
    urgency: ReadPriority<'_>,
    spread: &DeviceLoads,
) -> Vec<u8> {
    let has_copies =
        |unit: &SelectedGroup| matches!(&unit.source, GroupSource::Disk { frame, .. } if frame.copies() > 1);
    if !views.iter().any(|view| view.units.iter().any(has_copies)) {
        return Vec::new();
    }
    let mut pieces = Pieces::default();
    let mut piece_of = Vec::new();
    for (view, held) in views.iter().zip(held) {
        let block = view.layout.block(view.layer);
        // Frame, end and bytes of the piece that the next group may continue.
        let mut open: Option<(&Arc<FrameBody>, u64, usize)> = None;
        for (unit, held) in view.units.iter().zip(held) {
            let Some((frame, offset)) = on_disk(view, unit, held.as_ref(), urgency) else {
                piece_of.push(None);
                continue;
            };
            let block_bytes = unit.bytes(block);
            match &mut open {
                Some((last, end, bytes))
                    if Arc::ptr_eq(last, frame) && *end == offset && *bytes + block_bytes <= spread.piece_bytes =>
                {
                    (*end, *bytes) = (offset + block_bytes as u64, *bytes + block_bytes);
                    pieces.grow(block_bytes);
                }
                _ => {
                    open = Some((frame, offset + block_bytes as u64, block_bytes));
                    let devices = (0..frame.copies()).map(|copy| spread.device(frame.copy(copy).0));
                    pieces.push(block_bytes, devices);
                }
            }
            piece_of.push(Some(pieces.list.len() - 1));
        }
    }
    let chosen = pieces.balance(&spread.loads, spread.policy);
    piece_of.into_iter().map(|piece| piece.map_or(0, |piece| chosen[piece])).collect()
}

/// Cuts a selection into parts. `copies` has the copy of each group, all 0 if there are no copies.
fn plan_part(
    index: usize,
    view: &SelectionInner,
    (units, held): (Range<usize>, &[Option<BlockHit>]),
    copies: &[u8],
    urgency: ReadPriority<'_>,
    spread: &DeviceLoads,
) -> ReadPart {
    let block = view.layout.block(view.layer);
    let mut part = ReadPart {
        view: index,
        units: units.clone(),
        blocks: Vec::with_capacity(units.len()),
        resident: held.iter().map(BlockHit::resident).collect(),
        shared: Vec::new(),
        reads: Vec::new(),
        buffer_bytes: 0,
        records: None,
    };
    // The most that a group reads without its neighbours: its pages, and one page that it shares.
    let unit_most = round_up_to_page(block.block_bytes) + PAGE_BYTES;
    let count = units.len();
    for (nth, unit) in view.units[units].iter().enumerate() {
        let Some((frame, offset)) = on_disk(view, unit, held[nth].as_ref(), urgency) else {
            part.blocks.push(None);
            continue;
        };
        let copy = copies.get(nth).copied().unwrap_or(0);
        let readable = frame.readable(offset, unit.bytes(block));
        let (segment, own) = (frame.copy(usize::from(copy)).0, frame.offset_in(usize::from(copy), offset));
        let (start, end, first) = (own - (offset - readable.start), own + (readable.end - offset), readable.start);
        // A part has one buffer of at most a slab, so gaps must leave space for the groups to come.
        let room = SLAB_BYTES.saturating_sub(part.buffer_bytes + (count - 1 - nth) * unit_most) as u64;
        let gap = spread.gap(segment).min(room.saturating_sub(end - start));
        match part.reads.last_mut() {
            // It continues the last read, begins in its last read unit, or begins so close behind that the gap is
            // cheaper than a request.
            Some(last)
                if Arc::ptr_eq(&last.segment, segment)
                    && (Arc::ptr_eq(&last.frame, frame) || last.frame.copies() == 1 && frame.copies() == 1)
                    && start >= last.offset
                    && start <= last.offset + last.bytes as u64 + gap =>
            {
                let grown = (end - last.offset) as usize;
                part.buffer_bytes += grown.saturating_sub(last.bytes);
                last.bytes = last.bytes.max(grown);
            }
            _ => {
                let bytes = (end - start) as usize;
                let (segment, frame) = (Arc::clone(segment), Arc::clone(frame));
                part.reads.push(PlannedRead {
                    segment,
                    offset: start,
                    bytes,
                    to: part.buffer_bytes,
                    frame,
                    copy,
                    first,
                });
                part.buffer_bytes += bytes;
            }
        }
        if let Some(read) = part.reads.last() {
            part.blocks.push(Some(read.to + (own - read.offset) as usize));
        }
    }
    part
}
