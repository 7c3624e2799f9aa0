//! Planning reads: from selections to parts with requests. Pure, without I/O.
//!
//! 1. Look up cached blocks, and blocks that several selections have in common ([`share`]).
//! 2. Choose a copy for every block, so that all devices end as early as possible ([`balance`]).
//! 3. Cut each selection into parts of [`part_groups`] groups.
//! 4. Join neighbouring blocks of a part into one request, if the gap between them is small.
//! 5. Pages of stored clusters follow the groups of their selection, in parts of their own.
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
pub(crate) use selection::{GroupSource, KeySource, SelectedGroup, SelectedPage, SelectedTail, SelectionInner};
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

/// The bytes of the pages of a part, unless one page is larger.
const PART_BYTES: usize = 256 << 10;

/// Returns the parts of all selections, in order. Blocks that a prefetch brings, a cache holds or an earlier selection
/// reads get no request.
pub(crate) fn plan(
    selections: &[Arc<SelectionInner>],
    priority: ReadPriority<'_>,
    loads: &DeviceLoads,
) -> Vec<ReadPart> {
    let held = share::held(selections, priority, loads);
    let copies = choose_copies(selections, &held, priority, loads);
    let mut copies = copies.iter().copied();
    let mut parts = Vec::new();
    // The first part of each selection, and the groups per part.
    let mut cuts: Vec<(usize, usize)> = Vec::with_capacity(selections.len());
    for ((index, selection), held) in selections.iter().enumerate().zip(held) {
        let per_part = part_groups(selection.layout.block(selection.layer));
        cuts.push((parts.len(), per_part));
        let origin = |selection: usize, group: usize| {
            let (first, per_part) = cuts[selection];
            Origin { part: first + group / per_part, nth: group % per_part }
        };
        for start in (0..selection.groups.len()).step_by(per_part) {
            let groups = start..(start + per_part).min(selection.groups.len());
            let copies: Vec<u8> = copies.by_ref().take(groups.len()).collect();
            let held = &held[groups.clone()];
            let mut part = plan_part(index, selection, (groups, held), &copies, priority, loads);
            for (nth, held) in held.iter().enumerate() {
                if let Some(BlockHit::Shared { selection, group }) = held {
                    part.shared.push((nth, origin(*selection, *group)));
                }
            }
            parts.push(part);
        }
        plan_pages(index, selection, &held[selection.groups.len()..], loads, &mut parts);
    }
    parts
}

/// Appends the parts with the pages of a selection. A page that fails is read from its groups, so it has no copies.
fn plan_pages(
    index: usize,
    selection: &SelectionInner,
    held: &[Option<BlockHit>],
    loads: &DeviceLoads,
    parts: &mut Vec<ReadPart>,
) {
    let Some(bytes) = selection.pages.iter().map(SelectedPage::bytes).max() else { return };
    let per_part = (PART_BYTES / bytes).max(1);
    for start in (0..selection.pages.len()).step_by(per_part) {
        let pages = start..(start + per_part).min(selection.pages.len());
        let held = &held[pages.clone()];
        let resident = held.iter().map(BlockHit::resident).collect();
        let mut part = ReadPart::new(index, selection.groups.len()..selection.groups.len(), resident);
        part.pages = pages.clone();
        for (nth, page) in selection.pages[pages.clone()].iter().enumerate() {
            if held[nth].is_some() {
                part.blocks.push(None);
                continue;
            }
            let left = (pages.len() - 1 - nth) * (page.bytes() + PAGE_BYTES);
            place_block(&mut part, (&page.frame, page.offset(), page.bytes()), 0, left, loads);
        }
        parts.push(part);
    }
}

/// Returns the frame and offset of a group that must be read.
fn on_disk<'a>(
    selection: &'a SelectionInner,
    group: &'a SelectedGroup,
    held: Option<&BlockHit>,
    priority: ReadPriority<'_>,
) -> Option<(&'a Arc<FrameBody>, u64)> {
    let GroupSource::Disk { frame, offset, .. } = &group.source else { return None };
    if !group.is_needed() {
        return None;
    }
    // Looking up a key costs a cache miss, so it is done only if a prefetch is named.
    let awaited = || {
        matches!(priority, ReadPriority::Demand(Some(_)))
            && group.source.key(selection.layer).is_some_and(|key| priority.awaited(&key))
    };
    (held.is_none() && !awaited()).then_some((frame, *offset))
}

/// Returns the copy to read for each group of all selections, or nothing if no frame has copies. Neighbouring groups
/// form a piece, which is balanced over the devices as one.
fn choose_copies(
    selections: &[Arc<SelectionInner>],
    held: &[Vec<Option<BlockHit>>],
    priority: ReadPriority<'_>,
    loads: &DeviceLoads,
) -> Vec<u8> {
    let has_copies =
        |group: &SelectedGroup| matches!(&group.source, GroupSource::Disk { frame, .. } if frame.copies() > 1);
    if !selections.iter().any(|selection| selection.groups.iter().any(has_copies)) {
        return Vec::new();
    }
    let mut pieces = Pieces::default();
    let mut piece_of = Vec::new();
    for (selection, held) in selections.iter().zip(held) {
        let block = selection.layout.block(selection.layer);
        // Frame, end and bytes of the piece that the next group may continue.
        let mut open: Option<(&Arc<FrameBody>, u64, usize)> = None;
        for (group, held) in selection.groups.iter().zip(held) {
            let Some((frame, offset)) = on_disk(selection, group, held.as_ref(), priority) else {
                piece_of.push(None);
                continue;
            };
            let block_bytes = group.bytes(block);
            match &mut open {
                Some((last, end, bytes))
                    if Arc::ptr_eq(last, frame) && *end == offset && *bytes + block_bytes <= loads.piece_bytes =>
                {
                    (*end, *bytes) = (offset + block_bytes as u64, *bytes + block_bytes);
                    pieces.grow(block_bytes);
                }
                _ => {
                    open = Some((frame, offset + block_bytes as u64, block_bytes));
                    let devices = (0..frame.copies()).map(|copy| loads.device(frame.copy(copy).0));
                    pieces.push(block_bytes, devices);
                }
            }
            piece_of.push(Some(pieces.list.len() - 1));
        }
    }
    let chosen = pieces.balance(&loads.by_device, loads.policy);
    piece_of.into_iter().map(|piece| piece.map_or(0, |piece| chosen[piece])).collect()
}

/// Cuts a selection into parts. `copies` has the copy of each group, all 0 if there are no copies.
fn plan_part(
    index: usize,
    selection: &SelectionInner,
    (groups, held): (Range<usize>, &[Option<BlockHit>]),
    copies: &[u8],
    priority: ReadPriority<'_>,
    loads: &DeviceLoads,
) -> ReadPart {
    let block = selection.layout.block(selection.layer);
    let mut part = ReadPart::new(index, groups.clone(), held.iter().map(BlockHit::resident).collect());
    // The most that a group reads without its neighbours: its pages, and one page that it shares.
    let group_most = round_up_to_page(block.block_bytes) + PAGE_BYTES;
    let count = groups.len();
    for (nth, group) in selection.groups[groups].iter().enumerate() {
        let Some((frame, offset)) = on_disk(selection, group, held[nth].as_ref(), priority) else {
            part.blocks.push(None);
            continue;
        };
        let copy = copies.get(nth).copied().unwrap_or(0);
        place_block(&mut part, (frame, offset, group.bytes(block)), copy, (count - 1 - nth) * group_most, loads);
    }
    part
}

/// Adds a block to the reads of a part: the bytes at an offset of a frame, from one of its copies. `left` is the most
/// bytes of the blocks to come.
fn place_block(
    part: &mut ReadPart,
    (frame, offset, bytes): (&Arc<FrameBody>, u64, usize),
    copy: u8,
    left: usize,
    loads: &DeviceLoads,
) {
    let readable = frame.readable(offset, bytes);
    let (segment, own) = (frame.copy(usize::from(copy)).0, frame.offset_in(usize::from(copy), offset));
    let (start, end, first) = (own - (offset - readable.start), own + (readable.end - offset), readable.start);
    // A part has one buffer of at most a slab, so gaps must leave space for the blocks to come.
    let room = SLAB_BYTES.saturating_sub(part.buffer_bytes + left) as u64;
    let gap = loads.gap(segment).min(room.saturating_sub(end - start));
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
            let to = part.buffer_bytes;
            part.reads.push(PlannedRead { segment, offset: start, bytes, to, frame, copy, first });
            part.buffer_bytes += bytes;
        }
    }
    if let Some(read) = part.reads.last() {
        part.blocks.push(Some(read.to + (own - read.offset) as usize));
    }
}
