//! What exists: sequences, their frames, the segments that hold them, what is live. And, per open sequence, where each
//! group of a layer is.

mod catalog;
mod extents;
mod records;

pub(crate) use catalog::{
    AdapterMeta, COPIES_MAX, Catalog, Counters, FrameMeta, ReplicaMeta, SegmentKey, SegmentMeta, SegmentState,
    SequenceMeta, free_record, open_record, ref_record, release_record, seal_record,
};
pub(crate) use extents::{
    BlockPlace, Extent, ExtentTable, Flight, FrameBody, FrameCopy, FrameSlot, Run, SegmentHandle, Source,
};
pub(crate) use records::RecordBuffer;
