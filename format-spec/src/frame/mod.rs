//! Frames: atomic appends to a segment. Header pages hold descriptors and checksums, payload pages hold extents.
//!
//! - `header`: the header structure and its place
//! - `view`: a header that was checked, with its tables
//! - `builder`: how a header is written
//! - `descriptor`: what an extent holds, and how many bytes and checksums it has
//! - `summary`: the kinds of summaries and their records
//!
//! # Invariants of a checked header
//! - Extents are in the order of their descriptors. They start after the header and do not overlap.
//! - The front holds every extent except groups and pools, which start after it.
//! - A derived frame holds pools and directories of clusters, and nothing else. Other frames hold none of them.
//! - Descriptors cover the table of checksums without gaps.

mod builder;
mod descriptor;
mod header;
mod summary;
mod view;

pub use builder::{HeaderBuilder, header_bytes};
pub use descriptor::{
    CODEC_RAW, Descriptor, KIND_ADAPTER, KIND_CALLER_STATE, KIND_CLUSTER_DELTA, KIND_CLUSTER_DIRECTORY, KIND_GROUPS,
    KIND_KEYED_OBJECT, KIND_LOW_RANK_BASIS, KIND_POOL, KIND_REPLICA, KIND_SUMMARY, KIND_TAIL, KIND_TOKEN_IDS,
    TOKENS_MAX, min_max_element, min_max_record_bytes, tail_plane_bytes,
};
pub use header::{
    CALLER_STATE_BYTES_MAX, DESCRIPTORS_MAX, FrameHeader, FramePlace, HEADER_PAGES_MAX, MAGIC, TOTAL_PAGES_MAX,
};
pub use summary::{
    SUMMARY_CODES, SUMMARY_LANDMARKS, SUMMARY_LOW_RANK, SUMMARY_MIN_MAX, SUMMARY_RECORD_BYTES_MAX, SUMMARY_SIGNS,
    SUMMARY_VERSION, SummaryHeader, SummaryRecords, has_adapter, record_bytes, sign_dims,
};
pub use view::FrameView;
