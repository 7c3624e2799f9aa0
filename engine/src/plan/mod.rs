//! Views to reads: parts of fixed size, neighbours coalesced. Pure.
//!
//! A part is a run of a view's units, as many as [`part_groups`] says, cut the same way whatever is resident and wherever
//! it lies, so that attention over it gives the same bits every time. Blocks of a part that are on devices share one buffer.

mod balance;
mod selection;
mod share;
mod summary_sections;

pub(crate) use balance::{Load, Pieces};
pub(crate) use selection::{GroupSource, KeySource, SelectedGroup, SelectedTail, SelectionInner};
pub use selection::{PlaneSet, SelectOptions, Selection};
pub(crate) use summary_sections::{Section, SectionAt, plan_records};

use crate::cache::{BlockKey, Resident};
use crate::catalog::{FrameBody, SegmentHandle};
use crate::io::buffer::arena::PAGE_BYTES;
use crate::io::buffer::slab::SLAB_BYTES;
use crate::layout::part_groups;
use crate::log::Devices;
use crate::options::BalancePolicy;
use share::BlockHit;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use stratakv_format::page::round_up_to_page;

/// Why blocks are read now.
#[derive(Clone, Copy)]
pub(crate) enum ReadPriority<'a> {
    /// Somebody waits for them; those named were selected by a read ahead, which brings them.
    Demand(Option<&'a HashSet<BlockKey>>),
    /// They may be needed soon.
    Ahead,
}

impl ReadPriority<'_> {
    pub(crate) fn is_ahead(self) -> bool {
        matches!(self, Self::Ahead)
    }

    fn awaited(self, key: &BlockKey) -> bool {
        matches!(self, Self::Demand(Some(awaited)) if awaited.contains(key))
    }
}

/// One read: whole units of a segment (pages, or less where the device reads less) to an offset of the part's buffer.
#[derive(Clone)]
pub(crate) struct PlannedRead {
    pub(crate) segment: Arc<SegmentHandle>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    pub(crate) to: usize,
    /// The frame that it reads, which copy of it, and its offset in copy 0. A read of a frame with copies reads nothing else.
    pub(crate) frame: Arc<FrameBody>,
    pub(crate) copy: u8,
    pub(crate) first: u64,
}

impl PlannedRead {
    /// The same bytes of another copy: segment and offset.
    pub(crate) fn of_copy(&self, copy: usize) -> (&Arc<SegmentHandle>, u64) {
        (self.frame.copy(copy).0, self.frame.offset_in(copy, self.first))
    }
}

/// What the devices are like at the moment.
#[derive(Clone, Debug)]
pub(crate) struct DeviceLoads {
    /// By device index.
    pub(crate) loads: Vec<Load>,
    /// By device index: gaps that are read rather than left out.
    pub(crate) gaps: Vec<usize>,
    pub(crate) policy: BalancePolicy,
    /// Neighbours with copies are read together up to this size.
    pub(crate) piece_bytes: usize,
}

impl DeviceLoads {
    /// What the devices are like at the moment, for planning reads.
    pub(crate) fn of(devices: &Devices) -> Self {
        let slots = devices.list.slots();
        let mut spread = Self {
            loads: Vec::with_capacity(slots),
            gaps: Vec::with_capacity(slots),
            policy: devices.balance,
            piece_bytes: usize::MAX,
        };
        for index in 0..slots {
            let device = devices.list.get(index);
            let profile = device.map(|device| &device.profile);
            let (queued_s, request_s, byte_s, avoided) = profile.map_or((0.0, 1e-3, 1e-6, true), |p| p.load());
            let avoided = avoided || device.is_none_or(|d| d.is_lost());
            spread.loads.push(Load { queued_s, request_s, byte_s, avoided });
            spread.gaps.push(profile.map_or(0, |p| p.gap_bytes().min(devices.gap_limit)));
            let best = profile.map_or(usize::MAX, |p| p.best_request_bytes());
            spread.piece_bytes = spread.piece_bytes.min(best);
        }
        spread
    }

    fn gap(&self, segment: &SegmentHandle) -> u64 {
        self.gaps.get(usize::from(segment.key.0.0)).map_or(0, |gap| *gap as u64)
    }

    fn device(&self, segment: &SegmentHandle) -> usize {
        usize::from(segment.key.0.0).min(self.loads.len().saturating_sub(1))
    }
}

/// A part of a view.
pub(crate) struct ReadPart {
    pub(crate) view: usize,
    pub(crate) units: Range<usize>,
    /// Offset in the buffer of what is read of each unit's block; none for units in memory.
    pub(crate) blocks: Vec<Option<usize>>,
    /// Blocks of units that are on devices but need not be read.
    pub(crate) resident: Vec<Option<Resident>>,
    /// Units, counted within the part, whose blocks a part of an earlier view reads.
    pub(crate) shared: Vec<(usize, Origin)>,
    pub(crate) reads: Vec<PlannedRead>,
    pub(crate) buffer_bytes: usize,
    /// Records of summaries that its only read brings, in place of blocks.
    pub(crate) records: Option<SectionAt>,
}

/// A unit of another part.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) part: usize,
    /// Within it.
    pub(crate) nth: usize,
}

impl ReadPart {
    /// Whether the block of a unit, counted within the part, is read for another part.
    pub(crate) fn shares(&self, nth: usize) -> bool {
        self.shared.iter().any(|(own, _)| *own == nth)
    }
}

/// All parts of all views, view after view, less what `ahead` brings, a cache holds, or an earlier view reads.
pub(crate) fn plan(views: &[Arc<SelectionInner>], urgency: ReadPriority<'_>, spread: &DeviceLoads) -> Vec<ReadPart> {
    let held = share::held(views, urgency);
    let copies = choose_copies(views, &held, urgency, spread);
    let mut copies = copies.iter().copied();
    let mut parts = Vec::new();
    // The first part of each view and the units of its parts.
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
            let mut part = plan_part(index, view, units, held, &copies, urgency, spread);
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

/// The frame and offset of a unit that has to be read.
fn on_disk<'a>(
    view: &'a SelectionInner,
    unit: &'a SelectedGroup,
    held: Option<&BlockHit>,
    urgency: ReadPriority<'_>,
) -> Option<(&'a Arc<FrameBody>, u64)> {
    let GroupSource::Disk { frame, offset, .. } = &unit.source else { return None };
    // A key is looked up in memory that is in no cache: only where somebody asks.
    let awaited = || {
        matches!(urgency, ReadPriority::Demand(Some(_)))
            && unit.source.key(view.layer).is_some_and(|key| urgency.awaited(&key))
    };
    (held.is_none() && !awaited()).then_some((frame, *offset))
}

/// The copy that each unit of all views is read from; nothing when no frame has copies. Neighbours form pieces, which are balanced
/// over the devices as one.
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
        // Frame, end and bytes of the piece that may go on.
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

/// `copies`: the copy of each unit, all 0 when there are none.
fn plan_part(
    index: usize,
    view: &SelectionInner,
    units: Range<usize>,
    held: &[Option<BlockHit>],
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
    // What a unit takes at most without its neighbours: its pages, and one that it shares.
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
        // A part has one buffer, which gaps must not make longer than a slab: room is left for the units to come.
        let room = SLAB_BYTES.saturating_sub(part.buffer_bytes + (count - 1 - nth) * unit_most) as u64;
        let gap = spread.gap(segment).min(room.saturating_sub(end - start));
        match part.reads.last_mut() {
            // Continues the last read, lies in its last unit, or begins so close behind that the gap costs less than a request.
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
