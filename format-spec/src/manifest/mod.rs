//! The manifest: the log that says which frames exist. One header page, then batches of records.

mod batch;
mod check;
mod file;
mod record;

pub use batch::{
    BATCH_PAGES_MAX, Batch, BatchHeader, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, MAGIC as BATCH_MAGIC,
    RECORDS_BYTES_MAX, encode_batch,
};
pub use file::{DIRECTORY, FILE_BYTES_MAX, MAGIC, ManifestPage, file_name, parse_file_name};
pub use record::{
    ADAPTER_BYTES_MAX, ADAPTER_NAME_BYTES_MAX, AdapterDefined, CheckpointEnd, Counters, FLAG_IGNORABLE, Fork, Frame,
    FrameMoved, FrameRef, FrameRelease, KEY_BYTES_MAX, Kind, LayoutDefined, MEMBER_ACTIVE, MEMBER_DRAINING,
    MEMBER_LOST, MEMBER_REMOVED, Member, PoolAllocation, REPLICAS_MAX, Record, RecordHeader, Records, Replica,
    SegmentFree, SegmentOpen, SegmentSeal, SequenceCommit, SequenceCreate, SequenceDelete, SequenceTruncate,
    Superseded, encode_record,
};
