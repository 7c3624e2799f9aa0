//! The catalog: the sequences, frames, segments and members of a store, in memory.
//!
//! - `state` is the state that the manifest describes. [`Catalog::apply`] is the only way to change it.
//! - `meta` holds the entries of its tables and their records. `records` is a buffer of encoded records.
//! - `apply` applies a buffer of records to the state.
//! - `derived_refs` says which derived frames a cut takes.
//! - `extents` maps the groups of each layer of an open sequence to memory or to a frame.
//! - `pin` tells cleaning whether a reader still uses a segment.
//!
//! Invariants:
//! - Recovery, a commit and a checkpoint use the same records, so the state in memory equals the state on disk.
//! - A segment is freed only if it is sealed, has no live pages, and its pin is released.
//!
//! Lock order: the manifest's lock is taken before the catalog's, and the catalog's before the allocator's.

mod apply;
mod derived_refs;
mod extents;
mod meta;
mod pin;
mod records;
mod state;

pub(crate) use derived_refs::{DerivedRef, states_first, without_stale};
pub(crate) use extents::{
    BlockPlace, Extent, ExtentTable, Flight, FrameBody, FrameCopy, FrameSlot, GroupBuffer, SegmentHandle, Source,
    SummaryPlace, min_max_records,
};
pub(crate) use meta::{
    AdapterMeta, CopyMeta, Counters, FrameMeta, SegmentKey, SegmentMeta, SegmentState, SequenceMeta, free_record,
    open_record, ref_record, release_record, seal_record,
};
pub(crate) use pin::{Pin, PinWatch};
pub(crate) use records::RecordBuffer;
pub(crate) use state::{COPIES_MAX, Catalog};
