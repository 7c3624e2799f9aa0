//! The state of a store as its manifest records describe it.

use super::frames::{Frame, FrameTable, Segment};
use super::sequences::{Sequence, SequenceTable};
use std::collections::{BTreeMap, HashMap};
use stratakv_format::layout::Layout;
use stratakv_format::manifest as m;

/// The state of a store.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) members: BTreeMap<u16, m::Member>,
    pub(crate) layouts: BTreeMap<u32, Layout>,
    pub(super) sequences: SequenceTable,
    pub(super) frames: FrameTable,
    /// The number and nonce of the next generation, if the last record names one.
    pub(crate) superseded: Option<(u64, u64)>,
    /// The number of records applied.
    pub(crate) records: u64,
}

impl State {
    /// Returns the sequences by id.
    pub(crate) fn sequences(&self) -> &BTreeMap<u64, Sequence> {
        self.sequences.all()
    }

    /// Returns the frames by id: those that sequences refer to, and those without a reference yet.
    pub(crate) fn frames(&self) -> &HashMap<u64, Frame> {
        self.frames.frames()
    }

    /// Returns whether a frame is derived, so that no sequence needs it.
    pub(crate) fn is_derived(&self, frame: u64) -> bool {
        self.frames().get(&frame).is_some_and(Frame::is_derived)
    }

    /// Returns whether the store has declared a device lost, or has removed it.
    pub(crate) fn has_left(&self, device: u16) -> bool {
        let member = self.members.get(&device);
        member.is_some_and(|member| matches!(member.state, m::MEMBER_LOST | m::MEMBER_REMOVED))
    }

    /// Returns the segments by device and segment id, free segments included.
    pub(crate) fn segments(&self) -> &BTreeMap<(u16, u32), Segment> {
        self.frames.segments()
    }
}
