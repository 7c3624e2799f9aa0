//! The manifest: a log of records that says which frames exist and which sequences refer to them.
//!
//! A generation of the manifest is one file:
//!
//! - `file`: the header page and the names of manifest files
//! - `batch`: batches, the atomic units that follow the header page
//! - `record`: the records of a batch, and their kinds
//! - `body`: the fixed parts of the records
//! - `check`: checks of ranges and reserved bytes
//!
//! # Invariants
//! - A batch verifies only under the nonce, generation and sequence number of its place.
//! - Every record that [`Records`] returns has fields in range and reserved bytes of zero. References between records
//!   are checked by the code that applies them.

mod batch;
mod body;
mod check;
mod file;
mod record;

pub use batch::{
    BATCH_PAGES_MAX, Batch, BatchHeader, BatchPlace, FLAG_CHECKPOINT, FLAG_MORE, MAGIC as BATCH_MAGIC,
    RECORDS_BYTES_MAX, encode_batch,
};
pub use body::{
    ADAPTER_BYTES_MAX, ADAPTER_NAME_BYTES_MAX, AdapterDefined, CheckpointEnd, Counters, FLAG_DERIVED, Fork, Frame,
    FrameMoved, FrameRef, FrameRelease, KEY_BYTES_MAX, LayoutDefined, MEMBER_ACTIVE, MEMBER_DRAINING, MEMBER_LOST,
    MEMBER_REMOVED, Member, PoolAllocation, REPLICAS_MAX, Replica, SegmentFree, SegmentOpen, SegmentSeal,
    SequenceCommit, SequenceCreate, SequenceDelete, SequenceTruncate, Superseded,
};
pub use file::{DIRECTORY, FILE_BYTES_MAX, MAGIC, ManifestPage, file_name, parse_file_name};
pub use record::{FLAG_IGNORABLE, Kind, Record, RecordHeader, Records, encode_record};
