//! The result of planning: parts of selections with their reads. And its input: the devices with their loads.

use super::balance::Load;
use super::section::SectionAt;
use crate::cache::{BlockKey, ReadPrice, Resident};
use crate::catalog::{FrameBody, SegmentHandle};
use crate::log::Devices;
use crate::options::BalancePolicy;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// The priority of a read.
#[derive(Clone, Copy)]
pub(crate) enum ReadPriority<'a> {
    /// A step waits for them. The named blocks are brought by a prefetch.
    Demand(Option<&'a HashSet<BlockKey>>),
    /// They may be needed soon.
    Ahead,
}

impl ReadPriority<'_> {
    /// Returns whether this is a prefetch.
    pub(crate) fn is_ahead(self) -> bool {
        matches!(self, Self::Ahead)
    }

    /// Returns whether a prefetch brings this block.
    pub(super) fn awaited(self, key: &BlockKey) -> bool {
        matches!(self, Self::Demand(Some(awaited)) if awaited.contains(key))
    }
}

/// One read: whole read units of a segment, to an offset of the part's buffer.
#[derive(Clone)]
pub(crate) struct PlannedRead {
    pub(crate) segment: Arc<SegmentHandle>,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    /// The offset in the part's buffer.
    pub(crate) to: usize,
    /// The frame that it reads. A read of a frame with copies reads nothing else.
    pub(crate) frame: Arc<FrameBody>,
    /// The copy of the frame that it reads.
    pub(crate) copy: u8,
    /// The offset of the same bytes in copy 0.
    pub(crate) first: u64,
}

impl PlannedRead {
    /// Returns where another copy has the same bytes: segment and offset.
    pub(crate) fn of_copy(&self, copy: usize) -> (&Arc<SegmentHandle>, u64) {
        (self.frame.copy(copy).0, self.frame.offset_in(copy, self.first))
    }
}

/// The devices' queues and speeds at the moment of planning.
#[derive(Clone, Debug)]
pub(crate) struct DeviceLoads {
    /// By device index.
    pub(crate) by_device: Vec<Load>,
    /// By device index: bytes of a gap that one request covers at most.
    pub(crate) gaps: Vec<usize>,
    pub(crate) policy: BalancePolicy,
    /// Bytes of neighbouring blocks with copies that are read from one device, at most.
    pub(crate) piece_bytes: usize,
}

impl DeviceLoads {
    /// Takes the present state of the devices.
    pub(crate) fn of(devices: &Devices) -> Self {
        let slots = devices.list.slots();
        let mut loads = Self {
            by_device: Vec::with_capacity(slots),
            gaps: Vec::with_capacity(slots),
            policy: devices.balance,
            piece_bytes: usize::MAX,
        };
        for index in 0..slots {
            let device = devices.list.get(index);
            let profile = device.map(|device| &device.profile);
            let (queued_s, request_s, byte_s, avoided) = profile.map_or((0.0, 1e-3, 1e-6, true), |p| p.load());
            let avoided = avoided || device.is_none_or(|d| d.is_lost());
            loads.by_device.push(Load { queued_s, request_s, byte_s, avoided });
            loads.gaps.push(profile.map_or(0, |p| p.gap_bytes().min(devices.gap_limit)));
            let best = profile.map_or(usize::MAX, |p| p.best_request_bytes());
            loads.piece_bytes = loads.piece_bytes.min(best);
        }
        loads
    }

    /// Returns the mean price of a read on the devices that reads do not avoid, or on all if they avoid all.
    pub(super) fn read_price(&self) -> ReadPrice {
        let is_used = |load: &&Load| !load.avoided || self.by_device.iter().all(|load| load.avoided);
        let used: Vec<&Load> = self.by_device.iter().filter(is_used).collect();
        let mean = |of: fn(&Load) -> f64| used.iter().map(|load| of(load)).sum::<f64>() / used.len().max(1) as f64;
        ReadPrice { request_s: mean(|load| load.request_s), byte_s: mean(|load| load.byte_s) }
    }

    /// Returns the largest gap that one request covers on this device.
    pub(super) fn gap(&self, segment: &SegmentHandle) -> u64 {
        self.gaps.get(usize::from(segment.key.0.0)).map_or(0, |gap| *gap as u64)
    }

    /// Returns the index of the segment's device in the lists.
    pub(super) fn device(&self, segment: &SegmentHandle) -> usize {
        usize::from(segment.key.0.0).min(self.by_device.len().saturating_sub(1))
    }
}

/// A part of a selection: a stretch of its groups with one buffer.
pub(crate) struct ReadPart {
    /// The selection's index in the read.
    pub(crate) selection: usize,
    /// The positions of its groups in the selection.
    pub(crate) groups: Range<usize>,
    /// The pages of stored clusters that it brings instead of groups.
    pub(crate) pages: Range<usize>,
    /// The offset in the buffer of each group's block, or none for groups in memory. Likewise for each page.
    pub(crate) blocks: Vec<Option<usize>>,
    /// Cached blocks, which are not read.
    pub(crate) resident: Vec<Option<Resident>>,
    /// Groups, counted within the part, whose blocks a part of an earlier selection reads.
    pub(crate) shared: Vec<(usize, Origin)>,
    pub(crate) reads: Vec<PlannedRead>,
    pub(crate) buffer_bytes: usize,
    /// The summary records that its only read brings, instead of blocks.
    pub(crate) records: Option<SectionAt>,
}

/// A group of another part.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) part: usize,
    /// The group's index within it.
    pub(crate) nth: usize,
}

impl ReadPart {
    /// Returns a part without reads. `resident` has the cached blocks.
    pub(super) fn new(selection: usize, groups: Range<usize>, resident: Vec<Option<Resident>>) -> Self {
        Self {
            selection,
            groups,
            pages: 0..0,
            blocks: Vec::with_capacity(resident.len()),
            resident,
            shared: Vec::new(),
            reads: Vec::new(),
            buffer_bytes: 0,
            records: None,
        }
    }

    /// Returns whether another part reads the block of a group, counted within this part.
    pub(crate) fn shares(&self, nth: usize) -> bool {
        self.shared.iter().any(|(own, _)| *own == nth)
    }
}
