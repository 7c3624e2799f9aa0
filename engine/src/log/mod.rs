//! The log: frames in segments, and the manifest that records which of them exist.
//!
//! - Write: [`FrameBuilder`] collects, [`write_frame`] takes pages from the [`SegmentAllocator`] and submits the
//!   writes.
//! - Commit: the [`Committer`] syncs segments, appends a batch to the manifest and syncs that.
//! - Shared state: [`StoreInner`] holds what all handles of an open store share.
//!
//! The room knows no selector and no query: summaries come in as bytes.
//!
//! Lock order: maintenance locks, the manifest, the catalog, the segment allocator, open handles.

mod background_state;
mod cleaning_progress;
mod commit;
mod commit_queue;
mod copies;
mod copy_location;
mod derived_release;
mod device;
mod device_set;
mod devices;
mod frame_builder;
mod frame_writer;
mod ids;
mod latency;
mod manifest;
mod membership;
mod open_handles;
mod rate_limiter;
mod segment_allocator;
mod sequence_identity;
mod sequence_lock;
mod store_state;
mod suspect_copies;

pub(crate) use background_state::Background;
pub(crate) use commit::{CommitRequest, Committer, keep_spare};
pub(crate) use copies::{CopyChange, CopyPlace, places};
pub(crate) use copy_location::{CopyAt, copies_of};
pub(crate) use derived_release::DerivedRelease;
pub(crate) use device::Device;
pub(crate) use device_set::{DeviceList, with_heirs};
pub(crate) use devices::{CONTROL_BYTES, Devices, StoreIdentity, exhausted};
pub(crate) use frame_builder::{AdapterPart, CoveredEnds, FrameBuilder, RecordBytes, Tail, TailRows};
pub(crate) use frame_writer::{
    DerivedDraft, DerivedFrame, DirectoryBytes, FrameTarget, WrittenFrame, front_limit, write as write_frame,
    write_derived,
};
pub(crate) use ids::{IdAllocator, NextIds};
pub(crate) use latency::Latencies;
pub(crate) use manifest::{GenerationStart, ManifestLog, ManifestPlace, bytes_without_data, copies_for};
pub(crate) use open_handles::OpenHandles;
pub(crate) use segment_allocator::{SegmentAllocator, Writer, allocate, open_ahead};
pub(crate) use sequence_identity::SequenceIdentity;
pub(crate) use sequence_lock::SequenceLock;
pub(crate) use store_state::{FRAMES_IN_FLIGHT, MaintenanceLocks, StoreActivity, StoreInner, Watermarks, WriteLimits};
pub(crate) use suspect_copies::SuspectCopies;
