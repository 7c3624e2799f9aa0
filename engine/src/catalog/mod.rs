//! What exists: sequences, their frames, the segments that hold them, what is live. And, per open sequence, where each
//! group of a layer is.

mod extents;
mod meta;
mod pin;
mod records;
mod state;

pub(crate) use extents::{
    BlockPlace, Extent, ExtentTable, Flight, FrameBody, FrameCopy, FrameSlot, GroupBuffer, SegmentHandle, Source,
    SummaryPlace, min_max_records,
};
pub(crate) use meta::{
    AdapterMeta, Counters, FrameMeta, ReplicaMeta, SegmentMeta, SegmentState, SequenceMeta, free_record, open_record,
    ref_record, release_record, seal_record,
};
pub(crate) use pin::{Pin, PinWatch};
pub(crate) use records::RecordBuffer;
pub(crate) use state::{COPIES_MAX, Catalog, SegmentKey};
